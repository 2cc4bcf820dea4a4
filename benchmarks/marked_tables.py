"""Write the tables of figures in README.md and examples/*/README.md out of benchmarks/results.

python -m benchmarks.marked_tables

A table is between <!-- measured --> and <!-- /measured -->; the rest of the files is written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(?<=<!-- measured -->\n).*?(?=<!-- /measured -->)", re.DOTALL)
CHAOS_ROW = re.compile(r"^\| ([\w -]+) \| (\d+) \| (\d+) \| [\d.]+ s \|$", re.MULTILINE)
"""What happened, rounds, rounds that ended as they should."""
QWEN_FROZEN = "train_step_qwen2_5_vl_2_frozen"
Row = dict[str, Any]
Cells = tuple[str, str, str]


def main() -> None:
    """Write every table into its file."""
    for name in TABLES:
        path = ROOT / name
        path.write_text(with_table(path.read_text(encoding="utf-8"), TABLES[name]()), encoding="utf-8")


def with_table(text: str, table: str) -> str:
    """Return a file's text with another table. Raises ValueError if it has no place for one."""
    changed, count = BLOCK.subn(lambda _: table, text)
    if count != 1:
        raise ValueError(f"expected one block <!-- measured -->, found {count}")
    return changed


def front_page() -> str:
    """Return README.md's table: speed beside the best peer, exactness, what survives."""
    lines = ["| | | shown by |", "|---|---|---|"]
    for heading, rows in FRONT_PAGE.items():
        lines.append(f"| **{heading}** | | |")
        lines += [f"| {what} | {figure} | {source} |" for what, figure, source in rows()]
    return "\n".join([*lines, ""])


def speed() -> list[Cells]:
    """Return the rows about speed, each from one file, in which the peer was measured too."""
    plain, fp8 = _rows("train_step_7b_2")[:2]
    padded, padded_fp8 = (row["÷ hf-padded"] for row in _rows("train_step_7b_4_gbs192")[:2])
    names = ("onevision_2", "qwen2_5_vl_2", "qwen2_audio_1")
    onevision, qwen, audio = (
        next(row for row in _rows(f"train_step_{name}") if row.get("graphs") != "off") for name in names
    )
    adapter, before = _rows("adapters_7b")[0], _rows("adapters_7b_h200")[0]
    page = "[performance.md](docs/performance.md)"
    return [
        (
            f"LLaVA-1.5-7B, {_gpu('train_step_7b_2')}, BF16 (FP8)",
            f"{plain['tok/s/GPU']:,} ({fp8['tok/s/GPU']:,}) tokens/s per GPU: {plain['÷ hf']:.2f} ({fp8['÷ hf']:.2f}) "
            f"times Hugging Face in BF16, packed; in FP8 {fp8['÷ hf-fp8']:.2f} times Hugging Face in FP8",
            page,
        ),
        (
            f"The same, {_gpu('train_step_7b_4_gbs192')}",
            f"{padded:.2f} ({padded_fp8:.2f}) times Hugging Face in BF16, padded",
            page,
        ),
        (
            f"LLaVA-OneVision-7B, tower trained, {_gpu('train_step_onevision_2')}, BF16",
            f"{onevision['tok/s/GPU']:,} tokens/s per GPU: {onevision['÷ hf']:.2f} times Hugging Face, packed",
            page,
        ),
        (
            f"Qwen2.5-VL-7B, tower trained, CUDA graphs, {_gpu('train_step_qwen2_5_vl_2')}, BF16",
            f"{qwen['tok/s/GPU']:,} tokens/s per GPU: {qwen['÷ hf']:.2f} times Hugging Face, packed",
            page,
        ),
        (
            f"Qwen2-Audio-7B, 8 of 32 layers, {_gpu('train_step_qwen2_audio_1')}, BF16",
            f"{audio['tok/s/GPU']:,} tokens/s: {audio['÷ hf']:.2f} times Hugging Face, packed",
            page,
        ),
        (
            f"LoRA of LLaVA-1.5-7B, {_gpu('adapters_7b')}, BF16",
            f"{adapter['tok/s']:,} tokens/s: {adapter['÷ PEFT']:.2f} times PEFT with Liger (an older version on "
            f"{_gpu('adapters_7b_h200')}: {before['÷ PEFT']:.2f})",
            page,
        ),
    ]


def exactness() -> list[Cells]:
    """Return the rows about what is exact."""
    adamw = "losses compared with Hugging Face and torch's AdamW"
    return [
        ("weights, Hugging Face → Megatron → Hugging Face", "bit for bit", "`tests/unit/test_import_export.py`"),
        ("logits, Hugging Face's and ours", "within 1e-5 at every tested layout", "`tests/parallel/test_layouts.py`"),
        (adamw, "within 1e-5 at every tp, pp and dp", "`tests/parallel/test_training.py`"),
        ("answers of a checkpoint", "the tokens of transformers' `generate`", "`tests/parallel/test_generate.py`"),
    ]


