"""What chaos is made with: layouts of a small model on the CPU, each with the losses of an uninterrupted run."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_mcore.convert.import_hf import import_hf
from tests.helpers.commands import ROOT, read_metrics, run
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_hf import make_hf_llava

ITERATIONS = 96
INTERVAL = 4
"""Iterations between checkpoints; every second one is kept, the others are replaced by the next."""
HANG_SECONDS = 30
"""--timeout of the runs; a start on a loaded machine has to be faster."""
COMPARED = ("iteration", "loss", "grad_norm", "lr", "num_tokens", "consumed_samples", "num_conversations")
COMMAND_TIMEOUT = 600
EMULATED_GRAPHS = [str(ROOT / "tests" / "helpers" / "with_emulated_graphs"), str(ROOT)]
GRAPHS = {"PYTHONPATH": os.pathsep.join([*EMULATED_GRAPHS, *filter(None, [os.environ.get("PYTHONPATH")])])}
"""Environment of runs with emulated graphs. What is already on the path stays on it."""
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Layout:
    """tp, dp: sizes. loaders: loader processes of a data-parallel rank. on_node: tensors of checkpoints that are not
    kept are in a folder of the node's own. graphs: packs, trained with emulated graphs. ep: ranks that divide
    experts. fsdp: what is fully sharded."""

    tp: int
    dp: int
    loaders: int
    distributed: bool
    background: bool
    on_node: bool = False
    graphs: bool = False
    ep: int = 1
    fsdp: str = "none"

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that its runs need."""
        return ENVIRONMENT | (GRAPHS if self.graphs else {})

    def __str__(self) -> str:
        parts = [f"tp {self.tp} x dp {self.dp}", f"{self.loaders} loader{'s' if self.loaders != 1 else ''}"]
        parts += ["distributed optimizer"] * self.distributed + ["background saves"] * self.background
        parts += ["own disk"] * self.on_node + ["emulated graphs"] * self.graphs + [f"ep {self.ep}"] * (self.ep > 1)
        return ", ".join(parts + [f"fsdp {self.fsdp}"] * (self.fsdp != "none"))


LAYOUTS = (
    Layout(1, 2, loaders=1, distributed=True, background=True),
    Layout(2, 1, loaders=0, distributed=False, background=False),
    Layout(2, 2, loaders=2, distributed=True, background=False),
    Layout(1, 2, loaders=2, distributed=False, background=True, on_node=True),
)
LAYOUTS_WITH_GRAPHS = (
    Layout(1, 2, loaders=1, distributed=True, background=True, graphs=True),
    Layout(2, 2, loaders=1, distributed=False, background=False, graphs=True),
)
LAYOUTS_WITH_EXPERTS = (
    Layout(1, 2, loaders=1, distributed=True, background=True, ep=2),
    Layout(2, 2, loaders=0, distributed=True, background=False, ep=2),
    Layout(1, 2, loaders=2, distributed=True, background=True, on_node=True, ep=2),
)
LAYOUTS_FULLY_SHARDED = (
    Layout(1, 2, loaders=1, distributed=False, background=True, fsdp="optim_grads_params"),
    Layout(2, 2, loaders=0, distributed=False, background=False, fsdp="optim_grads"),
)


class World:
    """A model, data, and what an uninterrupted run of them at one layout has written."""

    def __init__(self, material: Path, root: Path, layout: Layout, iterations: int = ITERATIONS) -> None:
        """Train the uninterrupted run.

        Args:
            material: folder that `make_material` has filled.
        """
        self.material, self.root, self.layout, self.iterations = material, root, layout, iterations
        root.mkdir(parents=True, exist_ok=True)
        run("train/run.py", *self.flags("whole"), timeout=COMMAND_TIMEOUT, env=os.environ | layout.environment)
        self.whole = self.compared(root / "whole")
        assert [values[0] for values in self.whole] == list(range(1, iterations + 1))

    def flags(self, name: str, save_dir: Path | None = None) -> list[Any]:
        """Return the command line of one run, which writes to `save_dir`, else below `root`."""
        layout, material = self.layout, self.material
        places = ("--megatron-load-dir", material / "megatron", "--tokenizer-load-dir", material / "hf")
        out = ("--save-dir", save_dir or self.root, "--data-path", material / "data", "--name", name)
        sizes = ("--micro-batch-size", 1, "--global-batch-size", 4, "--seq-length", 64, "--lr", 1e-3)
        saving = ("--save", "--save-optim", "--load-optim", "--save-interval", 2 * INTERVAL, "--keep-last", 2)
        more = ("--non-persistent-save-interval", INTERVAL, "--train-iters", self.iterations, "--timeout", HANG_SECONDS)
        switches = ["--async-save"] * layout.background + ["--dist-optim"] * layout.distributed
        if layout.on_node:
            switches += ["--non-persistent-local-ckpt-dir", (save_dir or self.root) / "disk"]
        data = (f"data.num_workers={layout.loaders}", "data.shuffle_buffer_size=16")
        switches += ["--packing"] * layout.graphs
        if layout.ep > 1:  # their data has samples that cannot be read
            switches += ["--ep", layout.ep, *["--sequence-parallel"] * (layout.tp > 1), "--max-skip-rate", 0.5]
        switches += ["--fsdp", layout.fsdp] if layout.fsdp != "none" else []
        size = ("-g", layout.tp * layout.dp, "--tp", layout.tp)
        return [*size, *places, *out, *sizes, *saving, *more, *switches, *data]

    def compared(self, folder: Path) -> list[list[Any]]:
        """Return what must be equal, iteration by iteration."""
        return [[line[key] for key in COMPARED] for line in read_metrics(folder)]


def make_material(folder: Path, *, with_experts: bool = False) -> Path:
    """Write a model with dropout, its checkpoint, and data; a model with experts gets samples that are skipped."""
    text = "qwen3_moe" if with_experts else "llama"
    make_hf_llava(folder / "hf", text=text, text_overrides={"attention_dropout": 0.1})
    import_hf(folder / "hf", folder / "megatron", tensor_parallel=2)
    make_dataset(folder / "data", replace={x: {"jpg": b"no image"} for x in (2, 12, 22)} if with_experts else {})
    return folder


CONTINUATION = re.compile("the same command |no checkpoint was saved: the same command |iteration [0-9]+ was saved ")
"""Advice at the end of a run that was stopped (launch/ending.py)."""


def last_line(text: str) -> str:
    """Return the last line that is not empty, before the one that says how the run can continue."""
    lines: Sequence[str] = [line for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if not CONTINUATION.match(line)), "")
