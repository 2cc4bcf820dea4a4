"""Settings of megatron-core 0.19.2's layers that have no public option.

Import `llava_mcore.parallel` first, as for megatron.core itself.
"""

from __future__ import annotations

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from llava_mcore.compat.required import replace_name, required


def split_gradients_without_copy() -> None:
    """Make attention split query, key and value so that their gradients need no copy.

    megatron-core looks for the function where Transformer Engine 2.20 no longer has it, and then copies these gradients
    although they are contiguous. The setting also covers decoders with norms of queries and keys, which separate the
    gradients: there they are copied as before. The other decoders split and rotate in one kernel.
    """
    from transformer_engine.pytorch.utils import SplitAlongDim  # on GPUs only

    replace_name(attention, "SplitAlongDim", SplitAlongDim.apply)


def set_frequencies(embedding: RotaryEmbedding, inv_freq: Tensor) -> None:
    """Give a rotary embedding its frequencies [rotated dims / 2]; megatron-core moves them to the GPU on first use."""
    replace_name(embedding, "inv_freq", inv_freq)


def set_rotary_factor(layer: SelfAttention, factor: float) -> None:
    """Make an attention layer scale cosines and sines, as it does for YaRN."""
    replace_name(layer, "_yarn_concentration_factor", factor)


def use_position_ids(model: GPTModel, embedding: nn.Module) -> None:
    """Let a model that was built for plain rotary positions compute angles from its position_ids by `embedding`.

    megatron-core's own embedding of such positions allocates on CUDA while it is built.
    """
    for name, value in (("rotary_pos_emb", embedding), ("position_embedding_type", "mrope")):
        replace_name(model, name, value)
    model.mrope_section = None  # what the class sets for itself where it builds the embedding; `embedding` knows it


_ATTENTION, _MLP = "_forward_attention", "_forward_mlp"
"""The two methods that a layer's forward pass consists of."""
_BEFORE_MLP, _AFTER_MLP = "_forward_pre_mlp_layernorm", "_forward_post_mlp"
"""Methods that the second one calls before and after the module."""
for _name in (_ATTENTION, _MLP, _BEFORE_MLP, _AFTER_MLP):
    required(TransformerLayer, _name)


def attention_of(
    layer: TransformerLayer, hidden_states: Tensor, packed: PackedSeqParams, angles: Tensor | None
) -> Tensor:
    """Return the hidden states [t, 1, h] after a layer's attention and its residual connection."""
    attention = required(layer, _ATTENTION)
    output: Tensor = attention(hidden_states, packed_seq_params=packed, rotary_pos_emb=angles)[0]
    return output


def mlp_of(
    layer: TransformerLayer, hidden_states: Tensor, packed: PackedSeqParams, padding_mask: Tensor | None
) -> Tensor:
    """Return what a layer returns, of what `attention_of` has returned."""
    output: Tensor = required(layer, _MLP)(hidden_states, padding_mask=padding_mask, packed_seq_params=packed)
    return output


def norm_before_mlp(layer: TransformerLayer, hidden_states: Tensor) -> Tensor:
    """Return what the module in place of the MLP reads, of what `attention_of` has returned."""
    output: Tensor = required(layer, _BEFORE_MLP)(hidden_states)
    return output


def after_mlp(layer: TransformerLayer, output_with_bias: tuple[Tensor, None], hidden_states: Tensor) -> Tensor:
    """Return what a layer returns, of the outputs of that module and of `attention_of`."""
    output: Tensor = required(layer, _AFTER_MLP)(output_with_bias, hidden_states)
    return output


def change_class(layer: nn.Module, to: type[nn.Module]) -> None:
    """Change the class of a layer that megatron-core has built to a subclass, which adds no state.

    Raises:
        AttributeError: megatron-core has built a layer of another class.
    """
    if not issubclass(to, type(layer)):
        raise AttributeError(
            f"megatron-core has built a {type(layer).__qualname__}: {to.__qualname__} is not a subclass of it"
        )
    layer.__class__ = to
