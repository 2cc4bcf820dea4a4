"""Configuration of the model: trained parts, layer implementation, recomputation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from llava_mcore.config.sections.base import Flag, Needs, Parts, Section, Size, comma_separated


class ModelConfig(Section):
    """Which parts are trained. The architecture comes from the Hugging Face config."""

    flag_group = "training"

    freeze_language_model: Annotated[bool, Flag("--freeze-lm")] = False
    """Do not train the language model (usual in stage 1)."""
    freeze_vision_model: bool = True
    """Do not train the vision tower."""
    freeze_vision_projection: bool = False
    """Do not train the projection between the vision tower and the language model."""
    drop_class_token: Annotated[bool, Flag("--no-add-class-token", after="--loss-scale")] = False
    """Require that the class token is dropped from the features. The model's config.json decides that, so that training
    and serving agree (vision_feature_select_strategy default: dropped; full: kept). A model that keeps it is an
    error."""
    freeze: Annotated[tuple[str, ...], BeforeValidator(comma_separated)] = ()
    """Parameters that are not trained, besides the frozen parts: patterns over their Hugging Face or Megatron
    names, such as *.embed_tokens.weight; several are separated by commas."""
    unfreeze: Annotated[tuple[str, ...], BeforeValidator(comma_separated)] = ()
    """Parameters that are trained although they are in a frozen part or match freeze: patterns as for freeze."""
    train_expanded: Annotated[bool, Flag("--train-expanded", after="--freeze-lm")] = False
    """Train only the layers that build --expand-layers inserted, and parameters that match model.unfreeze."""
    transformer_impl: Literal["transformer_engine", "local"] | None = None
    """Implementation of the layers: Transformer Engine's fused ones, or torch's. Default: Transformer Engine on GPUs if
    it is installed. Checkpoints are the same."""
    recompute: Annotated[Literal["none", "selective", "full"], Flag("--recompute", after="--fp8-format")] = "none"
    """Parts of the language model that the backward pass recomputes instead of storing their activations: none, the
    recompute_modules of every layer, or whole layers."""
    recompute_modules: Annotated[
        tuple[Literal["core_attn", "mlp"], ...],
        BeforeValidator(comma_separated),
        Field(min_length=1),
        Needs("model.recompute", value="selective"),
    ] = ("mlp",)
    """Modules that --recompute selective recomputes: mlp (saves most), core_attn (useful without fused attention), or
    both."""
    recompute_method: Annotated[Literal["uniform", "block"], Needs("model.recompute", value="full")] = "uniform"
    """Layers that --recompute full recomputes: all of them, in groups of recompute_num_layers (uniform), or the first
    recompute_num_layers of each pipeline stage (block)."""
    recompute_num_layers: Annotated[Parts, Needs("model.recompute", value="full")] = 1
    """Number of layers per group (uniform) or per stage (block) that --recompute full recomputes."""
    recompute_vision: Literal["none", "full"] = "none"
    """The same for a trained vision tower; a frozen one stores no activations."""
    # Other batches have other lengths, and graphs have fixed shapes.
    cuda_graphs: Annotated[bool, Flag("--cuda-graphs"), Needs("data.packing")] = False
    """Run the language model's layers as CUDA graphs, captured in the second step. It helps if the GPU runs kernels
    faster than the host can launch them: with small models, adapters, or few tokens per GPU."""
    cuda_graphs_vision: Annotated[bool, Flag("--cuda-graphs-vision"), Needs("model.cuda_graphs")] = False
    """Also run the layers of a trained tower as CUDA graphs (Qwen-VL, and with data.max_media_tokens Idefics2).
    This takes more memory; see docs/parallel.md."""
    attention_backend: Annotated[
        Literal["fused", "flash"] | None,
        Flag("--fused-attn", after="--no-add-class-token", value="fused"),
        Flag("--flash-attn", value="flash"),
    ] = None
    """Attention by cuDNN's fused kernels or by the package flash-attn, which must be installed
    (docs/install.md). Default: FlashAttention 4 where it is installed and supports the
    heads, else Transformer Engine chooses."""
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
        if self.train_expanded:
            names = "all but the expanded layers"
        patterns_by_key = {"freeze": self.freeze, "unfreeze": self.unfreeze}
        return ", ".join(
            [names, *(f"{key} {' '.join(patterns)}" for key, patterns in patterns_by_key.items() if patterns)]
        )
