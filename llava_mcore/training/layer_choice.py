"""Which implementation of layers a run uses: Transformer Engine's or torch's."""

from __future__ import annotations

from typing import Literal

from megatron.core.extensions.transformer_engine import HAVE_TE
from transformers import PretrainedConfig

from llava_mcore.compat.triton import NO_COMPILER, can_build_kernels
from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import ConfigError
from llava_mcore.models.language.registry import language_family
from llava_mcore.parallel.groups import Groups


def transformer_impl(run: RunConfig, groups: Groups, hf: PretrainedConfig) -> Literal["transformer_engine", "local"]:
    """Return which implementation of layers to use.

    Raises:
        ConfigError: Transformer Engine is requested, perhaps by --fp8, but is not installed or does not support this
            family, or Triton has no compiler.
    """
    setting = "--fp8" if run.model.transformer_impl is None else "model.transformer_impl = transformer_engine"
    if language_family(hf.text_config).shape(hf.text_config).needs_local_layers:
        if run.model.transformer_impl == "transformer_engine" or run.training.fp8:
            raise ConfigError(f"{setting}: {hf.text_config.model_type} models have local layers only: omit that")
        return "local"
    usable = groups.device.type == "cuda" and HAVE_TE
    chosen = run.model.transformer_impl or ("transformer_engine" if usable or run.training.fp8 else "local")
    if run.model.cuda_graphs and chosen == "local":
        raise ConfigError(
            "--cuda-graphs needs Transformer Engine's layers: install transformer-engine, or omit the flag"
        )
    if chosen == "transformer_engine" and not usable:
        raise ConfigError(f"{setting} needs GPUs and the package transformer-engine: install it, or omit that")
    if chosen == "transformer_engine" and not can_build_kernels():
        raise ConfigError(NO_COMPILER)
    return chosen
