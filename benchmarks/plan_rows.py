"""The rows of benchmarks/results that `plan_check` predicts, as configurations of runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.products import PRODUCTS
from llava_mcore.config.load import load_run_config
from llava_mcore.config.schema import RunConfig

RESULTS = Path(__file__).parent / "results"
FITTED = {
    ("train_step_7b_2.json", 0),
    ("train_step_7b_2.json", 1),
    ("train_step_7b_2_layouts.json", 1),
    ("train_step_7b_2_layouts.json", 2),
    ("train_step_1b_2_gbs96.json", 0),
    ("train_step_1b_2_gbs96.json", 1),
    ("train_step_1b_2_gbs96.json", 3),
    ("train_step_7b_2_fsdp.json", 1),
    ("train_step_7b_2_tp_overlap.json", 1),
    ("train_step_13b_2.json", 0),
    ("train_step_13b_2.json", 1),
    ("train_step_13b_2_pp.json", 1),
    ("train_step_onevision_2_short.json", 0),
    ("train_step_qwen2_5_vl_2.json", 0),
    ("train_step_qwen2_5_vl_2.json", 1),
    ("train_step_qwen2_5_vl_2_frozen.json", 2),
    ("products_qwen3_vl_30b_a3b.json", 0),
    ("train_step_qwen3_vl_moe_4.json", 0),
    ("adapters_7b.json", 0),
    ("adapters_7b_fp8.json", 0),
    ("adapters_7b_nf4.json", 0),
}
"""Rows to which the constants of `llava_mcore.plan.hardware.efficiency` were fitted: file and number of the row."""
ALLOCATED = (
    "train_step_7b_2_vision.json",
    "train_step_7b_4.json",
    "train_step_7b_4_gbs192.json",
    "train_step_7b_4_layouts.json",
    "train_step_7b_4_vision.json",
    "train_step_7b_weak.json",
    "train_step_siglip_qwen_4.json",
    "train_step_13b_4.json",
    "train_step_13b_2.json",
    "train_step_qwen2_audio_1.json",
)
"""Files from before `GiB` counted what torch has reserved: theirs is the peak of what was allocated."""
PEERS = ("Hugging Face", *(product.title.split(" ")[0] for product in PRODUCTS.values()))
"""What the names of rows that are not ours contain."""

# Four H200s, 96 packs of 4,096 tokens per step, BF16, tower frozen; not in benchmarks/results.
_FOUR = (
    ("llava-1.5-7b", 1, 1, 2, 6.774, 90.9),
    ("llava-1.5-7b", 2, 1, 2, 7.826, 59.1),
    ("llava-1.5-7b", 1, 2, 2, 7.115, 73.4),
    ("llava-1.5-7b", 2, 2, 2, 8.122, 50.6),
    ("llava-1.5-13b", 2, 2, 2, 15.181, 88.8),
    ("llava-1.5-13b", 1, 4, 1, 14.156, 84.8),
    ("llava-1.5-13b", 2, 1, 2, 14.795, 105.8),
)
_TOWERS = {"whole": "on", "divided": "off", "": "auto"}


@dataclass(frozen=True)
class Row:
    """A measured run.

    Attributes:
        layers: of a shortened decoder.
        seconds: of a step.
        gib: the fullest GPU's peak; None if it was not measured.
        allocated: whether the peak is of what was allocated, not reserved.
        images: of a sample, if it has any.
    """

    source: str
    number: int
    shape: str
    layers: int | None
    gpu: str
    world: int
    run: RunConfig
    seconds: float
    gib: float | None
    allocated: bool = False
    images: int = 1

    @property
    def is_fitted(self) -> bool:
        """Whether constants were fitted to it."""
        return (self.source, self.number) in FITTED


def rows() -> Iterator[Row]:
    """Yield every row of ours."""
    for file in sorted([*RESULTS.glob("train_step_*.json"), *RESULTS.glob("products_*.json")]):
        yield from _train_step(file)
    for file in sorted(RESULTS.glob("adapters_*.json")):
        yield from _adapters(file)
    for number, (shape, tp, pp, size, seconds, gib) in enumerate(_FOUR):
        flags = {"parallel.tensor_model_parallel_size": tp, "parallel.pipeline_model_parallel_size": pp}
        flags |= {"training.micro_batch_size": size, "training.global_batch_size": 96}
        yield Row("four H200s", number, shape, None, "h200", 4, _run(flags), seconds, gib)


def _run(flags: dict[str, Any], more: Sequence[str] = ()) -> RunConfig:
    common = {"data.packing": True, "data.seq_length": 4096, "parallel.use_distributed_optimizer": True}
    return load_run_config(None, more, common | flags)


def _gpu(about: dict[str, Any]) -> str:
    return "h100" if "H100" in about["gpu"] else "h200"


def _train_step(file: Path) -> Iterator[Row]:
    """Yield the rows of `train_step`, whose own command says what the row does not."""
    record = json.loads(file.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--images", type=int, default=1)
    parser.add_argument("--lora-r", type=int)
    parser.add_argument("--train-vision", action="store_true")
    args, rest = parser.parse_known_args([str(x) for x in record["about"]["command"]])
    keys = [x for x in rest if "=" in x and not x.startswith("-")]
    for number, row in enumerate(record["rows"]):
        what = str(row["what"])
        if "s/step" not in row or any(name in what for name in PEERS):
            continue
        flags: dict[str, Any] = {
            "parallel.tensor_model_parallel_size": row["tp"],
            "parallel.pipeline_model_parallel_size": row["pp"],
            "parallel.context_parallel_size": row.get("cp", 1),
            "parallel.expert_model_parallel_size": args.ep,
            "parallel.fsdp": row.get("fsdp", "none"),
            "training.micro_batch_size": row["mbs"],
            "training.global_batch_size": row["gbs"],
            "data.seq_length": args.seq_length,
            "model.freeze_vision_model": not args.train_vision,
            "parallel.vision_data_parallel": _TOWERS[row.get("tower", "divided" if row["tp"] > 1 else "")],
        }
        if args.lora_r:
            flags["adapter.r"] = args.lora_r
        more = list(keys)
        recipe, _, tower = what.partition("+")
        if recipe in ("delayed", "tensorwise", "blockwise"):
            flags |= {"training.fp8": True, "training.fp8_recipe": recipe, "training.fp8_vision": bool(tower)}
        if row.get("graphs", "off") != "off":
            more.append("model.cuda_graphs=true")
        if row.get("graphs") == "vision":
            more.append("model.cuda_graphs_vision=true")
        if "interleaved" in what:
            more.append("parallel.num_layers_per_virtual_pipeline_stage=8")
        if "sequence parallel" in what or row.get("overlap", "off") == "on":
            more.append("parallel.sequence_parallel=true")
        if row.get("overlap", "off") == "on":
            more.append("parallel.tp_comm_overlap=true")
        world = row["tp"] * row.get("cp", 1) * row["pp"] * row["dp"]
        run = _run(flags, more)
        seconds, gib, old = row["s/step"], row["GiB"], file.name in ALLOCATED
        gpu = _gpu(record["about"])
        yield Row(file.name, number, row["shape"], args.layers, gpu, world, run, seconds, gib, old, args.images)


def _adapters(file: Path) -> Iterator[Row]:
    """Yield the rows of `adapters`: eight packs of 4,096 tokens per step, one at a time, rank 64."""
    record = json.loads(file.read_text(encoding="utf-8"))
    command = [str(x) for x in record["about"]["command"]]
    shape = command[command.index("--shape") + 1]
    for number, row in enumerate(record["rows"]):
        stack, _, kind = str(row["what"]).partition(" ")
        if stack != "ours":
            continue
        flags: dict[str, Any] = {"training.micro_batch_size": 1, "training.global_batch_size": 8, "adapter.r": 64}
        if kind in ("fp8", "fp8only"):
            recipe = "delayed" if kind == "fp8" else "tensorwise"
            flags |= {"training.fp8": True, "training.fp8_recipe": recipe}
        if kind in ("nf4", "fp8w", "fp8only"):
            flags["adapter.quantize"] = "nf4" if kind == "nf4" else "fp8"
        run = _run(flags, [x for x in command if "=" in x])
        seconds = 8 * 4096 / row["tok/s"]
        yield Row(file.name, number, shape, None, _gpu(record["about"]), 1, run, seconds, row["peak GiB"], True)
