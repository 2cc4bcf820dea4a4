"""What the example shows at its end: a table, the loss curve, and spectrograms with what was heard."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from prompts import Prompt
from rich.console import Console
from transcribe import load
from transformers import WhisperFeatureExtractor

from examples.common import Stages, summary_table

ROWS = 4


def plot_loss(metrics: list[dict[str, float]], path: Path) -> None:
    """Draw the loss over the iterations."""
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes.plot([m["iteration"] for m in metrics], [m["loss"] for m in metrics], color="#0969da", linewidth=1)
    axes.set(xlabel="iteration", ylabel="loss (nats per trained token)", ylim=(0, None))
    axes.set_title("Speech: training loss on the CPU")
    axes.grid(alpha=0.3)
    figure.savefig(path)
    plt.close(figure)


def plot_spectrograms(
    prompts: Sequence[Prompt], heard: Mapping[str, Sequence[str]], model_folder: Path, path: Path
) -> None:
    """Draw what the encoder sees of some held-out recordings, with what was said and heard.

    Those of lengths in equal steps are chosen, whatever was heard.
    """
    extractor = WhisperFeatureExtractor.from_pretrained(model_folder)
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].seconds)
    chosen = [order[(2 * row + 1) * len(order) // (2 * ROWS)] for row in range(ROWS)]
    figure, grid = plt.subplots(ROWS, 1, figsize=(11, 3.1 * ROWS), dpi=110, layout="constrained")
    for axes, i in zip(grid, chosen, strict=True):
        wave = load(prompts[i].file, extractor.sampling_rate)
        mel = extractor(wave, sampling_rate=extractor.sampling_rate, return_tensors="np")["input_features"][0]
        frames = -(-len(wave) // extractor.hop_length)
        seconds = frames * extractor.hop_length / extractor.sampling_rate
        axes.imshow(mel[:, :frames], origin="lower", aspect="auto", extent=(0, seconds, 0, len(mel)), cmap="magma")
        axes.set(xlabel="seconds", ylabel="mel bin")
        lines = [f"said: {prompts[i].text}"]
        lines += [f"heard {when}: {' '.join(texts[i].split()) or '(nothing)'}" for when, texts in heard.items()]
        axes.set_title(
            "\n".join(textwrap.shorten(line, 130, placeholder=" …") for line in lines), fontsize=9, loc="left"
        )
    figure.suptitle("Recordings that were never trained on", fontsize=13)
    figure.savefig(path)
    plt.close(figure)


def print_summary(
    stages: Stages, metrics: list[dict[str, float]], scores: Mapping[str, Mapping[str, float]], folder: Path
) -> None:
    """Print the one table of the run."""
    title = "Speech: Whisper's encoder + SmolLM2 → Qwen2-Audio → Megatron → trained → Hugging Face"
    shares = {f"{name}, {when}": value for when, values in scores.items() for name, value in values.items()}
    Console().print(summary_table(title, stages, metrics, shares))
    print(f"look at {folder / 'spectrograms.png'} and {folder / 'loss.png'}; the model is in {folder / 'export'}")
