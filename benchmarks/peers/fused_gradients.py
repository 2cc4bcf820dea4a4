"""Apex's kernels that add a weight's gradient to an fp32 buffer inside the matrix product, by Transformer Engine."""

from __future__ import annotations

import importlib.machinery
import sys
import types

import torch
from torch import Tensor


def install() -> None:
    """Let `import apex` and `import fused_weight_gradient_mlp_cuda` find Transformer Engine's product.

    Call before anything imports megatron.core.
    """
    for name in ("apex", "fused_weight_gradient_mlp_cuda"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
    for name in ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"):
        setattr(sys.modules["fused_weight_gradient_mlp_cuda"], name, accumulate)


def accumulate(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add gradᵀ · input to the buffer."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm  # imports the product's patched modules

    x, gradient = total_input.flatten(0, -2), grad_output.flatten(0, -2)
    general_gemm(x, gradient, out_dtype=main_grad.dtype, layout="NT", grad=True, out=main_grad, accumulate=True)


def check(device: torch.device) -> None:
    """Stop where Transformer Engine's product does not do what apex's does."""
    draw = torch.Generator(device).manual_seed(1)
    x = torch.randn(64, 32, device=device, generator=draw).bfloat16()
    gradient = torch.randn(64, 48, device=device, generator=draw).bfloat16()
    out = torch.ones(48, 32, device=device)
    accumulate(x, gradient, out)
    torch.testing.assert_close(out, 1 + gradient.float().t() @ x.float(), atol=0.1, rtol=0.02)
