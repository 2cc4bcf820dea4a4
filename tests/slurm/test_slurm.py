"""Training as SLURM jobs, on a real slurmctld with two slurmd on this machine."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llava_mcore.checkpoint.complete import incomplete, iterations
from llava_mcore.convert.import_hf import import_hf
from tests.helpers.commands import ROOT, command, read_metrics
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_hf import make_hf_llava
from tests.slurm.cluster import Cluster, cluster, missing

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(missing()), reason=f"no SLURM: {missing()}")]
ITERATIONS = 40


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("material")
    make_hf_llava(root / "hf")
    import_hf(root / "hf", root / "megatron")
    make_dataset(root / "data")
    return root


def flags(root: Path, name: str, iterations: int) -> list[str]:
    places = f"--megatron-load-dir {root}/megatron --tokenizer-load-dir {root}/hf --data-path {root}/data"
    sizes = f"--micro-batch-size 2 --global-batch-size 4 --seq-length 64 --lr 1e-3 --train-iters {iterations}"
    rest = "data.num_workers=0 optimizer.lr_decay_style=constant optimizer.lr_warmup_fraction=0"
    return f"--save-dir {root}/save --name {name} -g 1 --backend gloo {places} {sizes} {rest}".split()


def output(folder: Path, job: str) -> str:
    file = folder / f"slurm-{job}.out"
    return file.read_text(errors="replace") if file.is_file() else f"no {file}"


def wait_until(slurm: Cluster, job: str, run_dir: Path, iteration: int) -> None:
    """Wait until metrics.jsonl shows an iteration; AssertionError if the job ends before."""
    end = time.monotonic() + 300
    while not any(m["iteration"] >= iteration for m in read_metrics(run_dir)):
        state = slurm.state(job)
        assert state in ("PENDING", "RUNNING") and time.monotonic() < end, f"{state}\n{output(run_dir, job)}"
        time.sleep(0.05)


def test_two_nodes_train_and_a_requeued_job_resumes(slurm: Cluster, root: Path) -> None:
    saving = ["--save-interval", "4", "--save-optim", "--load-optim"]
    submitted = command("train/run.py", *flags(root, "long", ITERATIONS), *saving, "--node", 2, "--submit")
    printed = slurm.call(*submitted, cwd=root)
    run_dir = root / "save" / "long"
    job = re.findall(r"as SLURM job (\d+)", printed)[0]
    wait_until(slurm, job, run_dir, 6)
    slurm.call("scontrol", "requeue", job)

    script = ROOT / "scripts" / "slurm" / "train.sbatch"  # the other way to submit, while the first job waits
    output_file = f"--output={root}/slurm-%j.out"
    short = slurm.call("sbatch", "--parsable", "--nodes=2", output_file, script, *flags(root, "short", 3), cwd=ROOT)
    assert slurm.wait(short.strip(), "COMPLETED", "FAILED", timeout=300) == "COMPLETED", output(root, short.strip())
    assert "node 1 of 2" in output(root, short.strip())

    assert slurm.wait(job, "COMPLETED", "FAILED", timeout=300) == "COMPLETED", output(run_dir, job)
    text = output(run_dir, job)
    assert "layout: tp 1 x pp 1 x dp 2 on cpu" in text
    before, after = text.split("requeued 1 times")
    first = [int(re.findall(r"step (\d+)/", part)[0]) for part in (before, after)]
    assert first[0] == 1 < first[1], "the second start continues after a checkpoint"
    long = read_metrics(run_dir)
    assert [m["iteration"] for m in long] == list(range(1, ITERATIONS + 1))
    assert [m["loss"] for m in long[:3]] == [m["loss"] for m in read_metrics(root / "save" / "short")]
    assert long[-1]["loss"] < long[0]["loss"]


def test_a_cancelled_job_leaves_a_checkpoint(slurm: Cluster, root: Path) -> None:
    """A plain scancel: SIGTERM to every process of the job, loader processes included, and KillWait's time to end."""
    words = [word.replace("data.num_workers=0", "data.num_workers=1") for word in flags(root, "cancelled", 100_000)]
    script, out = ROOT / "scripts" / "slurm" / "train.sbatch", f"--output={root}/slurm-%j.out"
    saving = ["--save", "--save-optim", "--load-optim"]
    job = slurm.call("sbatch", "--parsable", "--nodes=2", out, script, *words, *saving, cwd=ROOT).strip()
    run_dir = root / "save" / "cancelled"
    wait_until(slurm, job, run_dir, 3)
    slurm.call("scancel", job)
    assert slurm.wait(job, "CANCELLED", timeout=60) == "CANCELLED"
    end = time.monotonic() + 60
    while "stopped early" not in output(root, job):
        assert time.monotonic() < end, output(root, job)[-4000:]
        time.sleep(0.2)
    last = read_metrics(run_dir)[-1]["iteration"]
    assert iterations(run_dir) == [last] and incomplete(run_dir / f"iter_{last:07d}") is None


def test_a_job_that_cannot_work_is_refused_with_its_reason(slurm: Cluster, root: Path) -> None:
    script = command("train/run.py", *flags(root, "wrong", 3))
    batch = root / "wrong.sh"
    batch.write_text(f"#!/bin/bash\n{' '.join(script)}\n")  # without srun: one of two nodes
    job = slurm.call("sbatch", "--parsable", "--nodes=2", f"--output={root}/slurm-%j.out", batch).strip()
    assert slurm.wait(job, "COMPLETED", "FAILED", timeout=180) == "FAILED"
    assert "has 2 nodes and train was started on only one of them" in output(root, job)
