"""File systems of fsspec that a command has opened.

A forked process drops fsspec's cache of them. Clients with threads of their own, such as hdfs-native, then wait for
threads that only the parent has, and the command would never end. So they are kept until the process ends.
"""

from __future__ import annotations

import fsspec

OPENED: dict[int, fsspec.AbstractFileSystem] = {}


def file_system(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of a URL, and the path in it. Raises errors of fsspec and of the client."""
    files, path = fsspec.core.url_to_fs(url)
    OPENED[id(files)] = files
    return files, path
