"""From options to command lines: torchrun, the child process, and Singularity against a recording stand-in."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llava_mcore.__main__ import main
from llava_mcore.config.sections.launch import LaunchConfig
from llava_mcore.errors import ConfigError
from llava_mcore.launch import checkout
from llava_mcore.launch.checkout import REPOSITORY
from llava_mcore.launch.jobs.slurm import batch_file
from llava_mcore.launch.singularity import (
    bind_folders,
    container_argv,
    inner_command,
    requested_image,
    rerun_in_container,
    without_image,
)
from llava_mcore.launch.torchrun_command import ALLOCATOR, torchrun_argv, worker_env
from llava_mcore.processes.control import run_child


def test_torchrun_command() -> None:
    """One machine needs no address; arguments are passed on as they are."""
    assert torchrun_argv(4, "some.worker", ["--config", "/a b/run.yaml"])[1:] == [
        *("-m", "llava_mcore.launch.torchrun", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "4"),
        *("-m", "some.worker", "--config", "/a b/run.yaml"),
    ]


def test_an_installed_package_is_no_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder has other packages, so it stays off PYTHONPATH; images and batch files need the scripts."""
    monkeypatch.setattr(checkout, "REPOSITORY", tmp_path)
    env = worker_env({"PATH": "/bin"}, 1, cpu_cores=1, device_available=False)
    assert "PYTHONPATH" not in env
    assert worker_env({"PYTHONPATH": "/x"}, 1, cpu_cores=1, device_available=False)["PYTHONPATH"] == "/x"
    with pytest.raises(ConfigError, match=f"--sif-path needs a checkout .* is installed in {tmp_path}: clone"):
        rerun_in_container(tmp_path / "i.sif", ["x"])
    with pytest.raises(ConfigError, match="--submit needs a checkout"):
        batch_file("a", LaunchConfig(), tmp_path, [], on_gpus=False, cpus=1)


@pytest.mark.parametrize(
    ("processes", "device", "given", "threads"),
    [
        (1, False, {}, "8"),
        (3, False, {}, "2"),
        (16, False, {}, "1"),
        (4, True, {}, "1"),
        (4, False, {"OMP_NUM_THREADS": "5"}, "5"),
    ],
)
def test_worker_threads(processes: int, device: bool, given: dict[str, str], threads: str) -> None:
    """Ranks share the cores on CPUs, have one thread on GPUs, and keep what the user has set."""
    env = worker_env({"PATH": "/bin", **given}, processes, cpu_cores=8, device_available=device)
    assert env.pop("PYTORCH_ALLOC_CONF", None) == (ALLOCATOR if device else None)
    assert env.pop("CUDA_SCALE_LAUNCH_QUEUES", None) == ("4x" if device else None)
    assert env.pop("NCCL_GRAPH_REGISTER", None) == ("0" if device else None)
    assert env == {"PATH": "/bin", "OMP_NUM_THREADS": threads, "PYTHONPATH": str(REPOSITORY)}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_settings_of_the_user_stay(name: str) -> None:
    given = {name: "backend:cudaMallocAsync", "CUDA_SCALE_LAUNCH_QUEUES": "2x", "NCCL_GRAPH_REGISTER": "1"}
    env = worker_env(given, 1, cpu_cores=1, device_available=True)
    assert {key: value for key, value in env.items() if any(word in key for word in ("ALLOC", "CUDA", "NCCL"))} == given


def test_workers_find_the_package_before_anything_else_on_the_path() -> None:
    env = worker_env({"PYTHONPATH": "/elsewhere"}, 1, cpu_cores=1, device_available=False)
    assert env["PYTHONPATH"] == f"{REPOSITORY}:/elsewhere"


