"""Write docs/performance.md out of benchmarks/results/*.json, what the benchmarks wrote with --json.

python -m benchmarks.performance_page
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
LEFT_OUT = ("loss", "error", "steps")
HEADINGS = {"what": "FP8 recipe or peer", "wait %": "data wait %"}
INTRODUCTION = """# Performance

Made by `python -m benchmarks.performance_page` from `benchmarks/results/`; every table names its command, hardware and
versions. How to read it:

- Tokens are real ones: pads do not count, image tokens do. Seconds are wall time, waiting for data included; each
  figure is the median over the steps behind the warm-up.
- MFU is model FLOPs ([formula](performance_formulas.md)) against the dense BF16 peak, 989 TFLOP/s, also for FP8, where
  it only says how much faster it is.
- The pictures are JPEGs of 640 x 480 in shards, decoded by the loader while training; the vision tower is frozen unless
  the heading says otherwise, the language model and the projection are trained with AdamW, fp32 master weights and
  gradients, distributed optimizer, no recomputation. "none" is BF16.
- The peer is the best Hugging Face stack that we could build (`benchmarks/hf_peer.py`): FSDP2, Liger kernels with the
  fused linear cross-entropy, cuDNN attention, fused AdamW, on the same shards through the same loader.
  `÷ hf` is tokens per second divided by its.
- Where our data wait is more than 1 %, the row is from before the micro-batches of a step were made while the step
  before is computed, and too low by that; it is 0.3 to 0.6 % since. Only the table by layout is newer: its note says
  what waits there.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(sorted(RESULTS.glob("*.json"))), encoding="utf-8")


def page(results: Sequence[Path]) -> str:
    """Return the text of the page."""
    return "\n".join([INTRODUCTION, *(section(json.loads(path.read_text(encoding="utf-8"))) for path in results)])


def section(result: dict[str, Any]) -> str:
    """Return a heading, a table, and what it was made with."""
    about, rows = result["about"], [row for row in result["rows"] if "error" not in row]
    columns = [name for name in dict.fromkeys(key for row in rows for key in row) if name not in LEFT_OUT]
    lines = [
        f"## {about['title']}",
        "",
        _line([HEADINGS.get(name, name) for name in columns]),
        _line(["---"] * len(columns)),
    ]
    lines += [_line([_text(row.get(name, "-")) for name in columns]) for row in rows]
    module = about["script"].removesuffix(".py").replace("/", ".")
    command = " ".join(["python -m", module, *about["command"]])
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    notes = [f"{about['note']} "] if "note" in about else []
    return "\n".join(
        [
            *lines,
            "",
            *notes,
            f"{about['gpu']}; {versions}.",
            f"`{command}`",
            "",
        ]
    )


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
