"""What the ranks of the tests of --tp-comm-overlap run."""

from __future__ import annotations

from typing import Any

from torch import nn

from llava_mcore.models.multimodal import VisionLanguageModel
from tests.gpu.graph_checks import PACKED, STEPS, Curve, loader_of, train
from tests.gpu.te_checks import BF16, FP8, TE
from tests.helpers.batches import PackedLoader
from tests.parallel.checks import join
from tests.parallel.training_checks import MIXED, make_trainer, run_config

OVERLAP = {"parallel.tp_comm_overlap": True}
GRAPHS = {"model.cuda_graphs": True}
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "recomputed": {"model.recompute": "full"},
    "graphs": GRAPHS,
    "delayed": FP8,
    "tensorwise": FP8 | {"training.fp8_recipe": "tensorwise"},
    "tensorwise, ends in bf16, graphs": FP8
    | GRAPHS
    | {"training.fp8_recipe": "tensorwise", "training.fp8_first_layers_bf16": 1, "training.fp8_last_layers_bf16": 1},
}
OTHER_SIZES = {"bf16, other sizes": {}, "recomputed, other sizes": {"model.recompute": "full"}}
"""Passes that do not use the buffers."""


class Passes:
    """Counts the forward passes in which a decoder's first matrix used the buffers, and all of them."""

    def __init__(self, model: VisionLanguageModel) -> None:
        self.overlapped = self.all = 0
        layer = model.language_model.decoder.layers[0]
        layer.self_attention.linear_qkv.register_forward_pre_hook(self._count)

    def _count(self, linear: nn.Module, _: Any) -> None:
        self.overlapped += bool(linear.ub_overlap_ag_fprop)
        self.all += 1


def curves(checkpoint: str, save_dir: str) -> dict[str, dict[str, Curve]]:
    """Train at tp 2 without and with overlapping messages."""
    groups = join(2, 1)
    found: dict[str, dict[str, Curve]] = {}
    for name, flags in (CASES | OTHER_SIZES).items():
        found[name] = {}
        for kind, more in (("without", {}), ("with", OVERLAP)):
            given = BF16 | TE | PACKED | flags | more | {"parallel.sequence_parallel": True}
            trainer = make_trainer(groups, run_config(2, 1, checkpoint, save_dir, **given))
            passes = None if trainer.graphs else Passes(trainer.models[0])  # a captured layer must have no hooks
            loader = loader_of(groups, trainer)
            if loader is not None and name in OTHER_SIZES:
                size = trainer.run.training.micro_batch_size
                loader = PackedLoader(trainer.hf, micro_batch_size=size, dp_rank=0, dp_size=1, text_only=MIXED)
            found[name][kind] = train(groups, trainer, loader, STEPS)
            if passes is not None:
                assert passes.all and passes.overlapped == (passes.all if more and name not in OTHER_SIZES else 0)
    return found
