"""The image of a GPU's memory over an iteration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llava_mcore.files.regular import naming
from llava_mcore.training.logs.memory_timeline import CATEGORIES, GIB, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(timeline: Timeline, path: Path, title: str) -> None:
    """Write a PNG: memory by category over time, and the largest blocks at the peak."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # the import takes a second
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, height_ratios=[3, 1])
    figure.suptitle(title)
    _draw_amounts(top, timeline)
    _draw_largest(bottom, timeline)
    with naming(path):
        figure.savefig(path)


def _draw_amounts(axes: Axes, timeline: Timeline) -> None:
    """Draw the stack of categories, the peak, and what torch has reserved."""
    milliseconds, peak = timeline.milliseconds, timeline.peak
    names = [name for name in CATEGORIES if any(timeline.amounts[name])]
    values = [[size / GIB for size in timeline.amounts[name]] for name in names]
    is_one_time = len(milliseconds) == 1
    if is_one_time:  # without a record: what there is, at its only time
        milliseconds, values = [0.0, 1.0], [[*row, *row] for row in values]
    at_peak = timeline.at(peak)
    labels = [f"{name} ({at_peak.get(name, 0) / GIB:.2f})" for name in names]
    axes.stackplot(milliseconds, values, labels=labels, step="post", colors=[_color(name) for name in names])
    total = sum(at_peak.values()) / GIB
    axes.axhline(timeline.reserved / GIB, color="black", linestyle="--", linewidth=1)
    axes.set_ylabel("GiB")
    if is_one_time:
        axes.set_xticks([])
        heading = f"allocated: {total:.2f} GiB"
    else:
        axes.set_xlabel("milliseconds")
        axes.axvline(timeline.milliseconds[peak], color="black", linewidth=0.8, linestyle=":")
        heading = f"peak: {total:.2f} GiB at {timeline.milliseconds[peak]:.1f} ms"
    axes.set_title(f"{heading}; dashed: reserved by torch, {timeline.reserved / GIB:.2f} GiB", size=10)
    axes.margins(x=0)
    handles, texts = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], texts[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)


def _color(name: str) -> str:
    colors = (
        "#30507a",
        "#5b84b1",
        "#9db8d6",
        "#b9b9b9",
        "#c9c0a8",
        "#8d6bb0",
        "#4c9f70",
        "#e0a030",
        "#c0504d",
        "#e58f65",
    )
    return (*colors, "#7a5c3e", "#d4a5c9", "#666666")[CATEGORIES.index(name)]


def _draw_largest(axes: Axes, timeline: Timeline) -> None:
    """Write the largest blocks at the peak as a table."""
    axes.axis("off")
    rows = [
        f"{count:6} x {block.size / GIB:7.3f} GiB  {block.category:<30} {block.made_by}"
        for block, count in timeline.largest
    ]
    text = "\n".join(["largest parts at the peak", *rows])
    axes.text(0, 1, text, family="monospace", fontsize=8, va="top", transform=axes.transAxes)
