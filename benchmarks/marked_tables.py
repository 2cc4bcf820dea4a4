"""Write the tables of figures in README.md, docs/performance.md and examples/*/README.md out of benchmarks/results.

python -m benchmarks.marked_tables

A table is between <!-- measured --> and <!-- /measured -->; the rest of the files is written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(?<=<!-- measured -->\n).*?(?=<!-- /measured -->)", re.DOTALL)
IN_FP8 = "÷ hf-fp8"
REAL = {
    "÷ swift": "Megatron-SWIFT",
    "÷ automodel": "NeMo Automodel",
    "÷ veomni": "VeOmni",
    "÷ lmms": "lmms-engine",
}
"""Columns of ratios to published programs."""
PEERS = REAL | {
    "÷ hf": "Hugging Face, packed",
    IN_FP8: "Hugging Face in FP8, packed",
    "÷ hf-padded": "Hugging Face, padded",
    "÷ PEFT": "PEFT with Liger",
}
"""Columns of ratios to a peer that was measured in the same run."""
BEST_FIRST = ("÷ hf-padded", "÷ hf", "÷ PEFT")
"""The peer that a row names, if there are several and no product among them."""
IN_BF16 = {"none": "", "ours lora": "", "ours nf4": " (NF4)"}
WITH_FP8 = {"delayed": "", "tensorwise": " (tensorwise)", "delayed+vision": " (tower too)", "ours fp8only": ""}
"""Our rows -> what is said beside their speed."""
MEASURED = {
    "train_step_7b_2": "LLaVA-1.5-7B",
    "train_step_7b_4_gbs192": "LLaVA-1.5-7B, older version",
    "train_step_onevision_2": "LLaVA-OneVision-7B, tower trained",
    "train_step_qwen2_5_vl_2": "Qwen2.5-VL-7B, tower trained",
    "train_step_qwen2_5_vl_2_frozen": "Qwen2.5-VL-7B",
    "train_step_qwen2_5_vl_1": "Qwen2.5-VL-7B, tower trained, 14 of 28 layers, newer version",
    "train_step_qwen2_5_vl_1_lora": "Qwen2.5-VL-7B, LoRA, newer version",
    "train_step_qwen2_5_vl_1_videos": "Qwen2.5-VL-7B, images and videos, tower trained, 14 of 28 layers",
    "train_step_qwen2_audio_1": "Qwen2-Audio-7B, 8 of 32 layers",
    "train_step_qwen3_vl_moe_1": "Qwen3-VL-30B-A3B, 8 of 48 layers, newer version",
    "train_step_qwen3_5_9b_1": "Qwen3.5-9B, 12 of 32 layers",
    "train_step_qwen2_5_vl_1_long_128k": "Qwen2.5-VL-7B, 14 of 28 layers, packs of 131,072 tokens",
    "train_step_qwen3_vl_moe_4": "Qwen3-VL-30B-A3B, ep 4",
    "train_step_qwen3_vl_moe_4_12_layers": "Qwen3-VL-30B-A3B, ep 4, 12 of 48 layers",
    "train_step_13b_2_pp": "LLaVA-1.5-13B, pp 2",
    "train_step_13b_2_fsdp": "LLaVA-1.5-13B, `--fsdp`, recomputed",
    "train_step_jp_1_8b_1": "llm-jp-3-1.8b and CLIP-L/336",
    "train_step_1b_1": "LLaVA with 1B parameters",
    "adapters_7b": "LLaVA-1.5-7B, LoRA",
    "adapters_7b_nf4": "LLaVA-1.5-7B, QLoRA",
}
"""Files of results in the table of docs/performance.md, and what they are called there."""
BESIDE_LMMS = "products_qwen2_5_vl_7b_lmms"
PRODUCTS = {
    "products_qwen3_vl_30b_a3b": "Qwen3-VL-30B-A3B, 8 of 48 layers",
    "products_qwen3_vl_8b": "Qwen3-VL-8B, tower trained, 16 of 36 layers",
    "products_qwen2_5_vl_7b": "Qwen2.5-VL-7B, tower trained, 14 of 28 layers",
    BESIDE_LMMS: "Qwen2.5-VL-7B, tower trained, 14 of 28 layers, another run",
    "products_qwen2_5_vl_7b_lora": "Qwen2.5-VL-7B, LoRA",
}
"""Files of runs beside products: those that exist come first in the tables."""
ON_FRONT_PAGE = ("train_step_7b_2", "train_step_onevision_2", "adapters_7b_nf4")
CHAOS_ROW = re.compile(r"^\| ([\w -]+) \| (\d+) \| (\d+) \| [\d.]+ s \|$", re.MULTILINE)
"""What happened, rounds, rounds that ended as they should."""
QWEN_FROZEN = "train_step_qwen2_5_vl_2_frozen"
Row = dict[str, Any]


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
    """Return README.md's table: speed beside the best peer."""
    products = (name for name in beside_products() if name != BESIDE_LMMS)
    return speed_table((*products, *ON_FRONT_PAGE), memory=False)


