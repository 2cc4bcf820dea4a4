"""The checkout of the repository from which the package runs, if it is not installed as a wheel."""

from __future__ import annotations

import os
from pathlib import Path

from llava_mcore.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
"""The checkout; of an installed package, the folder of packages that has it."""


def python_path(user_value: str | None) -> str | None:
    """Return PYTHONPATH for processes that import this package, which keeps what the user has set.

    A checkout comes first. A folder of installed packages does not: they would come before Python's own modules and,
    in an image, before those of the image.
    """
    parts = [*([str(REPOSITORY)] if _is_checkout() else []), *([user_value] if user_value else [])]
    return os.pathsep.join(parts) or None


def require_checkout(flag: str) -> None:
    """Raise ConfigError if the package is installed: what the flag starts needs the scripts of a checkout."""
    if not _is_checkout():
        raise ConfigError(
            f"{flag} needs a checkout of the repository, but llava_mcore is installed in {REPOSITORY}: clone the "
            "repository and run `python scripts/train/run.py` there"
        )


def _is_checkout() -> bool:
    return (REPOSITORY / "scripts" / "train" / "run.py").is_file()
