"""The launcher: everything is checked before anything starts, and the workers get the resolved run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llava_mcore.checkpoint.choose_start import start_point, unread_start
from llava_mcore.checkpoint.layout import latest_checkpoint
from llava_mcore.cli import train
from llava_mcore.config.flags import parse_command_line
from llava_mcore.config.load import load_run_config, run_config_yaml, save_run_config
from llava_mcore.config.sections.checkpoint import CheckpointConfig
from llava_mcore.errors import CheckpointError
from llava_mcore.launch import start as launch
from llava_mcore.launch.preflight import resolve
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_hf import make_hf_llava

HF_CONFIG: dict[str, Any] = {
    "model_type": "llava",
    "image_token_index": 4,
    "image_seq_length": 16,
    "text_config": {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 401,
        "max_position_embeddings": 512,
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "image_size": 56,
        "patch_size": 14,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
    },
}


class Folders:
    """A Hugging Face folder, a Megatron folder at iteration 0, prepared shards, and a place for outputs."""

    def __init__(self, root: Path, shards: Path, hf_files: Path) -> None:
        """hf_files: tokenizer and processor."""
        self.hf, self.megatron, self.data, self.save = (root / name for name in ("hf", "mega", "data", "save"))
        self.hf_files = hf_files
        shutil.copytree(hf_files, self.hf)
        (self.hf / "config.json").write_text(json.dumps(HF_CONFIG))
        self.add_checkpoint(self.megatron, 0)
        shutil.copytree(shards, self.data)

    def add_checkpoint(self, folder: Path, iteration: int) -> None:
        inside = folder / f"iter_{iteration:07d}"
        shutil.copytree(self.hf_files, inside / "hf")
        (inside / "metadata.json").write_text("{}")
        (inside / "hf" / "config.json").write_text(json.dumps(HF_CONFIG))
        (folder / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")

    def flags(self, *more: str) -> list[str]:
        flags = f"--megatron-load-dir {self.megatron} --data-path {self.data} --save-dir {self.save} --name r".split()
        return [*flags, "-g", "2", "--tp", "2", "--train-iters", "6", "--seq-length", "64", *more]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("shards") / "data", num_samples=4)


@pytest.fixture(scope="module")
def hf_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files") / "hf"
    make_hf_llava(folder)
    (folder / "model.safetensors").unlink()
    return folder


@pytest.fixture
def folders(tmp_path: Path, shards: Path, hf_files: Path) -> Folders:
    return Folders(tmp_path, shards, hf_files)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_count_gpus", lambda: 0)


def refusal(flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert train.main(flags) == 2
    return capsys.readouterr().err


def test_what_the_model_cannot_read_is_said_before_ranks_start(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = folders.megatron / "iter_0000000" / "hf"
    settings = json.loads((inside / "processor_config.json").read_text())
    (inside / "processor_config.json").write_text(json.dumps(settings | {"patch_size": 16}))
    text = refusal(folders.flags("--dry-run"), capsys)
    assert "patch_size" in text and str(inside) in text
    (inside / "processor_config.json").write_text(json.dumps(settings))
    assert "alone has at least 16 tokens" in refusal(folders.flags("--dry-run", "--seq-length", "16"), capsys)
    (inside / "tokenizer.json").unlink()
    assert "tokenizer" in refusal(folders.flags("--dry-run"), capsys)


def test_dry_run_shows_the_run_and_writes_nothing(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(folders.flags("--dry-run")) == 0
    printed, said = capsys.readouterr()
    assert "1 x 2 processes = tp 2 x pp 1 x dp 1; 128 micro-batches per iteration; node 0: ranks 0 to 1\n" in said
    assert said.endswith("nothing was started, and nothing was written\n")
    assert "precision: fp32" in printed
    assert "backend: gloo" in printed
    assert f"--nproc-per-node 2 -m llava_mcore.launch.worker --config {folders.save}/r/run.yaml" in printed
    assert not folders.save.exists()


def test_workers_are_started_with_the_resolved_run(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stub_worker.py").write_text(
        "import os, pathlib, sys\n"
        f"pathlib.Path({str(tmp_path)!r}, 'rank' + os.environ['RANK']).write_text(' '.join(sys.argv[1:]))\n"
        "sys.exit(3 if os.environ.get('STUB_FAILS') else 0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(launch, "WORKER", "stub_worker")
    assert train.main(folders.flags("--save", "training.seed=3")) == 0
    written = folders.save / "r" / "run.yaml"
    given = {(tmp_path / f"rank{rank}").read_text().rpartition(" --parent ")[0] for rank in (0, 1)}
    assert given == {f"--config {written}"}
    run = load_run_config(written)
    assert (run.training.precision, run.parallel.backend, run.launch.num_gpus) == ("fp32", "gloo", 2)
    assert (run.training.seed, run.checkpoint.load) == (3, folders.megatron)
    monkeypatch.setenv("STUB_FAILS", "1")
    assert train.main(folders.flags()) == 3


def test_all_problems_in_one_message_and_nothing_started(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    """A start that fails lists everything that prevents it."""
    (folders.data / ".nv-meta").rename(folders.data / "elsewhere")
    changes = ["-g", "4", "--tp", "4", "--pp", "3", "--seq-length", "999", "--backend", "nccl", "--save-optim"]
    message = refusal(folders.flags(*changes), capsys)
    for expected in (
        "The run cannot start (7 problems)",
        f"--tp 4 does not divide the key/value heads of the language model, which is 2 in {folders.megatron}",
        "--pp 3 does not divide",
        "4 processes (--gpus) cannot be divided into groups of --tp 4 x --pp 3 = 12",
        "energon prepare",
        "--seq-length 999 exceeds the 512 positions",
        "--backend nccl needs GPUs",
        "--save-optim has no effect without --save",
    ):
        assert expected in message
    assert not folders.save.exists()


def test_without_a_start_or_with_broken_checkpoints(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    rest = folders.flags()[2:]
    assert "nothing to start from" in refusal(rest, capsys)
    assert "--init needs the model's config" in refusal([*rest, "--init"], capsys)
    assert "no such folder" in refusal([*rest, "--megatron-load-dir", "/nowhere"], capsys)
    hub = refusal([*rest, "--megatron-load-dir", "nobody/nothing", "--pp", "3", "--data-path", "/nowhere"], capsys)
    assert "hf download nobody/nothing --local-dir nothing\n" in hub and "and convert it with import-hf" in hub
    assert "data path /nowhere does not exist" in hub and "--pp 3" in hub, "all that needs no model"
    assert "model_type is 'llama'" in refusal_of_other_model(folders, rest, capsys)
    (folders.megatron / "latest_checkpointed_iteration.txt").unlink()
    assert "latest_checkpointed_iteration.txt" in refusal(folders.flags(), capsys)


def refusal_of_other_model(folders: Folders, rest: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    (folders.hf / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return refusal([*rest, "--init", "--tokenizer-load-dir", str(folders.hf)], capsys)


def test_validation_needs_a_part_of_the_data(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(folders.flags("--eval-interval", "2"), capsys)
    assert "has no validation part: create one (prepare --val-ratio 0.05" in message and "(1 problem)" in message


def test_from_random_weights(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    """--init needs no checkpoint and refuses to load an optimizer."""
    rest = folders.flags("--init", "--tokenizer-load-dir", str(folders.hf), "--dry-run")[2:]
    assert train.main(rest) == 0
    assert "--init loads none" in refusal([*rest, "--load-optim"], capsys)


def test_an_earlier_run_is_resumed_or_left_alone(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    folders.add_checkpoint(folders.save / "r", 4)
    assert "already holds a checkpoint: resume it with --load-optim" in refusal(folders.flags(), capsys)
    assert train.main(folders.flags("--load-optim", "--dry-run")) == 0
    assert train.main(folders.flags("--name", "other", "--dry-run")) == 0
    capsys.readouterr()
    assert train.main(folders.flags("--load-optim", "--train-iters", "4")) == 0, "requeued once more, it has succeeded"
    printed = capsys.readouterr().out
    assert printed.startswith("the run is complete: ") and "has reached iteration 4 of 4; to continue, raise" in printed
    assert not (folders.save / "r" / "run.yaml").exists(), "nothing is started"
    assert train.main(folders.flags("--load-optim", "--train-iters", "4", "--submit")) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("the run is complete: ") and printed.endswith("\nno job was submitted\n")
    assert not (folders.save / "r" / "train.sbatch").exists(), "without sbatch, submitting would have failed, too"


def test_a_finished_run_of_another_name_is_no_start_with_its_optimizer(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing would be trained, nothing saved, and the exit code be 0."""
    folders.add_checkpoint(folders.save / "first", 4)
    saved = load_run_config(None, ["data.path=d", "checkpoint.save_optim=true", "stage=2"])
    (folders.save / "first" / "iter_0000004" / "run.yaml").write_text(run_config_yaml(saved))
    second = [
        *folders.flags("--name", "second", "--train-iters", "4"),
        "--megatron-load-dir",
        str(folders.save / "first"),
    ]
    assert "or omit --load-optim the first time" in refusal([*second, "--load-optim"], capsys)
    assert train.main([*second, "--dry-run"]) == 0


