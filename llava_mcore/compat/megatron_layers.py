"""What megatron-core 0.19.2 lets nobody choose about its layers.

Import `llava_mcore.parallel` first, as for megatron.core itself.
"""

from __future__ import annotations

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import attention
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn

from llava_mcore.compat.required import replace_name


def split_gradients_side_by_side() -> None:
    """Let attention part query, key and value so that their gradients are not copied together.

    megatron-core looks for the function where Transformer Engine 2.20 no longer has it, and then copies these gradients
    although they lie side by side. It looks once, for the decoder too, whose rotary embeddings part them: there they
    are copied as before.
    """
    from transformer_engine.pytorch.utils import SplitAlongDim  # on GPUs only

    replace_name(attention, "SplitAlongDim", SplitAlongDim.apply)


def set_frequencies(embedding: RotaryEmbedding, inv_freq: Tensor) -> None:
    """Give a rotary embedding its frequencies [rotated dims / 2]; megatron-core moves them to the GPU on first use."""
    replace_name(embedding, "inv_freq", inv_freq)


def set_rotary_factor(layer: SelfAttention, factor: float) -> None:
    """Let an attention layer scale cosines and sines, as it does for YaRN."""
    replace_name(layer, "_yarn_concentration_factor", factor)


def change_class(layer: nn.Module, to: type[nn.Module]) -> None:
    """Make a layer that megatron-core has built one of a subclass, which adds no state.

    Raises:
        AttributeError: it has built a layer of another class.
    """
    if not issubclass(to, type(layer)):
        raise AttributeError(
            f"megatron-core has built a {type(layer).__qualname__}: {to.__qualname__} is none of these"
        )
    layer.__class__ = to
