"""Training on pictures and videos of several sizes inside a test world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encoding.assets import load_assets
from llava_mcore.data.loading.loader import TrainLoader
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.faults.skipped_samples import SkipBudget
from llava_mcore.training.fetch import fetch_step
from llava_mcore.training.step import train_step
from tests.parallel.checks import join
from tests.parallel.training_checks import GLOBAL_BATCH, make_trainer, run_config

STEPS = 3
SEQ_LENGTH = 192


def train(tp: int, pp: int, cases: dict[str, dict[str, str]], save_dir: str) -> dict[str, Any]:
    """Train on every case's checkpoint, packed; one process also trains padded.

    Returns losses, gradient norms and sizes of batches.
    """
    groups = join(tp, pp)
    found = {}
    for name, case in cases.items():
        for packing in (False, True) if tp * pp == 1 else (True,):
            flags = {"parallel.sequence_parallel": True} if tp > 1 and packing else {}
            run = run_config(tp, pp, case["checkpoint"], save_dir, **flags)
            found[f"{name}, packed" if packing else name] = _steps(groups, run, Path(case["hf"]), case["data"], packing)
    return found


def _steps(groups: Groups, run: Any, hf: Path, data: str, packing: bool) -> dict[str, list[float]]:
    trainer, loader = make_trainer(groups, run), None
    if groups.loads_data:
        config = DataConfig(
            path=Path(data), seq_length=SEQ_LENGTH, num_workers=0, num_streams=1, packing=packing, packing_buffer_size=6
        )
        loader = TrainLoader(
            config, load_assets(hf), micro_batch_size=4, dp_rank=groups.dp_rank, dp_size=groups.dp_size, seed=3
        )
    losses, norms, tokens, tiles = [], [], [], []
    for _ in range(STEPS):
        batches, counts, _ = fetch_step(groups, loader, GLOBAL_BATCH // 4, SkipBudget(0.0), trainer.fields)
        result = train_step(
            groups, trainer.chunks, trainer.optimizer, trainer.scheduler, batches, GLOBAL_BATCH
        ).result()
        losses.append(result.loss)
        norms.append(result.grad_norm)
        tokens.append(counts.num_tokens)
        tiles.append(counts.num_tiles + counts.num_patches)
    return {"loss": losses, "grad_norm": norms, "tokens": tokens, "tiles": tiles}
