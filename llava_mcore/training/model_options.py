"""The options that a model is built with, from the run's configuration and this rank's groups."""

from __future__ import annotations

from typing import Literal

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from transformers import PretrainedConfig

from llava_mcore.compat.delta_rule import triton_without_gradients
from llava_mcore.compat.triton import NO_COMPILER, can_build_kernels
from llava_mcore.config.rules.adapter import dequantizes_matrices
from llava_mcore.config.rules.delta_nets import no_gradients
from llava_mcore.config.schema import RunConfig
from llava_mcore.config.sections.model import ModelConfig
from llava_mcore.errors import ConfigError
from llava_mcore.models.configs import Fp8Options, ModelOptions, Recompute, Stages
from llava_mcore.models.language.families.registry import language_family
from llava_mcore.models.language.grouped_fp8 import GROUPED_FP8_MAJOR
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.optimization.data_parallel import params_dtype


def model_options(run: RunConfig, groups: Groups, hf: PretrainedConfig, *, initialize: bool) -> ModelOptions:
    """Return the run's options for building its model. Raises ConfigError like the functions below."""
    _require_gradients(run, groups, hf)
    _require_grouped_fp8(run, groups, hf)
    model = run.model
    return ModelOptions(
        params_dtype=params_dtype(run),
        tensor_model_parallel_size=groups.tp_size,
        pipeline_model_parallel_size=groups.pp_size,
        context_parallel_size=groups.cp_size,
        cp_comm_type=run.parallel.cp_comm_type,
        expert_model_parallel_size=groups.ep_size,
        expert_tensor_parallel_size=groups.etp_size,
        on_cpu=dequantizes_matrices(run),
        plain_linears=dequantizes_matrices(run),
        stages=stages(run, groups, hf.text_config.num_hidden_layers),
        sequence_parallel=run.parallel.sequence_parallel,
        tp_comm_overlap=run.parallel.tp_comm_overlap,
        attention_backend=model.attention_backend,
        make_vocab_size_divisible_by=model.make_vocab_size_divisible_by,
        initialize=initialize,
        deterministic=run.training.deterministic,
        transformer_impl=transformer_impl(run, groups, hf),
        fp8=fp8_options(run),
        recompute=recompute_options(model, model.recompute),
        recompute_vision=recompute_options(model, model.recompute_vision),
        vision_data_parallel=run.parallel.divides_images,
        force_balance=run.router.force_balance,
    )


def _require_gradients(run: RunConfig, groups: Groups, hf: PretrainedConfig) -> None:
    """Raise ConfigError for delta nets whose kernels cannot train with this rank's GPU and Triton."""
    has_delta_nets = bool(language_family(hf.text_config).delta_dims(hf.text_config))
    if has_delta_nets and groups.device.type == "cuda" and not run.training.deterministic:
        triton = triton_without_gradients([torch.cuda.get_device_capability()])
        if triton is not None:
            raise ConfigError(no_gradients(triton))


def _require_grouped_fp8(run: RunConfig, groups: Groups, hf: PretrainedConfig) -> None:
    """Raise ConfigError for experts that this rank's GPU cannot multiply in FP8."""
    has_experts = "num_moe_experts" in language_family(hf.text_config).config_from_hf(hf.text_config)
    if run.training.fp8 and has_experts and groups.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability()
        if major != GROUPED_FP8_MAJOR:
            raise ConfigError(
                f"--fp8 multiplies experts by torch's grouped product, which is for GPUs of compute capability "
                f"{GROUPED_FP8_MAJOR}.0 (Hopper); this one has {major}.{minor}: omit the flag"
            )


def transformer_impl(run: RunConfig, groups: Groups, hf: PretrainedConfig) -> Literal["transformer_engine", "local"]:
    """Return which implementation of layers to use.

    Raises:
        ConfigError: Transformer Engine is requested, perhaps by --fp8, but is not installed or does not support this
            family, or Triton has no compiler.
    """
    setting = "--fp8" if run.model.transformer_impl is None else "model.transformer_impl = transformer_engine"
    if language_family(hf.text_config).shape(hf.text_config).needs_local_layers:
        if run.model.transformer_impl == "transformer_engine" or run.training.fp8:
            raise ConfigError(f"{setting}: {hf.text_config.model_type} models have local layers only: omit it")
        if run.parallel.cp_comm_type is not None:
            raise ConfigError(
                f"--cp-comm-type {run.parallel.cp_comm_type}: {hf.text_config.model_type} models have windows or soft "
                "caps, which torch's attention computes with the keys and values of all processes gathered: omit it"
            )
        return "local"
    usable = groups.device.type == "cuda" and HAVE_TE
    chosen = run.model.transformer_impl or ("transformer_engine" if usable or run.training.fp8 else "local")
    if run.model.cuda_graphs and chosen == "local":
        raise ConfigError(
            "--cuda-graphs needs Transformer Engine's layers: install transformer-engine, or omit the flag"
        )
    if run.parallel.tp_comm_overlap and chosen == "local":
        raise ConfigError(
            "--tp-comm-overlap needs Transformer Engine's layers: install transformer-engine, or omit the flag"
        )
    if chosen == "transformer_engine" and not usable:
        raise ConfigError(f"{setting} needs GPUs and the package transformer-engine: install it, or omit {setting}")
    if chosen == "transformer_engine" and not can_build_kernels():
        raise ConfigError(NO_COMPILER)
    return chosen


def stages(run: RunConfig, groups: Groups, num_layers: int) -> Stages:
    """Return how the language model's layers are split over pipeline stages."""
    parallel = run.parallel
    assert parallel.balance == "none", "the launcher resolves the balance"
    chunk = parallel.num_layers_per_virtual_pipeline_stage
    return Stages(
        first=parallel.num_layers_in_first_pipeline_stage,
        last=parallel.num_layers_in_last_pipeline_stage,
        virtual=None if chunk is None else num_layers // groups.pp_size // chunk,
    )


def recompute_options(model: ModelConfig, granularity: Literal["none", "selective", "full"]) -> Recompute | None:
    """Return what is recomputed in a part's backward pass, or None."""
    if granularity == "none":
        return None
    return Recompute(granularity, model.recompute_method, model.recompute_num_layers, model.recompute_modules)


def fp8_options(run: RunConfig) -> Fp8Options | None:
    """Return the options for FP8, or None."""
    training = run.training
    if not training.fp8:
        return None
    return Fp8Options(
        recipe=training.fp8_recipe,
        format=training.fp8_format,
        num_bf16_layers_at_start=training.fp8_first_layers_bf16,
        num_bf16_layers_at_end=training.fp8_last_layers_bf16,
        vision=training.fp8_vision,
    )
