"""The sizes of towers and connectors, by the kinds that `models.vision` and `models.connectors` build."""

from __future__ import annotations

from math import isqrt
from typing import Any

from llava_mcore.plan.sizes.defaults import PERCEIVER, Values
from llava_mcore.plan.sizes.model import ConnectorShape, Decoder, LinearShape, Tower

_PADDED = 128
"""Qwen-VL's towers have MLPs padded to a multiple of this (`models.vision.encoder_layers.padded_width`)."""
_CLASS_TOKEN = ("clip_vision_model", "dinov2", "dinov2_with_registers", "internvl_vision")
_QWEN = (
    *("qwen2_vl_vision", "qwen2_5_vl_vision", "qwen3_vl_vision", "qwen3_5_vision"),
    *("qwen3_vl_moe_vision", "qwen3_5_moe_vision"),
)
_POST_NORM = ("idefics2_vision", "idefics3_vision", "smolvlm_vision")


def read_tower(kind: str, vision: Values, top_level: Values) -> Tower:
    """Return a tower's sizes. `vision`, `top_level`: its section of config.json, and the top level."""
    if kind in _QWEN:
        return _qwen(kind, vision)
    if kind == "qwen2_audio_encoder":
        return _audio(vision)
    if kind == "mllama_vision_model":
        return _mllama(vision)
    return _vit(kind, vision, top_level)


def _side(value: Any) -> int:
    return int(value[0] if isinstance(value, list | tuple) else value)


