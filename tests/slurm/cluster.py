"""A real SLURM cluster on this machine: one slurmctld and several slurmd, from the Debian package slurm-wlm."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.world import free_port

DAEMONS = ("slurmctld", "slurmd")


def missing() -> str:
    """Return why there can be no cluster here, or ''."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    absent = [name for name in (*DAEMONS, "srun", "sbatch") if shutil.which(name, path=path) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: apt-get install slurm-wlm)"
    return "" if os.geteuid() == 0 else "starting slurmd needs root"


@dataclass(frozen=True)
class Cluster:
    """A running cluster. `env`: what the SLURM commands need to find it."""

    root: Path
    env: dict[str, str]

    def call(self, *argv: object, cwd: Path | None = None) -> str:
        """Run a command against the cluster and return what it printed."""
        done = subprocess.run(
            [*map(str, argv)], env=self.env, cwd=cwd, capture_output=True, text=True, timeout=180, check=False
        )
        assert done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        """Return a job's state, such as PENDING, RUNNING or COMPLETED."""
        shown = self.call("scontrol", "show", "job", "-o", job)
        return shown.split(" JobState=")[1].split()[0]

    def wait(self, job: str, *wanted: str, timeout: float) -> str:
        """Wait until a job is in one of the states; AssertionError if it ends in another one or time is up."""
        end = time.monotonic() + timeout
        while (state := self.state(job)) not in wanted:
            assert state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), state
            assert time.monotonic() < end, f"job {job} is still {state}"
            time.sleep(0.2)
        return state


@contextlib.contextmanager
def cluster(root: Path, num_nodes: int = 2) -> Iterator[Cluster]:
    """Start a cluster without authentication, wait until its nodes are idle, and end it afterwards."""
    config = root / "slurm.conf"
    config.write_text(_config(root, num_nodes))
    env = os.environ | {"SLURM_CONF": str(config), "PATH": f"{os.environ['PATH']}:/usr/sbin:/usr/bin"}
    commands = [["slurmctld", "-D", "-c", "-f", str(config)]]
    commands += [["slurmd", "-D", "-N", f"node{i}", "-f", str(config)] for i in range(1, num_nodes + 1)]
    with contextlib.ExitStack() as stack:
        for command in commands:
            log = stack.enter_context((root / f"{'-'.join(command[:3:2])}-{command[3]}.log").open("wb"))
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
            stack.callback(_end, process)
        running = Cluster(root, env)
        _wait_for_nodes(running, num_nodes)
        yield running
        running.call("scancel", "--full", "--signal=KILL", "--me")
        end = time.monotonic() + 10
        while running.call("squeue", "--noheader").strip() and time.monotonic() < end:
            time.sleep(0.2)  # the daemons of the nodes end the processes


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_for_nodes(running: Cluster, num_nodes: int) -> None:
    end = time.monotonic() + 60
    while True:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%D %t"], env=running.env, capture_output=True, text=True, check=False
        )
        if done.stdout.split() == [str(num_nodes), "idle"]:
            return
        logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in running.root.glob("*.log"))
        assert time.monotonic() < end, f"{done.stdout}{done.stderr}\n{logs}"
        time.sleep(0.1)


def _config(root: Path, num_nodes: int) -> str:
    for name in ("state", "spool"):
        (root / name).mkdir()
    host = socket.gethostname()
    size = "CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=2000"
    nodes = [
        f"NodeName=node{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} {size}"
        for i in range(1, num_nodes + 1)
    ]
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={free_port()}",
        "AuthType=auth/none",
        "AuthInfo=cred_expire=5",  # a requeued job waits until its first credential has expired
        "CredType=cred/none",
        "SlurmUser=root",
        "SlurmdUser=root",
        f"StateSaveLocation={root}/state",
        f"SlurmdSpoolDir={root}/spool/%n",
        f"SlurmctldPidFile={root}/slurmctld.pid",
        f"SlurmdPidFile={root}/slurmd-%n.pid",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SchedulerParameters=sched_interval=2,batch_sched_delay=0",
        "MpiDefault=none",
        "SwitchType=switch/none",
        "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none",
        "ReturnToService=2",
        "KillWait=30",
        "MessageTimeout=30",
        "SlurmdParameters=config_overrides",
        *nodes,
        "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
    ]
    return "\n".join(lines) + "\n"
