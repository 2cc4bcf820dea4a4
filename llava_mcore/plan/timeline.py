"""An image of a step: what each pipeline stage does when."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llava_mcore.errors import ConfigError
from llava_mcore.plan.predict import Prediction
from llava_mcore.plan.schedule import Span, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg")
MOST_SHOWN = 8
"""Micro-batches per stage of the pipeline to draw; the rest of a long step repeats the middle."""
IDLE, FORWARD, BACKWARD, TOWER, MESSAGES, UPDATE = "#d9d9d9", "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d"


def draw(prediction: Prediction, path: Path, title: str) -> None:
    """Write the timeline of a step as PNG or SVG: idle stages grey, the tower's part of a pass green.

    Raises:
        ConfigError: another suffix, or a folder that does not exist.
    """
    if path.suffix not in FORMATS:
        raise ConfigError(f"--draw {path}: expected a name that ends in {' or '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--draw {path}: its folder does not exist")
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # the import takes a second
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # A row for each stage: grey, and over it what it computes.
    spans, num_drawn = passes(prediction)
    layout, end = prediction.layout, max(span.end for span in spans)
    figure = Figure(figsize=(14, 1.4 + 0.5 * layout.pp), layout="constrained")
    axes = figure.add_subplot()
    axes.barh(range(layout.pp), [1e3 * end] * layout.pp, height=0.8, color=IDLE, label="idle (bubble)")
    _bars(axes, prediction, spans)
    _after(axes, prediction, end)
    # Labels.
    axes.set_yticks(range(layout.pp), [f"stage {i}: {n} layers" for i, n in enumerate(layout.layers)])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    few = (
        ""
        if num_drawn == layout.num_micro_batches
        else f" (the first {num_drawn} of {layout.num_micro_batches} micro-batches)"
    )
    axes.set_title(f"{title}{few}", fontsize=10, loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    canvas = FigureCanvasSVG(figure) if path.suffix == ".svg" else FigureCanvasAgg(figure)
    canvas.print_figure(path, dpi=120, format=path.suffix[1:])


def passes(prediction: Prediction) -> tuple[list[Span], int]:
    """Return the passes to draw, and of how many micro-batches."""
    layout = prediction.layout
    num_drawn = min(layout.num_micro_batches, MOST_SHOWN * layout.pp)
    forward = [stage.forward.total for stage in prediction.stages]
    backward = [stage.backward.total for stage in prediction.stages]
    return simulate(forward, backward, num_drawn, virtual=layout.virtual), num_drawn


def _bars(axes: Axes, prediction: Prediction, spans: list[Span]) -> None:
    """Draw passes; the tower computes before the first chunk's layers and, if it is trained, after their backward
    pass."""
    labels = {FORWARD: "forward", BACKWARD: "backward", TOWER: "tower"}

    def bar(stage: int, begin: float, seconds: float, color: str) -> None:
        label = labels.pop(color, None)
        axes.barh(
            stage,
            1e3 * seconds,
            left=1e3 * begin,
            height=0.8,
            color=color,
            edgecolor="white",
            linewidth=0.5,
            label=label,
        )

    for span in spans:
        stage = prediction.stages[span.stage]
        is_forward = span.kind == "forward"
        of_tower = (stage.forward if is_forward else stage.backward).tower
        tower = min(of_tower, span.end - span.begin) if span.stage == span.chunk == 0 else 0.0
        color = FORWARD if is_forward else BACKWARD
        begin = span.begin + (tower if is_forward else 0.0)
        bar(span.stage, begin, span.end - span.begin - tower, color)
        if tower > 0:
            bar(span.stage, span.begin if is_forward else span.end - tower, tower, TOWER)


def _after(axes: Axes, prediction: Prediction, end: float) -> None:
    """Draw what follows the passes on all stages."""
    rows = range(prediction.layout.pp)
    parts = ((prediction.messages, MESSAGES, "messages between replicas"), (prediction.update, UPDATE, "update"))
    for seconds, color, label in parts:
        axes.barh(rows, [1e3 * seconds] * len(rows), left=1e3 * end, height=0.8, color=color, label=label)
        end += seconds
