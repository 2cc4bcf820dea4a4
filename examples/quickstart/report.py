"""What the quickstart shows at its end: a table, the loss curve, and images with questions and answers."""

from __future__ import annotations

import random
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from data import Exam
from PIL import Image
from questions import FORMS

from examples.common import Stages, console, summary_table

ROWS, COLUMNS = 4, 6
GREEN, RED = "#1a7f37", "#cf222e"


def plot_loss(metrics: list[dict[str, float]], path: Path) -> None:
    """Draw loss and learning rate over the iterations."""
    steps = [m["iteration"] for m in metrics]
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes.plot(steps, [m["loss"] for m in metrics], color="#0969da", linewidth=1)
    axes.set(xlabel="iteration", ylabel="loss (nats per trained token)", ylim=(0, None), xlim=(0, steps[-1]))
    axes.set_title("Quickstart: training loss at tp 2 x pp 2 on the CPU")
    rate = axes.twinx()
    rate.plot(steps, [m["lr"] for m in metrics], color="#8c959f", linewidth=1, linestyle="--")
    rate.set(ylabel="learning rate (dashed)", ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.savefig(path)
    plt.close(figure)


def plot_predictions(answered: list[tuple[Exam, str]], exam_folder: Path, path: Path) -> None:
    """Draw held-out images with question and answer, green where right, drawn at random over all forms."""
    rng = random.Random(0)
    forms = list(FORMS)
    by_form = {form: [x for x in answered if x[0].form == form] for form in forms}
    chosen = [rng.choice(by_form[forms[i % len(forms)]]) for i in range(ROWS * COLUMNS)]
    figure, grid = plt.subplots(ROWS, COLUMNS, figsize=(2.5 * COLUMNS, 2.75 * ROWS), dpi=110, layout="constrained")
    for axes, (question, text) in zip(grid.flat, chosen, strict=True):
        right = text == question.answer
        axes.imshow(Image.open(exam_folder / question.image))
        axes.set_xticks([])
        axes.set_yticks([])
        for spine in axes.spines.values():
            spine.set(color=GREEN if right else RED, linewidth=3)
        axes.set_title(textwrap.fill(question.question, width=26), fontsize=9)
        note = f"{text}  ✓" if right else f"{text or '(nothing)'}  ✗ ({question.answer})"
        axes.set_xlabel(note, fontsize=12, color=GREEN if right else RED, fontweight="bold")
    figure.suptitle("Scans the model has never seen: its answers", fontsize=15)
    figure.savefig(path)
    plt.close(figure)


def print_summary(stages: Stages, metrics: list[dict[str, float]], accuracies: dict[str, float], folder: Path) -> None:
    """Print the one table of the run."""
    scores = {f"exact match, {form}": share for form, share in accuracies.items()}
    title = "Quickstart: Hugging Face → Megatron tp 2 x pp 2 → trained → Hugging Face"
    console.print(summary_table(title, stages, metrics, scores))
    print(f"look at {folder / 'predictions.png'} and {folder / 'loss.png'}; the model is in {folder / 'export'}")
