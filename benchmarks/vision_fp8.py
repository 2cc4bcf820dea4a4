"""What FP8 would do to the vision tower: time of its passes in BF16 and in FP8, and how far its features move.

    python -m benchmarks.vision_fp8 --shape llava-1.5-7b --pictures 16 --json out.json

Forward is what a frozen tower does in a training step, both is what a trained one does. "ms" is the wall time of passes
that follow each other; "host ms" is how long the host took to launch them. Where that is longer, the GPU waits.
"off %" is the mean distance of the features from fp32's, as a percentage of their mean size. The variants
alternate; figures are medians of the rounds. The number of images times tokens must be a multiple of 16.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import LlavaConfig

from benchmarks.record import show, write_record
from benchmarks.runs import RECIPES
from benchmarks.shapes import SHAPES, make_hf_folder
from llava_mcore.models.configs import Fp8Options, ModelOptions, part_configs
from llava_mcore.models.vision.families.registry import vision_family
from llava_mcore.models.vision.features import feature_choice
from llava_mcore.models.vision.transformer import VisionTransformer
from llava_mcore.parallel.groups import initialize
from llava_mcore.parallel.random import seed_everything

PASSES = 10
"""Passes that are launched before the GPU is waited for."""
BF16 = "bf16"


def main() -> None:
    """Build the towers, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["llava-1.5-7b", "siglip-so400m-qwen2.5-7b"])
    parser.add_argument("--pictures", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29779")
    initialize(backend="nccl", tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
    seed_everything(0)
    rows: list[dict[str, Any]] = []
    for shape in args.shape:
        with tempfile.TemporaryDirectory() as work:
            hf = make_hf_folder(Path(work), shape, seq_length=4096, num_layers=2)
        rows += measure(shape, hf, args.pictures, args.rounds)
    show(rows)
    if args.json is not None:
        write_record(args.json, rows, gpus=1)


def measure(shape: str, hf: LlavaConfig, pictures: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for BF16 and one for each recipe, of a frozen tower and of a trained one."""
    size = hf.vision_config.image_size
    pixels = torch.randn(pictures, 3, size, size, device="cuda")
    truth = features(tower(hf, torch.float32), pixels)
    towers = dict(variants(hf))
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number in range(rounds + 1):
        for name, model in towers.items():
            for what, step in passes(model, pixels.bfloat16()).items():
                if number:  # the first round chooses kernels
                    found.setdefault((what, name), []).append(timed(step))
                else:
                    timed(step)
    rows = []
    for (what, name), times in sorted(found.items()):
        wall, host = (statistics.median(column) for column in zip(*times, strict=True))
        row = {"tower of": shape, "passes": what, "layers in": name, "ms": round(wall, 2), "host ms": round(host, 2)}
        row |= kernels(passes(towers[name], pixels.bfloat16())[what])
        off = (features(towers[name], pixels.bfloat16()) - truth).abs().mean() / truth.abs().mean()
        rows.append(row | {"off %": round(100 * off.item(), 2)})
    return rows


def variants(hf: LlavaConfig) -> Iterator[tuple[str, VisionTransformer]]:
    """Yield towers with equal weights."""
    yield BF16, tower(hf, torch.bfloat16)
    for recipe in RECIPES:
        yield recipe, tower(hf, torch.bfloat16, Fp8Options(recipe, "hybrid"))


def tower(hf: LlavaConfig, dtype: torch.dtype, fp8: Fp8Options | None = None) -> VisionTransformer:
    """Build a tower of Transformer Engine's layers; all have the weights of one seed, rounded to their type."""
    transformer = part_configs(hf, ModelOptions(params_dtype=dtype, transformer_impl="transformer_engine")).vision
    if fp8 is not None:
        transformer = replace(transformer, **fp8.fields())
    part = vision_family(hf.vision_config)
    model = VisionTransformer(transformer, part.shape(hf.vision_config), feature_choice(hf)).to("cuda", dtype)
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            weight = torch.randn(parameter.shape, device="cuda", generator=generator)
            parameter.copy_(weight * 0.02 + (1 if name.endswith(("norm_weight", "ln_pre.weight")) else 0))
    return model


def features(model: VisionTransformer, pixels: Tensor) -> Tensor:
    """Return the tower's features of images, in fp32."""
    with torch.no_grad():
        result: Tensor = model(pixels, {}).float()
    return result


def passes(model: VisionTransformer, pixels: Tensor) -> dict[str, Callable[[], None]]:
    """Return what a training step does with a frozen and with a trained tower."""

    def forward() -> None:
        with torch.no_grad():
            model(pixels, {})

    def both() -> None:
        out = model(pixels, {})
        out.backward(torch.ones_like(out))

    return {"forward": forward, "forward and backward": both}


def timed(step: Callable[[], None]) -> tuple[float, float]:
    """Return the wall time of a pass and what the host took to launch it, ms."""
    step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(PASSES):
        step()
    launched = time.perf_counter()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / PASSES * 1e3, (launched - start) / PASSES * 1e3


def kernels(step: Callable[[], None]) -> dict[str, Any]:
    """Return the time of a pass's kernels, ms, and how many they are."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    times = [e.time_range.elapsed_us() for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return {"kernels ms": round(sum(times) / 1e3, 2), "kernels": len(times)}


if __name__ == "__main__":
    main()
