"""Paths in a folder of Megatron checkpoints, and the records of an import.

latest_checkpointed_iteration.txt      the newest complete iteration
iter_0000006/                          dist_checkpointing files (torch_dist)
iter_0000006/hf/                       config, tokenizer and processor files, unused.safetensors, tensors.json
iter_0000006/hf/import_manifest.json   SHA-256 of every tensor that was imported, versions
iter_0000006/run.yaml                  the resolved run, if training wrote it
iter_0000006/run.json                  versions, layout, every file with its size and checksum, if training wrote it
iter_0000006/checksums.json            every file with its checksum, if an import wrote it
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava_mcore import __version__
from llava_mcore.config.schema import NON_PERSISTENT
from llava_mcore.errors import CheckpointError
from llava_mcore.files.atomic import replace_file
from llava_mcore.files.hf_files import hub_hint
from llava_mcore.files.regular import read_object

if TYPE_CHECKING:
    from llava_mcore.weights.table import MappingTable

TRACKER = "latest_checkpointed_iteration.txt"
UNUSED = "unused.safetensors"
RECORD = "tensors.json"
MANIFEST = "import_manifest.json"
RUN_FILE = "run.yaml"
ITERATION_NAME = re.compile(r"iter_(\d{7,})")
SHOWN_FOLDERS = 5
_LONGEST_TRACKER = 1000
_MOST_DIGITS = 18
_RUN_FILES = (UNUSED, RECORD, MANIFEST)
_MANIFEST_FORMAT = 1
_DTYPES = ("float32", "bfloat16", "float16")
_PACKAGES = ("torch", "megatron-core", "transformers", "safetensors")


def iteration_folder(root: Path, iteration: int) -> Path:
    """Return the folder of one iteration."""
    return root / f"iter_{iteration:07d}"


def hf_folder(checkpoint: Path) -> Path:
    """Return the folder of the Hugging Face files inside one iteration."""
    return checkpoint / "hf"


def companion_skip() -> tuple[str, ...]:
    """Names of our own files in `hf/`, which do not belong in an exported folder."""
    return _RUN_FILES


def is_iteration(folder: Path) -> bool:
    """Return whether a folder has one iteration's torch_dist files."""
    return (folder / "metadata.json").is_file() and (folder / ".metadata").is_file()


def latest_iteration(root: Path) -> int | None:
    """Return the iteration in the tracker, or None without a tracker.

    Raises:
        CheckpointError: the tracker does not contain a number.
    """
    tracker = root / TRACKER
    if not tracker.is_file():
        return None
    iteration = _tracked_iteration(tracker)
    if iteration is None:
        text = _tracker_text(tracker)
        excerpt = repr(text) if len(text) <= 80 else f"{text[:80]!r}… ({len(text)} characters)"
        raise CheckpointError(f"{tracker}: expected an iteration number, found {excerpt}")
    return iteration


def _tracker_text(tracker: Path) -> str:
    with tracker.open(encoding="utf-8", errors="backslashreplace") as file:
        return file.read(_LONGEST_TRACKER).strip()


def _tracked_iteration(tracker: Path) -> int | None:
    """Return the iteration in a tracker; None if it contains anything else."""
    text = _tracker_text(tracker) if tracker.is_file() else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def latest_checkpoint(root: Path) -> tuple[Path, int]:
    """Return the newest complete checkpoint of a folder, or one iteration whose folder is given; and its iteration.

    Raises:
        CheckpointError: the folder, the tracker, or the iteration in the tracker is missing.
    """
    if not root.is_dir():
        download = hub_hint(root)
        converted = "" if download is None else f"; {download}\nand convert it with import-hf"
        raise CheckpointError(f"{root}: no such folder; expected a folder of Megatron checkpoints{converted}")
    iteration = latest_iteration(root)
    one = ITERATION_NAME.fullmatch(root.resolve().name)
    if iteration is None and one is not None and is_iteration(root):
        return root, int(one[1])
    if iteration is None:
        raise CheckpointError(f"{root}: no {TRACKER}; {_instead(root)}")
    folder = iteration_folder(root, iteration)
    if not (folder / "metadata.json").is_file():
        raise CheckpointError(
            f"{root / TRACKER} names iteration {iteration}, but {folder} is not a complete checkpoint"
        )
    return folder, iteration