def survival() -> list[Cells]:
    """Return the rows about what a run survives; the counts are those of results/chaos.md."""
    text = (RESULTS / "chaos.md").read_text(encoding="utf-8")
    table = {name: (int(rounds), int(right)) for name, rounds, right in CHAOS_ROW.findall(text)}
    disturbed, right = (table["all"][i] - table["nothing"][i] for i in (0, 1))
    return [
        (
            "`kill -9`, then the same command",
            "the losses of an uninterrupted run, bit for bit",
            "`tests/e2e/test_resume.py`",
        ),
        (
            "another tp, pp or dp after it, with the same micro-batch size",
            "the same losses within 1e-5",
            "`tests/parallel/test_resume_layouts.py`",
        ),
        (
            f"{disturbed} kills, hangs, flipped bytes and full disks at random moments",
            f"the same losses, bit for bit, each time; {right} rounds passed, one failed because of a test bug",
            "[chaos.md](benchmarks/results/chaos.md)",
        ),
        (
            "broken samples",
            "skipped, logged and counted; too many end the run with a list",
            "`tests/unit/test_bad_data_table.py`",
        ),
    ]


FRONT_PAGE: dict[str, Callable[[], list[Cells]]] = {
    "Speed compared with the best peer": speed,
    "Exactness, on CPUs in fp32": exactness,
    "What a run survives": survival,
}


def llava() -> str:
    """Return the figures of LLaVA-1.5-7B, and how many conversations a pack has."""
    rows = _rows("train_step_7b_4")[0]
    per_pack = rows["samples/s"] * rows["s/step"] / rows["gbs"]
    names = ("train_step_7b_4", "train_step_7b_4_gbs192", "train_step_7b_4_layouts", "train_step_7b_2")
    chosen = [(name, row) for name in names for row in _rows(name) if "Hugging" not in row["what"]]
    chosen = [x for x in chosen if x[0] != "train_step_7b_4_gbs192" or x[1]["what"] != "none"]
    return _steps(chosen) + f"\nA pack has {per_pack:.1f} conversations there, with lengths like those of the mix.\n"


def _steps(rows: list[tuple[str, Row]]) -> str:
    """Return a table of training steps. `rows`: each with the name of its file."""
    lines = [
        "| GPUs | layout | per micro-batch, per step | precision | tokens/s per GPU | GiB per GPU |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows:
        layout = f"tp {row['tp']} x pp {row['pp']} x dp {row['dp']}"
        precision = "BF16" if row["what"] == "none" else f"FP8, {row['what'].replace('+vision', ', tower too')}"
        precision += {"train_step_7b_4_gbs192": ", older", QWEN_FROZEN: ", tower frozen"}.get(name, "")
        sizes = f"{row['mbs']}, {row['gbs']}"
        speed = f"{row['tok/s/GPU']:,} | {row['GiB']}"
        lines.append(f"| {_gpu(name)} | {layout} | {sizes} | {precision} | {speed} |")
    return "\n".join([*lines, ""])


def adapters() -> str:
    """Return the figures of LoRA and QLoRA beside PEFT's."""
    names = {
        "lora": "LoRA",
        "nf4": "QLoRA",
        "fp8": "LoRA with FP8 products",
        "fp8only": "LoRA on a base model in FP8 only",
    }
    lines = ["| | GPU | tokens/s | GiB |", "|---|---|---|---|"]
    files = ("7b", "7b_h200", "7b_fp8", "7b_nf4", "13b", "13b_nf4")
    for name, row in [(f"adapters_{file}", row) for file in files for row in _rows(f"adapters_{file}")]:
        who, kind = row["what"].split()
        size = row["shape"].removeprefix("llava-1.5-").upper()
        older = ", older" if name == "adapters_7b_h200" else ""
        gpu = _gpu(name).removeprefix("1 x ")
        lines.append(f"| {size}, {names[kind]}, {who}{older} | {gpu} | {row['tok/s']:,} | {row['peak GiB']} |")
    return "\n".join([*lines, ""])


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _rows(name: str) -> list[Row]:
    return [row for row in _read(name)["rows"] if not row.get("error")]


def _gpu(name: str) -> str:
    return str(_read(name)["about"]["gpu"])


TABLES: dict[str, Callable[[], str]] = {
    "README.md": front_page,
    "examples/llava-1.5-7b/README.md": llava,
    "examples/llava-onevision-7b/README.md": lambda: _steps(
        [(name, _rows(name)[0]) for name in ("train_step_onevision_2", "train_step_siglip_qwen_4")]
    ),
    "examples/qwen2.5-vl-7b/README.md": lambda: _steps(
        [
            (name, row)
            for name in ("train_step_qwen2_5_vl_2_fp8", QWEN_FROZEN)
            for row in _rows(name)
            if "Hugging" not in row["what"]
        ]
    ),
    "examples/lora-one-gpu/README.md": adapters,
}
"""File -> its table."""


if __name__ == "__main__":
    main()
