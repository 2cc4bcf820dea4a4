"""Energon datasets as a user creates them: real digits in tar files, then `energon prepare`."""

from __future__ import annotations

import functools
import io
import json
import multiprocessing
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import webdataset
from PIL import Image
from sklearn.datasets import load_digits

from tests.helpers.world import write_output_to

FIELD_MAP = '{"image":"jpg","context":"json[question]","answers":"txt"}'


digits = functools.cache(load_digits)
"""scikit-learn's scans of handwritten digits, read once."""


def jpeg(index: int, size: int = 56) -> bytes:
    """Return an image of one of the digits."""
    pixels = (digits().images[index] * 15.9).astype("uint8")
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert("RGB").resize((size, size)).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def write_shards(
    folder: Path, *, num_samples: int = 40, num_shards: int = 2, replace: dict[int, dict[str, Any]] | None = None
) -> None:
    """Write unprepared shards. `replace`: parts of single samples (None takes a part out)."""
    folder.mkdir(parents=True, exist_ok=True)
    writers = [webdataset.TarWriter(str(folder / f"{i:06d}.tar")) for i in range(num_shards)]
    for i in range(num_samples):
        parts: dict[str, Any] = {
            "__key__": f"sample{i:05d}",
            "jpg": jpeg(i),
            "txt": f"It is {digits().target[i]}.",
            "json": json.dumps({"question": "Which digit is shown?"}).encode(),
        }
        parts |= (replace or {}).get(i, {})
        writers[i % num_shards].write({k: v for k, v in parts.items() if v is not None})
    for writer in writers:
        writer.close()


def prepare(folder: Path, *, sample_type: str = "VQASample") -> None:
    """Run `energon prepare` as docs/data.md says, in a process that is forked from the tests' server."""
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
    arguments = [*command, "--sample-type", sample_type, *field_map]
    with tempfile.TemporaryDirectory() as printed:
        log = Path(printed) / "log"
        process = multiprocessing.get_context("forkserver").Process(target=_energon, args=(arguments, log))
        process.start()
        process.join()
        assert process.exitcode == 0, log.read_text()
    assert (folder / ".nv-meta" / "dataset.yaml").is_file()


def _energon(arguments: Sequence[str], log: Path) -> None:
    """Be the command `energon`."""
    write_output_to(log)
    from megatron.energon.cli.main import main

    main(arguments)


def make_dataset(folder: Path, **options: Any) -> Path:
    """Write and prepare."""
    sample_type = options.pop("sample_type", "VQASample")
    write_shards(folder, **options)
    prepare(folder, sample_type=sample_type)
    return folder
