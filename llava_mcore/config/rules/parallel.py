"""Rules for the options that save memory or time."""

from __future__ import annotations

from collections.abc import Iterator

from llava_mcore.config.rules.adapter import trains_tower
from llava_mcore.config.rules.dims import ModelDims
from llava_mcore.config.schema import ParallelConfig, RunConfig

OVERLAP = "--tp-comm-overlap"


def check_options(run: RunConfig, device_available: bool) -> Iterator[str]:
    """Yield options that have no effect or cannot work here."""
    model, parallel = run.model, run.parallel
    if model.recompute_vision != "none" and not trains_tower(run):
        yield (
            "model.recompute_vision has no effect on a frozen vision tower, which stores no activations: omit it, or "
            "train the tower with model.freeze_vision_model=false"
        )
    if model.cuda_graphs:
        yield from _check_graphs(run, device_available)
    yield from _check_overlap(run, device_available)
    yield from _check_optimizer(run, device_available)
    yield from check_balance(parallel)
    uneven_too = parallel.num_layers_per_virtual_pipeline_stage is not None and has_uneven_stages(parallel)
    uneven_too = uneven_too and parallel.balance == "none"  # else `check_balance` reports it
    if uneven_too and parallel.pipeline_model_parallel_size > 1:
        yield (
            "parallel.num_layers_per_virtual_pipeline_stage needs stages of equal size: omit it, or "
            "parallel.num_layers_in_first_pipeline_stage and …_last_…"
        )


def replica_words(parallel: ParallelConfig) -> str:
    """Return the factors of a model replica's size, as flags."""
    cp = parallel.context_parallel_size
    middle = f" x --cp {cp}" if cp > 1 else ""
    return f"--tp {parallel.tensor_model_parallel_size}{middle} x --pp {parallel.pipeline_model_parallel_size}"


def check_balance(parallel: ParallelConfig) -> Iterator[str]:
    """Yield keys that decide what parallel.balance would."""
    if parallel.balance == "none" or parallel.pipeline_model_parallel_size == 1:
        return
    decided = {
        "num_layers_in_first_pipeline_stage": parallel.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": parallel.num_layers_in_last_pipeline_stage,
        "num_layers_per_virtual_pipeline_stage": parallel.num_layers_per_virtual_pipeline_stage,
    }
    keys = [f"parallel.{name}" for name, value in decided.items() if value is not None]
    if keys:
        yield f"parallel.balance auto divides the layers by itself, into one chunk per stage: omit {' and '.join(keys)}"


def _check_graphs(run: RunConfig, device_available: bool) -> Iterator[str]:
    flag = "--cuda-graphs"
    if not device_available:
        yield f"{flag} captures layers on GPUs, and none was found: omit the flag"
    if run.model.transformer_impl == "local":
        yield f"{flag} captures Transformer Engine's layers: omit the flag, or model.transformer_impl local"
    if run.parallel.pipeline_model_parallel_size > 1:
        yield f"{flag} works with --pp 1 only, because a pipeline has several micro-batches in flight: omit it"
    if run.model.recompute != "none":
        yield f"{flag} does not work with --recompute {run.model.recompute}: omit one of them"
    if run.adapter.dropout:
        yield f"{flag} does not work with --lora-dropout: omit one of them"
    if run.model.cuda_graphs_vision and run.model.recompute_vision != "none":
        yield "--cuda-graphs-vision does not work with model.recompute_vision: omit one of them"
    if run.model.cuda_graphs_vision and not trains_tower(run):
        yield "--cuda-graphs-vision captures a trained tower: train it, adapt it, or omit the flag"


def _check_overlap(run: RunConfig, device_available: bool) -> Iterator[str]:
    """Yield options that do not work with --tp-comm-overlap."""
    parallel, training = run.parallel, run.training
    if not parallel.tp_comm_overlap:
        return
    if not device_available:
        yield f"{OVERLAP} sends messages between GPUs, and none was found: omit it"
    per_node, tp = run.launch.num_gpus, parallel.tensor_model_parallel_size
    if per_node > 0 and per_node % tp:
        yield f"{OVERLAP} works between GPUs of a node, which has {per_node}: lower --tp {tp} to a divisor, or omit it"
    if run.model.transformer_impl == "local":
        yield f"{OVERLAP} is for Transformer Engine's layers: omit it, or model.transformer_impl local"
    if not run.data.packing:
        yield f"{OVERLAP} needs passes of one size, to which packs are filled up: add --packing, or omit it"
    if parallel.context_parallel_size > 1:
        yield f"{OVERLAP} does not work with --cp yet: omit one of them"
    if parallel.fsdp != "none":
        yield f"{OVERLAP} does not work with --fsdp yet: omit one of them, or use --dist-optim"
    if run.adapter.is_on:
        yield f"{OVERLAP} does not work with adapters, which send messages of their own: omit it"
    if training.fp8 and training.fp8_recipe == "blockwise":
        yield f"{OVERLAP} does not work with --fp8-recipe blockwise: use delayed or tensorwise, or omit it"


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
            yield f"{OVERLAP} does not work with {kind}, which {source} has: omit it"


