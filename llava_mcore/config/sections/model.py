"""Configuration of the model: trained parts, layer implementation, recomputation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from llava_mcore.config.sections.base import Parts, Section, Size, comma_separated


class ModelConfig(Section):
    """Which parts are trained. The architecture comes from the Hugging Face config."""

    freeze_language_model: bool = False
    """Do not train the language model (usual in stage 1)."""
    freeze_vision_model: bool = True
    """Do not train the vision tower."""
    freeze_vision_projection: bool = False
    """Do not train the projection between the vision tower and the language model."""
    drop_class_token: bool = False
    """Require that the class token is dropped from the features. The model's config.json decides that, so that training
    and serving agree (vision_feature_select_strategy default: dropped; full: kept). A model that keeps it is an
    error."""
    freeze: Annotated[tuple[str, ...], BeforeValidator(comma_separated)] = ()
    """Parameters that are not trained, besides the frozen parts: patterns over their Hugging Face or Megatron
    names, such as *.embed_tokens.weight; several are separated by commas."""
    unfreeze: Annotated[tuple[str, ...], BeforeValidator(comma_separated)] = ()
    """Parameters that are trained although a frozen part or freeze contains them: patterns as for freeze."""
    transformer_impl: Literal["transformer_engine", "local"] | None = None
    """Implementation of the layers: Transformer Engine's fused ones, or torch's; not given: the former on GPUs if it is
    installed. Checkpoints are the same."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass recomputes of the language model instead of storing it: nothing, the recompute_modules of
    every layer, or whole layers."""
    recompute_modules: Annotated[
        tuple[Literal["core_attn", "mlp"], ...], BeforeValidator(comma_separated), Field(min_length=1)
    ] = ("mlp",)
    """What --recompute selective recomputes: mlp (saves most), core_attn (useful without fused attention), or both."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """What --recompute full recomputes: all layers, in units of recompute_num_layers (uniform), or the first
    recompute_num_layers of each pipeline stage (block)."""
    recompute_num_layers: Parts = 1
    """Layers of a unit (uniform) or of a stage (block) that --recompute full recomputes."""
    recompute_vision: Literal["none", "full"] = "none"
    """The same for a trained vision tower; a frozen one stores no activations."""
    cuda_graphs: bool = False
    """Run the language model's layers as CUDA graphs, captured in the second step: faster where the host starts kernels
    more slowly than the GPU runs them, such as for small models, adapters, and few tokens per GPU."""
    cuda_graphs_vision: bool = False
    """Also run the layers of a trained tower as CUDA graphs (Qwen-VL, and with data.max_media_tokens Idefics2).
    This takes more memory; see docs/parallel.md."""
    attention_backend: Literal["fused", "flash"] | None = None
    """Attention by cuDNN's fused kernels or by the package flash-attn; not given: Transformer Engine chooses."""
    make_vocab_size_divisible_by: Size = 128
    """The embedding is padded to a multiple of this times the tensor-parallel size; the padding is never exported."""

    def frozen_parts(self) -> str:
        """Return the names of the parts that are not trained."""
        parts = {
            "language model": self.freeze_language_model,
            "vision tower": self.freeze_vision_model,
            "projection": self.freeze_vision_projection,
        }
        names = ", ".join(name for name, frozen in parts.items() if frozen) or "none"
        patterns_by_key = {"freeze": self.freeze, "unfreeze": self.unfreeze}
        return ", ".join(
            [names, *(f"{key} {' '.join(patterns)}" for key, patterns in patterns_by_key.items() if patterns)]
        )
