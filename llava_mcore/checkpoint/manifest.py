"""The manifest of an import: what was imported, by what, and the SHA-256 of every tensor.

It is stored in the checkpoint and, like all Hugging Face files, in those that training writes later.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from llava_mcore import __version__
from llava_mcore.checkpoint.layout import MANIFEST
from llava_mcore.errors import CheckpointError
from llava_mcore.files.json_files import read_object
from llava_mcore.weights.table import MappingTable

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