def _check_optimizer(run: RunConfig, device_available: bool) -> Iterator[str]:
    optimizer = run.optimizer
    key = "optimizer.use_precision_aware_optimizer"
    if not optimizer.use_precision_aware_optimizer:
        return
    if not device_available:
        yield f"{key} needs GPUs and Transformer Engine, and no GPU was found: omit it"
    if not run.parallel.divides_optimizer:
        yield f"{key} works inside the distributed optimizer only: add --dist-optim"
    if run.training.precision == "fp32":
        yield f"{key} keeps fp32 weights in addition to half-precision ones: omit --precision fp32"


def check_stages(run: RunConfig, dims: ModelDims, world_size: int, source: str) -> Iterator[str]:
    """Yield why the language model's layers cannot be divided over the stages as requested.

    `check_layout` checks stages of equal size.
    """
    parallel = run.parallel
    pp, layers = parallel.pipeline_model_parallel_size, dims.num_layers
    if pp == 1 or parallel.balance == "auto":
        return
    # Features that are added in later layers stay on the first stage.
    stages = (
        f"--pp {pp}, parallel.num_layers_in_first_pipeline_stage {parallel.num_layers_in_first_pipeline_stage}, "
        f"parallel.num_layers_per_virtual_pipeline_stage {parallel.num_layers_per_virtual_pipeline_stage}"
    )
    advice = "give the first stage more, or lower --pp"
    yield from check_deepstack(
        dims.num_deepstack_layers, _layers_of_first_chunk(parallel, layers), source, stages, advice
    )
    # Uneven stages: what the first and the last leave is divided evenly.
    if has_uneven_stages(parallel):
        ends = [parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage]
        rest, others = layers - sum(n or 0 for n in ends), pp - sum(n is not None for n in ends)
        if rest < others or (rest % others if others else rest):
            advice = f"leave {others} or a multiple of it" if others else f"their sum must be {layers}"
            yield (
                f"parallel.num_layers_in_first_pipeline_stage {ends[0]} and …_last_… {ends[1]} leave {rest} of the "
                f"{layers} layers of {source} to {others} other stages (--pp {pp}): {advice}"
            )
        return
    # Interleaving: chunks divide a stage, and micro-batches come in groups of one per stage.
    chunk = parallel.num_layers_per_virtual_pipeline_stage
    if chunk is None or layers % pp:
        return
    fitting = [str(n) for n in range(1, layers // pp) if layers // pp % n == 0]
    if str(chunk) not in fitting:
        yield (
            f"parallel.num_layers_per_virtual_pipeline_stage {chunk} does not divide the {layers // pp} layers of a "
            f"stage of {source} into several chunks: use {' or '.join(fitting) or 'no interleaving'}"
        )
    replicas = max(1, world_size // parallel.replica_size)
    ramp = run.training.ramp
    for size in (run.training.global_batch_size, *(() if ramp is None else (ramp.start, ramp.increment))):
        micro_batches = size // (run.training.micro_batch_size * replicas)
        if micro_batches % pp:
            yield (
                f"an interleaved pipeline needs a number of micro-batches that is a multiple of --pp {pp}, not "
                f"{micro_batches} = {size} / --micro-batch-size / data-parallel ranks: change a batch size"
            )


def check_deepstack(num_deepstack: int, num_first: int, source: str, stages: str, advice: str) -> list[str]:
    """Return why features of inner layers of the tower would not reach all decoder layers that add them.

    Args:
        num_deepstack: decoder layers that add some: a stage hands only hidden states to the next.
        num_first: decoder layers beside the tower.
        source: names the model.
        stages: says how it is divided.
        advice: what to do.
    """
    if num_first >= num_deepstack:
        return []
    return [
        f"features of the vision tower are added after the first {num_deepstack} layers of {source}, so these must be "
        f"on the first stage, which has {num_first} ({stages}): {advice}"
    ]


def _layers_of_first_chunk(parallel: ParallelConfig, layers: int) -> int:
    """Return the layers that run beside the vision tower."""
    if parallel.num_layers_in_first_pipeline_stage is not None:
        return parallel.num_layers_in_first_pipeline_stage
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        return parallel.num_layers_per_virtual_pipeline_stage
    last = parallel.num_layers_in_last_pipeline_stage
    pp = parallel.pipeline_model_parallel_size
    return layers // pp if last is None else (layers - last) // (pp - 1)


def has_uneven_stages(parallel: ParallelConfig) -> bool:
    """Return whether the first or the last stage has its own number of layers, or will have."""
    return (
        parallel.balance == "auto"
        or parallel.num_layers_in_first_pipeline_stage is not None
        or parallel.num_layers_in_last_pipeline_stage is not None
    )
