"""Transcribe recordings with plain transformers, and count wrong words with jiwer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import jiwer
import numpy as np
import soundfile
import soxr
import torch
from numpy.typing import NDArray
from prompts import QUESTION, Prompt, words
from transformers import Qwen2AudioForConditionalGeneration, Qwen2AudioProcessor

BATCH_SIZE = 16
MAX_NEW_TOKENS = 96


def transcribe(folder: Path, prompts: Sequence[Prompt], progress: Callable[[int], None]) -> list[str]:
    """Return what a model hears in each recording. `progress` is called with the number just transcribed."""
    model = Qwen2AudioForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = Qwen2AudioProcessor.from_pretrained(folder)
    processor.tokenizer.padding_side = "left"
    heard: list[str] = []
    for first in range(0, len(prompts), BATCH_SIZE):
        batch = prompts[first : first + BATCH_SIZE]
        heard += _hear(model, processor, [load(x.file, processor.feature_extractor.sampling_rate) for x in batch])
        progress(len(batch))
    return heard


def load(file: Path, rate: int) -> NDArray[np.float32]:
    """Return a recording at another sampling rate, [samples]."""
    samples, own_rate = soundfile.read(file, dtype="float32", always_2d=True)
    return soxr.resample(samples.mean(axis=1), own_rate, rate)


def _hear(
    model: Qwen2AudioForConditionalGeneration, processor: Qwen2AudioProcessor, waves: list[NDArray[np.float32]]
) -> list[str]:
    content = [{"type": "audio"}, {"type": "text", "text": QUESTION}]
    asked = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(
        text=[asked] * len(waves),
        audio=waves,
        sampling_rate=processor.feature_extractor.sampling_rate,
        return_tensors="pt",
        padding=True,
        add_special_tokens=False,
    )
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    new = out[:, inputs["input_ids"].shape[1] :]
    return [text.strip() for text in processor.batch_decode(new, skip_special_tokens=True)]


def scores(prompts: Sequence[Prompt], heard: Sequence[str], known: Sequence[bool]) -> dict[str, float]:
    """Return the word error rate of all prompts and of those with known words only, and the share without an error."""
    both = [(words(x.text), words(text)) for x, text in zip(prompts, heard, strict=True)]
    return {
        "word error rate": word_error_rate(both),
        "word error rate, known words only": word_error_rate([x for x, yes in zip(both, known, strict=True) if yes]),
        "prompts without an error": sum(said == text for said, text in both) / len(both),
    }


def word_error_rate(both: Sequence[tuple[str, str]]) -> float:
    """Return substituted, deleted and inserted words over all spoken ones. More than 1 is possible.

    Args:
        both: what was said and what was heard.
    """
    return float(jiwer.wer([said for said, _ in both], [heard for _, heard in both]))


def numbers(prompts: Sequence[Prompt], known: Sequence[bool]) -> dict[str, int]:
    """Return how many prompts and words are held out, and how many prompts have known words only."""
    return {
        "prompts": len(prompts),
        "words": sum(len(words(x.text).split()) for x in prompts),
        "prompts with known words only": sum(known),
    }
