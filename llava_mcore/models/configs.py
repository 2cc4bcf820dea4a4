"""megatron-core's TransformerConfig of each part, from Hugging Face's config and the layout."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from llava_mcore.models.architectures.registry import architecture_of, tower_config
from llava_mcore.models.language.families.registry import language_family
from llava_mcore.models.vision.families.registry import vision_family


@dataclass(frozen=True)
class Fp8Options:
    """FP8 settings of the language model's layers, and with `vision` of the tower's. Everything else stays in
    params_dtype.

    `num_bf16_layers_at_start`, `num_bf16_layers_at_end`: of the language model.
    """

    recipe: Literal["delayed", "tensorwise", "blockwise"]
    format: Literal["hybrid", "e4m3"]
    num_bf16_layers_at_start: int = 0
    num_bf16_layers_at_end: int = 0
    vision: bool = False

    def fields(self) -> dict[str, Any]:
        """Return TransformerConfig fields."""
        return {
            "fp8": self.format,
            "fp8_recipe": self.recipe,
            "fp8_amax_history_len": 1024 if self.recipe == "delayed" else 1,
            "fp8_amax_compute_algo": "max",
            "first_last_layers_bf16": bool(self.num_bf16_layers_at_start or self.num_bf16_layers_at_end),
            "num_layers_at_start_in_bf16": self.num_bf16_layers_at_start,
            "num_layers_at_end_in_bf16": self.num_bf16_layers_at_end,
        }


@dataclass(frozen=True)
class Recompute:
    """Activations that a part's backward pass recomputes instead of storing them in the forward pass.

    `full`: whole layers, all in units of num_layers (`uniform`) or the first num_layers of a stage (`block`).
    `selective`: the named parts of every layer; not for a tower whose MLPs have biases, which megatron-core (0.19.2)
    returns through its checkpoint function, which creates an endless graph.
    """

    granularity: Literal["selective", "full"]
    method: Literal["uniform", "block"] = "uniform"
    num_layers: int = 1
    modules: tuple[Literal["core_attn", "mlp"], ...] = ("mlp",)

    def for_layers(self, layers: Collection[int]) -> Recompute:
        """Return the same in units of one layer if the outputs of several layers are used: those inside a unit are not
        kept."""
        return replace(self, num_layers=1) if self.method == "uniform" and len(layers) > 1 else self

    def fields(self) -> dict[str, Any]:
        """Return TransformerConfig fields."""
        if self.granularity == "selective":
            return {"recompute_granularity": "selective", "recompute_modules": list(self.modules)}
        return {
            "recompute_granularity": "full",
            "recompute_method": self.method,
            "recompute_num_layers": self.num_layers,
        }


@dataclass(frozen=True)
class Stages:
    """How the language model's layers are divided over the pipeline's stages.

    `first` and `last`: layers of that stage, if different from the others. `virtual`: number of chunks per stage
    (interleaved schedule); None: one chunk.
    """

    first: int | None = None
    last: int | None = None
    virtual: int | None = None

    def fields(self) -> dict[str, Any]:
        """Return TransformerConfig fields."""
        return {
            "num_layers_in_first_pipeline_stage": self.first,
            "num_layers_in_last_pipeline_stage": self.last,
            "virtual_pipeline_model_parallel_size": self.virtual,
            # Interleaved over two stages, a batch of messages is silently paired wrongly (0.19.2).
            "batch_p2p_comm": self.virtual is None,
            "overlap_p2p_comm": self.virtual is not None,
            # The host would wait for the device after each message, to avoid a race that torch 1.13 fixed.
            "batch_p2p_sync": False,
        }


@dataclass(frozen=True)
class ModelOptions:
    """Options for building a model, besides its Hugging Face config.

    `initialize` False does not initialize weights, which will be loaded. `on_cpu` allocates nothing on a GPU even if
    there is one. `transformer_impl`: implementation of the layers of decoder and encoder; checkpoints are the same.
    `context_parallel_size`: ranks that divide the tokens of the decoder; `cp_comm_type`: how Transformer Engine's
    attention exchanges them. `tp_comm_overlap`: messages of tensor parallelism overlap with the decoder's products, for
    which `compat.transformer_engine` must have opened buffers. `plain_linears`: the decoder's linear layers are
    megatron-core's own, even with Transformer Engine's other layers. `vision_data_parallel`: every tensor-parallel rank
    has the whole tower and runs it on a part of the images. `expert_model_parallel_size`: ranks that divide a layer's
    experts; `expert_tensor_parallel_size`: those that divide each of them. `force_balance`: routers choose by random
    numbers instead of their logits, to measure speed.
    """

    params_dtype: torch.dtype = torch.float32
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    cp_comm_type: Literal["p2p", "a2a", "all_gather", "a2a+p2p"] | None = None
    stages: Stages = Stages()
    sequence_parallel: bool = False
    tp_comm_overlap: bool = False
    make_vocab_size_divisible_by: int = 128
    initialize: bool = True
    deterministic: bool = False
    on_cpu: bool = False
    transformer_impl: Literal["transformer_engine", "local"] = "local"
    plain_linears: bool = False
    attention_backend: Literal["fused", "flash"] | None = None
    fp8: Fp8Options | None = None
    recompute: Recompute | None = None
    recompute_vision: Recompute | None = None
    vision_data_parallel: bool = False
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    force_balance: bool = False


@dataclass(frozen=True)
class PartConfigs:
    """One TransformerConfig per part."""

    language: TransformerConfig
    vision: TransformerConfig
    projection: TransformerConfig


def part_configs(hf: PretrainedConfig, options: ModelOptions) -> PartConfigs:
    """Derive the three configurations.

    Only the language model is pipelined and, if configured, sequence-parallel: the tower is on stage 0, and its number
    of tokens per image (577, 729) has no suitable divisor. The connector is tensor-parallel even if the tower is not:
    its widths follow from the language model's, it is small, and the gradients of what it reads are whole on every
    rank, so that the tower's ranks only have to take their own part of them.
    """
    architecture, text = architecture_of(hf), hf.text_config
    common = _common_fields(options)
    pipeline: dict[str, Any] = {
        "pipeline_model_parallel_size": options.pipeline_model_parallel_size,
        **options.stages.fields(),
        "context_parallel_size": options.context_parallel_size,
        "cp_comm_type": options.cp_comm_type,
        "pipeline_dtype": options.params_dtype,
        "deallocate_pipeline_outputs": True,
        "sequence_parallel": options.sequence_parallel,
        "tp_comm_overlap": options.tp_comm_overlap,
    }
    # Each part's fields from Hugging Face's config.
    heads = {"num_attention_heads": options.tensor_model_parallel_size}  # for a connector without one
    projection = heads | architecture.connector(hf).config_from_hf(hf)
    features = architecture.features(hf)
    num_layers = features.num_layers
    of_tower = tower_config(hf)
    tower = vision_family(of_tower)
    vision = tower.config_from_hf(of_tower, num_layers)
    if options.vision_data_parallel:
        vision["tensor_model_parallel_size"] = 1
    language = language_family(text).config_from_hf(text)
    if "num_moe_experts" in language:
        language |= {
            "expert_model_parallel_size": options.expert_model_parallel_size,
            "expert_tensor_parallel_size": options.expert_tensor_parallel_size,
            "moe_router_force_load_balancing": options.force_balance,
            "moe_permute_fusion": options.transformer_impl == "transformer_engine",
        }
    # Options of the run that change some parts only.
    if options.fp8 is not None:
        language |= options.fp8.fields()
        if options.fp8.vision:
            vision |= replace(options.fp8, num_bf16_layers_at_start=0, num_bf16_layers_at_end=0).fields()
    if options.recompute is not None:
        language |= options.recompute.fields()
    if options.recompute_vision is not None:
        vision |= options.recompute_vision.for_layers(features.layers).fields()
    if options.transformer_impl == "transformer_engine":
        # Kernels whose rounding differs from Hugging Face's operations in the last bits.
        rope = language_family(text).shape(text).rope
        pipeline |= {"use_te_activation_func": language["activation_func"] is F.silu}
        language |= rope.fusion_fields(language["kv_channels"])
        is_swiglu = vision["activation_func"] is F.silu and vision.get("gated_linear_unit", False)
        vision |= {"apply_rope_fusion": tower.uses_rope, "use_te_activation_func": is_swiglu}
    return PartConfigs(
        language=TransformerConfig(**(common | pipeline | language)),
        vision=TransformerConfig(**(common | vision)),
        projection=TransformerConfig(**common, **projection),
    )


def _common_fields(options: ModelOptions) -> dict[str, Any]:
    dtype = options.params_dtype
    return {
        "tensor_model_parallel_size": options.tensor_model_parallel_size,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "perform_initialization": options.initialize,
        "use_cpu_initialization": options.on_cpu or not torch.cuda.is_available(),
        "deterministic_mode": options.deterministic,
        "transformer_impl": options.transformer_impl,
        "attention_backend": AttnBackend[options.attention_backend or "auto"],  # only used by Transformer Engine
        # The loss is summed over trained tokens and divided by their number once, over all micro-batches and ranks.
        "calculate_per_token_loss": True,
        # Fusions need Apex or Transformer Engine kernels, and change the last bits (see part_configs).
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }
