"""Real shards through the loader, the model and the pipeline: the loss of every sample, packed and padded."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from llava_mcore.checkpoint.layout import hf_folder, latest_checkpoint
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.loader.train_loader import TrainLoader
from llava_mcore.data.samples import Batch
from llava_mcore.media.batch_fields import IMAGE_FIELDS
from llava_mcore.parallel.groups import Groups
from llava_mcore.parallel.share import share_step
from tests.parallel.checks import join, load_model

STEPS = 6
"""Of two micro-batches of two samples: with padding an epoch."""
MICRO_BATCHES = 2


def open_loader(data: str, hf: Path, *, packing: bool) -> TrainLoader:
    config = DataConfig(
        path=Path(data), seq_length=128, num_workers=0, shuffle_buffer_size=0, num_streams=1, packing=packing,
        packing_buffer_size=6,
    )  # fmt: skip
    return TrainLoader(config, load_assets(hf), micro_batch_size=2, dp_rank=0, dp_size=1, seed=3)


def token_losses(groups: Groups, model: torch.nn.Module, batches: list[Batch] | None) -> list[Tensor]:
    """Return the masked token losses [b, s] of every micro-batch, on the last stage."""
    found: list[Tensor] = []

    def step(shared: Any, stage: torch.nn.Module) -> Any:
        batch = next(shared)
        output = stage(
            batch.input_ids,
            batch.position_ids,
            batch.media,
            labels=batch.labels,
            packed_seq_params=batch.packed_seq_params,
        )

        def collect(losses: Tensor) -> Any:
            found.append((losses * batch.loss_mask).detach().cpu())
            return losses.sum(), torch.tensor(1), {}

        return output, collect

    shared = share_step(groups, batches, MICRO_BATCHES, IMAGE_FIELDS)
    rows, length = shared.shape
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(shared),
            model=[model],
            num_microbatches=MICRO_BATCHES,
            seq_length=length,
            micro_batch_size=rows,
            forward_only=True,
        )
    return found


def spans(batch: Batch) -> list[tuple[str, int, int, int]]:
    """Return key, row, begin and end of every conversation of a batch."""
    if not batch.cu_seqlens.numel():
        return [(key, row, 0, batch.input_ids.shape[1]) for row, key in enumerate(batch.sample_keys)]
    bounds = pairwise(batch.cu_seqlens.tolist())
    return [(key, 0, *bound) for key, bound in zip(batch.sample_keys, bounds, strict=False)]


def sample_losses(tp: int, pp: int, checkpoint: str, data: str) -> dict[str, dict[str, Any]]:
    """Return what this rank knows: on the loading rank where each sample is, on the last stage the token losses."""
    groups = join(tp, pp)
    path = latest_checkpoint(Path(checkpoint))[0]
    model = load_model(groups, path)
    out: dict[str, dict[str, Any]] = {}
    for name, packing in (("padded", False), ("packed", True)):
        loader = open_loader(data, hf_folder(path), packing=packing) if groups.loads_data else None
        places, losses = [], []
        for _ in range(STEPS):
            batches = None if loader is None else [next(loader) for _ in range(MICRO_BATCHES)]
            losses += token_losses(groups, model, batches)
            places += [spans(batch) for batch in batches or []]
        out[name] = {"places": places, "losses": losses}
    return out
