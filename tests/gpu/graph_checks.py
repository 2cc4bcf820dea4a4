"""What the ranks of the tests of CUDA graphs run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from llava_mcore.checkpoint.choose_start import start_point
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.fetch import MicroBatchLoader, SkipBudget, fetch_step
from llava_mcore.training.graphs import model_graphs
from llava_mcore.training.saving.save import Saver
from llava_mcore.training.saving.state import TrainingProgress, resume
from llava_mcore.training.setup import Trainer
from llava_mcore.training.step import train_step
from tests.gpu.te_checks import BF16, FP8, RECIPES, TE
from tests.helpers.batches import LENGTH, FakeBatch, FullPackLoader
from tests.helpers.class_checks import batch_of
from tests.helpers.emulated_graphs import small_buckets
from tests.parallel.checks import join
from tests.parallel.class_curve_checks import GivenLoader
from tests.parallel.graph_checks import OneRankFirstLoader
from tests.parallel.training_checks import GLOBAL_BATCH, MIXED, make_trainer, run_config
from tests.unit.training.test_layer_graphs import PACKS

STEPS = 5
LORA = {"adapter.r": 8, "adapter.projection_r": 4, "model.freeze_vision_model": True}
PACKED = {"data.packing": True, "data.seq_length": LENGTH}
KINDS: dict[str, dict[str, Any]] = {
    "all trained": {},
    "distributed": {"parallel.use_distributed_optimizer": True},
    "tower frozen": {"model.freeze_vision_model": True, "parallel.use_distributed_optimizer": True},
    "layers frozen": {"model.freeze_language_model": True},
    "lora": LORA,
    "lora, nothing else trained": {"adapter.r": 8, "model.freeze_vision_model": True},
    "nf4": LORA | {"adapter.quantize": "nf4"},
    "delayed": FP8,
    "tensorwise": FP8 | {"training.fp8_recipe": "tensorwise"},
    "blockwise": FP8 | {"training.fp8_recipe": "blockwise"},
    "tensorwise, ends in bf16": FP8
    | {"training.fp8_recipe": "tensorwise", "training.fp8_first_layers_bf16": 1, "training.fp8_last_layers_bf16": 1},
    "lora in FP8": LORA | FP8,
    "lora in FP8, no 16-bit copy": LORA | FP8 | {"training.fp8_recipe": "tensorwise", "adapter.quantize": "fp8"},
}
WHOLE = "distributed, whole towers"
"""Of tensor-parallel ranks that divide the images."""
TOWERS: dict[str, dict[str, Any]] = {
    "all trained": {},
    WHOLE: {"parallel.use_distributed_optimizer": True, "parallel.vision_data_parallel": True},
    "distributed": {"parallel.use_distributed_optimizer": True},
    "adapters": {"adapter.r": 8, "adapter.vision_r": 8, "adapter.projection_r": 4, "model.freeze_vision_model": True},
}

Curve = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


def curves(
    tp: int,
    kind: str,
    checkpoint: str,
    save_dir: str,
    cp: int = 1,
    comm_type: str | None = None,
    *,
    has_late_shape: bool = False,
) -> dict[str, Curve]:
    """Train without and with graphs, while another thread pins memory as the one that loads data does.

    Of several data-parallel ranks, one has shapes of packs first, and gradients are reduced matrix by matrix.

    Args:
        has_late_shape: on one rank, a shape of packs comes when there are graphs of another.
    """
    groups = join(tp, 1, cp=cp)
    model_graphs.LAYERS_PER_GRAPH = 2  # more than one graph in a model of four layers
    given = BF16 | TE | PACKED | KINDS[kind] | {"parallel.sequence_parallel": tp > 1}
    given |= {"parallel.context_parallel_size": cp, "parallel.cp_comm_type": comm_type} if cp > 1 else {}
    given |= {"training.micro_batch_size": 2} if groups.dp_size > 1 else {}
    found = {}
    for name, on in (("without", False), ("with", True)):
        flags = given | {"model.cuda_graphs": on}
        with small_buckets() if groups.dp_size > 1 else contextlib.nullcontext():
            trainer = make_trainer(groups, run_config(tp, 1, checkpoint, save_dir, **flags))
        size = trainer.run.training.micro_batch_size
        late = LateLoader(trainer.hf, micro_batch_size=size, dp_rank=0, dp_size=1, text_only=MIXED)
        with pinning(groups.device):
            found[name] = train(groups, trainer, late if has_late_shape else loader_of(groups, trainer), STEPS)
    return found


class LateLoader(FullPackLoader):
    """Packs that have a sample more only after two steps."""

    def __next__(self) -> FakeBatch:
        batch = super().__next__()
        size = len(batch.cu_seqlens) - 1
        if self.count <= 2 * GLOBAL_BATCH // self.size and size > self.size:
            batch.cu_seqlens = batch.cu_seqlens[[*range(size - 1), size]]
        return batch


@contextlib.contextmanager
def pinning(device: torch.device) -> Iterator[None]:
    """Let a thread pin memory that torch's cache does not have."""
    ended = threading.Event()

    def pin() -> None:
        torch.cuda.set_device(device)
        kept: list[torch.Tensor] = []
        while not ended.wait(0.001):
            kept.append(torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True))
            if len(kept) == 2000:
                kept.clear()
                torch._C._host_emptyCache()

    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(pin)
        try:
            yield
        finally:
            ended.set()
        work.result()


