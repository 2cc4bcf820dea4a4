"""The classes and family pairs that the layout tests run through, each with something of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoProcessor, LlavaForConditionalGeneration, PreTrainedModel

from llava_mcore.convert.inputs import processed_media
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.encode.tokens import media_tokens
from llava_mcore.data.loader.collate import collate
from llava_mcore.data.samples import EncodedSample, MediaSpan, TokenConversation, Video
from llava_mcore.media.batch_fields import FEATURE_POSITIONS, MEDIA_SEQLENS, PIXEL_VALUES, normalize
from llava_mcore.media.media import MediaPlan, MediaTokens, Processing, VideoShape, index_values
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.architectures.registry import ARCHITECTURES, architecture_of, features_per_tile
from llava_mcore.models.vision.features import image_side
from llava_mcore.models.vision.patch_plan import PatchPlan
from tests.helpers.tiny_audio import RATE, make_hf_audio, wave
from tests.helpers.tiny_classes import MAKERS
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.tiny_idefics2 import hf_pictures, make_hf_idefics2
from tests.helpers.tiny_mllama import attended_inputs, make_hf_mllama
from tests.helpers.tiny_qwen import KINDS, ROPE, make_hf_qwen

LLAMA3_ROPE = {
    "rope_theta": 500000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}
INTERLEAVED = {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
PARTIAL = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}
TWO_ROPES = {
    "full_attention": {"rope_theta": 1000000.0, "rope_type": "linear", "factor": 8.0},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}


@dataclass(frozen=True)
class Case:
    """One tiny model of the class `architecture` (model_type), at the (tp, pp) of `layouts` (None: all).

    `variant`: what it has of its own, beside another case of the same families.
    """

    vision: str
    text: str
    options: dict[str, Any] = field(default_factory=dict)
    layouts: tuple[tuple[int, int], ...] | None = None
    architecture: str = "llava"
    variant: str = ""

    @property
    def name(self) -> str:
        of_class = "" if self.architecture == "llava" else f"{self.architecture}-"
        return f"{of_class}{self.vision}-{self.text}{self.variant and '-'}{self.variant}"


ONE_AXIS, BOTH_AXES, ONE_PROCESS = ((1, 2), (2, 1)), ((2, 2),), ((1, 1),)

CASES = [
    Case("clip", "llama", {"text_overrides": {"vocab_size": 401}}),
    Case("clip", "mistral", {"feature_layer": [-2, 1], "text_overrides": {"rope_parameters": LINEAR}}),
    Case("clip", "qwen2", {"tie": True, "strategy": "full"}),
    Case("clip", "qwen3", {"feature_layer": -1}),
    Case("siglip", "llama", {"tie": True, "text_overrides": {"rope_parameters": LLAMA3_ROPE}}),
    Case("siglip", "mistral", {"text_overrides": {"num_key_value_heads": 8}}),
    Case("siglip", "qwen2", {"text_overrides": {"rope_parameters": YARN}, "strategy": "default"}),
    Case("siglip", "qwen3", {"tie": True, "feature_layer": 2}),
    Case(
        "dinov2",
        "phi3",
        {
            "feature_layer": [-2, 1],
            "text_overrides": {"rope_parameters": PARTIAL},
            "vision_overrides": {"use_swiglu_ffn": True},
        },
        ONE_AXIS + BOTH_AXES,
    ),
    Case("dinov2_with_registers", "gemma2", {"tie": True}, ONE_AXIS + BOTH_AXES),
    Case("internvit", "gemma3", {"tie": True, "feature_layer": -1}, ONE_AXIS),
    Case("siglip", "gemma3", {"text_overrides": {"rope_parameters": TWO_ROPES}}, BOTH_AXES),
    Case("clip", "mistral", {}, ONE_PROCESS + ONE_AXIS + BOTH_AXES, "llava_next"),
    Case("siglip", "qwen2", {"feature_layer": -1, "tie": True}, ONE_PROCESS + ONE_AXIS + BOTH_AXES, "llava_onevision"),
    Case("internvit", "qwen2", {"tie": True}, ONE_PROCESS + ONE_AXIS + BOTH_AXES, "internvl"),
    Case("internvit", "llama", {"vision_feature_layer": -2}, ONE_PROCESS + BOTH_AXES, "internvl"),
    Case(
        "internvit",
        "qwen3",
        {"vision_overrides": {"attention_bias": False, "use_qk_norm": True, "norm_type": "rms_norm"}},
        ONE_PROCESS + BOTH_AXES,
        "internvl",
        "6b",
    ),
    Case("internvit", "qwen3_moe", {}, ONE_PROCESS, "internvl"),
    Case("siglip", "qwen3_moe", {"feature_layer": -1}, ONE_PROCESS, "llava_onevision"),
    Case("siglip", "llama", {}, ONE_PROCESS + ONE_AXIS + BOTH_AXES, "idefics3"),
    Case("siglip", "llama", {"tie": True, "marks": False}, ONE_PROCESS + ONE_AXIS + BOTH_AXES, "smolvlm"),
    Case("siglip", "mistral", {}, ONE_PROCESS + ONE_AXIS + BOTH_AXES, "idefics2"),
    Case("siglip", "llama", {"tie": True, "splits": True}, ONE_PROCESS + BOTH_AXES, "idefics2"),
    Case("qwen2_vl", "qwen2", {"tie": True}, ONE_PROCESS + ONE_AXIS + BOTH_AXES, "qwen2_vl"),
    Case(
        "qwen2_5_vl",
        "qwen2",
        {"text_overrides": {"rope_parameters": ROPE | YARN | {"mrope_section": [1, 1, 2]}}},
        ONE_PROCESS + ONE_AXIS + BOTH_AXES,
        "qwen2_5_vl",
    ),
    Case(
        "qwen2_5_vl",
        "qwen2",
        {"tie": True, "text_overrides": {"rope_parameters": LINEAR | {"mrope_section": [1, 2, 1]}}},
        BOTH_AXES,
        "qwen2_5_vl",
        "tied",
    ),
    Case("qwen3_vl", "qwen3", {}, ONE_PROCESS + ONE_AXIS + BOTH_AXES, "qwen3_vl"),
    Case(
        "qwen3_vl",
        "qwen3",
        {"tie": True, "text_overrides": {"rope_parameters": YARN | INTERLEAVED}},
        ONE_PROCESS + BOTH_AXES,
        "qwen3_vl",
        "yarn",
    ),
    Case("qwen3_vl_moe", "qwen3_vl_moe", {}, ONE_PROCESS, "qwen3_vl_moe"),
    Case("qwen3_5", "qwen3_5", {"tie": True}, ONE_PROCESS + ONE_AXIS + BOTH_AXES, "qwen3_5"),
    Case("qwen3_5_moe", "qwen3_5_moe", {}, ONE_PROCESS, "qwen3_5_moe"),
    Case("qwen2_audio_encoder", "qwen2", {}, ONE_PROCESS + ONE_AXIS + BOTH_AXES, "qwen2_audio"),
    Case("mllama", "mllama", {}, (*ONE_PROCESS, (2, 1)), "mllama"),
]

SHORT_AUDIO = Case("qwen2_audio_encoder", "qwen2", {"seconds": 4}, None, "qwen2_audio")
"""Of long ones nearly all time would be spent in the tower."""
EACH_CLASS = [next(case for case in (SHORT_AUDIO, *CASES) if case.architecture == name) for name in ARCHITECTURES]
"""One case of every class: what README's table of capabilities says of adapters and `serve` is tested with these."""


