"""A complete, tiny, random folder of Qwen2-Audio with its own processor, and audio clips for it."""

from __future__ import annotations

import wave as wave_files
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import (
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from llava_mcore.data.samples import Audio, Conversation, Turn
from tests.helpers.packages import needs
from tests.helpers.tiny_hf import make_tokenizer, randomise, text_config

RATE = 16_000
TOKENS = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}USER: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>\n"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %} ASSISTANT:{% else %}{% generation %} "
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    "{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)


def make_hf_audio(
    folder: Path,
    *,
    text: str = "qwen2",
    seed: int = 0,
    seconds: int = 30,
    audio_overrides: dict[str, Any] | None = None,
    text_overrides: dict[str, Any] | None = None,
) -> Qwen2AudioForConditionalGeneration:
    """Write a whole folder and return the model. `seconds`: the longest clip."""
    tokenizer = make_tokenizer(404, named=TOKENS)
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=seconds)
    processor = Qwen2AudioProcessor(extractor, tokenizer, chat_template=CHAT_TEMPLATE)
    encoder = {
        "model_type": "qwen2_audio_encoder",
        "d_model": 32,
        "encoder_layers": 4,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "num_mel_bins": 16,
        "max_source_positions": 50 * seconds,
    }
    positions = {"vocab_size": 404, "max_position_embeddings": 4096, **(text_overrides or {})}
    config = Qwen2AudioConfig(
        audio_config=encoder | (audio_overrides or {}),
        text_config=text_config(text, **positions).to_dict(),
        audio_token_index=tokenizer.convert_tokens_to_ids(TOKENS["audio_token"]),
    )
    model = Qwen2AudioForConditionalGeneration._from_config(config).eval()
    randomise(model, seed)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model


def wave(seconds: float, seed: int = 0, *, rate: int = RATE) -> NDArray[np.float32]:
    """Tones and noise that change, [samples], at most 1."""
    n, random = round(seconds * rate), np.random.default_rng(seed)
    t = np.arange(n) / rate
    tone = np.sin(2 * np.pi * (200 + 100 * seed % 900) * t * (1 + 0.1 * np.sin(3 * t)))
    return (0.5 * tone + 0.1 * random.standard_normal(n)).clip(-1, 1).astype(np.float32)


def encoded(
    seconds: float,
    seed: int = 0,
    *,
    kind: str = "WAV",
    rate: int = RATE,
    channels: int = 1,
    subtype: str | None = None,
    endian: str | None = None,
) -> bytes:
    """An audio file of a kind that libsndfile writes. Skips the calling test if soundfile is not installed."""
    soundfile = needs("soundfile")
    buffer = BytesIO()
    mono = wave(seconds, seed, rate=rate)
    soundfile.write(buffer, np.stack([mono] * channels, axis=1), rate, format=kind, subtype=subtype, endian=endian)
    return buffer.getvalue()


def conversation(question: str, *seconds: float) -> Conversation:
    """A question about clips, and its answer."""
    turns = (Turn("user", question), Turn("assistant", "It is seven."))
    return Conversation(turns, (), audios=tuple(Audio(_wav_file(x, i)) for i, x in enumerate(seconds)))


def _wav_file(seconds: float, seed: int) -> bytes:
    """A WAV file of 16-bit samples, also where soundfile is not installed."""
    buffer = BytesIO()
    with wave_files.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((wave(seconds, seed) * 32767).round().astype("<i2").tobytes())
    return buffer.getvalue()