def tower_curves(tp: int, checkpoint: str, save_dir: str, hf: str, kind: str) -> dict[str, Curve]:
    """Train Qwen-VL without and with graphs, of the tower too; each step has packs of several sizes, on data-parallel
    ranks in other orders."""
    groups = join(tp, 1)
    given = BF16 | TE | TOWERS[kind] | {"parallel.sequence_parallel": tp > 1, "data.packing": True}
    given |= {"data.seq_length": 512}
    batches = [batch_of(load_assets(Path(hf)), pack, packed=True) for pack in PACKS]
    batches = batches[groups.dp_rank :] + batches[: groups.dp_rank]
    global_batch = len(PACKS) * groups.dp_size
    sizes = {"training.micro_batch_size": 1, "training.global_batch_size": global_batch}
    found = {}
    for name, on in (("without", False), ("with", True)):
        flags = given | sizes | {"model.cuda_graphs": on, "model.cuda_graphs_vision": on}
        trainer = make_trainer(groups, run_config(tp, 1, checkpoint, save_dir, **flags))
        assert len(trainer.graphs) == 2 * on
        loader = GivenLoader(batches * STEPS) if groups.loads_data else None
        found[name] = train(groups, trainer, loader, STEPS, global_batch)
    return found


def fp8_curves(checkpoint: str, save_dir: str, hf: str) -> dict[str, Curve]:
    """Train Qwen2.5-VL with graphs: in BF16, with the decoder in FP8, and with the tower in FP8 too.

    In BF16 and with both in FP8 also the step after a save, continued and resumed from the checkpoint.
    """
    groups = join(1, 1)
    given = BF16 | TE | {"data.packing": True, "data.seq_length": 512, "model.cuda_graphs": True}
    given |= {"model.cuda_graphs_vision": True, "checkpoint.save": True, "checkpoint.save_optim": True}
    batches = [batch_of(load_assets(Path(hf)), pack, packed=True, multiple=512) for pack in PACKS]
    given |= {"training.micro_batch_size": 1, "training.global_batch_size": len(PACKS)}
    recipes = {recipe: {"training.fp8": True, "training.fp8_recipe": recipe} for recipe in RECIPES}

    def begin(flags: dict[str, Any]) -> Trainer:
        return make_trainer(groups, run_config(1, 1, checkpoint, save_dir, **given | flags))

    found = {}
    for name, flags in recipes.items():
        trainer = begin(flags | {"name": f"{name} decoder"})
        found[f"{name}, decoder"] = train(groups, trainer, GivenLoader(batches * STEPS), STEPS, len(PACKS))
    both = {name: flags | {"training.fp8_vision": True} for name, flags in recipes.items()}
    for name, flags in ({"bf16": {}} | both).items():
        trainer = begin(flags | {"name": name})
        assert bool(trainer.models[0].vision_model.config.fp8) == (name in RECIPES)
        found[name] = train(groups, trainer, GivenLoader(batches * STEPS), STEPS, len(PACKS))
        Saver(trainer, Path(hf)).save(TrainingProgress(STEPS, STEPS * len(PACKS)), None)
        found[f"{name}, on"] = train(groups, trainer, GivenLoader(batches), 1, len(PACKS))
        trainer = begin(flags | {"name": name, "checkpoint.load_optim": True})
        start = start_point(trainer.run)
        assert start.kind == "resume" and start.checkpoint is not None
        resume(trainer)
        found[f"{name}, resumed"] = train(groups, trainer, GivenLoader(batches), 1, len(PACKS))
    return found


def resumed(kind: str, checkpoint: str, save_dir: str, hf: str) -> tuple[Curve, Curve]:
    """Return what follows a save, and what follows when it is resumed, both with graphs."""
    groups = join(1, 1)
    flags = BF16 | TE | PACKED | KINDS[kind] | {"model.cuda_graphs": True, "name": kind.replace(" ", "")}
    saving = {"checkpoint.save": True, "checkpoint.save_optim": True}
    trainer = make_trainer(groups, run_config(1, 1, checkpoint, save_dir, **flags, **saving))
    loader = loader_of(groups, trainer)
    train(groups, trainer, loader, STEPS)
    state = None if loader is None else loader.state()
    Saver(trainer, Path(hf)).save(TrainingProgress(STEPS, STEPS * GLOBAL_BATCH), state)
    expected = train(groups, trainer, loader, STEPS)
    again = run_config(1, 1, checkpoint, save_dir, **flags, **saving, **{"checkpoint.load_optim": True})
    trainer, start = make_trainer(groups, again), start_point(again)
    assert start.kind == "resume" and start.checkpoint is not None
    resume(trainer)
    loader = loader_of(groups, trainer)
    if loader is not None:
        loader.restore(state)
    return expected, train(groups, trainer, loader, STEPS)


def loader_of(groups: Groups, trainer: Trainer) -> FullPackLoader | None:
    """Open full packs on ranks that load data."""
    if not groups.loads_data:
        return None
    size = trainer.run.training.micro_batch_size
    ranks = {"dp_rank": groups.dp_rank, "dp_size": groups.dp_size}
    # The former's samples can be divided by two, and the last rank, here the only one, has a third in two steps.
    kind = OneRankFirstLoader if groups.dp_size > 1 or groups.cp_size > 1 else FullPackLoader
    return kind(trainer.hf, micro_batch_size=size, text_only=MIXED, **ranks)


def train(
    groups: Groups, trainer: Trainer, loader: MicroBatchLoader | None, steps: int, global_batch: int = GLOBAL_BATCH
) -> Curve:
    """Train some steps."""
    number = global_batch // (trainer.run.training.micro_batch_size * groups.dp_size)
    parts = groups, trainer.chunks, trainer.optimizer, trainer.scheduler
    found = []
    for _ in range(steps):
        batches, *_ = fetch_step(groups, loader, number, SkipBudget(0.0), trainer.fields)
        result = train_step(*parts, batches, global_batch, trainer.graphs).result()
        found.append((result.loss, result.grad_norm))
    return found
