"""What the example shows at its end: a table, the loss curves, and held-out images with questions and answers."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from conversations import FORMS, text
from PIL import Image
from rich.console import Console
from rich.table import Table
from scores import form_of, right_answer

from examples.common import Stages

ROWS, COLUMNS = 4, 6
GREEN, RED = "#1a7f37", "#cf222e"


def plot_losses(runs: Mapping[str, Sequence[Mapping[str, float]]], path: Path) -> None:
    """Draw the loss of each run over its iterations."""
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    for name, metrics in runs.items():
        axes.plot([m["iteration"] for m in metrics], [m["loss"] for m in metrics], linewidth=1, label=name)
    axes.set(xlabel="iteration", ylabel="loss (nats per trained token)", ylim=(0, 3))
    axes.set_title("Small VLM: training losses on the CPU")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path)
    plt.close(figure)


def plot_predictions(rows: Sequence[dict[str, Any]], answers: Sequence[str], pictures: Path, path: Path) -> None:
    """Draw held-out images with question and answer, green where right, drawn at random over all forms."""
    rng = random.Random(0)
    by_form = {form: [i for i, row in enumerate(rows) if form_of(row) == form] for form in FORMS}
    for numbers in by_form.values():
        rng.shuffle(numbers)
    places = [divmod(i, len(FORMS)) for i in range(ROWS * COLUMNS)]
    chosen = [by_form[FORMS[form]][turn % len(by_form[FORMS[form]])] for turn, form in places]
    figure, grid = plt.subplots(ROWS, COLUMNS, figsize=(2.5 * COLUMNS, 2.75 * ROWS), dpi=100, layout="constrained")
    for axes, i in zip(grid.flat, chosen, strict=True):
        truth, answer = right_answer(rows[i]), answers[i]
        color = GREEN if answer == truth else RED
        axes.imshow(Image.open(pictures / rows[i]["images"][0]))
        axes.set_xticks([])
        axes.set_yticks([])
        for spine in axes.spines.values():
            spine.set(color=color, linewidth=3)
        axes.set_title(textwrap.fill(text(rows[i]), width=26), fontsize=9)
        note = f"{answer}  ✓" if answer == truth else f"{textwrap.shorten(answer, 20) or '(nothing)'}  ✗ ({truth})"
        axes.set_xlabel(note, fontsize=12, color=color, fontweight="bold")
    figure.suptitle("Emoji that the model has never seen: its answers", fontsize=15)
    figure.savefig(path)
    plt.close(figure)


def print_summary(stages: Stages, shares: Mapping[str, Mapping[str, float]], numbers: Mapping[str, int]) -> None:
    """Print the times and the scores."""
    times = Table("stage", title="Small VLM: DINOv2-S + pixel shuffle + SmolLM2-135M")
    times.add_column("seconds", justify="right")
    times.add_column("CPU seconds", justify="right")
    for name, value in stages.seconds.items():
        times.add_row(name, f"{value:.0f}", f"{stages.cpu_seconds[name]:.0f}")
    times.add_section()
    times.add_row("all stages", f"{sum(stages.seconds.values()):.0f}", f"{sum(stages.cpu_seconds.values()):.0f}")
    Console().print(times)
    scores = Table("right answers about held-out images", title="Held-out emoji")
    for form in FORMS:
        scores.add_column(f"{form}\n({numbers[form]} questions)", justify="right")
    for name, values in shares.items():
        scores.add_row(name, *[f"{values[form]:.1%}" for form in FORMS])
    Console().print(scores)
