"""Run one of our commands inside a Singularity or Apptainer image. Needs only the standard library.

The host may lack torch: only the image needs the project's dependencies.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from llava_mcore.config.documents import MAX_BYTES
from llava_mcore.errors import ConfigError, problems
from llava_mcore.launch.checkout import REPOSITORY, python_path, require_checkout
from llava_mcore.launch.jobs.slurm import address_override
from llava_mcore.processes.control import run_child

ENGINES = ("singularity", "apptainer")
FLAG = "--sif-path"
_SYSTEM = tuple(Path(name) for name in ("/usr", "/etc", "/bin", "/sbin", "/lib", "/lib64", "/proc", "/sys", "/dev"))
_NOT_IN_BIND = re.compile(r"[:,\"\x00-\x1f\x7f]")
_NOT_IN_ENV = re.compile(r"[,\"\x00-\x1f\x7f]")
_OVERRIDE = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*=")
_PATH_IN_TEXT = re.compile(r"(?:~|\.\.)?/[^\s\"',\]}]+")


def requested_image(argv: Sequence[str]) -> Path | None:
    """Return the image that `--sif-path` names on a command line, else None."""
    return _flag_path(argv, FLAG)


def without_image(argv: Sequence[str]) -> list[str]:
    """Return the command line without `--sif-path`, so that the command inside does not start another container."""
    remaining: list[str] = []
    skip = False
    for text in argv:
        if skip:
            skip = False
        elif text == FLAG:
            skip = True
        elif not text.startswith(f"{FLAG}="):
            remaining.append(text)
    return remaining


def container_argv(
    sif: Path,
    argv: Sequence[str],
    *,
    engine: str = ENGINES[0],
    gpu: bool,
    binds: Sequence[Path],
    env: Mapping[str, str],
    cwd: Path,
) -> list[str]:
    """Return the command that runs `argv` inside an image, with the caller's environment and `env` on top of it.

    Raises ConfigError for folders and values that the engine's --bind and --env, which are lists separated by commas,
    cannot express.
    """
    # The engines split --bind and --env at commas.
    errors = [
        f"{path}: the container engine does not support a folder with {match[0]!r} in its name: rename it"
        for path in binds
        if (match := _NOT_IN_BIND.search(str(path)))
    ]
    errors += [
        f"{name}={value}: the container engine does not support a value with {match[0]!r}: change the variable"
        for name, value in env.items()
        if (match := _NOT_IN_ENV.search(value))
    ]
    if errors:
        raise ConfigError(problems("The container cannot be started", errors))
    # The current folder stays the same inside, so relative paths do too.
    return [
        engine,
        "exec",
        *(["--nv"] if gpu else []),
        *(part for path in binds for part in ("--bind", str(path))),
        *(part for name, value in env.items() for part in ("--env", f"{name}={value}")),
        *("--pwd", str(cwd)),
        str(sif),
        *argv,
    ]


def bind_folders(argv: Sequence[str], cwd: Path) -> list[Path]:
    """Return the folders that a command line needs: the repository, `cwd`, and those in its arguments.

    For a folder that does not exist yet, its nearest existing parent is returned. Paths in the file given by `--config`
    count too. Folders below another one and system folders are omitted.
    """
    candidates = [REPOSITORY, cwd]
    for path in _named_paths(argv, cwd):
        candidates += [_existing_folder(path), _existing_folder(path.resolve())]
    folders = [path for path in dict.fromkeys(candidates) if path != Path("/") and not _below(path, _SYSTEM)]
    return [path for path in folders if not _below(path, [other for other in folders if other != path])]


def inner_command(command: str, arguments: Sequence[str]) -> list[str]:
    """Return `python3 -m llava_mcore command arguments`, to run in the image.

    A training run gets overrides: a configuration file that names an image would ask for it again, and only the host
    can ask SLURM for the first node's address.
    """
    overrides = ["launch.sif_path=null", *address_override(arguments, os.environ)] if command == "train" else []
    return ["python3", "-m", "llava_mcore", command, *arguments, *overrides]


def require_image(sif: Path) -> None:
    """Raise ConfigError if the image, a file or an unpacked folder, does not exist."""
    if not sif.is_file() and not sif.is_dir():
        raise ConfigError(f"{FLAG} {sif}: no such image; environments/recipe_latest.def builds one")


def rerun_in_container(sif: Path, argv: Sequence[str], *, dry_run: bool = False) -> int:
    """Run a command of ours inside an image and return its exit code; with `dry_run`, print the exact command.

    `argv` is the command to run inside the image (see `inner_command`); `--sif-path` is removed from it.
    Raises ConfigError without an engine, without the image, or if the package does not run from a checkout.
    """
    require_checkout(FLAG)
    require_image(sif)
    engine = next((name for name in ENGINES if shutil.which(name)), None)
    if engine is None and not dry_run:
        raise ConfigError(f"{FLAG} needs {' or '.join(ENGINES)} on PATH, but neither is installed: install one of them")
    cwd = Path.cwd()
    inner = without_image(argv)
    command = container_argv(
        sif.resolve(),
        inner,
        engine=engine or ENGINES[0],
        gpu=Path("/dev/nvidiactl").exists(),
        binds=bind_folders(inner, cwd),
        env={"PYTHONPATH": python_path(os.environ.get("PYTHONPATH")) or ""},
        cwd=cwd,
    )
    if dry_run:
        print("note: only the image was checked; everything else is checked in it, before the start", file=sys.stderr)
        print(shlex.join(command))
        return 0
    return run_child(command)


def _flag_path(argv: Sequence[str], flag: str) -> Path | None:
    """Return the path given as `flag PATH` or `flag=PATH`; the last one if there are several."""
    path = None
    for text, following in itertools.pairwise([*argv, ""]):
        if text == flag and following:
            path = following
        elif text.startswith(f"{flag}="):
            path = text.removeprefix(f"{flag}=")
    return Path(path).expanduser() if path else None


def _named_paths(argv: Sequence[str], cwd: Path) -> Iterator[Path]:
    """Yield possible paths in the arguments and in the configuration file, as absolute paths."""
    values = [value for text in argv for value in _values_in(text)]
    config = _flag_path(argv, "--config")
    if config is not None and (cwd / config).is_file():
        # A file that cannot be read, or is longer, is refused inside the image.
        with contextlib.suppress(OSError), (cwd / config).open(encoding="utf-8", errors="replace") as file:
            values += _PATH_IN_TEXT.findall(file.read(MAX_BYTES))
    for value in values:
        if value and not value.startswith("-"):
            yield Path(os.path.normpath(cwd / Path(value).expanduser()))


def _values_in(text: str) -> list[str]:
    """Return what may be a path in one argument: the value of --flag=… or key.sub=…, else all of it.

    `date=2024-01-01/x` may be either, so both are returned: folders of partitioned data are named that way.
    """
    value = text.partition("=")[2]
    if text.startswith("-"):
        return [value]
    return [text, value] if _OVERRIDE.match(text) else [text]


def _existing_folder(path: Path) -> Path:
    """Return the path itself or the nearest folder above it that exists."""
    while not os.path.isdir(path):  # also False if it is too long for a file name
        path = path.parent
    return path


def _below(path: Path, others: Sequence[Path]) -> bool:
    return any(path.is_relative_to(other) for other in others)
