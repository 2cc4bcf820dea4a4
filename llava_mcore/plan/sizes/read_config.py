"""A model's sizes from its config.json, without transformers, whose import takes longer than a plan may."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llava_mcore.errors import ConfigError
from llava_mcore.plan.sizes.defaults import CLASSES, PARTS, TEXTS, TOWERS, Values
from llava_mcore.plan.sizes.model import Decoder, ExpertShape, Model, TileRules
from llava_mcore.plan.sizes.towers import read_connector, read_tower

_NORMS = {"gemma2": 4, "gemma3_text": 4}
_QKV_BIAS = ("qwen2", "qwen2_vl_text", "qwen2_5_vl_text")
_GATED_ATTENTION = ("qwen3_5_text", "qwen3_5_moe_text")
_HEAD_NORMS = ("qwen3", "qwen3_vl_text", "gemma3_text", "qwen3_moe", "qwen3_vl_moe_text", *_GATED_ATTENTION)
_COMPUTES_WINDOWS = ("gemma2", "gemma3_text")
_FAMILIES = {"qwen2_vl": "qwen2_vl_vision", "qwen2_5_vl": "qwen2_5_vl_vision", "idefics2": "idefics2_vision"}
_FAMILIES |= {"qwen3_vl": "qwen3_vl_vision", "qwen3_5": "qwen3_5_vision", "idefics3": "idefics3_vision"}
_FAMILIES |= {"smolvlm": "smolvlm_vision", "qwen3_vl_moe": "qwen3_vl_moe_vision", "qwen3_5_moe": "qwen3_5_moe_vision"}
"""Names that files give to the tower, which are those of the whole."""


def read_model(folder: Path) -> Model:
    """Read the sizes of a Hugging Face folder, or of a config.json alone; weights are not needed.

    Raises:
        ConfigError: there is no config.json, it is not JSON, or a class or a value is unknown.
    """
    path = folder / "config.json" if folder.is_dir() else folder
    values = _read_json(path)
    return model_of(values, source=str(path), processor=_read_processor(path.parent))


def model_of(values: Values, *, source: str, processor: Values | None = None) -> Model:
    """Return the sizes that the values of a config.json have.

    Args:
        source: names them in messages.
        processor: values of the image processor.

    Raises:
        ConfigError: a class or a value is unknown.
    """
    kind = values.get("model_type")
    if kind not in PARTS:
        raise ConfigError(f"{source}: model_type is {kind!r}, expected one of {', '.join(PARTS)}")
    try:
        return _model(str(kind), values, processor or {})
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    except (KeyError, ValueError, TypeError, AttributeError, ArithmeticError, IndexError) as error:
        raise ConfigError(f"{source}: a value that a plan needs is missing or strange ({error!r})") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: --hf-dir takes a folder with a config.json") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected an object, found a {type(values).__name__}")
    return values


def _read_processor(folder: Path) -> Values:
    """Return the image processor's values; empty without one."""
    for name, key in (("preprocessor_config.json", None), ("processor_config.json", "image_processor")):
        if (folder / name).is_file():
            values = _read_json(folder / name)
            part = values if key is None else values.get(key)
            if isinstance(part, dict):
                return part
    return {}


def _model(kind: str, values: Values, processor: Values) -> Model:
    text_kind, tower_kind = PARTS[kind]
    section = "audio_config" if kind == "qwen2_audio" else "vision_config"
    top_level = CLASSES.get(kind, {}) | {key: x for key, x in values.items() if x is not None}
    # Files of Qwen2-VL on the hub have the language model's values on the top level.
    written = values.get("text_config") or (values if "hidden_size" in values else {})
    text_kind = str(written.get("model_type", text_kind)) if written.get("model_type") != kind else text_kind
    if text_kind not in TEXTS:
        raise ConfigError(f"text_config.model_type is {text_kind!r}; a plan knows {', '.join(TEXTS)}")
    text = TEXTS[text_kind] | written
    of_tower = values.get(section) or {}
    named = str(of_tower.get("model_type", tower_kind))
    named = _FAMILIES.get(named, named)
    if named not in TOWERS:
        raise ConfigError(f"{section}.model_type is {named!r}, expected one of {', '.join(TOWERS)}")
    vision = TOWERS[named] | {key: x for key, x in of_tower.items() if x is not None}
    decoder = _decoder(
        text_kind,
        text,
        len(top_level.get("expanded_layers") or ()),
        tied=kind not in ("qwen2_audio", "mllama") and bool(top_level.get("tie_word_embeddings")),
    )
    tower = read_tower(named, vision, top_level)
    inner = len(vision.get("deepstack_visual_indexes", ())) if kind in ("qwen3_vl", "qwen3_vl_moe") else 0
    return Model(
        model_type=kind,
        decoder=decoder,
        tower=tower,
        connector=read_connector(kind, tower, decoder, top_level, inner),
        tiles=_tiles(kind, top_level, processor),
        pixels=_pixels(processor, tower.patch * 2),
        num_deepstack=inner,
    )


