"""Configuration of the parts of the model: trained or frozen, whose layers, what is recomputed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from llava_mcore.config.sections.base import Parts, Section, Size


def _parts(value: Any) -> Any:
    """Names divided by commas, or a list of them."""
    return value.split(",") if isinstance(value, str) else value


class ModelConfig(Section):
    """Which parts are trained. The architecture comes from the Hugging Face config."""

    freeze_language_model: bool = False
    """Keep the language model as it is (usual in stage 1)."""
    freeze_vision_model: bool = True
    """Keep the vision tower as it is."""
    freeze_vision_projection: bool = False
    """Keep the projection between the vision tower and the language model as it is."""
    drop_class_token: bool = False
    """Insist that the class token leaves the vision tower. The model's config.json decides that, so that training and
    serving agree (vision_feature_select_strategy default: it leaves; full: it stays): one that keeps it is an error."""
    freeze: Annotated[tuple[str, ...], BeforeValidator(_parts)] = ()
    """Parameters that are not trained, besides the frozen parts: patterns over their Hugging Face or Megatron
    names, such as *.embed_tokens.weight; several with commas."""
    unfreeze: Annotated[tuple[str, ...], BeforeValidator(_parts)] = ()
    """Parameters that are trained nevertheless, though in a frozen part or matched by freeze: patterns as there."""
    transformer_impl: Literal["transformer_engine", "local"] | None = None
    """Whose layers are used: Transformer Engine's fused ones, or torch's; not given: the former on GPUs if it is
    installed. Checkpoints are the same."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What of the language model is computed again in the backward pass instead of being kept: nothing, the
    recompute_modules of every layer, or whole layers."""
    recompute_modules: Annotated[
        tuple[Literal["core_attn", "mlp"], ...], BeforeValidator(_parts), Field(min_length=1)
    ] = ("mlp",)
    """What --recompute selective computes again: mlp (saves most), core_attn (useful without fused
    attention), or both."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """What --recompute full computes again: all layers, in units of recompute_num_layers (uniform), or the first
    recompute_num_layers of each pipeline stage (block)."""
    recompute_num_layers: Parts = 1
    """Layers of a unit (uniform) or of a stage (block) that --recompute full computes again."""
    recompute_vision: Literal["none", "full"] = "none"
    """The same for a vision tower that is trained; a frozen one keeps nothing anyway."""
    attention_backend: Literal["fused", "flash"] | None = None
    """Transformer Engine's attention: cuDNN's fused kernels, or those of the package flash-attn; not given: its own
    choice."""
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
        given = {"freeze": self.freeze, "unfreeze": self.unfreeze}
        return ", ".join([names, *(f"{key} {' '.join(patterns)}" for key, patterns in given.items() if patterns)])
