"""Qwen2-Audio's encoder on packed clips, compared with Hugging Face's on clips that are padded to 30 seconds.

    python -m benchmarks.audio_encoder --clips 32 --json out.json

Clips are 2 to 16 seconds long, as LibriSpeech's mostly are. Forward is what a frozen encoder does in a training step,
both is what a trained one does. Both models have the same weights, in bf16 on a GPU (ours with Transformer Engine's
layers, Hugging Face's with torch's SDPA) and in fp32 on a CPU. "÷ hf" is samples/s as a multiple of Hugging Face's.
"off %" is the mean distance of our features from Hugging Face's in fp32, as a percentage of their mean size,
and below it that of Hugging Face's own in bf16. The two alternate; figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, Qwen2AudioEncoder
from transformers.masking_utils import create_bidirectional_mask

from benchmarks.record import show, write_record
from benchmarks.shapes import AUDIO_SECONDS, SHAPES, make_hf_folder
from llava_mcore.media.batch_fields import FEATURE_POSITIONS, MEDIA_SEQLENS
from llava_mcore.media.clip_plan import ROWS_BEFORE, ClipLengths
from llava_mcore.models.configs import ModelOptions, part_configs
from llava_mcore.models.vision.families.registry import vision_family
from llava_mcore.models.vision.features import FeatureChoice
from llava_mcore.parallel.groups import initialize
from llava_mcore.parallel.random import seed_everything
from llava_mcore.weights.names import FUSED_NORMS

OURS, THEIRS = "packed (ours)", "padded (Hugging Face)"
FRAMES_PER_SECOND = 100


@dataclass(frozen=True)
class Clips:
    """The same clips for both: rows and fields for ours, padded mel frames [clips, bins, frames] for theirs."""

    lengths: list[ClipLengths]
    rows: Tensor
    fields: dict[str, Tensor]
    padded: Tensor


def main() -> None:
    """Build both encoders, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[x for x in SHAPES if "audio" in x], default="qwen2-audio-7b")
    parser.add_argument("--clips", type=int, default=16)
    parser.add_argument("--passes", type=int, default=10, help="passes before the device is waited for")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29781")
    on_gpu = torch.cuda.is_available()
    initialize(backend="nccl" if on_gpu else "gloo", tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
    seed_everything(0)
    with tempfile.TemporaryDirectory() as work:
        hf = make_hf_folder(Path(work), args.shape, seq_length=4096, num_layers=2)
    rows = measure(hf, args, torch.device("cuda" if on_gpu else "cpu"))
    show(rows)
    if args.json is not None:
        write_record(args.json, rows, gpus=1)


def measure(hf: PretrainedConfig, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each encoder, of forward passes alone and with backward passes."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    clips = make_clips(hf, args.clips, device)
    exact = their_encoder(hf, torch.float32, device)
    with torch.no_grad():
        truth = their_features(exact, clips)
    encoders = {OURS: our_encoder(hf, exact.state_dict(), dtype, device), THEIRS: their_encoder(hf, dtype, device)}
    del exact
    features: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: our_features(encoders[OURS], clips, dtype),
        THEIRS: lambda: their_features(encoders[THEIRS], clips),
    }
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(args.rounds + 1):
        for name, of_name in features.items():
            for what, step in passes(encoders[name], of_name).items():
                seconds = timed(step, args.passes, device)
                if number:  # the first round chooses kernels
                    found.setdefault((what, name), []).append(seconds)
    rows = []
    for what, name in sorted(found, reverse=True):
        with torch.no_grad():
            off = (features[name]().float() - truth).abs().mean() / truth.abs().mean()
        speed, other = (args.clips / statistics.median(found[what, x]) for x in (name, THEIRS))
        row = {"passes": what, "encoder": name, "clips": args.clips, "ms": round(1e3 * args.clips / speed, 2)}
        row |= {"samples/s": round(speed, 1), "÷ hf": round(speed / other, 2), "off %": round(100 * off.item(), 3)}
        rows.append(row)
    return rows


def make_clips(hf: PretrainedConfig, number: int, device: torch.device) -> Clips:
    """Return clips of random mel frames; the frames after a clip's end are silence."""
    draw, generator = random.Random(0), torch.Generator(device).manual_seed(0)
    bins, most = hf.audio_config.num_mel_bins, 2 * hf.audio_config.max_source_positions
    seconds = [draw.uniform(*AUDIO_SECONDS) for _ in range(number)]
    lengths = [ClipLengths.of_mel(min(most, round(x * FRAMES_PER_SECOND))) for x in seconds]
    padded = torch.full((number, bins, most), -1.5, device=device)
    rows = []
    for clip, length in zip(padded, lengths, strict=True):
        clip[:, : length.mel].normal_(generator=generator)
        own = torch.zeros(length.rows, bins, device=device)
        needed = clip[:, : length.rows - ROWS_BEFORE]
        own[ROWS_BEFORE : ROWS_BEFORE + needed.shape[1]] = needed.t()
        rows.append(own)
    fields = {
        MEDIA_SEQLENS: torch.tensor([x.hidden for x in lengths], dtype=torch.int32, device=device),
        FEATURE_POSITIONS: torch.zeros(sum(x.features for x in lengths), dtype=torch.int64, device=device),
    }
    return Clips(lengths, torch.cat(rows), fields, padded)


def their_encoder(hf: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> Qwen2AudioEncoder:
    """Build Hugging Face's encoder with the weights of one seed."""
    torch.manual_seed(0)
    with device:  # a CPU takes long to draw them
        model = Qwen2AudioEncoder._from_config(hf.audio_config, attn_implementation="sdpa")
    return model.to(dtype).train()


def our_encoder(hf: PretrainedConfig, weights: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> Any:
    """Build our encoder with Hugging Face's weights."""
    implementation: Any = "transformer_engine" if device.type == "cuda" else "local"
    config = part_configs(hf, ModelOptions(params_dtype=dtype, transformer_impl=implementation)).vision
    family, num_layers = vision_family(hf.audio_config), hf.audio_config.encoder_layers
    model = family.build(hf.audio_config, config, FeatureChoice((num_layers,), drop_first_token=False))
    entries = family.weight_entries(hf.audio_config, megatron="", prefix="", num_layers=num_layers)
    table = {entry.megatron: entry for entry in entries}
    with torch.no_grad():
        for name, parameter in model.to(device, dtype).named_parameters():
            for ours, fused in FUSED_NORMS.items():
                name = name.replace(fused, ours)
            parameter.copy_(table[name].to_megatron(weights))
    return model.train()


def our_features(model: Any, clips: Clips, dtype: torch.dtype) -> Tensor:
    """Return the features [m, h] of packed clips."""
    return model(clips.rows.to(dtype), clips.fields, max(x.hidden for x in clips.lengths))


def their_features(model: Qwen2AudioEncoder, clips: Clips) -> Tensor:
    """Return the same of padded ones, with the mask that Hugging Face's whole model makes."""
    hidden = torch.tensor([x.hidden for x in clips.lengths])
    features = torch.tensor([x.features for x in clips.lengths])
    most, device = clips.padded.shape[-1] // 2, clips.padded.device
    seen = (torch.arange(most)[None] < hidden[:, None]).long().to(device)
    blank = torch.zeros(*seen.shape, 1, device=device, dtype=model.dtype)
    mask = create_bidirectional_mask(config=model.config, inputs_embeds=blank, attention_mask=seen)
    out = model(clips.padded, attention_mask=mask).last_hidden_state
    return out[(torch.arange(out.shape[1])[None] < features[:, None]).to(device)]


def passes(model: nn.Module, features: Callable[[], Tensor]) -> dict[str, Callable[[], None]]:
    """Return what is timed."""

    def forward() -> None:
        with torch.no_grad():
            features()

    def both() -> None:
        features().float().sum().backward()
        model.zero_grad(set_to_none=True)

    return {"forward": forward, "both": both}


def timed(step: Callable[[], None], number: int, device: torch.device) -> float:
    """Return the seconds of a pass."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(number):
        step()
    _wait(device)
    return (time.perf_counter() - start) / number


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
