"""Checks of a data path before anything is loaded: is it prepared, and which data is it."""

from __future__ import annotations

import hashlib
import re
import shlex
from functools import partial
from pathlib import Path
from typing import Literal

import yaml
from megatron.energon.epathlib import EPath

from llava_mcore.data.storage.blend import NO_VALIDATION, SPLIT, URL_HINT, Leaf, read_blend
from llava_mcore.data.storage.remote import check_profile, check_remote_shards, locate, reading
from llava_mcore.data.storage.shard_files import check_shards
from llava_mcore.errors import DataError, problems
from llava_mcore.files.regular import kind_of

META = ".nv-meta"
SCRATCH = ".prepare"
"""Folder of `prepare` while it works; in a dataset without META, it has not completed it."""
MANIFEST = "manifest.json"
"""File of `prepare`: its request, totals, and the samples of each shard."""
PAIRS_FILE = "preference_pairs.txt"
"""File in META of a dataset whose samples have a chosen and a rejected answer."""
NO_TRAINING_ON_PAIRS = "training on preference pairs is not supported yet"
FIELD_MAP = '{"image":"jpg","context":"json[question]","answers":"txt"}'
VALIDATION = "val"
UNPREPARED = (".json", ".jsonl", ".parquet", ".csv", ".tsv")
"""Endings of files that `prepare` reads."""
MOST_NAMES = 10_000_000
BRACES = re.compile(r"\{(?:(?P<first>-?\d{1,18})\.\.(?P<last>-?\d{1,18})(?:\.\.-?\d+)?|(?P<names>[^{}]*))\}")
"""Brace patterns in the names of shards, which energon expands completely before it opens any."""


def check_dataset(path: Path | str | None, split: str = SPLIT, *, takes_pairs: bool = False) -> list[Path | EPath]:
    """Return the datasets of a data path: the path itself, or those in a blend (`*.yaml`); remote ones as EPath.

    Args:
        path: the data path.
        split: the part that is read.
        takes_pairs: accept datasets of preference pairs.

    Raises one DataError with everything that is missing and the command that prepares a dataset.
    """
    if path is None:
        raise DataError("no data path given; set data.path (--data-path)")
    location = locate(path)
    leaves = reading(location, lambda: _leaves(location, split))
    errors = [problem for leaf in leaves for problem in reading(leaf.path, partial(_check_leaf, leaf))]
    if not takes_pairs:
        paired = [leaf.path for leaf in leaves if reading(leaf.path, partial(has_pairs, leaf.path))]
        errors += [
            f"{leaf} holds preference pairs (a chosen and a rejected answer each): {NO_TRAINING_ON_PAIRS}. To train on "
            "conversations, prepare rows with one answer, without --preference-pairs"
            for leaf in paired
        ]
    if errors:
        title = f"{path} cannot be trained on" if split == SPLIT else f"{path} has no validation part: {NO_VALIDATION}"
        raise DataError(problems(title, list(dict.fromkeys(errors))))
    folders = dict.fromkeys(leaf.path for leaf in leaves)
    return [folder.local_path() if folder.is_local() else folder for folder in folders]


def has_pairs(dataset: EPath) -> bool:
    """Return whether the samples of a dataset are preference pairs."""
    return (dataset / META / PAIRS_FILE).is_file()


def fingerprint(path: Path | str) -> list[str]:
    """Return a hash for each dataset of a checked path, and one for a blend's file.

    It is computed from the files of `energon prepare` and from how the data is divided and read, not from its path, so
    a dataset may be moved between save and resume, but not prepared again.
    """
    location = locate(path)
    return reading(location, lambda: _hashes(location))


def _hashes(location: EPath) -> list[str]:
    hashes = [_hash(location.read_bytes())] if _kind(location) != "folder" else []
    for leaf in dict.fromkeys(leaf.path for leaf in _leaves(location, SPLIT)):
        if _kind(leaf) == "file":
            hashes.append(_hash(f"{leaf.name} {leaf.size()}".encode()))
        else:
            files = [leaf / META / name for name in Leaf(leaf, SPLIT).meta_files]
            hashes.append(_hash(*(file.read_bytes() for file in files if file.is_file())))
    return hashes


def nested_fingerprint(path: Path | str) -> list[str]:
    """Return a hash for each blend within a blend, and for each dataset that is read by other files than usual.

    `fingerprint` has the rest; older checkpoints hold that alone.
    """
    location = locate(path)
    return reading(location, lambda: _nested_hashes(location))


def _nested_hashes(location: EPath) -> list[str]:
    if _kind(location) == "folder":
        return []
    files, leaves = read_blend(location, SPLIT)
    usual = [Leaf(leaf.path, leaf.part) for leaf in leaves]
    others = [leaf for leaf, same in zip(leaves, usual, strict=True) if leaf != same]
    return [
        *(_hash(file.read_bytes()) for file in files[1:]),
        *(_hash(*((leaf.path / META / name).read_bytes() for name in leaf.meta_files)) for leaf in others),
    ]


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def refuse_endless(path: Path | str) -> None:
    """Raise DataError if opening a dataset of a path would block forever, or use all memory."""
    leaves = [leaf for leaf in _leaves(locate(path), SPLIT) if leaf.path.is_local()]
    errors = [problem for leaf in leaves for problem in _endless(leaf)]
    if errors:
        raise DataError(problems(f"{path} cannot be opened", list(dict.fromkeys(errors))))