def _instead(root: Path) -> str:
    """Return what a folder without a tracker is, and what to do."""
    if (root / RUN_FILE).is_file():
        if (root / NON_PERSISTENT / TRACKER).is_file():
            return f"this run has only a temporary checkpoint so far, in {root / NON_PERSISTENT}"
        return "this run has saved no checkpoint: train with --save (at the end) or --save-interval N"
    runs = sorted(folder.name for folder in root.iterdir() if (folder / TRACKER).is_file())
    if runs:
        more = ", …" if len(runs) > SHOWN_FOLDERS else ""
        return f"give one of the folders in it: {', '.join(runs[:SHOWN_FOLDERS])}{more}"
    other = "it is a Hugging Face folder: " if (root / "config.json").is_file() else ""
    return f"{other}import a model first (python -m llava_mcore import-hf)"


def newest_iteration(folder: Path) -> Path:
    """Return the folder of one iteration: `folder` itself, whatever its name, or its newest. Errors like
    `latest_checkpoint`."""
    return folder if is_iteration(folder) else latest_checkpoint(folder)[0]


def latest_readable(root: Path) -> tuple[Path, int]:
    """Return the newest checkpoint and its iteration, including those in Megatron-LM's older format (mp_rank_XX,
    `release`).

    Raises:
        CheckpointError: like `latest_checkpoint`.
    """
    tracker = root / TRACKER
    iteration = _tracked_iteration(tracker)
    is_release = tracker.is_file() and _tracker_text(tracker) == "release"
    folder = root / "release" if is_release else root if iteration is None else iteration_folder(root, iteration)
    if folder != root and any(folder.glob("mp_rank_*")):
        return folder, iteration or 0
    return latest_checkpoint(root)


def write_tracker(root: Path, iteration: int) -> None:
    """Point the tracker at a complete checkpoint, atomically."""
    replace_file(root / TRACKER, f"{iteration}\n".encode())


def write_record(checkpoint: Path, record: dict[str, Any]) -> None:
    """Write the record of the Hugging Face tensors that the checkpoint was imported from."""
    write_record_file(hf_folder(checkpoint), record)


def write_record_file(folder: Path, record: dict[str, Any]) -> None:
    """Write the record into a folder of Hugging Face files."""
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_record(checkpoint: Path) -> dict[str, Any]:
    """Inverse of `write_record`.

    Raises:
        CheckpointError: the checkpoint has no Hugging Face files, or the record is damaged.
    """
    path = hf_folder(checkpoint) / RECORD
    if not path.is_file():
        raise CheckpointError(
            f"{checkpoint}: no hf/{RECORD}; it was not written by llava_mcore: "
            "export it with --hf-config, a Hugging Face folder of the same model"
        )
    record = read_object(path, CheckpointError)
    if not isinstance(record.get("tensors"), dict):
        raise CheckpointError(f"{path}: does not list any tensors")
    return record


@dataclass(frozen=True)
class Manifest:
    """`digests`: SHA-256 of the bytes of each Hugging Face tensor as imported, that is after a cast to `dtype`.

    `table`: SHA-256 of the mapping table, which changes with any name, rule or layout in it. `config`: SHA-256 of the
    folder's config.json. `source`: the folder as it was given. `dtype` None: every tensor kept its dtype.
    """

    source: str
    config: str
    table: str
    dtype: str | None
    tp: int
    pp: int
    versions: dict[str, str]
    digests: dict[str, str]


def make_manifest(
    source: Path, table: MappingTable, digests: Mapping[str, str], *, dtype: str | None, tp: int, pp: int
) -> Manifest:
    """Return the manifest of a finished import."""
    versions = {"llava_mcore": __version__} | {name: importlib.metadata.version(name) for name in _PACKAGES}
    config = hashlib.sha256((source / "config.json").read_bytes()).hexdigest()
    folder = str(source.absolute())  # an exported adapter names it
    return Manifest(folder, config, table_digest(table), dtype, tp, pp, versions, dict(sorted(digests.items())))


def table_digest(table: MappingTable) -> str:
    """Return the SHA-256 of every entry, unused tensor and copy of a table."""
    lines = [*map(repr, table.entries.values()), repr(table.unused), repr(table.copies)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it into a folder of Hugging Face files."""
    content = {"format": _MANIFEST_FORMAT, **asdict(manifest)}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest | None:
    """Inverse of `write_manifest`; None if there is none.

    Raises:
        CheckpointError: it was written by a later version, or is damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    content = read_object(path, CheckpointError)
    stored_format = content.pop("format", None)
    if stored_format != _MANIFEST_FORMAT:
        raise CheckpointError(f"{path}: format {stored_format}; this version reads {_MANIFEST_FORMAT}")
    try:
        manifest = Manifest(**content)
    except TypeError as error:
        raise CheckpointError(f"{path}: not a manifest of an import: {error}") from error
    if not isinstance(manifest.digests, dict) or manifest.dtype not in (None, *_DTYPES):
        raise CheckpointError(f"{path}: not a manifest of an import")
    return manifest