def make_case(case: Case, folder: Path) -> Any:
    """Write the case's Hugging Face folder and return its model."""
    options = {"vision": case.vision, "text": case.text, "seed": len(case.name), **case.options}
    makers = MAKERS | {"idefics2": make_hf_idefics2}
    if case.architecture in makers:
        return makers[case.architecture](folder, **options)
    if case.architecture in KINDS:
        return make_hf_qwen(folder, case.architecture, **case.options)
    if case.architecture == "qwen2_audio":
        return make_hf_audio(folder, **case.options)
    if case.architecture == "mllama":
        return make_hf_mllama(folder)
    return make_hf_llava(folder, architecture=case.architecture, **options)


def case_inputs(case: Case, model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """Return what the case is tested on: images as its own processor makes them, if their sizes matter."""
    if case.architecture == "qwen2_audio":
        return audio_inputs(folder)
    if case.architecture == "mllama":
        return attended_inputs(folder)
    if case.architecture in KINDS:
        plan = load_assets(folder).plan
        assert isinstance(plan, PatchPlan)
        return patch_inputs(plan)
    if case.architecture in MAKERS or case.architecture == "idefics2":
        return pictures_of_sizes(folder)
    return make_inputs(model)


PICTURE_SIZES = ((100, 40), (56, 56), (30, 210))


def pictures_of_sizes(folder: Path, *, sizes: Sequence[tuple[int, int]] = PICTURE_SIZES, seed: int = 0) -> Any:
    """Return three samples as the data pipeline makes them: one with images of several sizes, one with the last of
    them alone, one with text alone (padded to the same length)."""
    assets = load_assets(folder)
    data = [_noise(*size) for size in sizes]
    generator = torch.Generator().manual_seed(seed)
    rows, media, places = [], [], []
    for row, pictures in enumerate((data, data[-1:], [])):
        parts, length = [], 0
        for item, picture in zip(media_tokens(pictures, assets.plan, 10**6), pictures, strict=True):
            text = torch.randint(300, 400, (3,), generator=generator)
            parts += [text, torch.from_numpy(item.ids)]
            media.append(MediaSpan(picture, length + 3, item))
            places.append((row, length + 3))
            length += 3 + len(item)
        rows.append(torch.cat([*parts, torch.randint(300, 400, (5,), generator=generator)]))
    length = -(-max(map(len, rows)) // 8) * 8
    pixels = torch.cat([assets.images.tiles([item]) for item in media])
    starts = [row * length + start for row, start in places]
    found = {
        "input_ids": torch.stack([torch.cat([x, x.new_full((length - len(x),), assets.pad_token_id)]) for x in rows]),
        PIXEL_VALUES: normalize(pixels, assets.images.pixel_scale),
        **index_values(assets.plan.fields, [item.tokens for item in media], starts),
    }
    if MEDIA_SEQLENS in assets.plan.fields:
        theirs = hf_pictures(folder, [item.data for item in media if isinstance(item.data, bytes)])
        found |= {THEIRS + name: x for name, x in theirs.items()}
    return found


def _noise(height: int, width: int) -> bytes:
    buffer = BytesIO()
    Image.effect_noise((width, height), 200).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def make_inputs(model: LlavaForConditionalGeneration, *, num_text: int = 24, seed: int = 0) -> dict[str, torch.Tensor]:
    """Two samples: one with two images, one with text alone (padded to the same length)."""
    hf = model.config
    if hf.model_type != "llava":
        return any_size_inputs(model, seed=seed)
    n = features_per_tile(hf)
    g = torch.Generator().manual_seed(seed)
    length = 2 * n + num_text
    ids = torch.randint(5, 300, (2, length), generator=g)
    starts = [3, 3 + n + 2]
    for start in starts:
        ids[0, start : start + n] = hf.image_token_id
    size = image_side(hf.vision_config)
    positions = torch.cat([torch.arange(start, start + n) for start in starts])
    return {
        "input_ids": ids,
        PIXEL_VALUES: torch.randn(2, 3, size, size, generator=g),
        FEATURE_POSITIONS: positions,
    }


def hf_logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return Hugging Face's logits [b, s, vocabulary] for the same inputs."""
    with torch.no_grad():
        return model(**hf_inputs(model, inputs)).logits


def hf_inputs(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same inputs as Hugging Face's model takes them."""
    theirs = {name.removeprefix(THEIRS): x for name, x in inputs.items() if name.startswith(THEIRS)}
    return {"input_ids": inputs["input_ids"]} | (
        theirs or {PIXEL_VALUES: hf_pixels(model.config, inputs[PIXEL_VALUES])}
    )


THEIRS = "hugging face: "
"""Before the names of inputs that only Hugging Face's model takes."""
SIZES = (((56, 140),), (), ((100, 60), (40, 40)), ((120, 120),), ())
"""Heights and widths of the images of each sample."""
VIDEOS = ((), (), (VideoShape(3, 40, 60),), (), (VideoShape(3, 20, 20, 2.0), VideoShape(3, 90, 30)))
"""The videos of each sample, for classes that take them. Hugging Face's model wants one number of frames."""


def media_plan(hf: Any) -> MediaPlan:
    """Return the plan of a class that needs nothing but the config for it; of one with videos if it takes them."""
    nothing: Any = None
    some: Any = object()
    return architecture_of(hf).media(hf, Processing(nothing, nothing, {}, some))


def patch_inputs(plan: PatchPlan, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Samples of one length with images of several sizes, one image, none, two, as packed patches."""
    g = torch.Generator().manual_seed(seed)
    items = [plan.tokens(sizes) for sizes in SIZES]
    length = max(sum(map(len, each)) for each in items) + 24
    samples = []
    for each in items:
        rows = sum(item.num_rows for item in each)
        pixels = torch.randn(rows, plan.tower.patch_dim(plan.hf.vision_config), generator=g)
        found = [_conversation("s", [(b"", item) for item in each], length, g)]
        samples.append(EncodedSample(__key__="s", __restore_key__=(), conversations=found, pixel_values=pixels))
    batch = collate(
        samples, seq_length=length, pad_token_id=3, packed=False, fields=plan.fields, num_axes=plan.num_axes
    )
    theirs = {
        "pixel_values": batch.media[PIXEL_VALUES],
        "image_grid_thw": torch.tensor([plan.grid_of(*size) for sizes in SIZES for size in sizes]),
        "mm_token_type_ids": (batch.input_ids == plan.image_token_id).int(),
    }
    ours = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, **batch.media}
    return ours | {THEIRS + name: x for name, x in theirs.items()}


CLIPS = ((0.3, 30.0), (), (7.777, 0.07, 2.0), (29.99,), (1.005, 0.3))
"""Seconds of the clips of each sample."""


def audio_inputs(folder: Path) -> dict[str, torch.Tensor]:
    """Samples of one length with clips of 0.07 to 30 seconds, and one without, as the folder's processor makes them.

    If it takes shorter clips only, they are cut.
    """
    processor = AutoProcessor.from_pretrained(folder)
    longest = processor.feature_extractor.chunk_length
    seconds = [[min(x, longest) for x in clips] for clips in CLIPS]
    one = f"{processor.audio_bos_token}{processor.audio_token}{processor.audio_eos_token}"
    texts = [f"USER: {one * len(clips)} What? ASSISTANT: no." for clips in CLIPS]
    waves = [wave(x, seed) for clips in seconds for seed, x in enumerate(clips)]
    theirs = processor(
        text=texts, audio=waves, sampling_rate=RATE, padding=True, padding_side="right", return_tensors="pt"
    )
    lengths = [[round(x * RATE) for x in clips] for clips in seconds]
    nothing: list[list[Any]] = [[] for _ in CLIPS]
    media, positions = processed_media(load_hf_config(folder), processor, theirs, nothing, audios=lengths)
    ours = {"input_ids": theirs.pop("input_ids"), "position_ids": positions, **media}
    return ours | {THEIRS + name: x for name, x in theirs.items() if name != "attention_mask"}


def any_size_inputs(model: Any, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Samples of one length with images of several sizes, one image, none, two; collated as the loader does.

    Where the class takes videos, one has a video between its images and one has two videos alone.
    """
    hf = model.config
    samples = any_size_samples(hf, seed=seed)
    length = len(samples[0].conversations[0])
    batch = collate(samples, seq_length=length, pad_token_id=3, packed=False, fields=media_plan(hf).fields)
    spans = [(span, sample) for sample in samples for span in sample.conversations[0].media]
    tiles = [part for sample in samples for part in sample.pixel_values.split(_num_rows(sample))]
    of_pictures = [part for (span, _), part in zip(spans, tiles, strict=True) if isinstance(span.data, bytes)]
    of_videos = [part for (span, _), part in zip(spans, tiles, strict=True) if isinstance(span.data, Video)]
    padded = pad_sequence(of_pictures, batch_first=True)  # [images, most tiles, 3, side, side]
    theirs = {"pixel_values": padded, "image_sizes": torch.tensor([x for sizes in SIZES for x in sizes])}
    if hf.model_type == "llava_onevision":
        theirs["batch_num_images"] = torch.tensor([len(sizes) for sizes in SIZES if sizes])
    if of_videos:
        theirs["pixel_values_videos"] = torch.stack(of_videos)  # [videos, frames, 3, side, side]
    return {"input_ids": batch.input_ids, **batch.media, **{THEIRS + name: x for name, x in theirs.items()}}


def any_size_samples(hf: Any, *, seed: int = 0) -> list[EncodedSample]:
    """Return the samples of SIZES and VIDEOS, all of one length, as the loader has them before collation."""
    plan, side, g = media_plan(hf), image_side(hf.vision_config), torch.Generator().manual_seed(seed)
    spans = []
    for sizes, videos in zip(SIZES, VIDEOS, strict=True):
        found: list[tuple[bytes | Video, MediaTokens]] = [(b"", item) for item in plan.tokens(sizes)]
        if plan.video_token_id is not None:
            found[1:1] = [(Video(()), item) for item in plan.video_tokens(videos)]
        spans.append(found)
    length = max(sum(len(item) for _, item in found) for found in spans) + 24
    samples = []
    for number, found in enumerate(spans):
        conversation = _conversation(f"k{number}", found, length, g)
        pixels = torch.randn(conversation.num_rows, 3, side, side, generator=g)
        samples.append(
            EncodedSample(__key__="s", __restore_key__=(), conversations=[conversation], pixel_values=pixels)
        )
    return samples


def _num_rows(sample: EncodedSample) -> list[int]:
    return [span.tokens.num_rows for span in sample.conversations[0].media]


def _conversation(
    key: str, items: list[tuple[bytes | Video, MediaTokens]], length: int, g: torch.Generator
) -> TokenConversation:
    ids, start, media = torch.randint(6, 300, (length,), generator=g).numpy(), 3, []
    for data, item in items:
        ids[start : start + len(item)] = item.ids
        media.append(MediaSpan(data, start, item))
        start += len(item) + 2
    return TokenConversation(key, ids, np.ones(length, dtype=np.bool_), tuple(media), truncated=False)


def hf_pixels(hf: Any, tiles: torch.Tensor) -> torch.Tensor:
    """Return tiles [k, 3, h, w] as the class takes them: some as those of one sample, [1, k, 3, h, w]."""
    return tiles[None] if hf.model_type in ("idefics3", "smolvlm") else tiles


def make_sharp_case(case: Case, folder: Path) -> LlavaForConditionalGeneration:
    """As `make_case`, with large queries and keys.

    Attention then depends on what scales its scores: on small random weights it is almost uniform.
    """
    model = make_case(case, folder)
    with torch.no_grad():
        parts = dict(model.model.named_children())
        for name, p in parts.get("language_model", parts.get("text_model")).named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight", "q_proj.weight", "k_proj.weight")):
                p *= 4.0
            if name.endswith("qkv_proj.weight"):
                p *= 2.0
    model.save_pretrained(folder)
    return model
