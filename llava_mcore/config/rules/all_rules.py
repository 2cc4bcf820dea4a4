"""Rules between the values of a run, its model and its machine. Rules only check; they never change a value.

Every function returns all problems as text: where, what was found, what is allowed, what to do.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from llava_mcore.config.needs import check_needs
from llava_mcore.config.rules.adapter import check_adapter, trains_projection, trains_tower
from llava_mcore.config.rules.context import check_context, check_context_model
from llava_mcore.config.rules.cross_attention import check_cross_attention, check_cross_stages
from llava_mcore.config.rules.delta_nets import FP8_MULTIPLE, check_delta_nets
from llava_mcore.config.rules.dims import ModelDims
from llava_mcore.config.rules.experts import check_experts
from llava_mcore.config.rules.fully_sharded import check_fully_sharded
from llava_mcore.config.rules.muon import check_muon
from llava_mcore.config.rules.operation import check_operations
from llava_mcore.config.rules.parallel import (
    check_deepstack,
    check_options,
    check_overlapped_model,
    check_stages,
    has_uneven_stages,
    replica_words,
)
from llava_mcore.config.rules.schedule import check_schedule
from llava_mcore.config.schema import RunConfig
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.files.hf_files import hub_hint


def check_layout(dims: ModelDims, tp: int, pp: int, source: str, *, vision_data_parallel: bool = False) -> list[str]:
    """Return why the model cannot be split into `tp` x `pp` parts.

    Args:
        source: names the model, such as its folder.
        vision_data_parallel: every rank has the whole tower.
    """
    # What tensor parallelism divides, and the sizes that would work.
    sizes = {
        "attention heads of the language model": dims.num_attention_heads,
        "key/value heads of the language model": dims.num_query_groups,
        "MLP width of the language model": dims.ffn_hidden_size,
        "width of the projection": dims.hidden_size,
        "width inside the projection": dims.projection_ffn_hidden_size,
        "key heads of the delta nets": dims.delta_key_heads,
        "value heads of the delta nets": dims.delta_value_heads,
    }
    of_tower = _tower_sizes(dims)
    common = math.gcd(*sizes.values())
    fitting, all_fitting = _divisors(math.gcd(common, *of_tower.values())), _divisors(common)
    advice = f"this model can use {all_fitting if vision_data_parallel else fitting}"
    # Name every size that does not divide: fixing only one of them would not help.
    errors = [
        f"--tp {tp} does not divide the {quantity}, which is {size} in {source}: {advice}"
        for quantity, size in sizes.items()
        if size % tp
    ]
    other = "" if all_fitting == fitting else f"; in training --vision-data-parallel also allows {all_fitting}"
    errors += [
        f"--tp {tp} does not divide the {quantity}, which is {size} in {source}: {advice}{other}"
        for quantity, size in of_tower.items()
        if size % tp and not vision_data_parallel
    ]
    if dims.num_layers % pp:
        errors.append(
            f"--pp {pp} does not divide the number of layers of the language model, which is {dims.num_layers} "
            f"in {source}: this model can use {_divisors(dims.num_layers)}"
        )
    return errors + check_cross_stages(dims, pp, source)


def check_parts(dims: ModelDims, tp: int, pp: int, source: str, *, vision_data_parallel: bool = False) -> list[str]:
    """Like `check_layout`, for a model that computes in `tp` x `pp` parts with stages of equal size."""
    errors = check_layout(dims, tp, pp, source, vision_data_parallel=vision_data_parallel)
    fitting = [
        n for n in range(1, pp) if dims.num_layers % n == 0 and dims.num_layers // n >= dims.num_deepstack_layers
    ]
    advice = f"use --pp {' or '.join(map(str, fitting or [1]))}"
    return errors + check_deepstack(dims.num_deepstack_layers, dims.num_layers // pp, source, f"--pp {pp}", advice)


def tower_divides(dims: ModelDims, tp: int) -> bool:
    """Return whether the tower can be divided over `tp` ranks."""
    return not any(size % tp for size in _tower_sizes(dims).values())


def _tower_sizes(dims: ModelDims) -> dict[str, int]:
    return {
        "attention heads of the vision tower": dims.vision_num_attention_heads,
        "MLP width of the vision tower": dims.vision_ffn_hidden_size,
    }


def check_run(
    run: RunConfig,
    dims: ModelDims | None,
    world_size: int,
    device_available: bool,
    source: str = "the model",
    typed: Collection[str] = (),
) -> list[str]:
    """Return every problem of a training run that can be found before it starts, except those of checkpoints and data.

    `dims` is None if the model's config could not be read, which is reported elsewhere.
    `world_size` is the number of processes; `device_available` says whether there are GPUs. `typed`: keys of flags
    on the command line (see `check_needs`).
    """
    # Problems of the configuration alone, then of this machine, then of the model.
    errors = [
        *check_values(run, typed),
        *check_options(run, device_available),
        *check_context(run, device_available),
        *check_batch(run, world_size),
    ]
    errors += [*check_fully_sharded(run, world_size), *check_operations(run, world_size)]
    if run.parallel.backend == "nccl" and not device_available:
        errors.append("--backend nccl needs GPUs and none was found: omit the flag, or use gloo")
    if run.logging.memory_snapshot is not None and not device_available:
        errors.append("--memory-snapshot records a GPU's memory and none was found: omit it; --profile works on CPUs")
    if run.model.attention_backend and (not device_available or run.model.transformer_impl == "local"):
        errors.append("--fused-attn and --flash-attn choose Transformer Engine's kernels, on GPUs: omit them")
    if run.training.fp8 and not device_available:
        errors.append("--fp8 needs a GPU with FP8 (Hopper or newer) and none was found: omit the flag")
    elif run.training.fp8 and run.training.precision == "fp32":  # without GPUs fp32 is the default
        errors.append("--fp8 needs half precision: omit --precision fp32")
    if run.training.fp8 and run.model.transformer_impl == "local":
        errors.append("--fp8 needs Transformer Engine's layers: omit model.transformer_impl local")
    if dims is not None:
        parallel = run.parallel
        tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        divides = parallel.vision_data_parallel != "off"  # auto: the launcher divides what can be divided
        even_pp = 1 if has_uneven_stages(parallel) else pp
        errors += check_layout(dims, tp, even_pp, source, vision_data_parallel=divides)
        errors += [*check_stages(run, dims, world_size, source), *check_length(run.data.seq_length, dims, source)]
        if run.training.fp8_vision:
            errors += check_fp8_tower(dims, 1 if divides else tp, source)
        errors += [*check_delta_nets(run, dims, source), *check_experts(run, dims, world_size, source)]
        errors += [*check_context_model(run, dims, source), *check_cross_attention(run, dims, source)]
        errors += check_overlapped_model(run, dims, source)
        errors += check_cross_stages(dims, pp, source) if pp != even_pp else []
        if run.model.drop_class_token and dims.keeps_class_token:
            errors.append(
                f"--no-add-class-token, but {source} keeps the class token (vision_feature_select_strategy full): "
                "omit the flag, or build the model with vision_feature_select_strategy default"
            )
    return errors


def check_fp8_tower(dims: ModelDims, tp: int, source: str) -> list[str]:
    """Return the widths of a tower's layers that FP8 cannot multiply, as problems.

    Args:
        tp: ranks that divide the layers.
    """
    sizes = {"width": dims.vision_hidden_size, "MLP width": dims.vision_ffn_hidden_size}
    return [
        f"--fp8-vision: the {quantity} of the vision tower, which is {size} in {source}, is not a multiple of "
        f"{FP8_MULTIPLE * tp}: {'lower --tp, add --vision-data-parallel, or ' if tp > 1 else ''}omit --fp8-vision"
        for quantity, size in sizes.items()
        if size % (FP8_MULTIPLE * tp)
    ]


def check_devices(num_gpus: int, gpu_count: int) -> list[str]:
    """Return why `num_gpus` processes cannot run on a machine with `gpu_count` GPUs (0: any number, with gloo)."""
    if gpu_count and num_gpus > gpu_count:
        return [f"--gpus {num_gpus}: this machine has {gpu_count}: use 1 to {gpu_count}, or -1 for all"]
    return []


def check_batch(run: RunConfig, world_size: int) -> list[str]:
    """Return why processes or batch sizes are not divisible."""
    replica = run.parallel.replica_size
    if world_size % replica:
        return [
            f"{world_size} processes (--gpus) cannot be divided into groups of {replica_words(run.parallel)} = "
            f"{replica}: use a multiple of {replica}"
        ]
    dp = world_size // replica
    step = run.training.micro_batch_size * dp
    sizes = {f"--global-batch-size {run.training.global_batch_size}": run.training.global_batch_size}
    if run.training.ramp is not None:
        sizes["START of --rampup-batch-size"] = run.training.ramp.start
        sizes["INCREMENT of --rampup-batch-size"] = run.training.ramp.increment
    return [
        f"{quantity} is not a multiple of {step} = --micro-batch-size {run.training.micro_batch_size} x {dp} "
        f"data-parallel ranks: use a multiple of {step}{_smaller_micro_batch(size, run.training.micro_batch_size, dp)}"
        for quantity, size in sizes.items()
        if size % step
    ]


def _smaller_micro_batch(size: int, micro_batch_size: int, dp: int) -> str:
    """Return the largest divisor of a micro-batch size with which a batch can be divided, as a piece of advice."""
    fitting = [n for n in range(1, micro_batch_size) if micro_batch_size % n == 0 and size % (n * dp) == 0]
    return f", or --micro-batch-size {fitting[-1]}" if fitting else ""


def check_values(run: RunConfig, typed: Collection[str] = ()) -> Iterator[str]:
    """Yield values that are missing, contradict each other or would have no effect. `typed`: see `check_needs`."""
    checkpoint, model, optimizer = run.checkpoint, run.model, run.optimizer
    yield from check_schedule(run.training, run.optimizer)
    yield from check_needs(run, typed)
    yield from check_adapter(run)
    yield from check_muon(run)
    # Folders and weights.
    if checkpoint.save_dir is None:
        yield "checkpoint.save_dir is missing: give the folder for the run's outputs with --save-dir"
    elif checkpoint.save_dir.exists() and not checkpoint.save_dir.is_dir():
        yield f"--save-dir {checkpoint.save_dir} is not a folder: give another one"
    if checkpoint.hf_dir is not None and not checkpoint.hf_dir.is_dir():
        download = hub_hint(checkpoint.hf_dir)
        hint = "" if download is None else f"; {download}\nand give {checkpoint.hf_dir.name}"
        yield f"--tokenizer-load-dir {checkpoint.hf_dir}: no such folder{hint}"
    if checkpoint.init and checkpoint.load is not None:
        yield "--init starts from random weights and --megatron-load-dir loads some: give one of the two"
    if run.faults.exit_duration_in_mins is not None and not checkpoint.saves:
        yield "--exit-duration-in-mins would lose the run without --save or --save-interval: add one of them"
    if not run.adapter.is_on and model.frozen_parts() == "language model, vision tower, projection":
        yield "all three parts are frozen, so nothing would be trained: unfreeze one of model.freeze_*"
    if model.train_expanded and (model.freeze_language_model or not model.freeze_vision_model):
        yield (
            "--train-expanded trains the inserted layers of the language model and freezes everything else: omit "
            "--freeze-lm and model.freeze_vision_model, and name what else to train in model.unfreeze"
        )
    # FP8.
    training = run.training
    if training.fp8 and training.fp8_vision and not model.cuda_graphs_vision:
        yield (
            "--fp8-vision needs --cuda-graphs-vision, which pads packs of patches to sizes that FP8 can multiply; "
            "without graphs, launching the tower's kernels would also take longer than running them: add "
            "--cuda-graphs-vision, or omit --fp8-vision"
        )
    if (
        training.fp8
        and training.fp8_recipe == "delayed"
        and (training.fp8_first_layers_bf16 or training.fp8_last_layers_bf16)
    ):
        yield "training.fp8_first_layers_bf16 and …_last_… do not work with --fp8-recipe delayed: choose another recipe"
    cp = run.parallel.context_parallel_size
    if run.data.seq_length % pad_multiple(run) and (training.fp8 or run.parallel.sequence_parallel or cp > 1):
        flag = "--fp8" if training.fp8 else "--sequence-parallel" if run.parallel.sequence_parallel else f"--cp {cp}"
        yield f"--seq-length {run.data.seq_length} must be a multiple of {pad_multiple(run)} with {flag}: change it"
    for key, lr, is_trained in (
        ("vision_lr", optimizer.vision_lr, trains_tower(run)),
        ("projection_lr", optimizer.projection_lr, trains_projection(run)),
    ):
        if lr is not None and not is_trained:
            yield f"optimizer.{key} has no effect on a part that is frozen: omit it, or train the part"
    if optimizer.lr_decay_style != "constant" and optimizer.min_lr > optimizer.lr:
        yield f"optimizer.min_lr {optimizer.min_lr:g} is above --lr {optimizer.lr:g}: lower it"


def pad_multiple(run: RunConfig) -> int:
    """Return the multiple to which the number of tokens is padded: 8, or what FP8's matrix products need.

    With sequence or context parallelism each rank's part of the tokens is a multiple of that.
    """
    multiple = 8
    if run.training.fp8:
        multiple = 128 if run.training.fp8_recipe == "blockwise" else FP8_MULTIPLE
    parallel = run.parallel
    multiple *= parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return multiple * parallel.context_parallel_size


def data_to_read(run: RunConfig) -> DataConfig:
    """Return the data of a run, with the multiple that lengths of packed samples are rounded up to."""
    cp = run.parallel.context_parallel_size
    default = 2 * cp if cp > 1 and run.data.packing else None
    return run.data.model_copy(update={"sample_multiple": run.data.sample_multiple or default})


def loader_multiple(run: RunConfig) -> int:
    """Return the multiple to which the loader pads the tokens of a micro-batch: whole packs where shapes are fixed."""
    return run.data.seq_length if run.has_fixed_shapes else pad_multiple(run)


def check_length(seq_length: int, dims: ModelDims, source: str) -> Iterator[str]:
    """Yield why a sequence is too long for the model."""
    if seq_length > dims.max_position_embeddings:
        yield f"--seq-length {seq_length} exceeds the {dims.max_position_embeddings} positions of {source}: lower it"
    if dims.sliding_window is not None and seq_length > dims.sliding_window:
        yield (
            f"--seq-length {seq_length} exceeds the sliding attention window of {dims.sliding_window} in {source}, "
            "which is not supported yet: lower it to the window"
        )


def _divisors(size: int) -> str:
    """Return '1, 2 or 4': the divisors of a size up to 16, into which it can be split."""
    fitting = [str(divisor) for divisor in range(1, min(size, 16) + 1) if size % divisor == 0]
    return " or ".join([", ".join(fitting[:-1]), fitting[-1]]) if len(fitting) > 1 else fitting[0]