def _decoder(kind: str, text: Values, expanded: int, *, tied: bool) -> Decoder:
    heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
    head_dim = int(text.get("head_dim") or hidden // heads)
    windows = kind not in _COMPUTES_WINDOWS and text.get("use_sliding_window", True)
    delta = _delta_nets(text, hidden) if kind in _GATED_ATTENTION else {}
    experts = _experts(text) if "num_experts_per_tok" in text else None
    return Decoder(
        num_layers=int(text["num_hidden_layers"]),
        hidden=hidden,
        ffn=0
        if experts is not None and experts.layers == text["num_hidden_layers"]
        else int(text["intermediate_size"]),
        heads=heads,
        groups=int(text["num_key_value_heads"] or heads),
        head_dim=head_dim,
        vocab=int(text["vocab_size"]),
        tied=tied,
        qkv_bias=kind in _QKV_BIAS,
        num_norms=_NORMS.get(kind, 2),
        head_norms=kind in _HEAD_NORMS,
        output_gate=kind in _GATED_ATTENTION,
        max_positions=int(text["max_position_embeddings"]),
        window=int(text["sliding_window"]) if windows and text.get("sliding_window") else None,
        experts=experts,
        expanded=expanded,
        cross_layers=len(text.get("cross_attention_layers", ())),
        more_rows=8 if kind == "mllama_text_model" else 0,
        **delta,
    )


def _experts(text: Values) -> ExpertShape:
    """Return the mixtures of a decoder."""
    layers = range(int(text["num_hidden_layers"]))
    step, dense = int(text.get("decoder_sparse_step", 1)), text.get("mlp_only_layers", [])
    sparse = sum(i not in dense and (i + 1) % step == 0 for i in layers)
    return ExpertShape(
        count=int(text["num_local_experts"] if "num_local_experts" in text else text["num_experts"]),
        chosen=int(text["num_experts_per_tok"]),
        ffn=int(text["moe_intermediate_size"]),
        layers=sparse,
        shared=int(text.get("shared_expert_intermediate_size") or 0),
    )


def _delta_nets(text: Values, hidden: int) -> dict[str, Any]:
    """Return the fields of Qwen3.5's gated delta nets; three of four layers have one unless layer_types says which."""
    layers = int(text["num_hidden_layers"])
    interval = int(text.get("full_attention_interval", 4))
    kinds = text.get("layer_types") or [
        "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)
    ]
    key_heads, value_heads = int(text["linear_num_key_heads"]), int(text["linear_num_value_heads"])
    keys, values = key_heads * int(text["linear_key_head_dim"]), value_heads * int(text["linear_value_head_dim"])
    convolved = 2 * keys + values
    return {
        "delta_layers": sum(kind == "linear_attention" for kind in kinds),
        "delta_in": convolved + values + 2 * value_heads,
        "delta_out": values,
        "delta_state": value_heads * int(text["linear_key_head_dim"]) * int(text["linear_value_head_dim"]),
        "delta_small": convolved * int(text["linear_conv_kernel_dim"])
        + 2 * value_heads
        + int(text["linear_value_head_dim"]),
        "delta_heads": (key_heads, value_heads),
    }


def _tiles(kind: str, top_level: Values, processor: Values) -> TileRules:
    if kind in ("llava_next", "llava_onevision"):
        max_tiles = str(top_level.get("vision_aspect_ratio", "")).rpartition("_")[2]
        points = tuple((int(a), int(b)) for a, b in top_level["image_grid_pinpoints"])
        is_onevision = kind == "llava_onevision"
        return TileRules(
            points, max_tiles=int(max_tiles) if is_onevision and max_tiles.isdecimal() else None, newline=True
        )
    if kind == "internvl":
        return TileRules(max_tiles=int(processor.get("max_patches", 12)), thumbnail=True)
    if kind in ("idefics3", "smolvlm"):
        size = processor.get("size")
        edge = size.get("longest_edge") if isinstance(size, Mapping) else None
        return TileRules(thumbnail=True, resized_to=int(edge or 1456))
    return TileRules()


def _pixels(processor: Values, side: int) -> tuple[int, int]:
    """Return the limits of a resized image's area, as the image processors of Qwen-VL have them."""
    size = processor.get("size")
    written = size if isinstance(size, Mapping) else {}
    smallest = processor.get("min_pixels") or written.get("shortest_edge") or 56 * 56
    largest = processor.get("max_pixels") or written.get("longest_edge") or 28 * 28 * 1280
    return max(int(smallest), side * side), int(largest)
