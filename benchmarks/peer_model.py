"""The model of a Hugging Face peer: transformers' class, sharded by FSDP2, with the fastest parts available."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from benchmarks.peer_attention import NAME, chosen, register
from benchmarks.peer_classes import CLASSES

Reshard = Literal["forward", "backward", "step"]
"""When weights that were gathered from the other ranks are freed again: after each forward pass of a layer, after
its backward pass (`reshard_after_forward=False`), or after the last micro-batch of a step, which also sums gradients
locally until then. The later, the faster, and the more memory it takes."""
ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
CHUNK = 1024
"""Tokens whose logits are in memory at once, without Liger."""


@dataclass(frozen=True)
class Stack:
    """How a peer is built. `fp8`: torchao's float8 in the decoder layers, which are then compiled."""

    reshard: Reshard = "backward"
    recompute: bool = False
    fp8: bool = False
    compiled: bool = False
    packed: bool = True
    train_vision: bool = False

    @property
    def compiles(self) -> bool:
        """float8 without compilation is slower than bf16: its casts are then kernels of their own."""
        return self.compiled or self.fp8

    def uses_liger(self, device: torch.device) -> bool:
        """Its kernels are Triton's, for GPUs."""
        return device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None

    def describe(self, device: torch.device) -> str:
        """Return its components in words."""
        gathered = {"forward": "for a pass", "backward": "until the backward pass", "step": "for a whole step"}
        liger = self.uses_liger(device)
        attention = chosen(device.type)[0] if self.packed else "torch's SDPA with a mask"
        parts = [
            f"FSDP2 with weights gathered {gathered[self.reshard]}",
            f"attention: {attention}",
            "loss: Liger's fused linear cross-entropy" if liger else f"loss: chunks of {CHUNK} tokens",
            *(["float8 tensorwise by torchao with float8 all-gather"] if self.fp8 else []),
            "decoder layers compiled" if self.compiles else "Liger's layers" if liger else "transformers' layers",
            "decoder layers recomputed" if self.recompute else "nothing recomputed",
        ]
        return "; ".join(parts)


class Inputs:
    """One micro-batch. No container that FSDP looks into: it would move what must stay on the host to the GPU.

    `text`: arguments of the model's forward about tokens. `pictures`: those about images; without any
    (`has_pictures`), arguments of `get_image_features` for a blank one. `rows`: the flat [b * s] tokens that are
    trained, `targets`: what they predict.
    """

    def __init__(
        self,
        text: dict[str, Any],
        pictures: dict[str, Any],
        rows: Tensor,
        targets: Tensor,
        *,
        has_pictures: bool = True,
    ) -> None:
        self.text, self.pictures, self.rows, self.targets = text, pictures, rows, targets
        self.has_pictures = has_pictures


class Peer(nn.Module):
    """transformers' model with a loss that needs the output layer for trained tokens alone."""

    def __init__(self, model: PreTrainedModel, *, liger: bool) -> None:
        super().__init__()
        self.model = model
        self._liger, self._kind = liger, CLASSES[model.config.model_type]

    def forward(self, inputs: Inputs) -> Tensor:
        """Return the summed loss of the trained tokens."""
        weight, base = self.model.lm_head.weight, self.model.model
        pictures = {
            name: x.to(weight.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
            for name, x in inputs.pictures.items()
        }
        with sdpa_kernel(ATTENTION, set_priority=True):
            given = pictures if inputs.has_pictures else {}
            hidden = base(**inputs.text, **given, use_cache=False).last_hidden_state
            unused = [] if inputs.has_pictures else self._kind.unused(base, pictures)
        hidden = hidden.flatten(0, 1).index_select(0, inputs.rows)
        loss = self._loss(hidden, weight, inputs.targets)
        return loss + sum(0.0 * x.float().sum() for x in unused)

    def _loss(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        if not self._liger:
            return chunked_loss(hidden, weight, targets)
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return liger_fused_linear_cross_entropy(hidden, weight, targets, reduction="sum")


def chunked_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross-entropy of [n, h] hidden states; logits are computed twice and never all kept."""

    def of_chunk(x: Tensor, wanted: Tensor) -> Tensor:
        return nn.functional.cross_entropy((x @ weight.T).float(), wanted, reduction="sum")

    chunks = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
    return torch.stack([checkpoint(of_chunk, x, wanted, use_reentrant=False) for x, wanted in chunks]).sum()


def build(config: PretrainedConfig, stack: Stack, device: torch.device) -> Peer:
    """Return the sharded model with random weights; fp32 ones that are computed with in bf16, on GPUs."""
    torch.manual_seed(0)
    register()
    config = copy.deepcopy(config)  # which from_config changes
    kind = CLASSES[config.model_type]
    with init_empty_weights(include_buffers=False):
        model = kind.new(config, attn_implementation="sdpa", dtype=torch.float32)
    tower, decoder = model.model.get_submodule(kind.tower), model.model.language_model
    tower.requires_grad_(stack.train_vision)
    # As an argument of from_config, the name would make transformers look for a package on the hub.
    for part in [decoder] * stack.packed + [tower] * kind.packs_pictures:
        part.config._attn_implementation = NAME
    liger = stack.uses_liger(device)
    if liger and not stack.compiles:
        kind.use_liger(model)
    if stack.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if stack.fp8:
        use_float8(decoder.layers, emulate=device.type != "cuda")
    if stack.compiles:
        for layer in decoder.layers:
            layer.forward = torch.compile(layer.forward)  # without the hooks of FSDP, which would cut it in pieces
    peer = Peer(model, liger=liger)
    shard(peer, stack, device)
    with values_of_buffers(peer, device):
        peer.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            local = parameter.to_local()
            local.fill_(1.0) if local.ndim == 1 and "norm" in name else local.normal_(0, 0.02)
    return peer.train()


def shard(peer: Peer, stack: Stack, device: torch.device) -> None:
    """Give every decoder layer and the rest of the model to FSDP2.

    The tower goes with the root: sharded by itself, transformers no longer collects its hidden states.
    """
    low = torch.bfloat16 if device.type == "cuda" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    for layer in peer.model.model.language_model.layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=stack.reshard == "forward")
    fully_shard(peer, mp_policy=policy, reshard_after_forward=False)


def keep_gathered(peer: FSDPModule, stack: Stack, *, is_last: bool) -> None:
    """Say before a micro-batch whether its step continues after it."""
    if stack.reshard == "step":
        peer.set_requires_gradient_sync(is_last)
        peer.set_reshard_after_backward(is_last)


def use_float8(layers: nn.ModuleList, *, emulate: bool) -> None:
    """Replace the decoder layers' linear layers by torchao's float8 ones. `emulate`: in fp32, on a CPU."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(layers, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=emulate))


def after_update(peer: Peer, stack: Stack) -> None:
    """Compute the scales of all float8 weights at once, with one all-reduce, as torchao advises."""
    if stack.fp8:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(peer)


@contextmanager
def values_of_buffers(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Keep the values of buffers (rotary frequencies, positions) while the model's memory is allocated."""
    values = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name].to(device))
