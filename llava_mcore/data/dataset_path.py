"""A data path before anything is loaded from it: is it prepared, and which data is it."""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path

import yaml
from megatron.energon import traverse_metadataset

from llava_mcore.errors import DataError, problems

META = ".nv-meta"
FIELD_MAP = '{"image":"jpg","context":"json[question]","answers":"txt"}'
META_FILES = ("dataset.yaml", "split.yaml", "index.sqlite", "index.uuid")
SPLIT = "train"


def check_dataset(path: Path | None) -> list[Path]:
    """Return the datasets of a data path: itself, or those that a blend (`*.yaml`) names.

    Raises one DataError that names everything that is missing and the command that prepares a dataset.
    """
    if path is None:
        raise DataError("no data path given; set data.path (--data-path)")
    leaves = _leaves(path)
    found = [problem for leaf in leaves for problem in _check_leaf(leaf)]
    if found:
        raise DataError(problems(f"{path} cannot be trained on", found))
    return leaves


def fingerprint(path: Path) -> list[str]:
    """Return one hash for each dataset of a checked path, and one for a blend's file.

    It is made from what `energon prepare` gave the data and from how it is divided and read, not from where it lies,
    so a dataset may be moved between save and resume, but not prepared anew.
    """
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest()] if path.is_file() else []
    for leaf in _leaves(path):
        if leaf.is_file():
            hashes.append(hashlib.sha256(f"{leaf.name} {leaf.stat().st_size}".encode()).hexdigest())
            continue
        parts = [(leaf / META / name).read_bytes() for name in ("index.uuid", "split.yaml", "dataset.yaml")]
        hashes.append(hashlib.sha256(b"\0".join(parts)).hexdigest())
    return hashes


def _leaves(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"data path {path} does not exist")
    if path.is_dir():
        return [path]
    if path.suffix != ".yaml":
        raise DataError(f"data path {path} must be a prepared folder or the .yaml file of a blend")
    try:
        references = traverse_metadataset(path, split_part=SPLIT)
    # Energon checks a blend's file with assertions and plain look-ups.
    except (AssertionError, ValueError, KeyError, TypeError, OSError, yaml.YAMLError) as error:
        raise DataError(f"{path} is no blend of datasets that energon can read: {error}") from error
    return list(dict.fromkeys(Path(str(reference.path)) for reference in references))


def _check_leaf(leaf: Path) -> list[str]:
    if leaf.is_file():
        return [] if leaf.suffix == ".jsonl" else [f"{leaf} is neither a prepared folder nor a .jsonl file"]
    if not leaf.is_dir():
        return [f"{leaf} does not exist"]
    if not (leaf / META).is_dir():
        return [f"{leaf} has no {META}: it is not prepared. Prepare it with\n{prepare_command(leaf)}"]
    missing = [name for name in META_FILES if not (leaf / META / name).is_file()]
    if missing:
        return [
            f"{leaf / META} is not complete ({', '.join(missing)} missing). Prepare it anew with\n"
            f"{prepare_command(leaf)} --force-overwrite"
        ]
    with (leaf / META / "split.yaml").open(encoding="utf-8") as file:
        split = yaml.safe_load(file)
    if not (split.get("split_parts") or {}).get(SPLIT):
        return [f"{leaf} has no shards in its {SPLIT!r} part; see {leaf / META / 'split.yaml'} (ratios count shards)"]
    return []


def prepare_command(path: Path) -> str:
    """The shell command that prepares shards of jpg, json and txt."""
    return (
        f"energon prepare {shlex.quote(str(path))} --non-interactive --split-ratio 1,0,0 "
        f"--sample-type VQASample --field-map '{FIELD_MAP}'"
    )
