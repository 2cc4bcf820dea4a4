"""SLURM without SLURM: what the environment says, and what `--submit` writes. tests/slurm runs the real one."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

import pytest

from llava_mcore.config.sections.launch import LaunchConfig
from llava_mcore.errors import ConfigError
from llava_mcore.launch import nodes
from llava_mcore.launch.checkout import REPOSITORY
from llava_mcore.launch.jobs import slurm
from llava_mcore.launch.jobs.slurm import batch_file, submit
from llava_mcore.launch.nodes import Nodes, check_gpu_ids, check_interface, find_nodes
from llava_mcore.launch.singularity import inner_command
from llava_mcore.launch.torchrun_command import torchrun_argv, worker_env

STEP = {
    "SLURM_JOB_ID": "12345",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_NODELIST": "gpu[01-03]",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "gpu[01-03]",
    "SLURM_NODEID": "2",
    "SLURM_RESTART_COUNT": "1",
}
BATCH = {key: value for key, value in STEP.items() if "STEP" not in key} | {"SLURM_NODEID": "0", "SLURM_PROCID": "0"}
SCONTROL = """\
#!/bin/sh
case "$*" in
"show hostnames gpu[01-03]") printf 'gpu01.invalid\\ngpu02.invalid\\n' ;;
"show node -o gpu01.invalid") echo 'NodeName=gpu01 NodeAddr=10.0.0.7 NodeHostName=x' ;;
"show job -o 12345") echo 'JobId=12345 EndTime=2031-02-03T04:05:06 X=y' ;;
*) echo "unexpected: $*" >&2; exit 1 ;;
esac
"""


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(stat.S_IRWXU)


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin", "scontrol", SCONTROL)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


@pytest.mark.usefixtures("scontrol")
def test_everything_comes_from_the_job_step() -> None:
    assert find_nodes(LaunchConfig(), STEP) == Nodes(3, 2, "10.0.0.7", 22345, "12345")
    job = slurm.read_job(STEP)
    assert job is not None
    assert slurm.describe(job) == ("SLURM job 12345, node 3 of 3, requeued 1 times, time limit at 2031-02-03 04:05:06")
    typed = LaunchConfig(master_addr="a", master_port=5, slurm_job_id="9")
    assert find_nodes(typed, STEP) == Nodes(3, 2, "a", 5, "9")


def test_without_slurm_flags_say_everything() -> None:
    assert find_nodes(LaunchConfig(), {}) == nodes.ONE_MACHINE
    typed = LaunchConfig(num_nodes=2, node_rank=1, master_addr="h")
    assert find_nodes(typed, {}) == Nodes(2, 1, "h", 29500, "none")
    assert find_nodes(LaunchConfig(num_nodes=2, node_rank=1, master_addr="h", slurm_job_id="7"), {}).port == 20007
    with pytest.raises(ConfigError) as raised:
        find_nodes(LaunchConfig(num_nodes=2), {})
    assert "--rank" in str(raised.value) and "--master-addr" in str(raised.value)
    with pytest.raises(ConfigError, match="--rank 2 is not below --node 2"):
        find_nodes(LaunchConfig(num_nodes=2, node_rank=2, master_addr="h"), {})


@pytest.mark.parametrize(
    ("launch", "environ", "expected"),
    [
        (LaunchConfig(), BATCH, "has 3 nodes and train was started on only one of them"),
        (LaunchConfig(), STEP | {"SLURM_STEP_NUM_TASKS": "24"}, "SLURM started train 24 times on 3 nodes"),
        (LaunchConfig(num_nodes=2), STEP, "--node 2: SLURM started train on 3 nodes"),
    ],
)
def test_a_wrong_start_is_refused(launch: LaunchConfig, environ: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        find_nodes(launch, environ)


def test_one_node_of_a_larger_job_on_purpose() -> None:
    """A run that asks for one node uses one, whatever the job has."""
    found = find_nodes(LaunchConfig(num_nodes=1), BATCH)
    assert (found.count, found.port) == (1, None)


def test_commands_of_one_and_many_machines() -> None:
    """Several machines, or a given port, make torchrun meet at the address."""
    argv = torchrun_argv(8, "w", [], Nodes(2, 1, "host", 4000, "77"))
    expected = "--nnodes 2 --node-rank 1 --rdzv-id 77 --master-addr host --master-port 4000 --nproc-per-node 8 -m w"
    assert argv[3:] == expected.split()
    with_port = torchrun_argv(1, "w", [], find_nodes(LaunchConfig(master_port=4001), {}))
    assert "--standalone" not in with_port and "4001" in with_port


def test_interface_and_chosen_gpus_reach_the_workers() -> None:
    env = worker_env({}, 2, cpu_cores=1, device_available=True, interface="eth1", gpu_ids=(1, 3))
    assert (env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"]) == ("eth1", "eth1")
    assert env["CUDA_VISIBLE_DEVICES"] == "1,3"
    shown = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert worker_env(shown, 2, cpu_cores=1, device_available=True, gpu_ids=(1, 3))["CUDA_VISIBLE_DEVICES"] == "5,7"


def test_what_this_machine_does_not_have() -> None:
    assert "use one of" in check_interface(LaunchConfig(interface="nope0"))[0]
    assert check_interface(LaunchConfig(interface="lo")) == []
    assert check_gpu_ids(LaunchConfig(gpu_ids="0, 3"), 4) == []
    assert "numbered 0 to 2" in check_gpu_ids(LaunchConfig(gpu_ids="0,3"), 3)[0]
    assert "names 2 GPUs, --gpus says 3" in check_gpu_ids(LaunchConfig(gpu_ids="0,3", num_gpus=3), 4)[0]
    assert "has no GPU" in check_gpu_ids(LaunchConfig(gpu_ids="0"), 0)[0]
    with pytest.raises(ValueError, match="expected numbers of GPUs"):
        LaunchConfig(gpu_ids="0,0")


@pytest.mark.usefixtures("scontrol")
def test_inside_an_image_the_address_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in STEP.items():
        monkeypatch.setenv(key, value)
    assert inner_command("train", ["--tp", "2"])[-1] == "launch.master_addr=10.0.0.7"
    assert inner_command("train", ["-m", "x"])[-1] == "launch.sif_path=null"
    assert inner_command("export-hf", [])[-1] == "export-hf"


def test_without_scontrol_the_address_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="give --master-addr"):
        find_nodes(LaunchConfig(), STEP)


def test_batch_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes, GPUs, output and own options are #SBATCH lines; the last line starts every node."""
    launch = LaunchConfig(num_gpus=8, num_nodes=4, sbatch_options="--partition=gpu --comment='two words'")
    text = batch_file("my", launch, tmp_path / "my", ["--name", "a b"], on_gpus=True, cpus=24)
    lines = text.splitlines()
    for option in (
        "--nodes=4",
        "--gpus-per-node=8",
        "--cpus-per-task=24",
        "--mem=0",
        f"--output={tmp_path}/my/slurm-%j.out",
        "--partition=gpu",
    ):
        assert f"#SBATCH {option}" in lines
    assert '#SBATCH "--comment=two words"' in lines
    last = shlex.split(lines[-1])
    assert last[:3] == ["exec", "bash", str(REPOSITORY / "scripts/slurm/on_each_node.sh")]
    assert last[-3:] == [str(REPOSITORY / "scripts/train/run.py"), "--name", "a b"]
    launch = LaunchConfig(num_gpus=2, slurm_output_name="/log/%x.txt")
    text = batch_file("my", launch, tmp_path, [], on_gpus=False, cpus=3)
    assert "gpus-per-node" not in text and "#SBATCH --output=/log/%x.txt\n" in text
    # Both ways to submit ask SLURM for the same things.
    by_hand = (REPOSITORY / "scripts/slurm/train.sbatch").read_text()
    for option in ("--ntasks-per-node=1", "--mem=0", "--open-mode=append", "--requeue", "--signal=B:USR1@300"):
        assert f"#SBATCH {option}\n" in by_hand and f"#SBATCH {option}\n" in text
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs sbatch on PATH"):
        submit(tmp_path / "x")
    program(tmp_path, "sbatch", "#!/bin/sh\necho 'no such partition' >&2\nexit 1\n")
    with pytest.raises(ConfigError, match=r"no such partition\n.*--cpus-per-task=N --mem=SIZE"):
        submit(tmp_path / "x")


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ("--cpus-per-gpu=8", ["--mem=0"]),
        ("-c16 --mem-per-gpu 100G", []),
        ("--exclusive", ["--mem=0"]),
        ("--mem=200G --mem-bind=local", ["--cpus-per-task=24"]),
    ],
)
def test_cpus_and_memory_may_be_chosen(options: str, left: list[str], tmp_path: Path) -> None:
    text = batch_file("a", LaunchConfig(num_gpus=8, sbatch_options=options), tmp_path, [], on_gpus=True, cpus=24)
    assert [option for option in ("--cpus-per-task=24", "--mem=0") if f"#SBATCH {option}\n" in text] == left


