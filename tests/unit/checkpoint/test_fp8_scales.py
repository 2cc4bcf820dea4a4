"""FP8's scales travel through checkpoints as tensors; tests/gpu/test_options.py does it with Transformer Engine."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from llava_mcore.checkpoint import fp8_scales
from llava_mcore.checkpoint.fp8_scales import Scales, take_scales, with_plain_scales
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.configs import Fp8Options, ModelOptions, part_configs
from llava_mcore.training.validation import without_side_effects
from tests.helpers.tiny_hf import make_hf_llava


class Linear(nn.Linear):
    """Stands for Transformer Engine's: it has scales once it has run."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.fp8_meta: dict[str, Any] = {}
        self.scales: Scales | None = None

    def run(self) -> Linear:
        self.scales = {"scaling_fwd": draw(3), "scaling_bwd": draw(2)}
        return self

    def get_fp8_meta_tensors(self) -> Scales | None:
        return self.scales

    def init_fp8_meta_tensors(self, recipe: Any) -> None:
        assert self.fp8_meta["num_gemms"] == 1
        self.scales = {key: [torch.ones(n), torch.zeros(4, n)] for key, n in (("scaling_fwd", 3), ("scaling_bwd", 2))}

    def reset_fp8_meta_tensors(self, fp8_meta_tensors: Scales | None = None) -> None:
        assert self.scales is not None and fp8_meta_tensors is not None
        for key, tensors in fp8_meta_tensors.items():
            for mine, given in zip(self.scales[key], tensors, strict=True):
                mine.copy_(given)


def draw(number: int) -> list[Tensor]:
    return [torch.rand(number), torch.rand(4, number)]


def state_of(model: nn.Module, value: object) -> dict[str, Any]:
    """What megatron-core makes of the model: a pickle for each linear layer, and a norm's, which is empty."""
    objects = {name: ShardedObject(name, value, (1,), (0,)) for name in ("0._extra_state", "1._extra_state")}
    return {"0.weight": model[0].weight, "norm._extra_state": ShardedObject("n", None, (1,), (0,)), **objects}  # type: ignore[index]


@pytest.fixture(autouse=True)
def linears_keep_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(model: nn.Sequential) -> dict[str, Any]:
        return {name: x for name, x in model.named_children() if isinstance(x, Linear)}

    monkeypatch.setattr(fp8_scales, "scaled_modules", found)
    monkeypatch.setattr(fp8_scales, "get_fp8_recipe", lambda config: None)


def make_model() -> Any:
    model: Any = nn.Sequential(Linear(), Linear())
    model.config = None
    return model


def test_scales_are_saved_and_loaded_as_tensors() -> None:
    model = make_model()
    model[0].run()
    saved = with_plain_scales(model, state_of(model, b"pickle"), is_loading=False)
    assert list(saved) == ["0.weight", "0._extra_state"]
    again = make_model()
    wanted = with_plain_scales(again, state_of(again, b"pickle"), is_loading=True)
    assert set(wanted) == {"0.weight", "0._extra_state", "1._extra_state"}
    loaded = {"0.weight": saved["0.weight"], "0._extra_state": saved["0._extra_state"].data}
    assert list(take_scales(again, loaded)) == ["0.weight"]
    for key, tensors in model[0].scales.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, again[0].scales[key], strict=True))
    assert again[1].scales is None


class Part(MegatronModule):
    """A part of a model, with its own FP8 settings."""

    def __init__(self, **fp8: Any) -> None:
        super().__init__(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **fp8))


@pytest.mark.parametrize(("recipe", "expected"), [("delayed", ["language_model"]), ("tensorwise", [])])
def test_only_parts_in_fp8_have_scales(recipe: str, expected: list[str]) -> None:
    """A run may use FP8 in the tower, and be resumed without."""
    model = Part(fp8="hybrid", fp8_recipe=recipe)
    model.vision_model, model.language_model = Part(), Part(fp8="hybrid", fp8_recipe=recipe)
    assert list(fp8_scales.parts_with_scales(model)) == expected


def test_weights_are_converted_again_after_the_last_step() -> None:
    """For answers during training too, whose passes are not those of a schedule."""
    chunk: Any = Part(fp8="hybrid", fp8_recipe="tensorwise")
    chunk.linear, chunk.ddp_config = nn.Linear(2, 2), SimpleNamespace(overlap_param_gather=False)
    chunk.linear.is_first_microbatch = False
    trainer: Any = SimpleNamespace(chunks=[chunk], models=[chunk])
    with without_side_effects(trainer):
        assert chunk.linear.is_first_microbatch


@pytest.mark.parametrize("vision", [False, True])
def test_the_tower_has_fp8_only_on_request(tmp_path: Path, vision: bool) -> None:
    make_hf_llava(tmp_path)
    fp8 = Fp8Options("tensorwise", "hybrid", num_bf16_layers_at_start=1, vision=vision)
    configs = part_configs(load_hf_config(tmp_path), ModelOptions(on_cpu=True, fp8=fp8))
    assert configs.language.fp8 == "hybrid" and configs.language.num_layers_at_start_in_bf16 == 1
    assert configs.vision.fp8 == ("hybrid" if vision else None) and not configs.vision.first_last_layers_bf16
    assert configs.projection.fp8 is None


def test_a_pickle_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    pickles = {"0._extra_state": torch.zeros(9, dtype=torch.uint8), "1._extra_state": torch.zeros(0, dtype=torch.uint8)}
    assert take_scales(model, pickles) == {}
    assert "FP8: 1 layers start with new scales" in caplog.text
    assert model[0].scales is None