def beside_products() -> tuple[str, ...]:
    """Return the files of runs beside products that have been measured."""
    return tuple(name for name in PRODUCTS if (RESULTS / f"{name}.json").exists())


def speed_table(names: Sequence[str], *, memory: bool) -> str:
    """Return a table with a row per file of results: our speed in BF16 and in FP8, and the ratio to each peer."""
    columns = ["model", "GPUs", "BF16", "FP8", "peer", "BF16 ÷ peer", "FP8 ÷ peer", "FP8 ÷ peer in FP8"]
    columns += ["GiB, BF16", "GiB, FP8", "MFU %, BF16"] if memory else []
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name in names:
        ours = _fastest(_rows(name))
        plain = next(row for row in ours if row["what"] in IN_BF16)
        fp8 = next((row for row in ours if row["what"] in WITH_FP8), {})
        peer = _best_peer(plain)
        cells = [(PRODUCTS | MEASURED)[name], _gpu(name), _speed(plain, IN_BF16), _speed(fp8, WITH_FP8)]
        cells += [PEERS[peer], _ratio(plain, peer), _ratio(fp8, peer)] if peer else ["not measured", "-", "-"]
        cells += [_ratio(fp8, IN_FP8)]
        cells += [_gib(plain), _gib(fp8), str(plain.get("MFU %", "-"))] if memory else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def products() -> str:
    """Return a table with a row per run beside products: our speed, every product's, and the ratio to the best; then
    the commands."""
    names = beside_products()
    measured = {row["what"] for name in names for row in _rows(name)}
    titles = [title for title in REAL.values() if title in measured]
    lines = [f"| model | GPUs | ours | {' | '.join(titles)} | ours ÷ best |", "|---" * (len(titles) + 4) + "|"]
    commands = []
    for name in names:
        ours = next(row for row in _fastest(_rows(name)) if row["what"] == "none")
        speeds = {row["what"]: f"{row['tok/s/GPU']:,}" for row in _rows(name)}
        best = _best_peer(ours)
        assert best in REAL, f"{name}: no product has been measured in this run"
        cells = [PRODUCTS[name], _gpu(name), f"{ours['tok/s/GPU']:,}", *(speeds.get(title, "-") for title in titles)]
        lines.append(f"| {' | '.join(cells)} | {ours[best]:.2f} |")
        command = " ".join(_read(name)["about"]["command"])
        commands += [f"# {PRODUCTS[name]}", f"python -m benchmarks.train_step --peer-packages products {command}"]
    return "\n".join([*lines, "", "```shell", *commands, "```", ""])


def _best_peer(row: Row) -> str | None:
    """Return the column of the fastest product beside a row of ours; of another peer where there is no product."""
    beside = [name for name in REAL if name in row]
    return min(beside, key=lambda name: row[name]) if beside else next((x for x in BEST_FIRST if x in row), None)


def _fastest(rows: Sequence[Row]) -> list[Row]:
    """Return the rows without those of the same settings that are slower without, or with, CUDA graphs."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = tuple(row.get(name) for name in ("what", "tp", "pp", "dp", "mbs", "gbs"))
        groups.setdefault(key, []).append(row)
    return [max(group, key=lambda row: row.get("tok/s/GPU") or row["tok/s"]) for group in groups.values()]


def _speed(row: Row, notes: dict[str, str]) -> str:
    return f"{row.get('tok/s/GPU') or row['tok/s']:,}{notes[row['what']]}" if row else "-"


def _ratio(row: Row, peer: str) -> str:
    return f"{row[peer]:.2f}" if peer in row else "-"


def _gib(row: Row) -> str:
    return f"{row.get('GiB') or row['peak GiB']:.1f}" if row else "-"


def survived() -> tuple[int, int]:
    """Return how many rounds of results/chaos.md disturbed a run, and how many of these ended as they should."""
    text = (RESULTS / "chaos.md").read_text(encoding="utf-8")
    rows = [(name, int(rounds), int(right)) for name, rounds, right in CHAOS_ROW.findall(text) if name != "all"]
    disturbed = [(rounds, right) for name, rounds, right in rows if name != "nothing"]
    return sum(rounds for rounds, _ in disturbed), sum(right for _, right in disturbed)


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
        "| GPUs | layout | per micro-batch, per iteration | precision | tokens/s per GPU | GiB per GPU |",
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
    "docs/performance.md": lambda: speed_table((*beside_products(), *MEASURED), memory=True),
    "docs/products.md": products,
    "examples/llava-1.5-7b/README.md": llava,
    "examples/llava-onevision-7b/README.md": lambda: _steps(
        [(name, _rows(name)[0]) for name in ("train_step_onevision_2", "train_step_siglip_qwen_4")]
    ),
    "examples/qwen2.5-vl-7b/README.md": lambda: _steps(
        [
            (name, row)
            for name in ("train_step_qwen2_5_vl_2", "train_step_qwen2_5_vl_2_fp8", QWEN_FROZEN)
            for row in _fastest(_rows(name))
            if "Hugging" not in row["what"]
        ]
    ),
    "examples/lora-one-gpu/README.md": adapters,
}
"""File -> its table."""


if __name__ == "__main__":
    main()
