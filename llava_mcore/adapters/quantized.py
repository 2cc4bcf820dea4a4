"""Matrices in fewer bits: NF4 with double quantization (QLoRA, Dettmers et al. 2023, arXiv 2305.14314), and FP8.

NF4's codes are those that bitsandbytes gives each Hugging Face matrix, bit for bit, at every tensor-parallel size:
a block is 64 values of a row, and the blocks of 256 scales are those of the whole matrix, which ranks gather.

o: outputs of a megatron-core layer on this rank, h: its inputs on this rank, n: blocks of a row on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from llava_mcore.adapters.linear_layers import MegatronLinear
from llava_mcore.errors import ConfigError

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)
import logging
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from llava_mcore.adapters.attach import linear_modules
from llava_mcore.adapters.linear_layers import ModelLayers
from llava_mcore.compat.megatron.frozen_linears import keep_in_fp8
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.parallel.groups import Groups

NF4_BLOCK, SCALE_BLOCK, FP8_BLOCK = 64, 256, 128
_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max

Gather = Callable[[Tensor], list[Tensor]]
"""Returns the tensors of all tensor-parallel ranks."""


class Quantized(Protocol):
    """A matrix that is kept in fewer bits. `num_weights`, `num_bytes`: of this rank's part."""

    @property
    def num_weights(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def dequantize(self) -> Tensor:
        """Return [o, h] in the dtype of computation."""
        ...


@dataclass(frozen=True)
class Nf4:
    """`codes` [o, h / 2] two to a byte, `scale_codes` [o, n]; `scales` of blocks of scales, of all members.

    Row i's scales are numbers `position[i]` and following of its member's, whose blocks begin at `first_scale[i]`, and
    whose mean is `offset[i]`.
    """

    codes: Tensor
    scale_codes: Tensor
    scales: Tensor
    position: Tensor
    first_scale: Tensor
    offset: Tensor
    map: Tensor
    dtype: torch.dtype

    @property
    def num_weights(self) -> int:
        return 2 * self.codes.numel()

    @property
    def num_bytes(self) -> int:
        tensors = (self.codes, self.scale_codes, self.scales, self.position, self.first_scale, self.offset)
        return sum(x.nbytes for x in tensors)

    def absmax(self) -> Tensor:
        """Return the largest value of every block, [o, n], as bitsandbytes restores it."""
        count = self.scale_codes.shape[1]
        index = self.position[:, None] + torch.arange(count, device=self.position.device)
        scale = self.scales[self.first_scale[:, None] + index // SCALE_BLOCK]
        return self.map[self.scale_codes.int()] * scale + self.offset[:, None]

    def dequantize(self) -> Tensor:
        """Return [o, h] in the dtype of computation."""
        rows, half = self.codes.shape
        return torch.ops.bitsandbytes.dequantize_4bit.default(
            self.codes.view(-1, 1), self.absmax().flatten(), NF4_BLOCK, "nf4", [rows, 2 * half], self.dtype
        )


def to_nf4(weight: Tensor, linear: MegatronLinear, tp_size: int, tp_rank: int, gather: Gather) -> Nf4:
    """Quantize a rank's part of a layer; a collective call.

    Raises:
        ConfigError: blocks would cross the borders of ranks or rows.
    """
    from bitsandbytes import functional  # of the extra `qlora`

    # Codes: each Hugging Face matrix in blocks of a row, as PEFT quantizes the whole matrix.
    check_block(weight, linear, NF4_BLOCK, tp_size)
    layout, members = linear.blocks(tp_size)
    parts = layout.to_hf(weight)
    quantized = [functional.quantize_4bit(x.contiguous(), blocksize=NF4_BLOCK, quant_type="nf4") for x in parts]
    codes = [packed.view(len(x), -1) for (packed, _), x in zip(quantized, parts, strict=True)]
    absmax = [state.absmax.view(len(x), -1) for (_, state), x in zip(quantized, parts, strict=True)]
    # Scales of blocks are quantized again. Blocks of scales span rows and ranks: a rank gathers the scales of the
    # whole matrix, quantizes them as one, and keeps those of its rows.
    columns: dict[str, list[Tensor]] = {name: [] for name in ("scale_codes", "position", "first_scale", "offset")}
    scales: list[Tensor] = []
    map_of_scales = weight.new_empty(0)
    for member in dict.fromkeys(members):
        local = [absmax[i] for i, owner in enumerate(members) if owner == member]
        full = _gathered(local, linear, gather)
        offset = full.mean()
        scale_codes, state = functional.quantize_blockwise(full.flatten() - offset, blocksize=SCALE_BLOCK)
        map_of_scales = state.code
        for rows, first_column in _own_rows(local, full, linear, tp_size, tp_rank):
            part = scale_codes.view_as(full)[rows, first_column : first_column + local[0].shape[1]]
            columns["scale_codes"].append(part)
            columns["position"].append(rows * full.shape[1] + first_column)
            columns["first_scale"].append(torch.full_like(rows, sum(map(len, scales))))
            columns["offset"].append(offset.expand(len(rows)))
        scales.append(state.absmax)
    # Back to the order of Megatron's rows.
    ordered = {name: layout.to_megatron(*parts).contiguous() for name, parts in columns.items()}
    return Nf4(
        codes=layout.to_megatron(*codes).contiguous(),
        scales=torch.cat(scales),
        map=map_of_scales,
        dtype=weight.dtype,
        **ordered,
    )


def _gathered(local: list[Tensor], linear: MegatronLinear, gather: Gather) -> Tensor:
    """Return the scales of a whole Hugging Face matrix, of a rank's parts of its blocks of rows."""
    if linear.is_row_parallel:
        return torch.cat(gather(local[0]), dim=1)
    return torch.cat([x for block in local for x in gather(block)])


def _own_rows(
    local: list[Tensor], full: Tensor, linear: MegatronLinear, tp_size: int, tp_rank: int
) -> list[tuple[Tensor, int]]:
    """Return which rows of the whole matrix a rank's blocks are, and the first column."""
    if linear.is_row_parallel:
        return [(torch.arange(len(full), device=full.device), tp_rank * local[0].shape[1])]
    row_ranges, start = [], 0
    for block in local:
        row_ranges.append((torch.arange(len(block), device=full.device) + start + tp_rank * len(block), 0))
        start += tp_size * len(block)
    return row_ranges


@dataclass(frozen=True)
class Fp8:
    """`codes` [o, h] in e4m3; `scales` [o, n]: the factors of blocks of 128 values of a row."""

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def num_weights(self) -> int:
        return self.codes.numel()

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def dequantize(self) -> Tensor:
        """Return [o, h] in the dtype of computation."""
        blocks = self.codes.to(self.dtype).unflatten(1, (self.scales.shape[1], -1))
        return (blocks * self.scales[..., None].to(self.dtype)).flatten(1)


def to_fp8(weight: Tensor, linear: MegatronLinear, tp_size: int, tp_rank: int, gather: Gather) -> Fp8:
    """Quantize a rank's part of a layer.

    Raises:
        ConfigError: blocks would cross the borders of ranks or rows.
    """
    check_block(weight, linear, FP8_BLOCK, tp_size)
    blocks = weight.float().unflatten(1, (-1, FP8_BLOCK))
    scales = _fp8_scales(blocks.abs().amax(-1), weight.dtype)
    codes = (blocks / scales[..., None]).clamp(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn)
    return Fp8(codes.flatten(1), scales, weight.dtype)


def _fp8_scales(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factors of blocks in fp32, of their largest absolute values.

    They are rounded to the dtype in which they are used, so that codes are made with the factor that undoes them. In
    fp16 small ones are rounded up: to 0, a block would become NaN, and by a fraction less, its codes would overflow.
    """
    scales = largest.clamp(min=1e-12) / _LARGEST_FP8
    if dtype == torch.float16:
        step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # between subnormal numbers
        is_subnormal = scales < torch.finfo(dtype).smallest_normal
        scales = torch.where(is_subnormal, (scales / step).ceil() * step, scales)
    return scales.to(dtype).float()


def check_block(weight: Tensor, linear: MegatronLinear, block: int, tp_size: int) -> None:
    """Raise ConfigError unless a rank's part of every row holds whole blocks."""
    if weight.shape[1] % block:
        name = linear.members[0].name
        size = weight.shape[1] * (tp_size if linear.is_row_parallel else 1)
        where = f" on each of {tp_size} tensor-parallel ranks" if linear.is_row_parallel and tp_size > 1 else ""
        raise ConfigError(
            f"--lora-quantize: the {size} inputs of {name} are not a whole number of blocks of {block}{where}: use "
            f"{'a smaller --tp, or ' if where else ''}another format, or omit it"
        )


QUANTIZERS: dict[str, Any] = {"nf4": to_nf4, "fp8": to_fp8}


logger = logging.getLogger(__name__)

PART = "language_model"
"""The part whose layers are quantized: it has nearly all weights."""


def multiply_in_fp8(models: Sequence[VisionLanguageModel], layers: ModelLayers) -> None:
    """Keep the frozen linear layers of a rank's chunks in FP8 only; Transformer Engine multiplies in it."""
    modules = [module for model in models for _, module in frozen_linears(model, layers)]
    for module in modules:
        keep_in_fp8(module)
    weights = sum(module.weight.numel() for module in modules)
    logger.info("fp8: %s weights of this rank's %d layers have no 16-bit copy", f"{weights:,}", len(modules))


def frozen_linears(model: VisionLanguageModel, layers: ModelLayers) -> Iterator[tuple[MegatronLinear, Any]]:
    """Yield the linear layers of PART that are not trained."""
    modules = linear_modules(model)
    for linear in layers.linears:
        module = modules.get(linear.name)
        if module is not None and linear.members[0].part == PART and not module.weight.requires_grad:
            yield linear, module


def gather_parts(x: Tensor, groups: Groups) -> list[Tensor]:
    """Return a tensor of every tensor-parallel rank."""
    if groups.tp_size == 1:
        return [x]
    parts = [torch.empty_like(x) for _ in range(groups.tp_size)]
    dist.all_gather(parts, x.contiguous(), group=groups.tensor_parallel)
    return parts
