"""Examine an exported model with plain transformers: greedy answers about scans that it has never seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from data import Exam, read_exam
from PIL import Image
from questions import WHICH_DIGIT
from transformers import LlavaForConditionalGeneration, LlavaProcessor

BATCH_SIZE = 128
MAX_NEW_TOKENS = 8


def answer_all(model_folder: Path, exam_folder: Path, progress: Callable[[int], None]) -> list[tuple[Exam, str]]:
    """Return every question of the exam with the model's answer. `progress` is called with the number just answered."""
    model = LlavaForConditionalGeneration.from_pretrained(model_folder).eval()
    processor = LlavaProcessor.from_pretrained(model_folder)
    processor.tokenizer.padding_side = "left"
    questions = read_exam(exam_folder)
    answered: list[tuple[Exam, str]] = []
    for first in range(0, len(questions), BATCH_SIZE):
        batch = questions[first : first + BATCH_SIZE]
        answered += zip(batch, _answers(model, processor, exam_folder, batch), strict=True)
        progress(len(batch))
    return answered


def _answers(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, folder: Path, batch: list[Exam]
) -> list[str]:
    texts = [processor.apply_chat_template(conversation(x.question), add_generation_prompt=True) for x in batch]
    pictures = [Image.open(folder / x.image) for x in batch]
    inputs = processor(text=texts, images=pictures, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    new = out[:, inputs["input_ids"].shape[1] :]
    return [text.strip() for text in processor.batch_decode(new, skip_special_tokens=True)]


def conversation(question: str) -> list[dict[str, object]]:
    """Return one user turn with an image, as processors take it."""
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]


def accuracy(answered: list[tuple[Exam, str]]) -> dict[str, float]:
    """Return the share of exact matches of each question form, and of "which digit" over both of its forms."""
    right: dict[str, list[bool]] = defaultdict(list)
    for question, text in answered:
        right[question.form].append(text == question.answer)
    which = [match for form in WHICH_DIGIT for match in right[form]]
    return {form: sum(x) / len(x) for form, x in right.items()} | {"which digit": sum(which) / len(which)}
