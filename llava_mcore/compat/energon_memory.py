"""Energon 7.4.1 keeps shards open, and Python's tarfile keeps a record of every file that it read of one.

So a loader process grows by some 0.8 KB a sample, 8 GB in ten million. Energon never looks at the records. It also
reads for ever where a header says that a file has less than no bytes, since tarfile goes back then.
"""

from __future__ import annotations

from tarfile import TarInfo

from megatron.energon.flavors.webdataset.itar import ITarFile

from llava_mcore.compat.required import replace_name, required

_read_next = required(ITarFile, "next")


def _read_next_and_forget(self: ITarFile) -> TarInfo | None:
    before = self.offset
    try:
        found = _read_next(self)
    except RecursionError as error:
        raise ValueError("too many headers for one member of the tar file") from error
    self.members.clear()
    if found is not None and (found.size < 0 or self.offset <= before):
        raise ValueError(f"the member {found.name!r} of the tar file has {found.size} bytes")
    return found


def forget_what_was_read() -> None:
    """Let open shards forget the files that were read of them. Calling it again changes nothing.

    Raises:
        AttributeError: energon reads shards in another way.
    """
    replace_name(ITarFile, "next", _read_next_and_forget)
