"""Rules for fully sharded data parallelism (--fsdp)."""

from __future__ import annotations

from collections.abc import Iterator

from llava_mcore.config.schema import RunConfig


def check_fully_sharded(run: RunConfig, world_size: int) -> Iterator[str]:
    """Yield options that do not work with --fsdp."""
    parallel = run.parallel
    if parallel.fsdp == "none":
        return
    flag = f"--fsdp {parallel.fsdp}"
    if parallel.pipeline_model_parallel_size > 1:
        yield f"{flag} works with --pp 1 only: use --tp and --fsdp, or --pp and --dist-optim"
    yield from _check_replicas(run, world_size)
    yield from _check_precision(run, flag)
    yield from _check_model(run, flag)
    yield from _check_operation(run, flag)


def _check_replicas(run: RunConfig, world_size: int) -> Iterator[str]:
    """Yield why the data-parallel ranks cannot be divided into groups."""
    parallel, replicas = run.parallel, run.parallel.hsdp_replicas
    per_replica = parallel.replica_size
    if replicas == 1 or world_size % per_replica:
        return
    ranks = world_size // per_replica * parallel.context_parallel_size
    if ranks % replicas or ranks == replicas:
        fitting = [str(n) for n in range(2, ranks) if ranks % n == 0]
        advice = f"use --hsdp {' or '.join(fitting)}" if fitting else "omit it"
        cp = " x context" if parallel.context_parallel_size > 1 else ""
        yield f"--hsdp {replicas} does not divide the {ranks} data-parallel{cp} ranks into groups of several: {advice}"


def _check_precision(run: RunConfig, flag: str) -> Iterator[str]:
    """Yield number formats and optimizers that Megatron-FSDP does not support."""
    optimizer = run.optimizer
    if run.training.precision == "fp16":
        yield f"{flag} does not work with the loss scale of --precision fp16: use bf16"
    if run.training.fp8:
        yield f"{flag} does not work with --fp8 yet: omit one of them, or use --dist-optim in place of {flag}"
    if optimizer.use_precision_aware_optimizer:
        yield f"{flag} does not work with optimizer.use_precision_aware_optimizer: omit one of them"
    if optimizer.cpu_offload:
        yield f"{flag} does not work with an optimizer on the host: omit optimizer.cpu_offload, or {flag}"


def _check_model(run: RunConfig, flag: str) -> Iterator[str]:
    """Yield parts of the model that cannot be divided."""
    if run.model.cuda_graphs:
        yield f"{flag} does not work with --cuda-graphs, whose weights must stay where they are: omit one of them"
    if run.adapter.expert_r:
        yield f"{flag} does not work with adapters on experts: omit adapter.expert_r, or use --dist-optim"
    if run.adapter.quantize != "none":
        yield f"{flag} does not divide quantized weights: omit --lora-quantize, or use --dist-optim in place of {flag}"


def _check_operation(run: RunConfig, flag: str) -> Iterator[str]:
    """Yield tasks of a run that need whole weights."""
    if run.checkpoint.non_persistent_local_dir is not None:
        yield f"{flag} does not save to node-local disks: omit --non-persistent-local-ckpt-dir"
    if run.parallel.divides_weights and run.validation.eval_generate is not None:
        yield (
            f"--eval-generate writes answers of different lengths on each model replica, and with {flag} replicas "
            "gather weights from each other: omit it, or use --fsdp optim_grads"
        )
