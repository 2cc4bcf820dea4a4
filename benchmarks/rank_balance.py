"""How evenly the data-parallel ranks share the work of a step: no GPU is needed.

    python -m benchmarks.rank_balance --shape qwen2.5-vl-7b --ranks 2 --packs 8 --steps 20

Loads what each rank would train on, packed as training does it, and counts the FLOPs of decoder and tower per rank and
step (`llava_mcore/models/flops.py`). All ranks wait for the slowest at the end of a step: "slowest / mean" is by how
much a step takes longer than with an even share, if time follows FLOPs. "patches" is the same of the tower's patches.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from benchmarks.record import show, write_record
from benchmarks.shapes import SHAPES, make_hf_folder
from benchmarks.train_step import make_data
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import Assets, load_assets
from llava_mcore.data.loader.train_loader import TrainLoader
from llava_mcore.models.flops import TrainedParts, Workload, model_flops
from llava_mcore.training.fetch import StepCounts, count


def main() -> None:
    """Load, count and print a row."""
    args = parse()
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        folder = Path(work)
        hf = make_hf_folder(folder / "hf", args.shape, seq_length=args.seq_length)
        make_data(folder / "data", SHAPES[args.shape].sizes, args.samples)
        assets = load_assets(folder / "hf")
        ranks = [steps_of_rank(args, folder / "data", assets, rank) for rank in range(args.ranks)]
    row = row_of(args, hf, ranks)
    show([row])
    if args.json is not None:
        write_record(args.json, [row], gpus=1)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-vl-7b")
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks")
    parser.add_argument("--packs", type=int, default=8, help="of a rank per step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--frozen-tower", action="store_true")
    parser.add_argument("--work", type=Path, help="folder for the data (default: the system's temporary one)")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def steps_of_rank(args: argparse.Namespace, path: Path, assets: Assets, rank: int) -> list[StepCounts]:
    """Return what a rank trains on in each step."""
    data = DataConfig(path=path, packing=True, seq_length=args.seq_length, num_workers=1)
    loader = TrainLoader(
        data, assets, micro_batch_size=1, dp_rank=rank, dp_size=args.ranks, seed=1234, num_micro_batches=args.packs
    )
    try:
        return [count([next(loader) for _ in range(args.packs)]) for _ in range(args.steps)]
    finally:
        loader.close()


def row_of(args: argparse.Namespace, hf: PretrainedConfig, ranks: list[list[StepCounts]]) -> dict[str, Any]:
    """Return the spread over ranks, and how full the packs are."""
    trained = TrainedParts(vision_model=not args.frozen_tower)
    work = [[Workload(x.num_tokens, x.num_pairs, x.media) for x in rank] for rank in ranks]
    spread = _spread([[model_flops(hf, x, trained).total for x in rank] for rank in work])
    patches = _spread([[x.num_patches or x.num_tiles for x in rank] for rank in ranks])
    every = [x for rank in ranks for x in rank]
    return {
        "shape": args.shape,
        "ranks": args.ranks,
        "packs per rank": args.packs,
        "steps": args.steps,
        "slowest / mean": round(statistics.mean(spread), 4),
        "worst step": round(max(spread), 4),
        "patches": round(statistics.mean(patches), 4),
        "fill": round(sum(x.num_tokens for x in every) / sum(x.num_positions for x in every), 4),
    }


def _spread(ranks: list[list[int]]) -> list[float]:
    """Return the largest number of any rank as a multiple of their mean, for each step."""
    return [max(step) / statistics.mean(step) for step in zip(*ranks, strict=True)]


if __name__ == "__main__":
    main()