def _endless(leaf: Leaf) -> list[str]:
    meta = leaf.path.local_path() / META
    files = sorted(meta.iterdir()) if meta.is_dir() else []
    odd = [file for file in files if file.exists() and not file.is_file() and not file.is_dir()]
    if odd:
        return [f"{file} is {kind_of(file.stat().st_mode)}, not a regular file" for file in odd]
    try:
        content = yaml.safe_load((meta / leaf.split_file).read_bytes())
        listed = [*(content["split_parts"].get(leaf.part) or ()), *(content.get("exclude") or ())]
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError, RecursionError):
        return []  # reported elsewhere
    count = sum(num_names(pattern) for pattern in listed if isinstance(pattern, str))
    if count <= MOST_NAMES:
        return []
    return [f"{meta / leaf.split_file} lists {count} shards; the limit is {MOST_NAMES}; prepare the dataset again"]


def _kind(location: EPath) -> Literal["file", "folder", "nothing"]:
    """Return the kind of a path. A store that cannot list files has a folder if there is a dataset's index."""
    if location.is_file():
        return "file"
    is_folder = location.is_dir() or (location / META / "dataset.yaml").is_file()
    return "folder" if is_folder else "nothing"


def _leaves(location: EPath, split: str) -> list[Leaf]:
    """Return the datasets of a path with the split that is read of each; a blend may name another split."""
    kind = _kind(location)
    if kind == "nothing":
        raise DataError(f"data path {location} does not exist")
    if kind == "folder":
        return [Leaf(location, split)]
    if location.internal_path.suffix.lower() in UNPREPARED:
        raise DataError(
            f"data path {location} is a file of conversations, not prepared data. Prepare it with\n"
            f"python -m llava_mcore prepare {shlex.quote(str(location))} --out shards --tokenizer-load-dir HF_FOLDER\n"
            "and give --data-path shards (docs/prepare.md)"
        )
    if location.internal_path.suffix != ".yaml":
        raise DataError(f"data path {location} must be a prepared folder or the .yaml file of a blend")
    return read_blend(location, split)[1]


def _check_leaf(leaf: Leaf) -> list[str]:
    path = leaf.path
    kind = _kind(path)
    errors = check_profile(path)
    if kind == "file":
        if path.internal_path.suffix != ".jsonl":
            return [f"{path} is neither a prepared folder nor a .jsonl file"]
        return errors + _check_shards(leaf)
    if kind == "nothing":
        return [f"{path} does not exist{URL_HINT if ':/' in str(path.internal_path) else ''}"]
    unfinished = _check_meta(leaf)
    if unfinished is not None:
        return [unfinished]
    endless = _endless(leaf) if path.is_local() else []
    return endless or errors + _check_shards(leaf)


def _check_meta(leaf: Leaf) -> str | None:
    """Return what is wrong with a dataset's .nv-meta; None if it has all files, and shards in the part to read."""
    path, needed = leaf.path, (*leaf.meta_files, "index.sqlite")
    present = [name for name in needed if (path / META / name).is_file()]
    if not present and (path / SCRATCH).is_dir():
        return f"{path} has no {META}: `prepare` has not completed it; run its command again (its message says why)"
    if not present:
        return f"{path} has no {META}: it is not prepared. Prepare it with\n{prepare_command(path)}"
    if len(present) < len(needed):
        missing = ", ".join(name for name in needed if name not in present)
        return (
            f"{path / META} is not complete ({missing} missing). Prepare it again with\n"
            f"{prepare_command(path)} --force-overwrite"
        )
    split_file = path / META / leaf.split_file
    try:
        parts = yaml.safe_load(split_file.read_bytes())["split_parts"]
        is_empty = not (parts or {}).get(leaf.part)
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        return f"{split_file} does not say which shards belong to which part (split_parts): {error}"
    if is_empty:
        return f"{path} has no shards in its {leaf.part!r} part; see {split_file} (ratios count shards)"
    return None


def num_names(pattern: str) -> int:
    """Return the maximum number of names that a brace pattern expands to, such as 10 for `{0..9}.tar`."""
    count = 1
    while (group := BRACES.search(pattern)) is not None:
        first, last, names = group["first"], group["last"], group["names"]
        count *= abs(int(last) - int(first)) + 1 if first is not None else (names or "").count(",") + 1
        pattern = pattern[: group.start()] + pattern[group.end() :]
    return count


def _check_shards(leaf: Leaf) -> list[str]:
    which = {"split_part": leaf.part, "split_config": leaf.split_file}
    path = leaf.path
    return check_shards(path.local_path(), **which) if path.is_local() else check_remote_shards(path, **which)


def prepare_command(path: EPath) -> str:
    """Return the shell command that prepares shards of jpg, json and txt."""
    return (
        f"energon prepare {shlex.quote(str(path))} --non-interactive --split-ratio 1,0,0 "
        f"--sample-type VQASample --field-map '{FIELD_MAP}'"
    )
