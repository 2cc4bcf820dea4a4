"""Run features together at random, each combination as a user starts it, and compare it with one process.

    python -m tests.e2e.combinations --rounds 30 --markdown table.md

A round draws a model, layouts (--tp, --pp, --cp, --ep, --fsdp, …) for four processes and features that change numbers
(--packing, adapters, Muon, …). It is right if

- what cannot be combined is refused: exit code 2 and a message, no traceback;
- else losses and gradient norms are those of one process with the same features, up to rounding;
- and the run that resumes from its middle checkpoint writes the same numbers again, bit for bit.

The exit code is 1 if something is not so; the table says what.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_mcore.checkpoint.layout import iteration_folder
from llava_mcore.convert.import_hf import import_hf
from tests.helpers.commands import ROOT, command, read_metrics
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.tiny_qwen import make_hf_qwen

ITERATIONS, SAVED = 4, 2
"""Iterations of a run, and the one after which it also saves."""
SECONDS = 400
TOLERANCE = {"fp32": 2e-5, "bf16": 3e-2}
"""Of losses and gradient norms, relative."""
MODELS = ("llava", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "tp": ("--tp", "2"),
    "sp": ("--tp", "2", "--sequence-parallel"),
    "pp": ("--pp", "2"),
    "vpp": ("--pp", "2", "parallel.num_layers_per_virtual_pipeline_stage=1"),
    "cp": ("--cp", "2"),
    "ep": ("--ep", "2", "--dist-optim"),
    "dist": ("--dist-optim",),
    "fsdp": ("--fsdp", "optim_grads_params"),
    "fsdp optim": ("--fsdp", "optim"),
    "hsdp": ("--fsdp", "optim_grads_params", "--hsdp", "2"),
    "whole tower": ("--vision-data-parallel",),
    "async": ("--async-save",),
    "recompute": ("--recompute", "full"),
    "selective": ("--recompute", "selective"),
}
"""Flags that do not change numbers."""
FEATURES: dict[str, tuple[str, ...]] = {
    "packing": ("--packing",),
    "lora": ("--lora-r", "4"),
    "dora": ("--lora-r", "4", "--lora-dora"),
    "qlora": ("--lora-r", "4", "--lora-quantize", "nf4"),
    "muon": ("optimizer.name=muon",),
    "bf16": ("--precision", "bf16"),
    "frozen tower": ("model.freeze_vision_model=true",),
    "trained tower": ("model.freeze_vision_model=false",),
    "augment": ("data.augment=[{name: RandomGrayscale, p: 0.5}]",),
    "validation": ("--eval-interval", "2"),
    "answers": ("--eval-generate", "4", "--eval-generate-samples", "5", "--eval-generate-max-new-tokens", "4"),
}
COMPARED = ("loss", "grad_norm", "num_tokens", "num_conversations")
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Combination:
    """A model, and names of `LAYOUTS` and `FEATURES`."""

    model: str
    layouts: tuple[str, ...]
    features: tuple[str, ...]

    def __str__(self) -> str:
        return " + ".join([self.model, *self.layouts, *self.features])


@dataclass(frozen=True)
class Ended:
    """How a run has ended. `lines`: of metrics.jsonl."""

    code: int
    output: str
    lines: list[dict[str, Any]]

    @property
    def values(self) -> list[list[float]]:
        """Return what is compared, of each iteration."""
        return [[line[key] for key in COMPARED] for line in self.lines]


class Trial:
    """Runs combinations in a folder that has models and data."""

    def __init__(self, root: Path) -> None:
        self.root, self.baselines = root, dict[tuple[str, tuple[str, ...]], Ended]()

    def material(self, model: str) -> Path:
        """Return the folder of a model and its checkpoint; data for all of them are beside it."""
        folder, data = self.root / model, self.root / "data"
        if not data.exists():
            make_dataset(data, num_samples=60, num_shards=3)
            split = "split_parts: {train: [000000.tar, 000001.tar], val: [000002.tar], test: []}\nexclude: []\n"
            (data / ".nv-meta" / "split.yaml").write_text(split)
        if not folder.exists():
            make_hf_llava(folder / "hf") if model == "llava" else make_hf_qwen(folder / "hf", model)
            import_hf(folder / "hf", folder / "megatron")
        return folder

    def flags(self, combination: Combination, name: str, processes: int, layouts: Sequence[str]) -> list[Any]:
        """Return the command line of a run."""
        folder = self.material(combination.model)
        places = ("--megatron-load-dir", folder / "megatron", "--tokenizer-load-dir", folder / "hf")
        places += ("--data-path", self.root / "data", "--save-dir", self.root / "runs", "--name", name)
        sizes = ("--micro-batch-size", 1, "--global-batch-size", 4, "--seq-length", 128, "--lr", 1e-3, "-g", processes)
        saving = ("--save", "--save-optim", "--load-optim", "--save-interval", SAVED, "--train-iters", ITERATIONS)
        chosen = [flag for layout in layouts for flag in LAYOUTS[layout]]
        chosen += [flag for feature in combination.features for flag in FEATURES[feature]]
        keys = ("data.num_workers=0", "data.shuffle_buffer_size=16")
        precision = () if "bf16" in combination.features else ("--precision", "fp32")
        return [*places, *sizes, *saving, *precision, *_without_doubles(chosen), *keys]

    def run(self, flags: Sequence[Any], name: str) -> Ended:
        """Start a run and wait until it ends."""
        try:
            done = subprocess.run(
                command("train/run.py", *flags), capture_output=True, text=True, timeout=SECONDS, cwd=ROOT,
                check=False, env=os.environ | ENVIRONMENT,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            return Ended(-1, f"{error.stdout!r}", [])
        output = done.stdout + done.stderr
        for stacks in sorted((self.root / "runs" / name / "stacks").glob("*.txt")):  # a rank that crashed or hung
            output = f"=== {stacks.name} ===\n{stacks.read_text(encoding='utf-8')}\n{output}"
        return Ended(done.returncode, output, read_metrics(self.root / "runs" / name))

    def baseline(self, combination: Combination) -> Ended:
        """Return the run of one process with the same features."""
        key = combination.model, combination.features
        if key not in self.baselines:
            name = "one-" + "-".join([combination.model, *combination.features]).replace(" ", "-")
            self.baselines[key] = self.run(self.flags(combination, name, 1, ()), name)
        return self.baselines[key]

    def play(self, combination: Combination, name: str) -> tuple[str, str]:
        """Return the verdict on a combination, and what was printed."""
        flags = self.flags(combination, name, 4, combination.layouts)
        first = self.run(flags, name)
        if first.code == 2 and "Traceback" not in first.output:
            return "refused: " + _last_line(first.output), first.output
        if first.code != 0 or len(first.lines) != ITERATIONS:
            return f"WRONG: exit code {first.code}: {_last_line(first.output)}", first.output
        # Beside one process.
        one = self.baseline(combination)
        if one.code == 2:
            return "WRONG: one process is refused, four are not: " + _last_line(one.output), one.output
        tolerance = TOLERANCE["bf16" if "bf16" in combination.features else "fp32"]
        difference = max(
            abs(x - y) / max(abs(y), 1e-9)
            for here, there in zip(first.values, one.values, strict=True)
            for x, y in zip(here, there, strict=True)
        )
        wrong = [] if difference <= tolerance else [f"differs from one process by {difference:.1e}"]
        # Resumed from the middle.
        folder = self.root / "runs" / name
        shutil.rmtree(iteration_folder(folder, ITERATIONS))
        again = self.run(flags, name)
        if again.code != 0:
            wrong.append(f"resuming: exit code {again.code}: {_last_line(again.output)}")
        elif f"iteration {SAVED}" not in again.output:
            wrong.append("was not resumed")
        elif again.values[SAVED:ITERATIONS] != first.values[SAVED:]:
            wrong.append("resuming gives other numbers")
        output = f"{first.output}\n\n=== resumed ===\n{again.output}"
        return ("WRONG: " + "; ".join(wrong) if wrong else f"ok, {difference:.0e}"), output


def _without_doubles(flags: Sequence[str]) -> list[str]:
    """Return flags without those that are there already, each with its value."""
    found: dict[str, list[str]] = {}
    name = ""
    for flag in flags:
        if flag.startswith("--") or "=" in flag:
            name = flag
            found[name] = [flag]
        else:
            found[name].append(flag)
    return list(itertools.chain.from_iterable(found.values()))


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def draw(random_: random.Random) -> Combination:
    """Return a combination of two or three layouts and one or two features."""
    model = random_.choice(MODELS)
    names = [x for x in LAYOUTS if x != "ep" or model.endswith("moe")]
    layouts = random_.sample(names, random_.choice((2, 2, 3)))
    features = random_.sample(list(FEATURES), random_.choice((1, 1, 2)))
    return Combination(model, tuple(sorted(layouts)), tuple(sorted(features)))


def main(argv: Sequence[str] | None = None) -> int:
    """Play as many rounds as asked for and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="combinations that are not refused")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="a model, layouts and features to run")
    parser.add_argument("--logs", type=Path, help="write what wrong rounds printed to this folder")
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    args = parser.parse_args(argv)
    rows = ["| combination | verdict |", "|---|---|"]
    print("\n".join(rows), flush=True)
    played = wrong = 0
    random_ = random.Random(args.seed)
    seen: set[Combination] = set()
    with tempfile.TemporaryDirectory() as name:
        trial = Trial(Path(name))
        while played < args.rounds:
            if args.only:
                of = [tuple(x for x in args.only if x in names) for names in (MODELS, LAYOUTS, FEATURES)]
                combination, args.rounds = Combination(of[0][0], of[1], of[2]), 1
            else:
                combination = draw(random_)
            if combination in seen:
                continue
            seen.add(combination)
            verdict, output = trial.play(combination, f"run{len(seen)}")
            played += not verdict.startswith("refused") or bool(args.only)
            rows.append(f"| {combination} | {verdict} |")
            print(rows[-1], flush=True)
            if verdict.startswith("WRONG"):
                wrong += 1
                if args.logs is not None:
                    args.logs.mkdir(parents=True, exist_ok=True)
                    (args.logs / f"{str(combination).replace(' ', '-')}.txt").write_text(output, encoding="utf-8")
            if args.markdown is not None:
                args.markdown.write_text("\n".join([*rows, ""]), encoding="utf-8")
    print(f"\n{played} combinations ran, {wrong} were wrong, {len(seen) - played} were refused")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
