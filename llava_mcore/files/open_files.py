"""The number of files and sockets that this process may have open."""

from __future__ import annotations

import resource

MOST_FILES = 65536
"""Number of open files that a process requests from the system."""


def allowed_files() -> int:
    """Raise this process's limit of open files to the hard limit or the requested number, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        return limit
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft
