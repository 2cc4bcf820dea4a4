"""Configuration of adapters: small matrices that are trained beside a frozen model."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from llava_mcore.config.sections.base import Flag, Needs, Section, UserPath, comma_separated

ALL_LINEAR = "all-linear"

Rank = Annotated[int, Field(ge=1, le=4096)]


def is_adapter_name(value: str) -> bool:
    """Return whether a text can be an adapter's name."""
    return re.fullmatch(r"[A-Za-z0-9_-]{1,100}", value) is not None


def _adapter_name(value: str) -> str:
    """The name is a part of tensors' names, where dots separate modules."""
    if not is_adapter_name(value):
        raise ValueError("expected letters, digits, '-' and '_'")
    return value


RANK_KEYS = {
    "language_model": "--lora-r",
    "vision_model": "adapter.vision_r",
    "vision_projection": "adapter.projection_r",
    "experts": "adapter.expert_r",
}
"""Settings that give the layers of a part a rank."""
_RANKS = ("adapter.r", *list(RANK_KEYS.values())[1:])
_LORA = Needs(*_RANKS)
_ADAPTER = Needs(*_RANKS, "adapter.load")


class AdapterConfig(Section):
    """LoRA and its variants, as the library PEFT defines them. Without a rank, the model itself is trained."""

    flag_group = "adapters"

    r: Annotated[Rank | None, Flag("--lora-r")] = None
    """Rank of LoRA's matrices in the language model. The model itself is then frozen, the freeze keys have no effect,
    and only the adapter is saved."""
    vision_r: Rank | None = None
    """Rank in the vision tower. Default: no adapter."""
    projection_r: Rank | None = None
    """Rank in the projection. Default: no adapter."""
    expert_r: Rank | None = None
    """Rank in every expert of a mixture of experts: each of its matrices gets its own A and B. Default: no adapter. Not
    with DoRA or dropout, which PEFT does not support there."""
    alpha: Annotated[int, Flag("--lora-alpha"), _LORA] = Field(16, ge=1, le=10**6)
    """An adapter's output is multiplied by alpha / rank, with rslora by alpha / sqrt(rank)."""
    dropout: Annotated[float, Flag("--lora-dropout"), _LORA] = Field(0.0, ge=0, lt=1)
    """Probability of dropout on the adapters' inputs."""
    targets: Annotated[
        tuple[str, ...], BeforeValidator(comma_separated), Field(min_length=1), Flag("--lora-targets", many=True), _LORA
    ] = (ALL_LINEAR,)
    """Linear layers that get an adapter, by their names in Hugging Face's model or the ends of these, such as
    q_proj,v_proj; all-linear: all of them except the output layer."""
    dora: Annotated[bool, Flag("--lora-dora"), _LORA] = False
    """DoRA: also train the magnitude of every row of the adapted matrices."""
    rslora: Annotated[bool, Flag("--lora-rslora"), _LORA] = False
    """rsLoRA: divide by the square root of the rank, so that a larger rank does not weaken what is learned."""
    quantize: Annotated[Literal["none", "nf4", "fp8"], Flag("--lora-quantize"), _ADAPTER] = "none"
    """Store the frozen language model's matrices in 4 bits (nf4: QLoRA, double quantization, like bitsandbytes) or in 8
    bits (fp8: e4m3, one scale per 128 values), and dequantize them for each product. fp8 with --fp8: multiply them in
    FP8, with one scale each and no 16-bit copy."""
    bias: Annotated[Literal["none", "all", "lora_only"], _LORA] = "none"
    """Model biases to train: none, all, or those of the layers with an adapter."""
    modules_to_save: Annotated[
        tuple[str, ...],
        BeforeValidator(comma_separated),
        Flag("--lora-modules-to-save", after="--lora-targets", many=True),
        _LORA,
    ] = ()
    """Modules that are trained in full and saved with the adapter, such as multi_modal_projector or lm_head."""
    name: Annotated[str, AfterValidator(_adapter_name), _ADAPTER] = "default"
    """Name of the adapter that is trained."""

    load: UserPath | None = None
    """PEFT folder of an adapter to continue training; its files determine rank, targets and everything else."""
    frozen: Annotated[tuple[UserPath, ...], BeforeValidator(comma_separated), _ADAPTER] = ()
    """PEFT folders of adapters that are active beside the trained one and stay unchanged; each is named after its
    folder."""

    @property
    def is_on(self) -> bool:
        """Whether an adapter is trained."""
        return bool(self.ranks or self.load)

    @property
    def ranks(self) -> dict[str, int]:
        """LoRA's ranks by the parts of `RANK_KEYS`, without the parts that get no adapter."""
        ranks = self.r, self.vision_r, self.projection_r, self.expert_r
        return {part: rank for part, rank in zip(RANK_KEYS, ranks, strict=True) if rank is not None}
