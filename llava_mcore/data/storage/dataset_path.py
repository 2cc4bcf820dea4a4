"""Checks of a data path before anything is loaded: is it prepared, and which data is it."""

from __future__ import annotations

import hashlib
import re
import shlex
from functools import partial
from pathlib import Path
from typing import Literal

import ryml
import yaml
from megatron.energon import traverse_metadataset
from megatron.energon.epathlib import EPath

from llava_mcore.compat.energon.named_code import NamedCodeError, refuse_named_code
from llava_mcore.data.storage.remote import check_profile, check_remote_shards, locate, reading
from llava_mcore.data.storage.shard_files import check_shards
from llava_mcore.errors import DataError, problems
from llava_mcore.files.regular import kind_of

META = ".nv-meta"
SCRATCH = ".prepare"
"""Folder of `prepare` while it works; in a dataset without META, it has not completed it."""
FIELD_MAP = '{"image":"jpg","context":"json[question]","answers":"txt"}'
META_FILES = ("dataset.yaml", "split.yaml", "index.sqlite", "index.uuid")
SPLIT = "train"
VALIDATION = "val"
NO_VALIDATION = (
    "create one (prepare --val-ratio 0.05, or a val section in a blend), or omit --eval-interval and --eval-generate"
)
BLEND_ERRORS = (
    AssertionError,
    AttributeError,
    ValueError,
    KeyError,
    TypeError,
    OSError,
    RecursionError,
    ryml.ExceptionBasic,
)
"""Errors that energon raises for a blend: it parses with ryml and checks with assertions and look-ups."""
MOST_NAMES = 10_000_000
BRACES = re.compile(r"\{(?:(?P<first>-?\d{1,18})\.\.(?P<last>-?\d{1,18})(?:\.\.-?\d+)?|(?P<names>[^{}]*))\}")
"""Brace patterns in the names of shards, which energon expands completely before it opens any."""
URL_HINT = " (in a blend, paths in object stores begin with msc://, see docs/remote_data.md)"


def check_dataset(path: Path | str | None, split: str = SPLIT) -> list[Path | EPath]:
    """Return the datasets of a data path: the path itself, or those in a blend (`*.yaml`); remote ones as EPath.

    Raises one DataError with everything that is missing and the command that prepares a dataset.
    """
    if path is None:
        raise DataError("no data path given; set data.path (--data-path)")
    location = locate(path)
    leaves = reading(location, lambda: _leaves(location, split))
    found = [problem for leaf, part in leaves.items() for problem in reading(leaf, partial(_check_leaf, leaf, part))]
    if found:
        title = f"{path} cannot be trained on" if split == SPLIT else f"{path} has no validation part: {NO_VALIDATION}"
        raise DataError(problems(title, found))
    return [leaf.local_path() if leaf.is_local() else leaf for leaf in leaves]


def fingerprint(path: Path | str) -> list[str]:
    """Return a hash for each dataset of a checked path, and one for a blend's file.

    It is computed from the files of `energon prepare` and from how the data is divided and read, not from its path, so
    a
    dataset may be moved between save and resume, but not prepared again.
    """
    location = locate(path)
    return reading(location, lambda: _hashes(location))


def _hashes(location: EPath) -> list[str]:
    hashes = [hashlib.sha256(location.read_bytes()).hexdigest()] if _kind(location) != "folder" else []
    for leaf in _leaves(location, SPLIT):
        if _kind(leaf) == "file":
            hashes.append(hashlib.sha256(f"{leaf.name} {leaf.size()}".encode()).hexdigest())
            continue
        parts = [(leaf / META / name).read_bytes() for name in ("index.uuid", "split.yaml", "dataset.yaml")]
        hashes.append(hashlib.sha256(b"\0".join(parts)).hexdigest())
    return hashes


def refuse_endless(path: Path | str) -> None:
    """Raise DataError if opening a dataset of a path would block forever, or use all memory."""
    location = locate(path)
    leaves = _leaves(location, SPLIT)
    found = [
        problem for leaf, part in leaves.items() if leaf.is_local() for problem in _endless(leaf.local_path(), part)
    ]
    if found:
        raise DataError(problems(f"{path} cannot be opened", found))


