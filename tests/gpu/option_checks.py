"""What the ranks of the GPU tests of docs/parallel.md run: Transformer Engine's layers in bf16."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llava_mcore.checkpoint.choose_start import start_point
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.parallel.groups import Groups
from llava_mcore.parallel.share import share_step
from llava_mcore.training.fetch import LoadedBatch, MicroBatchLoader, SkipBudget, fetch_step
from llava_mcore.training.saving.save import Saver
from llava_mcore.training.saving.state import TrainingProgress, resume
from llava_mcore.training.setup import Trainer
from llava_mcore.training.step import train_step
from tests.gpu import te_checks
from tests.gpu.te_checks import FP8, TE
from tests.helpers.batches import FakeLoader, PackedLoader
from tests.helpers.class_checks import batch_of
from tests.parallel.checks import join
from tests.parallel.class_curve_checks import GivenLoader
from tests.parallel.frozen_checks import AWARE, DISTRIBUTED, OFFLOAD, OFFLOAD_HALF
from tests.parallel.option_checks import FIRST, SEQUENCE
from tests.parallel.resume_checks import STEPS, open_fake_loader, train_steps
from tests.parallel.training_checks import GLOBAL_BATCH, MIXED, TrainingRun, make_trainer, run_all, run_config
from tests.unit.training.test_layer_graphs import PACKS

BF16 = te_checks.BF16 | TE
HALF_MOMENTS = AWARE | {"optimizer.exp_avg_dtype": "bf16", "optimizer.exp_avg_sq_dtype": "bf16"}
INTERLEAVED = {"parallel.num_layers_per_virtual_pipeline_stage": 1}
OWN_DISK = "checkpoint.non_persistent_local_dir"


def curves(tp: int, pp: int, checkpoint: str, save_dir: str) -> dict[str, dict[str, list[float]]]:
    """Train `option_runs`."""
    groups = join(tp, pp)
    runs = {
        name: TrainingRun(checkpoint, MIXED, BF16 | run.flags, run.packed)
        for name, run in option_runs(tp, pp, groups.dp_size).items()
    }
    return run_all(groups, runs, save_dir)


@dataclass(frozen=True)
class OptionRun:
    """A run with an option. `baseline`: the run that it is compared with."""

    flags: dict[str, Any]
    packed: bool = False
    baseline: str | None = None

    @property
    def fp8(self) -> bool:
        return bool(self.flags.get("training.fp8"))


def option_runs(tp: int, pp: int, dp: int) -> dict[str, OptionRun]:
    """Return the runs without options, and those with each option that the layout allows."""
    plain = {"plain": OptionRun({}), "packed": OptionRun({}, packed=True), "delayed": OptionRun(FP8)}

    def varied(baseline: str, flags: dict[str, Any]) -> OptionRun:
        return OptionRun(plain[baseline].flags | flags, plain[baseline].packed, baseline)

    recompute = {"model.recompute": "selective"}
    options = plain | {
        "plain + recompute selective": varied("plain", recompute),
        "plain + recompute full": varied("plain", {"model.recompute": "full", "model.recompute_vision": "full"}),
        "packed + recompute full": varied("packed", {"model.recompute": "full"}),
        "delayed + recompute selective": varied("delayed", recompute),
        "plain + precision-aware optimizer": varied("plain", AWARE),
        "plain + half moments": varied("plain", HALF_MOMENTS),
        "plain + optimizer on the host": varied("plain", OFFLOAD),
        "plain + half of the optimizer on the host": varied("plain", OFFLOAD_HALF),
    }
    if tp > 1:
        options |= {f"{name} + sequence parallel": varied(name, SEQUENCE) for name in plain}
    if pp > 1:
        options |= {
            "plain + first stage smaller": varied("plain", {FIRST: 1}),
            "plain + interleaved": varied("plain", INTERLEAVED),
            "packed + interleaved, distributed optimizer": varied("packed", INTERLEAVED | DISTRIBUTED),
        }
    if pp > 1 or dp > 1:  # too few tokens for FP8 at a time
        options = {name: run for name, run in options.items() if not run.fp8}
    return options


def save_and_resume(
    tp: int, pp: int, checkpoint: str, save_dir: str, hf: str
) -> dict[str, tuple[list[float], list[float]]]:
    """Return the losses after a save and those after resuming it, for each kind of optimizer and place."""
    groups = join(tp, pp)
    found = {}
    disk = {"checkpoint.non_persistent_save_interval": 1, OWN_DISK: f"{save_dir}/disk"}
    kinds: dict[str, dict[str, Any]] = {
        "distributed": DISTRIBUTED,
        "aware": AWARE,
        "half": HALF_MOMENTS,
        "offload": OFFLOAD,
        "offload half": OFFLOAD_HALF,
        "own disk": DISTRIBUTED | disk,
        "own disk, half": HALF_MOMENTS | disk,
    }
    if groups.dp_size == 1:  # else too few tokens for FP8 at a time
        kinds |= {"FP8": FP8, "own disk, FP8": FP8 | DISTRIBUTED | disk}
    for name, flags in kinds.items():
        common = {"name": name, "checkpoint.save": True, "checkpoint.save_optim": True, **BF16, **flags}
        run = run_config(tp, pp, checkpoint, save_dir, **common)
        trainer = make_trainer(groups, run)
        loader = open_fake_loader(groups, trainer, run, 0)
        train_steps(groups, trainer, run, loader)
        state = None if loader is None else loader.state()
        Saver(trainer, Path(hf)).save(
            TrainingProgress(STEPS, STEPS * GLOBAL_BATCH), state, persistent=OWN_DISK not in flags
        )
        uninterrupted = train_steps(groups, trainer, run, loader)
        again = run_config(tp, pp, checkpoint, save_dir, **common, **{"checkpoint.load_optim": True})
        trainer, start = make_trainer(groups, again), start_point(again)
        assert start.kind == "resume" and start.checkpoint is not None
        resume(trainer)
        found[name] = (
            uninterrupted,
            train_steps(groups, trainer, again, open_fake_loader(groups, trainer, again, STEPS)),
        )
    return found


def step_without_waiting(tp: int, pp: int, checkpoint: str, save_dir: str) -> None:
    """Raise if the host waits for the device between a batch on the host and the updated weights."""
    groups = join(tp, pp)
    run = run_config(tp, pp, checkpoint, save_dir, **BF16)
    number = GLOBAL_BATCH // run.training.micro_batch_size
    for kind in (FakeLoader, PackedLoader):
        trainer = make_trainer(groups, run)
        loader = kind(trainer.hf, micro_batch_size=2, dp_rank=0, dp_size=1, text_only=MIXED)
        _step_without_waiting(groups, trainer, loader if groups.loads_data else None, number, steps_before=1)


def qwen_step_without_waiting(checkpoint: str, save_dir: str, hf: str) -> None:
    """The same of Qwen2.5-VL on packs of images of several sizes, also with the graphs of decoder and tower."""
    groups = join(1, 1)
    batches = [batch_of(load_assets(Path(hf)), pack, packed=True, multiple=512) for pack in PACKS]
    given = BF16 | {"data.packing": True, "data.seq_length": 512}
    given |= {"training.micro_batch_size": 1, "training.global_batch_size": len(PACKS)}
    for on in (False, True):
        flags = given | {"model.cuda_graphs": on, "model.cuda_graphs_vision": on}
        trainer = make_trainer(groups, run_config(1, 1, checkpoint, save_dir, **flags))
        loader = GivenLoader(batches * 4)
        _step_without_waiting(groups, trainer, loader, len(PACKS), steps_before=3)  # the second one captures


def _step_without_waiting(
    groups: Groups, trainer: Trainer, loader: MicroBatchLoader | None, number: int, *, steps_before: int
) -> None:
    """Train a step without waiting, after some that choose kernels, allocate and capture."""
    parts = groups, trainer.chunks, trainer.optimizer, trainer.scheduler
    size = trainer.run.training.global_batch_size
    for _ in range(steps_before):
        batches, *_ = fetch_step(groups, loader, number, SkipBudget(0.0), trainer.fields)
        train_step(*parts, batches, size, trainer.graphs)
    assert all(part._graphs and not part._seen for part in trainer.graphs), "everything runs as graphs"
    on_host = None if loader is None else [_pinned(next(loader)) for _ in range(number)]
    busy = _busy()
    torch.cuda.set_sync_debug_mode("error")  # which does not notice copies that wait because memory is not pinned
    try:
        batches = share_step(groups, on_host, number, trainer.fields)
        assert not busy.query(), "the batch is sent while the device works"
        step = train_step(*parts, batches, size, trainer.graphs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.result().finite


def _pinned(batch: LoadedBatch) -> LoadedBatch:
    """Pin a batch, as torch's thread does."""
    for fields in (vars(batch), batch.media):
        fields.update({name: x.pin_memory() for name, x in fields.items() if isinstance(x, torch.Tensor)})
    return batch


def _busy() -> torch.cuda.Event:
    """Let the device work for about half a second. Return the end of it."""
    matrix = torch.zeros(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(300):
        matrix @ matrix
    end = torch.cuda.Event()
    end.record()
    return end


def whole_towers_at_random(hf: str, save_dir: str) -> list[bool]:
    """Return for each tensor of a tower drawn at random whether both tensor-parallel ranks have the same one."""
    groups = join(2, 1)
    flags = BF16 | {"checkpoint.init": True, "checkpoint.hf_dir": hf, "parallel.vision_data_parallel": True}
    trainer = make_trainer(groups, run_config(2, 1, None, save_dir, **flags))
    found = []
    for tensor in trainer.models[0].vision_model.parameters():
        both = [torch.empty_like(tensor) for _ in range(2)]
        torch.distributed.all_gather(both, tensor.detach().contiguous(), group=groups.tensor_parallel)
        found.append(torch.equal(*both))
    return found
