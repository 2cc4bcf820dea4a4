"""What adapters keep for the backward pass."""

from __future__ import annotations

import copy
from pathlib import Path

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llava_mcore.adapters import attach
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.models.activations import StatelessActivation
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.parallel.groups import join_alone
from tests.helpers.tiny_hf import make_hf_llava
from tests.parallel.training_checks import make_trainer, run_config
from tests.unit.training.test_layer_graphs import LORA, train


class SwiGlu(nn.Module):
    """Stands for Transformer Engine's, which needs a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


def test_outputs_of_activations_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made again, with the same losses and gradient norms, bit for bit."""
    make_hf_llava(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    groups, run = join_alone(), run_config(1, 1, str(tmp_path / "megatron"), str(tmp_path), **LORA)
    expected = train(make_trainer(groups, run))
    find = attach._activations
    found: dict[nn.Module, StatelessActivation] = {}

    def with_modules(model: VisionLanguageModel) -> dict[nn.Module, StatelessActivation]:
        for mlp in model.language_model.decoder.modules():
            if isinstance(mlp, MLP):
                mlp.config = copy.copy(mlp.config)
                mlp.config.use_te_activation_func = True
                mlp.activation_func = StatelessActivation(SwiGlu())
        found.update(find(model))
        return found

    monkeypatch.setattr(attach, "_activations", with_modules)
    trainer = make_trainer(groups, run)
    layers = trainer.models[0].language_model.decoder.layers
    assert len(found) == len(layers)
    assert train(trainer) == expected
    sources: list[Tensor] = []
    made: list[Tensor] = []
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    def record(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        sources.extend(inputs)
        made.append(output)

    layers[0].mlp.activation_func.register_forward_hook(record)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        layers[0].mlp(torch.randn(3, 1, layers[0].config.hidden_size, requires_grad=True))
    assert made[0].data_ptr() not in [x.data_ptr() for x in kept]
    assert sources[0].shape in [x.shape for x in kept]  # what the activation itself keeps is half as wide
    # Late shapes of graphs are recomputed: what Down keeps goes through the checkpoint, and the gradients stay.
    mlp, x = layers[0].mlp, torch.randn(3, 1, layers[0].config.hidden_size)
    factors = [p for name, p in trainer.models[0].named_parameters() if ".layers.0.mlp." in name and p.requires_grad]
    plain, recomputed = mlp(x)[0], checkpoint(mlp, x, use_reentrant=False)[0]
    assert factors
    for a, b in zip(
        torch.autograd.grad(plain.sum(), factors), torch.autograd.grad(recomputed.sum(), factors), strict=True
    ):
        assert torch.equal(a, b)
