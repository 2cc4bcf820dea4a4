"""Bitwise equal reruns."""

from __future__ import annotations

import os

import torch


def make_deterministic() -> None:
    """Allow deterministic kernels only. Call before CUDA starts; torch raises where no such kernel exists."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
    os.environ.setdefault("NCCL_ALGO", "Ring")  # one order of summation
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # Transformer Engine's attention; megatron-core insists on it
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