@pytest.mark.parametrize(
    ("code", "expected"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_exit_code_of_the_child(code: str, expected: int) -> None:
    """It is returned, or 128 + n after signal n."""
    assert run_child([sys.executable, "-c", code]) == expected


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process inside `run_child`, whose child waits, and on a signal writes `ended` and exits with 21."""
    child = f"""
import pathlib, signal, sys, time
def end(number, frame):
    pathlib.Path({str(tmp_path)!r}, "ended").write_text(str(number))
    sys.exit(21)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, end)
pathlib.Path({str(tmp_path)!r}, "ready").touch()
time.sleep(30)
"""
    argv = [sys.executable, "-c", child]
    code = f"import sys; from llava_mcore.processes.control import run_child as run; sys.exit(run({argv!r}))"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY)
    wait_for(tmp_path / "ready")
    yield process
    process.kill()
    process.wait()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_reach_the_child(number: signal.Signals, parent: subprocess.Popen[bytes], tmp_path: Path) -> None:
    parent.send_signal(number)
    assert parent.wait(timeout=20) == 21
    assert (tmp_path / "ended").read_text() == str(int(number))


def test_child_ends_when_the_parent_is_killed(parent: subprocess.Popen[bytes], tmp_path: Path) -> None:
    parent.kill()
    wait_for(tmp_path / "ended")


def test_own_signal_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    run_child([sys.executable, "-c", ""])
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("argv", "image", "rest"),
    [
        (["a", "--sif-path", "/i.sif", "b"], Path("/i.sif"), ["a", "b"]),
        (["--sif-path=/i.sif", "b"], Path("/i.sif"), ["b"]),
        (["--sif-path", "/1", "--sif-path", "/2"], Path("/2"), []),
        (["--sif-path", "~/i.sif"], Path.home() / "i.sif", []),
        (["a", "--sif-path"], None, ["a"]),
        (["a", "--save"], None, ["a", "--save"]),
    ],
)
def test_image_flag_is_found_and_taken_out(argv: list[str], image: Path | None, rest: list[str]) -> None:
    assert requested_image(argv) == image
    assert without_image(argv) == rest


def test_container_command() -> None:
    """Binds, variables and the folder are passed to singularity or apptainer."""
    argv = container_argv(
        Path("/i.sif"), ["python3", "x.py"], gpu=True, binds=[Path("/a"), Path("/b c")], env={"K": "v"}, cwd=Path("/a")
    )
    assert argv == [
        *("singularity", "exec", "--nv", "--bind", "/a", "--bind", "/b c", "--env", "K=v", "--pwd", "/a"),
        *("/i.sif", "python3", "x.py"),
    ]
    argv = container_argv(Path("/i.sif"), ["x"], engine="apptainer", gpu=False, binds=[], env={}, cwd=Path("/a"))
    assert argv == ["apptainer", "exec", "--pwd", "/a", "/i.sif", "x"]


def test_what_bind_and_env_cannot_express() -> None:
    binds, env = [Path("/a:b"), Path("/c,d"), Path('/"e"'), Path("/f\ng"), Path("/h i")], {"A": "x,y", "B": "/x:/y z"}
    with pytest.raises(ConfigError) as raised:
        container_argv(Path("/i.sif"), [], gpu=False, binds=binds, env=env, cwd=Path("/"))
    message = str(raised.value)
    assert "(5 problems)" in message
    engine = "the container engine"
    for expected in (f"/a:b: {engine}", f"/c,d: {engine}", '"e"', r"with '\n' in its name", f"A=x,y: {engine}"):
        assert expected in message


def test_folders_of_partitioned_data_are_bound(tmp_path: Path) -> None:
    inner = tmp_path / "data" / "date=2024-01-01" / "x"
    for folder in (inner, tmp_path / "cwd" / "date=2024-01-02" / "y", tmp_path / "out"):
        folder.mkdir(parents=True)
    argv = [
        "train",
        "--data-path",
        str(inner),
        f"checkpoint.save_dir={tmp_path / 'out'}",
        "--chat-template",
        "x" * 5000,
    ]
    assert set(bind_folders(argv, tmp_path / "cwd")) == {REPOSITORY, tmp_path / "cwd", inner, tmp_path / "out"}
    assert set(bind_folders([*argv[:2], f"--data-path={inner}"], tmp_path / "cwd")) == {
        REPOSITORY,
        tmp_path / "cwd",
        inner,
    }
    (tmp_path / "link").symlink_to(inner)
    (tmp_path / "cwd" / "day=1").symlink_to(tmp_path / "link")
    assert inner in bind_folders(["train", "--data-path", "day=1"], tmp_path / "cwd")


def test_folders_that_the_command_needs_are_bound(tmp_path: Path) -> None:
    for name in ("cwd/inside", "data", "models/hf", "store", "configured"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "store")
    (tmp_path / "cwd" / "run.yaml").write_text(f"data: {{path: {tmp_path / 'configured'}, seq_length: 8}}\n")
    argv = [
        *("train", "--data-path", str(tmp_path / "data"), f"--megatron-load-dir={tmp_path / 'models' / 'hf'}"),
        *("--save-dir", str(tmp_path / "models" / "new" / "deep"), "--name", "x", "--lr", "1e-5", "--tp", "2"),
        *("--tokenizer-load-dir", str(tmp_path / "link"), "--config", "run.yaml", "--text-model", "org/name"),
        *("a=../data", "b=inside", "c=/usr/share", "d=/no-such-top-folder/x"),
    ]
    expected = {REPOSITORY, *(tmp_path / name for name in ("cwd", "data", "models", "link", "store", "configured"))}
    assert set(bind_folders(argv, tmp_path / "cwd")) == expected


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a `singularity` on PATH that writes down what it is called with and exits with 5."""
    folder, record = tmp_path / "bin", tmp_path / "record.json"
    folder.mkdir()
    script = f"""\
        #!{sys.executable}
        import json, os, sys
        json.dump({{"argv": sys.argv[1:], "env": dict(os.environ)}}, open({str(record)!r}, "w"))
        sys.exit(5)
        """
    (folder / "singularity").write_text(textwrap.dedent(script))
    (folder / "singularity").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return record


@pytest.mark.parametrize("command", ["train", "import-hf", "export-hf", "build", "prepare", "check"])
def test_command_is_run_again_inside_the_image(
    command: str, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "i.sif").touch()
    monkeypatch.setenv("KEPT", "yes")
    monkeypatch.chdir(tmp_path)
    assert main([command, "--tp", "2", "--sif-path", "i.sif"]) == 5
    called = json.loads(engine.read_text())
    override = ["launch.sif_path=null"] if command == "train" else []
    inner = [str(tmp_path / "i.sif"), "python3", "-m", "llava_mcore", command, "--tp", "2", *override]
    assert called["argv"][0] == "exec"
    assert called["argv"][-len(inner) :] == inner
    assert "--cleanenv" not in called["argv"]
    assert called["env"]["KEPT"] == "yes"
    assert called["env"]["PATH"] == os.environ["PATH"]


def test_image_from_a_configuration_file(engine: Path, tmp_path: Path) -> None:
    """The command runs in the image that the file names, which it does not enter again."""
    (tmp_path / "i.sif").touch()
    (tmp_path / "run.yaml").write_text(f"launch: {{sif_path: {tmp_path / 'i.sif'}}}\n")
    assert main(["train", "--config", str(tmp_path / "run.yaml")]) == 5
    assert json.loads(engine.read_text())["argv"][-1] == "launch.sif_path=null"


def test_dry_run_prints_the_exact_command(engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "i.sif").touch()
    arguments = ["--dry-run", "--name", "a b", "--sif-path", str(tmp_path / "i.sif")]
    assert main(["train", *arguments]) == 0
    assert not engine.exists()
    printed = shlex.split(capsys.readouterr().out)
    assert rerun_in_container(tmp_path / "i.sif", inner_command("train", arguments)) == 5
    assert json.loads(engine.read_text())["argv"] == printed[1:]


def test_missing_image_and_missing_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is one message."""
    with pytest.raises(ConfigError, match=r"none\.sif: no such image"):
        rerun_in_container(tmp_path / "none.sif", ["x"])
    (tmp_path / "i.sif").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs singularity or apptainer on PATH"):
        rerun_in_container(tmp_path / "i.sif", ["x"])


LEAVES = """
    import atexit, sys
    from llava_mcore.processes.control import exit_now

    class Kept:
        def __del__(self):
            print("torn down", flush=True)

    kept = Kept()
    atexit.register(print, "exit handler")
    print("printed")
    exit_now(3)
"""


def test_a_worker_leaves_without_tearing_the_interpreter_down() -> None:
    """What is torn down under a thread of gloo's ends the process by SIGABRT: torchrun would report that instead."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LEAVES)], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, check=False
    )
    assert (done.returncode, done.stdout) == (3, "printed\nexit handler\n")


def test_leaving_into_a_closed_pipe_is_quiet() -> None:
    code = (
        "import sys; from llava_mcore.processes.control import exit_now; sys.stdin.read(); print('unread'); exit_now(3)"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}  # else print would fail, not the flush
    with subprocess.Popen([sys.executable, "-c", code], **pipes, text=True, env=buffered) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdout.close()
        process.stdin.close()
        assert (process.stderr.read(), process.wait()) == ("", 3)
