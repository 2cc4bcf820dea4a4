"""Exported tensors have the names that servers' LLaVA loaders look for.

Facts, read in the packages themselves (vllm/model_executor/models/{llava,clip,siglip,llama,gemma2,gemma3}.py of vLLM
0.33.0 and sglang/srt/models/llava.py of SGLang 0.5.23), not their code: what a name's prefix becomes, the modules that
exist afterwards, what is dropped, and which towers the LLaVA class builds.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import LlavaForConditionalGeneration

from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.files.hf_folder import HfFolder

pytest_plugins = ("tests.helpers.build_fixtures",)

# vLLM 0.33.0: prefixes that its LLaVA class renames. All others stay.
VLLM_PREFIXES = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "lm_head.": "language_model.lm_head.",
}
LINEAR = r"(weight|bias)"
TOWER_LAYER = rf"encoder\.layers\.\d+\.(layer_norm[12]|self_attn\.(q|k|v|out)_proj|mlp\.fc[12])\.{LINEAR}"
TOWER_ENDS = (
    r"embeddings\.(class_embedding|(patch_embedding|position_embedding)\.(weight|bias))|pre_layrnorm\.(weight|bias)"
)
DROPPED = r"(post_layernorm|head)\..*"  # the loaders leave out what LLaVA does not use
# Parameters of a decoder layer, fused ones under the names they have before fusing.
SEPARATE = r"self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj"
DECODER = {
    "llama": rf"(input|post_attention)_layernorm|{SEPARATE}",
    "qwen3": rf"(input|post_attention)_layernorm|{SEPARATE}|self_attn\.[qk]_norm",
    "phi3": r"(input|post_attention)_layernorm|self_attn\.(qkv|o)_proj|mlp\.(gate_up|down)_proj",
    "gemma2": rf"(input|post_attention|(pre|post)_feedforward)_layernorm|{SEPARATE}",
}
DECODER["gemma3"] = DECODER["gemma2"] + r"|self_attn\.[qk]_norm"


def known_to_vllm(name: str, text: str) -> bool:
    """Tell whether a tensor of a file finds a parameter, or is left out on purpose."""
    for before, after in VLLM_PREFIXES.items():
        if name.startswith(before):
            name = after + name.removeprefix(before)
    patterns = (
        rf"vision_tower\.vision_model\.({TOWER_LAYER}|{TOWER_ENDS}|{DROPPED})",
        rf"multi_modal_projector\.linear_[12]\.{LINEAR}",
        rf"language_model\.model\.layers\.\d+\.({DECODER[text]})\.{LINEAR}",
        r"language_model\.(model\.(embed_tokens|norm)|lm_head)\.weight",
    )
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def known_to_sglang(name: str) -> bool:
    """Its LLaVA class takes the parts' prefixes away and renames nothing.

    0.5.23 registers no CLIP or SigLIP tower for that class, so only language model and projector can be checked.
    """
    return name.startswith(("language_model.model.", "language_model.lm_head.", "multi_modal_projector.linear_"))


@pytest.mark.parametrize(
    ("vision", "text", "tie"),
    [
        ("clip", "qwen3", False),
        ("siglip", "phi3", False),
        ("clip", "gemma2", True),
        ("siglip", "gemma3", False),
    ],
)
def test_every_exported_tensor_finds_its_module(
    build_tiny: Any, tiny_parts: Any, tmp_path: Path, vision: str, text: str, tie: bool
) -> None:
    folder = build_tiny(tiny_parts(text, tie=tie), tiny_parts(vision))
    import_hf(folder, tmp_path / "m", tensor_parallel=2)
    export_hf(tmp_path / "m", tmp_path / "out", tensor_parallel=2, max_shard_size="200KB")
    names = HfFolder.open(tmp_path / "out").shapes.keys()
    assert [name for name in names if not known_to_vllm(name, text)] == []
    assert [name for name in names if not known_to_sglang(name) and not name.startswith("vision_tower.")] == []
    assert ("language_model.lm_head.weight" in names) != tie
    # One class in config.json for all readers, and an index that names every tensor and file.
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlavaForConditionalGeneration"] and config["model_type"] == "llava"
    assert config["vision_config"]["model_type"] == f"{vision}_vision_model"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == names and all((tmp_path / "out" / file).is_file() for file in index.values())
    _, info = LlavaForConditionalGeneration.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_names_that_transformers_writes_itself_would_not_be_found() -> None:
    """Why build writes its own: `vision_tower.encoder…` has no module in vLLM 0.33."""
    assert not known_to_vllm("vision_tower.encoder.layers.0.mlp.fc1.weight", "llama")
    assert known_to_vllm("model.vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", "llama")
