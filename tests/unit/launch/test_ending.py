"""Last lines of a run: where its results are after its end, and how it continues after a stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from llava_mcore.checkpoint import choose_start
from llava_mcore.checkpoint.choose_start import StartPoint
from llava_mcore.config.load import load_run_config
from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import CheckpointError
from llava_mcore.launch.ending import last_lines
from llava_mcore.processes.control import INTERRUPTED, STOPPED_EARLY


def run_in(folder: Path, *keys: str) -> RunConfig:
    return load_run_config(None, [f"checkpoint.save_dir={folder}", "name=r", *keys])


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder with a checkpoint, the loss and TensorBoard's files."""
    folder = tmp_path / "r"
    (folder / "tensorboard").mkdir(parents=True)
    (folder / "loss.png").touch()

    def start_point(run: RunConfig) -> StartPoint:
        assert run.checkpoint.load_optim
        return StartPoint("resume", folder / "iter_0000010", 10, folder)

    monkeypatch.setattr(choose_start, "start_point", start_point)
    return folder


NOTHING = "no checkpoint was saved: the same command starts again"
SAVING = ("checkpoint.save=true", "checkpoint.save_optim=true")


def test_results_of_a_finished_run(saved: Path) -> None:
    lines = last_lines(run_in(saved.parent, *SAVING, "logging.tensorboard=true"), 0)
    assert lines == [
        f"losses: {saved / 'loss.png'}",
        f"TensorBoard's files: {saved / 'tensorboard'}",
        f"checkpoint: {saved / 'iter_0000010'}",
        f"as a Hugging Face folder: python -m llava_mcore export-hf --megatron-dir {saved} --hf-dir FOLDER",
    ]
    adapted = last_lines(run_in(saved.parent, *SAVING, "adapter.r=8"), 0)
    assert adapted[-1].startswith("as a PEFT adapter (--merge: a whole model): python -m llava_mcore export-hf ")
    assert last_lines(run_in(saved.parent), 0) == lines[:1], "nothing was saved, and an older run wrote the others"


@pytest.mark.parametrize("code", [STOPPED_EARLY, INTERRUPTED, 128 + 9])
def test_how_a_stopped_run_goes_on(saved: Path, code: int) -> None:
    resuming = run_in(saved.parent, *SAVING, "checkpoint.load_optim=true")
    ended = "ended by SIGINT; " if code == INTERRUPTED else ""
    assert last_lines(resuming, code) == [f"{ended}the same command resumes at iteration 10"]
    assert last_lines(run_in(saved.parent, *SAVING), code) == [
        f"{ended}the same command with --load-optim resumes at iteration 10"
    ]
    others = last_lines(resuming, code, first_node=False)
    assert others == (["ended by SIGINT"] if ended else []), "what is the same for all nodes is printed once"
    assert "without --save-optim" in last_lines(run_in(saved.parent, SAVING[0]), code)[0]


def test_a_stopped_run_without_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start_point(run: RunConfig) -> StartPoint:
        raise CheckpointError("none is complete")

    assert last_lines(run_in(tmp_path, *SAVING), INTERRUPTED) == [f"ended by SIGINT; {NOTHING}"]
    monkeypatch.setattr(choose_start, "start_point", start_point)
    assert last_lines(run_in(tmp_path, *SAVING), STOPPED_EARLY) == [NOTHING]
    assert last_lines(run_in(tmp_path, *SAVING), 2) == [], "an error has its own message"
