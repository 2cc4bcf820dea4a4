"""Energon datasets as a user creates them: real digits in tar files, then `energon prepare`."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import webdataset
from PIL import Image
from sklearn.datasets import load_digits

FIELD_MAP = '{"image":"jpg","context":"json[question]","answers":"txt"}'


def jpeg(index: int, size: int = 56) -> bytes:
    """Return one of scikit-learn's scans of handwritten digits."""
    pixels = (load_digits().images[index] * 15.9).astype("uint8")
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert("RGB").resize((size, size)).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def write_shards(
    folder: Path, *, num_samples: int = 40, num_shards: int = 2, replace: dict[int, dict[str, Any]] | None = None
) -> None:
    """Write unprepared shards. `replace`: parts of single samples (None takes a part out)."""
    folder.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    writers = [webdataset.TarWriter(str(folder / f"{i:06d}.tar")) for i in range(num_shards)]
    for i in range(num_samples):
        parts: dict[str, Any] = {
            "__key__": f"sample{i:05d}",
            "jpg": jpeg(i),
            "txt": f"It is {digits.target[i]}.",
            "json": json.dumps({"question": "Which digit is shown?"}).encode(),
        }
        parts |= (replace or {}).get(i, {})
        writers[i % num_shards].write({k: v for k, v in parts.items() if v is not None})
    for writer in writers:
        writer.close()


def prepare(folder: Path, *, sample_type: str = "VQASample") -> None:
    """Run `energon prepare` as docs/data.md says."""
    field_map = ["--field-map", FIELD_MAP] if sample_type == "VQASample" else []
    command = [
        "prepare",
        str(folder),
        "--non-interactive",
        "--split-ratio",
        "1,0,0",
        "--no-progress",
        "--num-workers",
        "1",
    ]
    energon = [sys.executable, "-m", "megatron.energon.cli.main"]  # the script `energon` may be anywhere on PATH
    subprocess.run([*energon, *command, "--sample-type", sample_type, *field_map], check=True, capture_output=True)
    assert (folder / ".nv-meta" / "dataset.yaml").is_file()


def make_dataset(folder: Path, **options: Any) -> Path:
    """Write and prepare."""
    sample_type = options.pop("sample_type", "VQASample")
    write_shards(folder, **options)
    prepare(folder, sample_type=sample_type)
    return folder