def _vit(kind: str, vision: Values, top_level: Values) -> Tower:
    """CLIP, SigLIP, DINOv2, InternViT, and the SigLIPs of Idefics."""
    h, layers = int(vision["hidden_size"]), int(vision["num_hidden_layers"])
    chosen = top_level.get("vision_feature_layer", -1)
    used = max(i if i >= 0 else layers + 1 + i for i in (chosen if isinstance(chosen, list | tuple) else [chosen]))
    side, patch = _side(vision["image_size"]), _side(vision["patch_size"])
    patches, values = (side // patch) ** 2, int(vision["num_channels"]) * patch**2
    is_dino, gated = kind.startswith("dinov2"), bool(vision.get("use_swiglu_ffn", False))
    ffn = int(h * vision["mlp_ratio"]) if is_dino else int(vision["intermediate_size"])
    ffn = (int(ffn * 2 / 3) + 7) // 8 * 8 if gated else ffn
    before = (1 if kind in _CLASS_TOKEN else 0) + int(vision.get("num_register_tokens", 0))
    # Biases, norms, scales.
    norm = h if vision.get("norm_type") == "rms_norm" else 2 * h
    biases = (3 * h if is_dino or vision.get("attention_bias", True) else 0) + 2 * h + ffn * (2 if gated else 1)
    scales = 2 * h if is_dino or kind == "internvl_vision" else 0
    head_norms = 2 * h if vision.get("use_qk_norm") else 0
    table = patches + (1 if kind in _CLASS_TOKEN else 0)
    ends = table * h + before * h + (0 if kind == "clip_vision_model" else h)
    ends += 2 * h if kind == "clip_vision_model" or kind in _POST_NORM else 0
    packed = kind == "idefics2_vision"
    return Tower(
        kind,
        num_layers=used if "vision_feature_layer" in top_level else layers,
        all_layers=layers,
        hidden=h,
        ffn=ffn,
        heads=int(vision["num_attention_heads"]),
        gated=gated,
        patch=patch,
        positions=0 if packed else patches + before,
        patch_values=values,
        embedding=values * h,
        small=ends,
        layer_small=biases + 2 * norm + scales + head_norms,
        image_side=side,
        keeps_class_token=before > 0 and top_level.get("vision_feature_select_strategy", "default") != "default",
        padded_ffn=ffn,
    )


def _qwen(kind: str, vision: Values) -> Tower:
    width = int(vision["embed_dim"] if kind == "qwen2_vl_vision" else vision["hidden_size"])
    ffn = int(width * vision["mlp_ratio"]) if kind == "qwen2_vl_vision" else int(vision["intermediate_size"])
    padded, layers, gated = -(-ffn // _PADDED) * _PADDED, int(vision["depth"]), kind == "qwen2_5_vl_vision"
    values = int(vision["in_channels"]) * int(vision["temporal_patch_size"]) * int(vision["patch_size"]) ** 2
    norm = width if gated else 2 * width
    table = int(vision.get("num_position_embeddings", 0)) * width
    return Tower(
        kind,
        num_layers=layers,
        all_layers=layers,
        hidden=width,
        ffn=ffn,
        heads=int(vision["num_heads"]),
        gated=gated,
        patch=int(vision["patch_size"]),
        positions=0,
        patch_values=values,
        embedding=values * width,
        small=table + (width if table else 0),
        layer_small=3 * width + 2 * width + padded * (2 if gated else 1) + 2 * norm,
        merged=int(vision["spatial_merge_size"]) ** 2,
        full_layers=len([i for i in vision["fullatt_block_indexes"] if i < layers]) if gated else None,
        window=int(vision.get("window_size", 0)),
        padded_ffn=padded,
    )


def _audio(audio: Values) -> Tower:
    """Qwen2-Audio's encoder: two convolutions, then layers; a position is a hidden frame of 20 ms."""
    h, ffn, mel = int(audio["d_model"]), int(audio["encoder_ffn_dim"]), int(audio["num_mel_bins"])
    return Tower(
        "qwen2_audio_encoder",
        num_layers=int(audio["encoder_layers"]),
        all_layers=int(audio["encoder_layers"]),
        hidden=h,
        ffn=ffn,
        heads=int(audio["encoder_attention_heads"]),
        gated=False,
        patch=1,
        positions=0,
        patch_values=2 * mel,
        embedding=3 * mel * h + 3 * h * h,
        small=2 * h + int(audio["max_source_positions"]) * h + 2 * h,
        layer_small=2 * h + 2 * h + ffn + 4 * h,
        padded_ffn=ffn,
        merged=2,
    )


def _mllama(vision: Values) -> Tower:
    """Mllama's: the tiles of an image, padding among them, are one sequence, so that an image counts as one tile."""
    h, ffn = int(vision["hidden_size"]), int(vision["intermediate_size"])
    side, patch, tiles = _side(vision["image_size"]), _side(vision["patch_size"]), int(vision["max_num_tiles"])
    layers, gated = int(vision["num_hidden_layers"]), int(vision["num_global_layers"])
    table = ((side // patch) ** 2 + 1) * h
    values, grids = int(vision["num_channels"]) * patch**2, len(vision["supported_aspect_ratios"]) + 1
    return Tower(
        "mllama_vision_model",
        num_layers=layers + gated,
        all_layers=layers + gated,
        hidden=h,
        ffn=ffn,
        heads=int(vision["attention_heads"]),
        gated=False,
        patch=patch,
        positions=tiles * -(-table // h // 8) * 8,
        patch_values=values,
        embedding=values * h,
        small=h + table + grids * tiles * (table + 2 * h) + 4 * h + 3 + 2 * gated,
        layer_small=ffn + h + 4 * h,
        image_side=side,
        keeps_class_token=True,
        padded_ffn=ffn,
    )


def read_connector(kind: str, tower: Tower, decoder: Decoder, top_level: Values, inner: int) -> ConnectorShape:
    """Return the sizes of the connector of a class. `inner`: connectors of the tower's inner layers beside it."""
    w, h = tower.hidden, decoder.hidden
    layer = top_level.get("vision_feature_layer", -1)
    w *= len(layer) if isinstance(layer, list | tuple) else 1
    # As a share of the positions of a tile: the connector does not see a dropped class token.
    before = tower.positions - isqrt(max(0, tower.positions)) ** 2 if tower.positions else 0
    seen = 1.0 if not tower.positions or tower.keeps_class_token else 1 - min(1, before) / tower.positions
    if kind in ("llava", "llava_next", "llava_onevision"):
        newline = h if kind != "llava" else 0
        bias = 2 * h if top_level.get("multimodal_projector_bias", True) else 0
        return ConnectorShape((LinearShape(w, h, seen), LinearShape(h, h, seen)), bias + newline, h)
    if kind == "qwen2_audio":
        return ConnectorShape((LinearShape(w, h, 0.5),), h, h)
    if kind == "mllama":
        return ConnectorShape((LinearShape(int(top_level["vision_config"]["vision_output_dim"]), h),), h, h)
    if kind == "idefics2":
        return _perceiver(tower, decoder, top_level)
    if kind in ("idefics3", "smolvlm"):
        square = int(top_level["scale_factor"]) ** 2
        return ConnectorShape((LinearShape(w * square, h, 1 / square),), 0, h)
    if kind == "internvl":
        square = round(1 / float(top_level["downsample_ratio"])) ** 2
        wide = w * square
        return ConnectorShape(
            (LinearShape(wide, h, seen / square), LinearShape(h, h, seen / square)), 2 * wide + 2 * h, h
        )
    wide = w * tower.merged
    # Norm before the merge; Qwen3-VL's inner mergers have it after.
    norm = w if kind == "qwen2_5_vl" else 2 * w
    share = 1 / tower.merged
    small = wide + h + norm + (inner * 2 * (wide - w) / (1 + inner) if inner else 0)
    return ConnectorShape(
        (LinearShape(wide, wide, share), LinearShape(wide, h, share)), round(small), wide, repeated=1 + inner
    )


def _perceiver(tower: Tower, decoder: Decoder, top_level: Values) -> ConnectorShape:
    """Idefics2's: a gated MLP at the patches, then latents of each image that read it."""
    values = PERCEIVER | {key: x for key, x in (top_level.get("perceiver_config") or {}).items() if x is not None}
    h, f, latents = decoder.hidden, decoder.ffn, int(values["resampler_n_latents"])
    depth = int(values["resampler_depth"])
    queries = int(values["resampler_n_heads"]) * int(values["resampler_head_dim"])
    keys = int(values["num_key_value_heads"]) * int(values["resampler_head_dim"])
    products = [LinearShape(tower.hidden, 2 * f), LinearShape(f, h)]
    for _ in range(depth):
        products += [
            LinearShape(h, queries + 0, latents, "picture"),
            LinearShape(h, 2 * keys),
            LinearShape(queries, h, latents, "picture"),
            LinearShape(h, 8 * h, latents, "picture"),
            LinearShape(4 * h, h, latents, "picture"),
        ]
    return ConnectorShape(tuple(products), latents * h + depth * 3 * h + h, 4 * h, latents=latents)
