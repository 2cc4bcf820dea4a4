"""Rows of the machine: GPUs, driver, libraries, limits, tools, environment variables."""

from __future__ import annotations

import os
import re
import resource
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_mcore.compat.triton import NO_COMPILER, can_build_kernels
from llava_mcore.doctor.imports import last_line, run_limited
from llava_mcore.doctor.rows import DoctorRow, Status
from llava_mcore.files.regular import MOST_FILES
from llava_mcore.launch.singularity import ENGINES
from llava_mcore.launch.torchrun_command import ALLOCATOR, ALLOCATOR_NAMES, GRAPH_REGISTER, LAUNCH_QUEUES

GPUS, LIMITS, TOOLS, ENVIRONMENT = "GPUs", "limits", "tools", "environment variables"
GIB = 1 << 30
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_SHARED_MEMORY = Path("/dev/shm")
_FEW_FILES = 4096
_QUERY_SECONDS = 30
_FP8_FROM = (9, 0)
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "NVTE_")
_NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_HOME",
    "CUBLAS_WORKSPACE_CONFIG",
    "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS",
    "HF_HOME",
    "TMPDIR",
    *ALLOCATOR_NAMES,
    LAUNCH_QUEUES[0],
)
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel: unset it",
    "NCCL_P2P_DISABLE": "GPUs exchange through the host's memory: unset it",
    "NCCL_SHM_DISABLE": "GPUs of a machine without peer access exchange through sockets: unset it",
    "NCCL_IB_DISABLE": "machines exchange through TCP instead of InfiniBand: unset it if there is InfiniBand",
}
"""Variables that make runs slow if they are 1."""


@dataclass(frozen=True)
class NvidiaDriver:
    """version: None without a driver. gpus: names that nvidia-smi lists. failure: what it says if it lists none."""

    version: str | None
    gpus: Sequence[str] = ()
    failure: str = ""

    @classmethod
    def detect(cls) -> NvidiaDriver:
        """Ask nvidia-smi, if it is there, else read the file of the driver's module."""
        failure = ""
        if shutil.which("nvidia-smi") is not None:
            query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
            text, errors, reason = run_limited(query, _QUERY_SECONDS)
            lines = re.findall(r"^(\d+\.[\d.]+), (.+)$", text, re.MULTILINE)
            if lines:
                return cls(lines[0][0], [name for _, name in lines])
            failure = f"nvidia-smi lists no GPU: {reason or last_line(text + errors)}"
        if not _DRIVER_FILE.is_file():
            return cls(None, failure=failure)
        match = re.search(r"\d+\.\d+(\.\d+)?", _DRIVER_FILE.read_text(encoding="utf-8"))
        return cls("unknown" if match is None else match[0], failure=failure)


def gpu_rows(torch: Mapping[str, Any] | None, driver: NvidiaDriver) -> list[DoctorRow]:
    """Return the rows of GPUs, driver and CUDA's libraries.

    Args:
        torch: what torch knows (`probe`); None: it cannot be imported, which is a row of its package.
    """
    status: Status = "note" if driver.failure else "ok" if driver.version else "absent"
    rows = [DoctorRow(GPUS, "driver", driver.version or "-", status=status, message=driver.failure)]
    if torch is None:
        return rows + [DoctorRow(GPUS, f"GPU {i}", name) for i, name in enumerate(driver.gpus)]
    for library in ("CUDA", "NCCL", "cuDNN"):
        version = torch[library.lower()]
        message = "of this build of torch" if version else "not in this build of torch"
        rows.append(DoctorRow(GPUS, library, version or "-", status="ok" if version else "absent", message=message))
    for i, gpu in enumerate(torch["gpus"]):
        capability = tuple(map(int, gpu["capability"].split(".")))
        value = f"{gpu['name']}, {gpu['memory'] / GIB:.0f} GiB, compute capability {gpu['capability']}"
        message = "" if capability >= _FP8_FROM else "no --fp8, which needs Hopper (9.0) or newer"
        rows.append(DoctorRow(GPUS, f"GPU {i}", value, message=message))
    if not torch["gpus"]:
        rows.append(_no_gpu(torch, driver))
    return rows


