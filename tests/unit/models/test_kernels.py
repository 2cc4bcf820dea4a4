"""Our kernels without a GPU: interpreted, and compiled for one. tests/gpu/test_kernels.py runs them."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (before megatron.core)

import os
import subprocess
import sys
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llava_mcore.models.kernels import add_gradients, logit_gradients, quantize_fp8, split_rotated, window_attention

HOPPER = GPUTarget("cuda", 90, 32)
ROTARY = {"SIZE": 128, "HALF": 64, "HALF_TILE": 64, "REST": 0, "REST_TILE": 1, "ROWS": 4, "GROUPS": 4, "QUERIES": 7}
ROTARY |= {"PADDED": 128, "PADDING_TILE": 1}
PADDED = {"SIZE": 72, "HALF": 36, "PADDED": 96, "PADDING_TILE": 32}
WINDOWS = {"SIZE": 80, "SIZE_TILE": 128, "LONGEST": 64}
LOGITS = {"ROWS": 32128, "NUM_TRUE": 32000, "BLOCK": 4096}
TILES = {"ROWS": 128, "COLUMNS": 64}
KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "split": (split_rotated._split_rotated, ROTARY | {"JOINS": False}),
    "split with padding": (split_rotated._split_rotated, ROTARY | PADDED | {"JOINS": False}),
    "join with padding": (split_rotated._split_rotated, ROTARY | PADDED | {"JOINS": True}),
    "join": (split_rotated._split_rotated, ROTARY | {"JOINS": True}),
    "parts of heads": (split_rotated._split_rotated, ROTARY | {"HALF": 32, "REST": 64, "REST_TILE": 64, "JOINS": True}),
    "windows": (window_attention._forward, WINDOWS),
    "windows, backward": (window_attention._backward, WINDOWS),
    "losses": (logit_gradients._log_sum_and_target, LOGITS),
    "gradients of logits": (logit_gradients._into_gradients, LOGITS),
    "rows in FP8": (quantize_fp8._rows, {"TILE": 2048}),
    "sums of gradients": (add_gradients._add, {"BLOCK": 4096}),
    "matrices in FP8": (quantize_fp8._matrices, TILES),
}
OTHERS = {"angles": "*fp32", "bounds": "*i32", "heads": "i32", "scale": "fp32"}
OTHERS |= {"local": "*i64"} | dict.fromkeys(("logits", "log_sum", "target", "at_target"), "*fp32")
OTHERS |= {"total": "*fp32", "count": "i32"}
OTHERS |= {"values": "*fp8e4nv", "scales": "*fp32"} | dict.fromkeys(("height", "width"), "i32")
"""Types of the arguments that are not bf16 tensors."""


def test_interpreted_kernels_compute_what_torch_does() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.interpreted_kernels"]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("17 shapes agree\n")


@pytest.mark.parametrize(("kernel", "constants"), KERNELS.values(), ids=KERNELS)
def test_they_compile_for_hopper(kernel: Any, constants: dict[str, Any]) -> None:
    types = {name: "constexpr" if name in constants else OTHERS.get(name, "*bf16") for name in kernel.arg_names}
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    found = triton.compile(ASTSource(kernel, types, fixed), target=HOPPER)
    assert ".target sm_90" in found.asm["ptx"]
