"""Rules for context parallelism (`--cp`): what it needs, and what does not work with it yet."""

from __future__ import annotations

from collections.abc import Iterator

from llava_mcore.config.rules.dims import ModelDims
from llava_mcore.config.schema import RunConfig


def check_context(run: RunConfig, device_available: bool) -> Iterator[str]:
    """Yield options that contradict context parallelism. For what the model allows see `check_context_model`."""
    parallel, data = run.parallel, run.data
    cp = parallel.context_parallel_size
    if data.sample_multiple is not None and data.sample_multiple % (2 * cp):
        yield (
            f"data.sample_multiple {data.sample_multiple} is not a multiple of {2 * cp} = 2 x --cp {cp}, the chunks "
            "that a sample is cut into: change it, or omit it"
        )
    elif data.sample_multiple is not None and data.seq_length % data.sample_multiple:
        yield (
            f"--seq-length {data.seq_length} is not a multiple of data.sample_multiple {data.sample_multiple}, to "
            "which a sample of nearly that length is rounded up: change one of them"
        )
    if cp == 1:
        return
    flag = f"--cp {cp}"
    uses_engine = device_available and run.model.transformer_impl != "local"
    # Transformer Engine decides how ranks exchange keys and values.
    comm_type = parallel.cp_comm_type
    if comm_type is not None and not uses_engine:
        yield "--cp-comm-type chooses how Transformer Engine's attention exchanges tokens, on GPUs: omit it"
    if comm_type == "a2a+p2p":
        yield from _check_levels(cp, parallel.cp_a2a_size)
    if uses_engine and run.training.precision == "fp32":
        yield (
            f"{flag}: with divided tokens, Transformer Engine's attention needs half precision: omit --precision fp32, "
            "or add model.transformer_impl=local"
        )
    if uses_engine and run.model.attention_backend == "flash" and not data.packing:
        yield f"{flag}: --flash-attn divides the tokens of packed samples only: add --packing, or use --fused-attn"


def _check_levels(cp: int, neighbors: int | None) -> Iterator[str]:
    """Yield why `cp` processes cannot be divided into groups of neighbors."""
    sizes = [n for n in range(2, cp) if cp % n == 0]
    if not sizes:
        yield f"--cp-comm-type a2a+p2p: --cp {cp} cannot be divided into groups of neighbors: use p2p or a2a"
    elif neighbors not in sizes:
        problem = "needs --cp-a2a-size" if neighbors is None else f"does not work with --cp-a2a-size {neighbors}"
        one_of = " or ".join(map(str, sizes))
        yield f"--cp-comm-type a2a+p2p {problem}: of --cp {cp} processes, {one_of} neighbors can exchange heads"


def check_context_model(run: RunConfig, dims: ModelDims, source: str) -> Iterator[str]:
    """Yield why the tokens of a model cannot be divided as requested."""
    parallel = run.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if cp == 1:
        return
    # With all-to-all, ranks divide the heads that tensor parallelism leaves.
    neighbors = parallel.cp_a2a_size
    neighbors = None if neighbors is None or cp % neighbors else neighbors  # else `_check_levels` reports it
    exchanging = {"a2a": ("--cp", cp), "a2a+p2p": ("--cp-a2a-size", neighbors)}
    flag, ranks = exchanging.get(parallel.cp_comm_type or "", ("", None))
    for quantity, size in (("attention", dims.num_attention_heads), ("key/value", dims.num_query_groups)):
        if ranks is not None and size % (tp * ranks):
            yield (
                f"--cp-comm-type {parallel.cp_comm_type} divides heads, and --tp {tp} x {flag} {ranks} = {tp * ranks} "
                f"does not divide the {size} {quantity} heads of {source}: lower {flag}, or use --cp-comm-type p2p"
            )
    yield from check_divided_tokens(dims, tp, cp, source)


def check_divided_tokens(dims: ModelDims, tp: int, cp: int, source: str) -> Iterator[str]:
    """Yield why `cp` processes cannot divide the tokens of a model, whose matrices `tp` processes divide.

    Delta nets read tokens in order, so processes divide their heads instead.
    """
    if cp == 1:
        return
    if dims.num_cross_layers:
        yield f"--cp {cp} does not work with the layers of {source} that attend to images: omit it"
    for quantity, size in (("key", dims.delta_key_heads), ("value", dims.delta_value_heads)):
        if size % (tp * cp):
            yield (
                f"--tp {tp} x --cp {cp} = {tp * cp} does not divide the {size} {quantity} heads of the delta nets of "
                f"{source}, which its processes divide: lower --cp"
            )