def _endless(leaf: Path, split: str) -> list[str]:
    meta = leaf / META
    files = sorted(meta.iterdir()) if meta.is_dir() else []
    odd = [file for file in files if file.exists() and not file.is_file() and not file.is_dir()]
    if odd:
        return [f"{file} is {kind_of(file.stat().st_mode)}, not a regular file" for file in odd]
    try:
        content = yaml.safe_load((meta / "split.yaml").read_bytes())
        listed = [*(content["split_parts"].get(split) or ()), *(content.get("exclude") or ())]
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError, RecursionError):
        return []  # reported elsewhere
    number = sum(num_names(pattern) for pattern in listed if isinstance(pattern, str))
    if number <= MOST_NAMES:
        return []
    return [f"{meta / 'split.yaml'} lists {number} shards; the limit is {MOST_NAMES}; prepare the dataset again"]


def _kind(location: EPath) -> Literal["file", "folder", "nothing"]:
    """Return the kind of a path. A store that cannot list files has a folder if there is a dataset's index."""
    if location.is_file():
        return "file"
    is_folder = location.is_dir() or (location / META / "dataset.yaml").is_file()
    return "folder" if is_folder else "nothing"


def _leaves(location: EPath, split: str) -> dict[EPath, str]:
    """Return the datasets of a path with the split that is read of each; a blend may name another split."""
    kind = _kind(location)
    if kind == "nothing":
        raise DataError(f"data path {location} does not exist")
    if kind == "folder":
        return {location: split}
    if location.internal_path.suffix != ".yaml":
        raise DataError(f"data path {location} must be a prepared folder or the .yaml file of a blend")
    refuse_named_code()
    try:
        references = traverse_metadataset(location, split_part=split)
    except NamedCodeError as error:
        raise DataError(f"{location} is refused: {error}") from error
    except BLEND_ERRORS as error:
        if split != SPLIT and isinstance(error, KeyError):
            raise DataError(f"the blend {location} has no {split!r} section: {NO_VALIDATION}") from error
        hint = URL_HINT if "protocol" in str(error) else ""
        raise DataError(f"{location} is not a blend of datasets that energon can read: {error!r}{hint}") from error
    return {EPath(reference.path): reference.split_part for reference in references}


def _check_leaf(leaf: EPath, split: str) -> list[str]:
    kind = _kind(leaf)
    found = check_profile(leaf)
    if kind == "file":
        if leaf.internal_path.suffix != ".jsonl":
            return [f"{leaf} is neither a prepared folder nor a .jsonl file"]
        return found + _check_shards(leaf)
    if kind == "nothing":
        return [f"{leaf} does not exist{URL_HINT if ':/' in str(leaf.internal_path) else ''}"]
    present = [name for name in META_FILES if (leaf / META / name).is_file()]
    if not present and (leaf / SCRATCH).is_dir():
        return [f"{leaf} has no {META}: `prepare` has not completed it; run its command again (its message says why)"]
    if not present:
        return [f"{leaf} has no {META}: it is not prepared. Prepare it with\n{prepare_command(leaf)}"]
    if len(present) < len(META_FILES):
        missing = [name for name in META_FILES if name not in present]
        return [
            f"{leaf / META} is not complete ({', '.join(missing)} missing). Prepare it again with\n"
            f"{prepare_command(leaf)} --force-overwrite"
        ]
    split_file = leaf / META / "split.yaml"
    try:
        parts = yaml.safe_load(split_file.read_bytes())["split_parts"]
        is_empty = not (parts or {}).get(split)
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        return [f"{split_file} does not say which shards belong to which part (split_parts): {error}"]
    if is_empty:
        return [f"{leaf} has no shards in its {split!r} part; see {split_file} (ratios count shards)"]
    endless = _endless(leaf.local_path(), split) if leaf.is_local() else []
    if endless:
        return endless
    return found + _check_shards(leaf)


def num_names(pattern: str) -> int:
    """Return the maximum number of names that a brace pattern expands to, such as 10 for `{0..9}.tar`."""
    number = 1
    while (group := BRACES.search(pattern)) is not None:
        first, last, names = group["first"], group["last"], group["names"]
        number *= abs(int(last) - int(first)) + 1 if first is not None else (names or "").count(",") + 1
        pattern = pattern[: group.start()] + pattern[group.end() :]
    return number


def _check_shards(leaf: EPath) -> list[str]:
    return check_shards(leaf.local_path()) if leaf.is_local() else check_remote_shards(leaf)


def prepare_command(path: EPath) -> str:
    """Return the shell command that prepares shards of jpg, json and txt."""
    return (
        f"energon prepare {shlex.quote(str(path))} --non-interactive --split-ratio 1,0,0 "
        f"--sample-type VQASample --field-map '{FIELD_MAP}'"
    )
