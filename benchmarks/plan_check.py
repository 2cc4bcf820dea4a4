"""The predictions of `python -m llava_mcore plan` beside what was measured: every row of benchmarks/results.

    python -m benchmarks.plan_check

Prints predicted and measured seconds of a step and GiB of the fullest GPU, their differences, and the rows beyond 10 %
of time or 5 % of memory. Rows to which constants were fitted are marked; the totals are of the others.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.plan_rows import Row, rows
from benchmarks.shapes import SHAPES, make_hf_folder
from llava_mcore.plan.hardware.efficiency import Efficiency
from llava_mcore.plan.hardware.gpus import gpu_named
from llava_mcore.plan.layout import layout_of
from llava_mcore.plan.material import packs_for
from llava_mcore.plan.predict import Prediction, predict
from llava_mcore.plan.seconds import Machine
from llava_mcore.plan.sizes.model import Model
from llava_mcore.plan.sizes.read_config import read_model
from llava_mcore.plan.work import like_llava, spoken

TIME, MEMORY = 10.0, 5.0
"""Differences in percent beyond which a row is a miss."""


@dataclass(frozen=True)
class Compared:
    """A row and its prediction."""

    row: Row
    prediction: Prediction

    @property
    def time_off(self) -> float:
        """Difference of the step's time from the measured one, in percent."""
        return 100 * (self.prediction.seconds / self.row.seconds - 1)

    @property
    def memory_off(self) -> float | None:
        """The same of the memory."""
        return None if self.row.gib is None else 100 * (self.prediction.reserved / self.row.gib - 1)

    @property
    def is_miss(self) -> bool:
        """Whether one of them is beyond the limits."""
        return abs(self.time_off) > TIME or abs(self.memory_off or 0) > MEMORY


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        models = {}
        for row in rows():
            key = (row.shape, row.layers)
            if key not in models:
                folder = Path(work) / f"{row.shape}-{row.layers}"
                make_hf_folder(folder, row.shape, seq_length=8192, num_layers=row.layers)
                models[key] = read_model(folder)
        show([compare(row, models[row.shape, row.layers]) for row in rows()])


def compare(row: Row, model: Model, fit: Efficiency | None = None) -> Compared:
    """Predict a row. `model`: with as many layers as the row's."""
    sizes = SHAPES[row.shape].sizes
    samples = like_llava(sizes, row.images) if sizes else spoken()
    layout = layout_of(row.run, row.world, model.decoder.num_layers)
    machine = Machine(gpu_named(row.gpu), fit or Efficiency())
    return Compared(row, predict(model, layout, packs_for(model, layout, samples), machine))


def show(compared: Sequence[Compared]) -> None:
    """Print all rows, then totals, then the misses."""
    for item in compared:
        print(line(item))
    held = [x for x in compared if not x.row.is_fitted]
    times = [abs(x.time_off) for x in held]
    memories = [abs(x.memory_off) for x in held if x.memory_off is not None]
    for name, values, limit in (("time", times, TIME), ("memory", memories, MEMORY)):
        within = sum(x <= limit for x in values)
        print(
            f"{name}: within {limit:g} % in {within} of {len(values)} rows that nothing was fitted to, "
            f"median {statistics.median(values):.1f} %, most {max(values):.1f} %"
        )
    print("beyond:")
    for item in held:
        if item.is_miss:
            print(line(item))


def line(item: Compared) -> str:
    """Return a row as text."""
    row, predicted = item.row, item.prediction
    layout = predicted.layout
    name = f"{row.source.removesuffix('.json')}[{row.number}]"
    what = f"tp {layout.tp} pp {layout.pp} dp {layout.dp} mbs {layout.micro_batch_size} x{layout.num_micro_batches}"
    what += f" {layout.fp8}" if layout.fp8 != "none" else ""
    what += " graphs" if layout.graphs else ""
    memory = f"{predicted.reserved:6.1f} {row.gib or 0:6.1f} {item.memory_off or 0:+6.1f} %"
    mark = "*" if row.is_fitted else " "
    seconds = f"{predicted.seconds:7.3f} {row.seconds:7.3f} {item.time_off:+6.1f} %"
    return f"{mark} {name:38} {row.gpu} {what:34} {seconds}  {memory}"


if __name__ == "__main__":
    main()
