"""Model FLOPs against a model counted by hand, torch's own counter over Hugging Face's model, and the docs' table."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from llava_mcore.media.batch_fields import MediaWork
from llava_mcore.models.architectures.registry import features_per_tile
from llava_mcore.models.flops import Flops, TrainedParts, Workload, mfu, model_flops, peak_flops
from llava_mcore.models.vision.families.registry import vision_family
from llava_mcore.models.vision.features import feature_choice
from tests.helpers.tiny_hf import text_config, vision_config

DOCS = Path(__file__).parents[3] / "benchmarks" / "formulas.md"


def llava(
    vision: str = "clip",
    text: str = "llama",
    feature_layer: int | list[int] = -2,
    vision_fields: dict[str, Any] | None = None,
    **text_fields: Any,
) -> LlavaConfig:
    v = vision_config(vision, **(vision_fields or {}))
    strategy = "full" if vision == "siglip" else "default"
    t = text_config(text, **text_fields)
    config = LlavaConfig(
        vision_config=v,
        text_config=t,
        image_token_id=4,
        vision_feature_layer=feature_layer,
        vision_feature_select_strategy=strategy,
        attn_implementation="eager",
    )
    config.image_seq_length = features_per_tile(config)
    return config


def test_a_tiny_model_counted_by_hand() -> None:
    """The number of operations is that of a count on paper."""
    hf = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, patch_size=2, image_size=6
        ),
        text_config=LlamaConfig(
            hidden_size=12,
            intermediate_size=20,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=50,
        ),
        vision_feature_layer=-2,
    )
    # Samples of 12 and 5 tokens; the first holds an image of 9 patches.
    found = model_flops(hf, Workload.of_samples([12, 5], num_tiles=1), TrainedParts())

    # Tower, frozen: forward only, 2 of 3 layers, 9 patches and the class token.
    assert found.patch_embedding == Flops(2 * 9 * (3 * 2 * 2) * 8, 0)
    layer = 4 * (2 * 10 * 8 * 8) + 2 * (2 * 10 * 8 * 16)  # q, k, v, o; two of the MLP
    assert found.vision_layers == Flops(2 * layer, 0)
    attention = 2 * (2 * 10 * 10 * 4) * 2  # scores and values, 2 heads of 4
    assert found.vision_attention == Flops(2 * attention, 0)

    # Projection, trained: the first matrix needs no gradient of its input.
    first, second = 2 * 9 * 8 * 12, 2 * 9 * 12 * 12
    assert found.projection == Flops(first + second, first + 2 * second)

    # Language model: 17 tokens, 4 heads of 3, 2 groups.
    q = o = 2 * 17 * 12 * 12
    k = v = 2 * 17 * 12 * 6
    mlp = 3 * (2 * 17 * 12 * 20)
    assert found.language_layers == Flops(2 * (q + k + v + o + mlp), 4 * (q + k + v + o + mlp))
    pairs = sum(range(1, 13)) + sum(range(1, 6))  # token i sees i tokens of its own sample
    attention = 2 * (2 * pairs * 3) * 4
    assert found.language_attention == Flops(2 * attention, 4 * attention)
    head = 2 * 17 * 12 * 50
    assert found.head == Flops(head, 2 * head)
    assert found.total == sum(part.forward + part.backward for part in found.parts().values())
    assert list(found.parts()) == [
        "patch_embedding",
        "vision_layers",
        "vision_attention",
        "projection",
        "language_layers",
        "language_attention",
        "head",
        "adapters",
    ]
    # Adapters alone, with rank 2 on the queries of both layers: gradients flow through frozen products.
    weights = 2 * 2 * (12 + 12)
    lora = model_flops(
        hf, Workload.of_samples([12, 5], num_tiles=1), TrainedParts(False, False, False, language_adapter=weights)
    )
    assert lora.adapters == Flops(2 * 17 * weights, 2 * (2 * 17 * weights))
    assert lora.language_layers == Flops(found.language_layers.forward, found.language_layers.forward)
    assert lora.language_attention == found.language_attention
    assert lora.projection.backward == lora.vision_layers.backward == 0


def counted(hf: LlavaConfig, trained: TrainedParts, *, samples: int, length: int, images: int) -> int:
    """Count the FLOPs of Hugging Face's forward and backward with torch's counter, except for rotary angles.

    These are a matrix product or an elementwise one, which is no FLOP to the counter, by the version of transformers.
    """
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(hf)
    parts = model.model
    parts.language_model.requires_grad_(trained.language_model)
    model.lm_head.requires_grad_(trained.language_model)
    parts.vision_tower.requires_grad_(trained.vision_model)
    parts.multi_modal_projector.requires_grad_(trained.vision_projection)
    ids = torch.randint(5, 300, (samples, length))
    ids[:, 1 : 1 + images * features_per_tile(hf)] = 4
    size = hf.vision_config.image_size
    with FlopCounterMode(display=False) as counter:
        out = model(input_ids=ids, pixel_values=torch.randn(samples * images, 3, size, size), use_cache=False).logits
        if out.requires_grad:
            out.sum().backward()
    by_module = {name: sum(flops.values()) for name, flops in counter.get_flop_counts().items()}
    return counter.get_total_flops() - sum(x for name, x in by_module.items() if name.endswith(".rotary_emb"))


def beyond_the_model(hf: LlavaConfig, *, samples: int, images: int) -> int:
    """Return what Hugging Face computes and the model does not need: unused layers of the tower."""
    vision = hf.vision_config
    tokens = features_per_tile(hf) + feature_choice(hf).drop_first_token
    unused = vision.num_hidden_layers - feature_choice(hf).num_layers  # forward only: no gradient reaches them
    gated = vision.to_dict().get("use_swiglu_ffn", False)
    matrices = 4 * vision.hidden_size**2 + (3 if gated else 2) * vision.hidden_size * vision_family(vision).ffn_size(
        vision
    )
    return samples * images * unused * (2 * tokens * matrices + 4 * tokens**2 * vision.hidden_size)


CONFIGS: dict[str, dict[str, Any]] = {
    "clip llama": {},
    "clip qwen3, own head size": {"text": "qwen3", "feature_layer": -1},
    "clip mistral, two feature layers": {"text": "mistral", "feature_layer": [-2, 1]},
    "siglip qwen2, one group": {
        "vision": "siglip",
        "text": "qwen2",
        "num_key_value_heads": 1,
        "vision_fields": {"vision_use_head": False},
    },
    "dinov2 phi3, gated tower": {"vision": "dinov2", "text": "phi3", "vision_fields": {"use_swiglu_ffn": True}},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_torch_counts_the_same_over_hugging_face(name: str) -> None:
    hf = llava(**CONFIGS[name])
    shape = {"samples": 2, "length": 2 * features_per_tile(hf) + 7, "images": 2}
    # Eager attention computes every pair of a sample and masks half of them, so here a sample of n has n * n.
    n = shape["length"]
    work = Workload(num_tokens=2 * n, num_pairs=2 * n * n, media=MediaWork(4))
    for language, vision, projection in itertools.product([True, False], repeat=3):
        trained = TrainedParts(language, vision, projection)
        expected = model_flops(hf, work, trained).total + beyond_the_model(hf, samples=2, images=2)
        assert counted(hf, trained, **shape) == expected, trained


def test_causal_pairs_are_those_of_every_sample() -> None:
    work = Workload.of_samples([1, 2, 7], num_tiles=0)
    seen = sum(j <= i for n in (1, 2, 7) for i in range(n) for j in range(n))
    assert (work.num_tokens, work.num_pairs) == (10, seen)
    hf = llava()
    parts = model_flops(hf, work, TrainedParts())
    assert parts.vision_layers.total == parts.projection.total == 0
    whole = model_flops(hf, Workload.of_samples([10], num_tiles=0), TrainedParts())
    assert whole.language_attention.total * seen == parts.language_attention.total * 55
    assert whole.language_layers == parts.language_layers and whole.head == parts.head


def test_only_trained_tokens_need_the_output_layer() -> None:
    hf, some = llava(), Workload(num_tokens=10, num_pairs=55, media=MediaWork(1), num_trained=4)
    parts = model_flops(hf, some, TrainedParts()).parts()
    whole = model_flops(hf, Workload(num_tokens=10, num_pairs=55, media=MediaWork(1)), TrainedParts()).parts()
    assert parts["head"].total * 10 == whole["head"].total * 4
    assert {k: v for k, v in parts.items() if k != "head"} == {k: v for k, v in whole.items() if k != "head"}


def test_peaks_and_utilization() -> None:
    """Known devices have a peak, unknown ones none, and utilization is relative to it."""
    assert peak_flops("NVIDIA H200") == 989e12 and peak_flops("NVIDIA H100 80GB HBM3", fp8=True) == 1979e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12  # the same chip, slower
    assert peak_flops("NVIDIA A100-SXM4-80GB", fp8=True) is None
    assert peak_flops("Some other device") is None
    assert mfu(989 * 10**12, seconds=0.5, num_devices=4, peak=989e12) == pytest.approx(0.5)


def example_table() -> str:
    """The table of benchmarks/formulas.md: LLaVA-1.5-7B, one packed row of 4096 tokens of three samples."""
    hf = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=24,
            num_attention_heads=16,
            patch_size=14,
            image_size=336,
        ),
        text_config=LlamaConfig(
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=32,
            vocab_size=32064,
        ),
        vision_feature_layer=-2,
    )
    work = Workload.of_samples([1800, 1296, 1000], num_tiles=3)
    columns = {
        "tower frozen": TrainedParts(),
        "all trained": TrainedParts(vision_model=True),
        "projector only": TrainedParts(language_model=False),
        "LoRA, rank 64": TrainedParts(False, False, False, language_adapter=64 * 32 * (4 * 8192 + 3 * (4096 + 11008))),
    }
    found = {name: model_flops(hf, work, trained) for name, trained in columns.items()}
    lines = [f"| TFLOP | forward | {' | '.join(columns)} |", "|---|---|---|---|---|---|"]
    for part, flops in found["tower frozen"].parts().items():
        totals = [f"{x.parts()[part].total / 1e12:.3f}" for x in found.values()]
        lines.append(f"| {part.replace('_', ' ')} | {flops.forward / 1e12:.3f} | {' | '.join(totals)} |")
    forward = sum(x.forward for x in found["tower frozen"].parts().values())
    totals = [f"{x.total / 1e12:.3f}" for x in found.values()]
    lines.append(f"| **total** | {forward / 1e12:.3f} | {' | '.join(totals)} |")
    return "\n".join(lines)


def test_the_docs_show_what_the_formula_gives() -> None:
    assert example_table() in DOCS.read_text(), f"put this into {DOCS.name}:\n{example_table()}"
