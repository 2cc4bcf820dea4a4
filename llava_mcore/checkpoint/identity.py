"""Which weights a checkpoint holds, and which run wrote it.

What an adapter is trained on must be what it is later used with. A run must not resume from temporary checkpoints of an
earlier one of its name, whose folder has been deleted.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from pathlib import Path

from llava_mcore.checkpoint.checksums import recorded
from llava_mcore.checkpoint.complete import RUN_JSON
from llava_mcore.checkpoint.layout import hf_folder
from llava_mcore.checkpoint.manifest import read_manifest
from llava_mcore.errors import CheckpointError
from llava_mcore.files.text_files import naming, read_text

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
