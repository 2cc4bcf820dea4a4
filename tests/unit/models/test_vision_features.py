"""Image features equal Hugging Face's: activation, norm epsilon, class token, feature layers, any number of patches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llava_mcore.checkpoint.dist import load_weights
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.errors import ConversionError
from llava_mcore.media.batch_fields import NO_SCALE, PIXEL_SCALE, PIXEL_VALUES
from llava_mcore.models.architectures.registry import features_per_tile
from llava_mcore.models.configs import ModelOptions, Recompute
from llava_mcore.models.language.decoder import insert_features
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.vision.features import feature_choice
from llava_mcore.parallel.groups import single_process
from tests.helpers.tiny_hf import make_hf_llava

CASES: dict[str, dict[str, Any]] = {
    # A class token is dropped from the output only: positions stay where they are (trap 8).
    "clip, default": {"vision": "clip"},
    "clip, full": {"vision": "clip", "strategy": "full"},
    # SigLIP has GELU (tanh) and its own epsilon (trap 5), and no class token to drop (trap 6).
    "siglip, full": {"vision": "siglip"},
    "siglip, default drops patch 0": {"vision": "siglip", "strategy": "default"},
    # Neither 576 or 729 patches nor 16 heads of 64 (trap 11), and an image that is not a multiple of the patch.
    "odd sizes": {"vision": "siglip", "vision_overrides": {"image_size": 75, "num_attention_heads": 2}},
    "another epsilon and activation": {
        "vision": "clip",
        "vision_overrides": {"layer_norm_eps": 1e-2, "hidden_act": "gelu"},
    },
    "several layers": {"vision": "clip", "feature_layer": [-2, 0, 2]},
    "last layer": {"vision": "siglip", "feature_layer": -1},
}


@pytest.mark.parametrize("case", CASES)
def test_features_equal_hugging_face(tmp_path: Path, case: str) -> None:
    hf = make_hf_llava(tmp_path / "hf", **CASES[case])
    checkpoint = import_hf(tmp_path / "hf", tmp_path / "megatron")
    size = hf.config.vision_config.image_size
    pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), single_process():
        model = VisionLanguageModel(hf.config, ModelOptions(initialize=False))
        load_weights([model], checkpoint)
        ours = model.eval().image_features({PIXEL_VALUES: pixels, PIXEL_SCALE: NO_SCALE})
        theirs = torch.cat(tuple(hf.get_image_features(pixel_values=pixels).pooler_output))
    assert ours.shape[0] == 2 * features_per_tile(hf.config) == theirs.shape[0]
    assert (ours - theirs).abs().max().item() <= 1e-5


def test_several_layers_of_a_tower_that_is_recomputed_in_larger_units(tmp_path: Path) -> None:
    hf = make_hf_llava(tmp_path / "hf", vision="clip", feature_layer=[-2, 0, 2])
    checkpoint = import_hf(tmp_path / "hf", tmp_path / "megatron")
    size = hf.config.vision_config.image_size
    media = {PIXEL_VALUES: torch.randn(2, 3, size, size), PIXEL_SCALE: NO_SCALE}
    gradients = []
    with single_process():
        for recompute in (None, Recompute("full", "uniform", 4), Recompute("full", "block", 2)):
            model = VisionLanguageModel(hf.config, ModelOptions(initialize=False, recompute_vision=recompute))
            load_weights([model], checkpoint)
            model.train().image_features(media).square().sum().backward()
            gradients.append(model.vision_model.decoder.layers[0].mlp.linear_fc1.weight.grad)
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])


@pytest.mark.parametrize("layer", [6, -7, 0, [], [0]])
def test_feature_layers_that_cannot_be(tmp_path: Path, layer: Any) -> None:
    hf = make_hf_llava(tmp_path / "hf")
    hf.config.vision_feature_layer = layer
    with pytest.raises(ConversionError, match="vision_feature_layer"):
        feature_choice(hf.config)


def test_features_go_to_their_places_and_gradients_come_back() -> None:
    embeddings = torch.randn(5, 2, 3, requires_grad=True)
    features = torch.randn(3, 3, requires_grad=True)
    places = torch.tensor([1, 2, 7])  # sample 0, tokens 1 and 2; sample 1, token 2
    placed = insert_features(embeddings, features, places)
    assert torch.equal(placed[1, 0], features[0]) and torch.equal(placed[2, 1], features[2])
    assert torch.equal(placed[0], embeddings[0])
    placed.sum().backward()
    assert features.grad is not None and embeddings.grad is not None
    assert torch.equal(features.grad, torch.ones(3, 3))
    assert embeddings.grad[1, 0].abs().sum() == 0 and embeddings.grad[0, 0].sum() == 3
