"""Heat maps of the load of experts: layers x experts, in the run's folder and in TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llava_mcore.files.regular import naming
from llava_mcore.training.logs.expert_loads import ExpertTokens
from llava_mcore.training.logs.metrics_file import JsonLinesWriter

FILE, IMAGE = "expert_loads.jsonl", "expert_loads.png"
"""In the run's folder. A line has the tokens of each expert of each layer in some iterations, and the image shows the
newest line."""
EVERY = 100
"""Iterations of a line."""
_MOST = 8.0
"""Times an even load at which colors end, and the divisor below it."""


class ExpertMaps:
    """Adds up the tokens of experts over some iterations, then writes and draws them."""

    def __init__(self, run_dir: Path, *, keep_until: int) -> None:
        """Drop the lines of later iterations than a run resumes from.

        Raises:
            FileError, OSError: the file of an earlier start cannot be used.
        """
        self._file = JsonLinesWriter(run_dir / FILE, keep_until=keep_until, value="first_iteration")
        self._run_dir = run_dir
        self._totals: list[list[float]] = []
        self._iterations = (0, 0)

    def add(self, iteration: int, loads: ExpertTokens) -> bool:
        """Add the tokens of an iteration, and return whether it is time to draw."""
        if not loads:
            return False
        if not self._totals:
            self._totals, self._iterations = [[0.0] * len(x) for x in loads], (iteration, iteration)
        self._totals = [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(self._totals, loads, strict=True)]
        self._iterations = (self._iterations[0], iteration)
        return iteration % EVERY == 0

    def draw(self) -> tuple[Path, int] | None:
        """Write and draw what has been added, and begin again; return the image and its last iteration. None: nothing
        has been added.

        Raises:
            OSError: a file cannot be written.
        """
        totals, (first, last) = self._totals, self._iterations
        if not totals:
            return None
        self._totals = []
        tokens = [[round(x) for x in layer] for layer in totals]
        self._file.write({"iteration": last, "first_iteration": first, "tokens": tokens})
        path = self._run_dir / IMAGE
        draw_loads(totals, path, title=f"{self._run_dir.name}, iterations {first} to {last}")
        return path, last


def draw_loads(loads: ExpertTokens, path: Path, *, title: str) -> None:
    """Draw a row per layer with experts, a column per expert, and as color the load relative to an even one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # the import takes a second
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    layers = [number for number, tokens in enumerate(loads) if sum(tokens)]
    shares = [[x * len(loads[i]) / sum(loads[i]) for x in loads[i]] for i in layers]
    clipped = [[min(_MOST, max(1 / _MOST, x)) for x in layer] for layer in shares]
    width = 3.5 + 0.07 * max((len(x) for x in clipped), default=0)
    figure = Figure(figsize=(min(14, max(6, width)), min(12, 2 + 0.16 * len(layers))), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="expert", ylabel="layer", title=title)
    image = axes.imshow(clipped, cmap="RdBu_r", norm=LogNorm(1 / _MOST, _MOST), aspect="auto", interpolation="nearest")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    step = -(-len(layers) // 24)
    axes.set_yticks(range(0, len(layers), step), [str(x) for x in layers[::step]])
    ticks = [1 / _MOST, 0.5, 1, 2, _MOST]
    bar = figure.colorbar(image, ax=axes, label="tokens ÷ even load", ticks=ticks)
    bar.ax.set_yticklabels(_tick_labels(ticks))
    bar.ax.minorticks_off()
    with naming(path):
        figure.savefig(path)


def _tick_labels(ticks: Sequence[float]) -> list[str]:
    """Return labels of which the first and the last stand for everything beyond."""
    first, *inner, last = (f"{x:g}" for x in ticks)
    return [f"≤ {first}", *inner, f"≥ {last}"]