@pytest.mark.parametrize(
    ("name", "options", "folder", "expected"),
    [
        ("a", "--comment='x\nrm -rf ~'", "out", [r"'--comment=x\nrm -rf ~': '\n' is not allowed there"]),
        ("a", "--comment='\"q\"' --x=a#b --y='c\\d'", "out", ['--comment="q"', "'--x=a#b': '#'", r"'--y=c\\d'"]),
        ("it's", None, "out", ["--job-name=it's", "--output="]),
        ("a", "--comment='open", "out", ["an unclosed quote"]),
        ("a", None, "o#ut", ["'#' is not allowed there"]),
    ],
)
def test_what_a_batch_file_cannot_carry(
    name: str, options: str | None, folder: str, expected: list[str], tmp_path: Path
) -> None:
    launch = LaunchConfig.model_construct(num_gpus=1, sbatch_options=options)
    with pytest.raises(ConfigError) as raised:
        batch_file(name, launch, tmp_path / folder / name, ["--name", name], on_gpus=True, cpus=24)
    assert all(words in str(raised.value) for words in expected), raised.value


def test_arguments_with_line_breaks_stay_arguments(tmp_path: Path) -> None:
    """bash gets what was typed; nothing of it can be taken for an option of sbatch's or a command."""
    typed = ["--name", "a b", "x='\n#SBATCH --uid=0\ntouch ran\n'"]
    text = batch_file("a", LaunchConfig(num_gpus=1), tmp_path / "50%", typed, on_gpus=True, cpus=24)
    assert f"#SBATCH --output={tmp_path}/50%%/slurm-%j.out\n" in text
    head, _, tail = text.partition("\nexec ")
    assert all(line.startswith("#") for line in head.splitlines())
    assert shlex.split(tail)[-3:] == typed


