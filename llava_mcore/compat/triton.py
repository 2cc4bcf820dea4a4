"""Tools that Triton (3.6) needs to build kernels for GPUs."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

NO_COMPILER = (
    "Triton cannot build kernels for GPUs: it needs gcc or clang (or the compiler in CC) and Python.h: install "
    "gcc and python3-dev, or use model.transformer_impl=local"
)


def can_build_kernels() -> bool:
    """Return whether Triton finds a C compiler and the header that its code includes, as it looks for them."""
    named = os.environ.get("CC")
    compilers = ("gcc", "clang") if named is None else (named,)
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # Debian's own
    header = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    return any(shutil.which(name) for name in compilers) and header.is_file()
