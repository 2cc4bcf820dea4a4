"""Rules for models whose layers have mixtures of experts (Qwen3-MoE)."""

from __future__ import annotations

from collections.abc import Iterator

from llava_mcore.config.rules.delta_nets import FP8_MULTIPLE
from llava_mcore.config.rules.dims import ModelDims
from llava_mcore.config.schema import RunConfig


def check_experts(run: RunConfig, dims: ModelDims, world_size: int, source: str) -> Iterator[str]:
    """Yield why experts cannot be divided as requested, and what a model with experts cannot do."""
    parallel = run.parallel
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    flags = " and ".join(f"{flag} {size}" for flag, size in (("--ep", ep), ("--etp", etp)) if size > 1)
    if not dims.num_experts:
        if flags:
            yield f"{flags}: {source} has no mixtures of experts to divide: omit {'them' if ' and ' in flags else 'it'}"
        keys = ", ".join(f"router.{key}" for key in run.router.model_dump(exclude_defaults=True))
        if keys:
            yield f"{keys}: {source} has no mixtures of experts, so no router: omit {'them' if ', ' in keys else 'it'}"
        if run.adapter.expert_r is not None:
            yield f"adapter.expert_r: {source} has no mixtures of experts: omit it"
        return
    # The layout: what divides the experts, and the processes of a stage.
    yield from check_expert_layout(dims, ep, etp, source)
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp = parallel.context_parallel_size
    per_stage = world_size // pp
    if world_size % (tp * cp * pp) == 0 and per_stage % (ep * etp):
        yield (
            f"--ep {ep} x --etp {etp} = {ep * etp} does not divide the {per_stage} processes of a stage, which are "
            f"--tp {tp} x {f'--cp {cp} x ' if cp > 1 else ''}{per_stage // (tp * cp)} data-parallel ones: lower --ep "
            "or --etp, or use more processes"
        )
    # What experts need besides.
    if tp > 1 and not parallel.sequence_parallel:
        yield (
            f"--tp {tp}: {source} has mixtures of experts, which train at --tp 2 or more with --sequence-parallel "
            "only: add the flag, or use --tp 1"
        )
    # megatron-core then gives the experts an optimizer of their own.
    if ep > 1 or etp != tp:
        why = (
            f"--tp {tp}, --ep {ep}, --etp {etp}: the gradients of experts are summed over a different group of "
            "processes than the others"
        )
        if not parallel.divides_optimizer:
            yield f"{why}, which needs the distributed optimizer: add --dist-optim"
        if run.training.precision == "fp16" and run.training.loss_scale is None:  # each optimizer would find its own
            yield f"{why}, which does not work with fp16's dynamic loss scale: use bf16, or give --loss-scale"
    if tp % etp:
        yield f"--etp {etp} does not divide --tp {tp}: experts are divided by tensor-parallel processes; lower it"
    if run.training.fp8:
        yield from _check_fp8(run, dims, etp, source)
    yield from _check_combinations(run, source)


def check_expert_layout(dims: ModelDims, ep: int, etp: int, source: str) -> list[str]:
    """Return why the experts of a model cannot be divided over `ep` x `etp` processes."""
    if not dims.num_experts:
        return []
    sizes = {
        "--ep": (ep, "number of experts", dims.num_experts),
        "--etp": (etp, "width of an expert", dims.expert_ffn_hidden_size),
    }
    return [
        f"{flag} {size} does not divide the {quantity}, which is {full_size} in {source}: this model can use {fitting}"
        for flag, (size, quantity, full_size) in sizes.items()
        if full_size % size
        for fitting in [", ".join(str(n) for n in range(1, full_size + 1) if full_size % n == 0)]
    ]


def _check_fp8(run: RunConfig, dims: ModelDims, etp: int, source: str) -> Iterator[str]:
    """Yield why experts cannot multiply in FP8."""
    if run.training.precision == "fp16":
        yield f"--fp8 of experts needs bf16, and {source} has experts: omit --precision fp16"
    sizes = {"width of an expert": (dims.expert_ffn_hidden_size, etp), "hidden size": (dims.hidden_size, 1)}
    for quantity, (size, parts) in sizes.items():
        if size % (FP8_MULTIPLE * parts):
            yield (
                f"--fp8: the {quantity}, which is {size} in {source}, is not a multiple of {FP8_MULTIPLE * parts}, as "
                f"FP8 products of experts need: {'lower --etp, or ' if parts > 1 else ''}omit --fp8"
            )


def _check_combinations(run: RunConfig, source: str) -> Iterator[str]:
    """Yield options that do not work with experts."""
    has = f"{source} has mixtures of experts"
    if run.adapter.expert_r is not None:
        without = {"--lora-dora": run.adapter.dora, "--lora-dropout": run.adapter.dropout}
        for flag in (flag for flag, is_given in without.items() if is_given):
            yield f"{flag} does not work with adapter.expert_r: PEFT does not have it for experts; omit one of them"
    if run.parallel.hsdp_replicas > 1:
        yield f"--hsdp {run.parallel.hsdp_replicas} does not divide experts into groups yet, and {has}: omit it"
    if run.adapter.quantize != "none" and run.parallel.expert_tensor_parallel_size > 1:
        yield f"--lora-quantize quantizes whole experts, and {has}: omit --etp, or use --ep in its place"