def test_flags_that_one_machine_does_not_need() -> None:
    with pytest.raises(ConfigError) as raised:
        find_nodes(LaunchConfig(node_rank=0, master_addr="h"), {})
    assert "--rank has no effect without --node" in str(raised.value) and "--master-addr has no" in str(raised.value)
    assert find_nodes(LaunchConfig(num_nodes=1, node_rank=0, master_addr="h"), {}).count == 1
    assert find_nodes(LaunchConfig(master_addr="h", master_port=4), {}).master_addr == "h"


def test_time_limit_is_handed_on_and_the_job_requeued(tmp_path: Path) -> None:
    """on_each_node.sh with stand-ins: SIGUSR1 reaches the command, which may still save, then the job is requeued."""
    import signal
    import subprocess
    import time

    program(tmp_path, "srun", '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n')
    program(tmp_path, "scontrol", f'#!/bin/bash\necho "$*" > {tmp_path}/asked\n')
    script = f"trap 'sleep 0.3; touch {tmp_path}/saved; exit 3' USR1; touch {tmp_path}/up; while :; do sleep 0.05; done"
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "8"}
    argv = ["bash", str(REPOSITORY / "scripts/slurm/on_each_node.sh"), "bash", "-c", script]
    process = subprocess.Popen(argv, env=env)
    try:
        while not (tmp_path / "up").exists():
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=20) == 3
    finally:
        process.kill()
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "asked").read_text() == "requeue 8\n"
    for _ in range(20):  # one that ends at once may be gone before it is waited for
        assert subprocess.run([*argv[:2], "bash", "-c", "exit 7"], env=env, check=False).returncode == 7
