"""Rules for messages of tensor parallelism that overlap with matrix products (--tp-comm-overlap)."""

from __future__ import annotations

from collections.abc import Iterator

from llava_mcore.config.rules.dims import ModelDims
from llava_mcore.config.schema import RunConfig

FLAG = "--tp-comm-overlap"


def check_tensor_overlap(run: RunConfig, device_available: bool) -> Iterator[str]:
    """Yield options that do not work with --tp-comm-overlap."""
    parallel, training = run.parallel, run.training
    if not parallel.tp_comm_overlap:
        return
    if not device_available:
        yield f"{FLAG} sends messages between GPUs, and none was found: omit it"
    if run.model.transformer_impl == "local":
        yield f"{FLAG} is for Transformer Engine's layers: omit it, or model.transformer_impl local"
    if not run.data.packing:
        yield f"{FLAG} needs passes of one size, to which packs are filled up: add --packing, or omit it"
    if parallel.context_parallel_size > 1:
        yield f"{FLAG} does not work with --cp yet: omit one of them"
    if parallel.fsdp != "none":
        yield f"{FLAG} does not work with --fsdp yet: omit one of them, or use --dist-optim"
    if run.adapter.is_on:
        yield f"{FLAG} does not work with adapters, which send messages of their own: omit it"
    if training.fp8 and training.fp8_recipe == "blockwise":
        yield f"{FLAG} does not work with --fp8-recipe blockwise: use delayed or tensorwise, or omit it"


def check_overlapped_model(run: RunConfig, dims: ModelDims, source: str) -> Iterator[str]:
    """Yield layers whose messages cannot overlap."""
    if not run.parallel.tp_comm_overlap:
        return
    for kind, count in (
        ("mixtures of experts", dims.num_experts),
        ("gated delta nets", dims.delta_key_heads),
        ("layers that attend to images", dims.num_cross_layers),
    ):
        if count:
            yield f"{FLAG} does not work with {kind}, which {source} has: omit it"