@pytest.mark.parametrize(
    ("gpus", "flag", "world", "precision", "backend"),
    [
        (0, -1, 1, "fp32", "gloo"),
        (0, 4, 4, "fp32", "gloo"),
        (8, -1, 8, "bf16", "nccl"),
        (8, 2, 2, "bf16", "nccl"),
    ],
)
def test_what_the_machine_decides(gpus: int, flag: int, world: int, precision: str, backend: str) -> None:
    run, world_size = resolve(load_run_config(None, [f"launch.num_gpus={flag}", "data.path=d"]), gpus)
    assert (world_size, run.launch.num_gpus) == (world, world)
    assert (run.training.precision, run.parallel.backend) == (precision, backend)
    assert run.data.path == Path.cwd() / "d"


def test_what_is_given_is_kept() -> None:
    run, _ = resolve(load_run_config(None, ["training.precision=fp32", "parallel.backend=gloo"]), 8)
    assert (run.training.precision, run.parallel.backend) == ("fp32", "gloo")


def test_more_gpus_than_there_are(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "_count_gpus", lambda: 1)
    assert "--gpus 2: this machine has 1" in refusal(folders.flags(), capsys)


def test_a_mistyped_flag_ends_the_script_with_code_2_at_once() -> None:
    script = Path(train.__file__).parents[2] / "scripts" / "train" / "run.py"
    done = subprocess.run([sys.executable, str(script), "--tpp", "2"], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (2, "error: --tpp: no such flag (did you mean --tp?)\n")


def test_submit_checks_and_shows_the_batch_file(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    several = ["--backend", "gloo", "--node", "2", "--submit", "--dry-run"]
    assert train.main(folders.flags(*several)) == 0
    printed = capsys.readouterr().out
    assert "#SBATCH --nodes=2" in printed and "--submit" not in printed and "--tp 2" in printed
    assert not folders.save.exists()
    assert "--tp 3 does not divide" in refusal(folders.flags(*several, "--tp", "3"), capsys)
    assert "give -g" in refusal(["--submit"], capsys)


def test_submit_into_an_image_checks_image_model_data_and_layout(
    folders: Folders, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sif = folders.save.parent / "image.sif"
    flags = folders.flags("--backend", "gloo", "--submit", "--dry-run", "--sif-path", str(sif))
    wrong = refusal([*flags, "--tp", "4", "-g", "4", "--data-path", "missing"], capsys)
    for line in ("image.sif: no such image", "--tp 4 does not divide the key/value heads", "/missing"):
        assert line in wrong
    sif.touch()
    assert train.main([*flags, "--mlflow"]) == 0  # the image may have what this machine has not
    assert (
        capsys.readouterr().err
        == "note: no checkpoint is saved: --save saves at the end of a run, --save-interval N also every N iterations\n"
    )
    # A machine without our libraries checks what it can, and says what it cannot.
    monkeypatch.setitem(sys.modules, "llava_mcore.training.assets", None)
    assert train.main([*flags, "--save"]) == 0
    assert "not checked, because this machine has no" in capsys.readouterr().err
    assert "--data-path" in refusal([*flags, "--data-path", "missing"], capsys)
    assert not folders.save.exists()


def test_a_run_that_saves_nothing_says_so(
    folders: Folders, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "run_child", lambda *_, **__: 0)
    assert train.main(folders.flags()) == 0
    assert "\nnote: no checkpoint is saved: --save" in capsys.readouterr().out
    assert CheckpointConfig(save_interval=2).unsaved is None
    with pytest.raises(CheckpointError, match=r"this run has saved no checkpoint: train with --save"):
        latest_checkpoint(folders.save / "r")
    with pytest.raises(CheckpointError, match=r"give one of the folders in it: mega$"):
        latest_checkpoint(folders.megatron.parent)


def test_another_start_of_a_resumed_run_is_named(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    folders.add_checkpoint(folders.save / "r", 3)
    before = parse_command_line(folders.flags(), "run.py").load()
    save_run_config(before, folders.save / "r" / "iter_0000003" / "run.yaml")
    other = folders.megatron.with_name("other")
    for load, expected in (
        (folders.megatron, None),
        (folders.save / "r", None),
        (other, f"{other} is not used: the run began"),
    ):
        run = parse_command_line(folders.flags("--load-optim", "--megatron-load-dir", str(load)), "run.py").load()
        line = unread_start(run, start_point(run))
        assert line is None if expected is None else line is not None and expected in line
