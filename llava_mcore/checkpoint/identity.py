"""Which weights a checkpoint holds, and which run wrote it.

An adapter must be used with the weights that it was trained on. A run must not resume from non-persistent checkpoints
of an earlier run of its name whose folder has been deleted.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from llava_mcore import __version__
from llava_mcore.checkpoint.checksums import recorded
from llava_mcore.checkpoint.complete import RUN_JSON
from llava_mcore.checkpoint.layout import MANIFEST, hf_folder
from llava_mcore.errors import CheckpointError
from llava_mcore.files.regular import naming, read_object, read_text
from llava_mcore.weights.table import MappingTable

RUN_ID_FILE, RUN_ID = "run_id.txt", "run_id"
"""An id in SAVE_DIR/NAME, and its key in the run.json of checkpoints. Older versions wrote none."""
_METADATA = ".metadata"
_IMPORT = "import"


def weights_identity(checkpoint: Path) -> str:
    """Return a text that is the same for the same weights.

    For an import, it is computed from the SHA-256 of the Hugging Face tensors, so another import of the same folder
    counts as the same. For a checkpoint of training, it is computed from the files' checksums. Nothing large is read.

    Raises:
        CheckpointError: the folder holds no checkpoint.
    """
    manifest = None if (checkpoint / RUN_JSON).is_file() else read_manifest(hf_folder(checkpoint))
    if manifest is not None:
        return _digest(_IMPORT, manifest.digests)
    files = recorded(checkpoint)
    if files is not None:
        return _digest("files", {name: text for name, text in files.items() if "/" not in name})
    path = checkpoint / _METADATA
    if not path.is_file():
        raise CheckpointError(f"{checkpoint}: no {_METADATA}; expected the folder of one iteration")
    return _digest("metadata", {_METADATA: hashlib.sha256(path.read_bytes()).hexdigest()})


def is_of_import(identity: str) -> bool:
    """Return whether weights are those of an imported Hugging Face folder."""
    return identity.startswith(f"{_IMPORT}:")


def _digest(kind: str, parts: dict[str, str]) -> str:
    return f"{kind}:{hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()}"


def run_id(run_dir: Path) -> str | None:
    """Return the id of a run's folder; None before its first checkpoint. FileError for a file that is not text."""
    file = run_dir / RUN_ID_FILE
    return read_text(file).strip() if file.is_file() else None


def ensure_run_id(run_dir: Path) -> str:
    """Return the id of a run's folder, and write one if it has none."""
    identity = run_id(run_dir)
    if identity is None:
        identity = uuid.uuid4().hex
        run_dir.mkdir(parents=True, exist_ok=True)
        with naming(run_dir / RUN_ID_FILE):
            (run_dir / RUN_ID_FILE).write_text(f"{identity}\n", encoding="utf-8")
    return identity


FORMAT = 1
_DTYPES = ("float32", "bfloat16", "float16")
_PACKAGES = ("torch", "megatron-core", "transformers", "safetensors")


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
    content = {"format": FORMAT, **asdict(manifest)}
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
    if stored_format != FORMAT:
        raise CheckpointError(f"{path}: format {stored_format}; this version reads {FORMAT}")
    try:
        manifest = Manifest(**content)
    except TypeError as error:
        raise CheckpointError(f"{path}: not a manifest of an import: {error}") from error
    if not isinstance(manifest.digests, dict) or manifest.dtype not in (None, *_DTYPES):
        raise CheckpointError(f"{path}: not a manifest of an import")
    return manifest
