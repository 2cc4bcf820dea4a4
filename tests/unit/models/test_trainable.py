"""Which parameters are trained: parts and patterns over names; and the rates that they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llava_mcore import parallel  # noqa: F401  before megatron.core
from llava_mcore.config.load import load_run_config
from llava_mcore.config.rules.all_rules import check_values
from llava_mcore.config.sections.model import ModelConfig
from llava_mcore.config.sections.optimizer import OptimizerConfig
from llava_mcore.errors import CheckpointError, ConfigError
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.trainable import trained_parameters
from llava_mcore.training.optimization.optimizer import follow_settings, part_rates
from tests.helpers.tiny_hf import make_hf_llava

LAYER = "language_model.decoder.layers.3."


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("trainable") / "hf"
    make_hf_llava(folder)
    return load_hf_config(folder)


def trained(hf: Any, **fields: Any) -> set[str]:
    """Return the names of what is trained."""
    return {name for name, value in trained_parameters(hf, ModelConfig.model_validate(fields)).items() if value}


def test_parts(hf: Any) -> None:
    """Freezing a part leaves the others trained."""
    assert {name.partition(".")[0] for name in trained(hf)} == {"language_model", "vision_projection"}
    only = trained(hf, freeze_language_model=True)
    assert only and all(name.startswith("vision_projection.") for name in only)


@pytest.mark.parametrize(
    "pattern",
    [
        LAYER + "*",
        "language_model.model.layers.3.*",
        "model.language_model.layers.3.*",
        f"{LAYER}[!m]*,*.layers.3.mlp.*",
    ],
)
def test_a_layer_goes_by_the_names_of_either_side(hf: Any, pattern: str) -> None:
    everything = trained(hf)
    layer = {name for name in everything if name.startswith(LAYER)}
    assert len(layer) == 6
    assert trained(hf, freeze=pattern) == everything - layer
    assert trained(hf, freeze_language_model=True, unfreeze=pattern) == layer | trained(hf, freeze_language_model=True)


def test_the_last_pattern_wins_and_hits_only_its_own(hf: Any) -> None:
    found = trained(hf, freeze="*", unfreeze="*.post_attention_layernorm.weight,vision_tower.embeddings.*")
    vision = {name for name in found if name.startswith("vision_model.")}
    assert len(found - vision) == 4 and all(name.endswith("pre_mlp_layernorm.weight") for name in found - vision)
    assert vision == {
        "vision_model.conv1.weight",
        "vision_model.class_token",
        "vision_model.position_embeddings.weight",
    }


def test_all_that_is_wrong_is_said_at_once(hf: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        trained(hf, freeze="*.q_proj.weight", unfreeze="language_modle.*")
    text = str(caught.value)
    assert "model.unfreeze: 'language_modle.*' matches no parameter; names look like language_model." in text
    words = "layers.0.self_attention.linear_qkv.weight (and 3 parameters like it) is one parameter, so choose all of "
    assert words + "language_model.model.layers.0.self_attn.q_proj.weight, language_model.model." in text
    with pytest.raises(ConfigError, match="nothing would be trained"):
        trained(hf, freeze="*")


def test_rates_of_parts() -> None:
    """A part's own rate scales the smallest rate too; the others keep the common one."""
    rates = part_rates(OptimizerConfig(lr=1e-3, min_lr=1e-4, vision_lr=2e-4))
    assert rates["language_model"] == rates["vision_projection"]
    assert (rates["vision_model"].max_lr, rates["vision_model"].min_lr) == (2e-4, pytest.approx(2e-5))


def test_a_resumed_run_may_change_rates_but_not_tell_equal_ones_apart() -> None:
    before = OptimizerConfig(lr=1e-3, vision_lr=2e-4)
    groups: list[dict[str, Any]] = [{"max_lr": 1e-3, "min_lr": 0.0}, {"max_lr": 2e-4, "min_lr": 0.0}]
    follow_settings({"param_groups": groups}, before, OptimizerConfig(lr=5e-4, vision_lr=1e-3, adam_beta2=0.95))
    assert [group["max_lr"] for group in groups] == [5e-4, 1e-3]
    assert all(group["betas"] == (0.9, 0.95) and group["eps"] == 1e-8 for group in groups)
    equal = OptimizerConfig(lr=1e-3, vision_lr=1e-3)
    with pytest.raises(CheckpointError, match="cannot be distinguished"):
        follow_settings({"param_groups": []}, equal, before)


def test_rates_without_effect_are_refused() -> None:
    keys = ["optimizer.vision_lr=1", "optimizer.decay_norms_and_biases=true"]
    found = "\n".join(check_values(load_run_config(None, keys)))
    assert "optimizer.vision_lr has no effect on a part that is frozen" in found
    assert "optimizer.decay_norms_and_biases has no effect without optimizer.weight_decay" in found