def _no_gpu(torch: Mapping[str, Any], driver: NvidiaDriver) -> DoctorRow:
    """Return why torch sees no GPU: there is none, it is hidden, or torch cannot use it."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = ", ".join(driver.gpus) or "a driver for GPUs"
    if driver.version is None:
        return DoctorRow(GPUS, "GPU", "-", status="absent", message="training runs on the CPU, over gloo")
    if hidden is not None and (not hidden or hidden.startswith("-")):
        return DoctorRow(GPUS, "GPU", "-", status="note", message=f"hidden by CUDA_VISIBLE_DEVICES={hidden}: unset it")
    if torch["cuda"] is None:
        why = "this torch is built for CPUs: install the build for CUDA (make venv-gpu, docs/install.md)"
    else:
        reason = torch["warning"] or "no reason is known"
        why = f"torch, built for CUDA {torch['cuda']}, sees no GPU with driver {driver.version}: {reason}"
    return DoctorRow(GPUS, "GPU", "-", status="problem", message=f"the machine has {listed}, but {why}")


def limit_rows(num_gpus: int) -> list[DoctorRow]:
    """Return the rows of disk space, shared memory and open files."""
    return [_temporary_row(), _shared_memory_row(num_gpus), _files_row()]


def _temporary_row() -> DoctorRow:
    try:
        folder = tempfile.gettempdir()
    except OSError as error:
        message = f"{error.strerror}: name a writable folder in TMPDIR"
        return DoctorRow(LIMITS, "temporary folder", "-", status="problem", message=message)
    free = shutil.disk_usage(folder).free
    value = f"{folder}, {free / GIB:.1f} GiB free"
    if free < GIB:
        return DoctorRow(LIMITS, "temporary folder", value, status="note", message="TMPDIR names another folder")
    return DoctorRow(LIMITS, "temporary folder", value)


def _shared_memory_row(num_gpus: int) -> DoctorRow:
    name = str(_SHARED_MEMORY)
    if not _SHARED_MEMORY.is_dir():
        return DoctorRow(LIMITS, name, "-", status="note" if num_gpus > 1 else "absent", message="NCCL uses it")
    usage = shutil.disk_usage(_SHARED_MEMORY)
    value = f"{usage.total / GIB:.1f} GiB, {usage.free / GIB:.1f} GiB free"
    if num_gpus > 1 and usage.free < GIB:
        message = "NCCL uses it between GPUs: docker run --shm-size=1g, or --ipc=host"
        return DoctorRow(LIMITS, name, value, status="note", message=message)
    return DoctorRow(LIMITS, name, value)


def _files_row() -> DoctorRow:
    soft, hard = (
        str(x) if x != resource.RLIM_INFINITY else "unlimited" for x in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    value = f"{soft} now, at most {hard}"
    message = f"runs raise it, to {MOST_FILES} if they may"
    if hard.isdecimal() and int(hard) < _FEW_FILES:
        message = f"few for large datasets and many ranks: raise the hard limit (ulimit -Hn {MOST_FILES})"
        return DoctorRow(LIMITS, "open files", value, status="note", message=message)
    return DoctorRow(LIMITS, "open files", value, message=message)


def tool_rows(*, builds_kernels: bool) -> list[DoctorRow]:
    """Return the rows of programs. builds_kernels: runs will use Transformer Engine, beside which Triton compiles."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang")), None)
    usable = can_build_kernels()
    status: Status = "ok" if usable else "problem" if builds_kernels else "absent"
    message = "Triton's kernels" if usable or not builds_kernels else NO_COMPILER
    container = next(filter(shutil.which, ENGINES), None)
    rows = [DoctorRow(TOOLS, "C compiler and Python.h", compiler or "-", status=status, message=message)]
    return [
        *rows,
        _tool(" or ".join(ENGINES), container, "--sif-path"),
        _tool("sbatch", "sbatch" if shutil.which("sbatch") else None, "--submit"),
        _tool("scontrol", "scontrol" if shutil.which("scontrol") else None, "SLURM jobs on several nodes"),
    ]


def _tool(name: str, program: str | None, purpose: str) -> DoctorRow:
    path = None if program is None else shutil.which(program)
    return DoctorRow(TOOLS, name, path or "-", status="ok" if path else "absent", message=purpose)


def environment_rows(environ: Mapping[str, str], *, on_gpus: bool) -> list[DoctorRow]:
    """Return a row of every variable that is set and changes how runs go, and what `train` sets on GPUs."""
    rows = []
    for name in sorted(environ):
        if name.startswith(_PREFIXES) or name in _NAMES:
            slow = _SLOW.get(name, "") if environ[name] == "1" else ""
            rows.append(DoctorRow(ENVIRONMENT, name, environ[name], status="note" if slow else "ok", message=slow))
    if on_gpus:
        defaults = [LAUNCH_QUEUES, GRAPH_REGISTER]
        defaults += [] if any(x in environ for x in ALLOCATOR_NAMES) else [(ALLOCATOR_NAMES[0], ALLOCATOR)]
        rows += [
            DoctorRow(ENVIRONMENT, name, value, message="not set; train sets it")
            for name, value in defaults
            if name not in environ
        ]
    return rows
