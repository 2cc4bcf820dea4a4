"""The language model: megatron-core's GPTModel with Hugging Face's rotary frequencies and a true vocabulary.

GPTModel is only built here (megatron-core has announced its successor).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PretrainedConfig

from llava_mcore.compat.megatron.layers import change_class, set_frequencies, set_rotary_factor, use_position_ids
from llava_mcore.config.rules.parallel import check_deepstack
from llava_mcore.errors import ConfigError
from llava_mcore.models.activations import StatelessActivation
from llava_mcore.models.attention.sdpa import sees_window
from llava_mcore.models.language.block import block_spec
from llava_mcore.models.language.embedding import TokenEmbedding
from llava_mcore.models.language.shape import DecoderShape, Rope
from llava_mcore.models.loss.linear_cross_entropy import OutputLayer
from llava_mcore.models.rotary import TokenRopeSelfAttention
from llava_mcore.parallel.named_sums import add_token_losses


class TokenRope(nn.Module):
    """Rotary embedding for megatron-core's GPTModel. Its own classes tabulate indices or
    only support chunked sections, and need CUDA."""

    def __init__(self, inv_freq: Tensor, axes: Tensor | None = None) -> None:
        """Keep what angles are computed from.

        Args:
            inv_freq: float32 [d / 2].
            axes: int64 [d / 2], which axis of a position each frequency is multiplied by; None: there is only one.
        """
        super().__init__()
        self.inv_freq, self.axes = inv_freq, axes  # no buffers: a model that is built without memory would lose them

    def forward(self, position_ids: Tensor, mrope_section: Any = None, cp_group: Any = None) -> Tensor:
        """Return angles float32 [s, b, 1, d] of positions int64 [b, s], [a, b, s] where there are axes.

        Other arguments are ignored.
        """
        if self.inv_freq.device != position_ids.device:
            self.inv_freq = self.inv_freq.to(position_ids.device)
            self.axes = None if self.axes is None else self.axes.to(position_ids.device)
        by_axis = position_ids[None] if self.axes is None else position_ids[self.axes]
        angles = by_axis.permute(2, 1, 0).float() * self.inv_freq  # [s, b, d / 2]
        return torch.cat((angles, angles), dim=-1)[:, :, None]


def padded_vocab_size(vocab_size: int, *, divisible_by: int, tensor_model_parallel_size: int) -> int:
    """Return the number of embedding rows: a multiple of both `divisible_by` and the tensor-parallel size."""
    multiple = math.lcm(divisible_by, tensor_model_parallel_size)
    return -(-vocab_size // multiple) * multiple


class LanguageModel(GPTModel):
    """GPTModel for an HF text config.

    Rows that pad the vocabulary never get probability: logits and loss are those of the true vocabulary, so
    they do not depend on the tensor-parallel size.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hf: PretrainedConfig,
        shape: DecoderShape,
        *,
        tied: bool,
        num_rows: int,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None = None,
        plain_linears: bool = False,
    ) -> None:
        super().__init__(
            config,
            block_spec(config, shape, vp_stage, plain_linears=plain_linears),
            vocab_size=num_rows,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=tied,
            scatter_embedding_sequence_parallel=False,
            vp_stage=vp_stage,
        )
        self.true_vocab_size = hf.vocab_size
        # GPTModel has no option for these layers' classes.
        if pre_process:
            change_class(self.embedding.word_embeddings, TokenEmbedding)
        if post_process:
            change_class(self.output_layer, OutputLayer)
        if config.use_te_activation_func:
            for mlp in (layer.mlp for layer in self.decoder.layers if not layer.is_moe_layer):
                mlp.activation_func = StatelessActivation(mlp.activation_func)
        # Hugging Face's frequencies: by position ids, or by indices if layers with a window have others.
        self.shape = shape
        if shape.local_rope is None:
            use_position_ids(self, TokenRope(shape.rope.inv_freq, shape.rope.axes))
        else:
            set_frequencies(self.rotary_pos_emb, shape.rope.inv_freq)
        for layer in self.decoder.layers:
            if isinstance(layer.self_attention, SelfAttention):
                self._scale_rope(layer.self_attention, shape.rope)
        if shape.local_rope is not None:
            self._use_local_rope(shape.local_rope)

    def _use_local_rope(self, rope: Rope) -> None:
        """Give layers with a window their own rotary frequencies, one object for all of them."""
        embedding = RotaryEmbedding(self.config.kv_channels, rotary_percent=1.0)
        set_frequencies(embedding, rope.inv_freq)
        for layer in self.decoder.layers:
            if sees_window(self.config, layer.layer_number):
                layer.self_attention.local_rope = embedding
                self._scale_rope(layer.self_attention, rope)

    def _scale_rope(self, attention: SelfAttention, rope: Rope) -> None:
        """Let a layer scale cosines and sines (YaRN)."""
        factor = rope.factor(is_fused=self.config.apply_rope_fusion)
        if isinstance(attention, TokenRopeSelfAttention):
            attention.factor = factor
        else:
            set_rotary_factor(attention, factor)

    def add_to_main_grad(self, *, scales_loss: bool) -> None:
        """Let embedding and output layer add their gradients to `main_grad`, megatron-core's sum of the step.

        Args:
            scales_loss: the gradient of the loss is not 1 but a scale (fp16), so the output layer must wait for it.
        """
        if self.post_process:
            self.output_layer.adds_to_main_grad = not scales_loss
        is_shared = self.pre_process and self.post_process and self.share_embeddings_and_output_weights
        if is_shared and scales_loss:
            return  # autograd adds the gradients of both
        if self.pre_process:
            self.embedding.word_embeddings.adds_to_main_grad = True
        if is_shared:  # nothing is left for data parallelism to add
            vars(self.shared_embedding_or_output_weight())["zero_out_wgrad"] = False

    def embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return token embeddings [s, b, h], scaled in some families; int64 [b, s] both."""
        return self.scaled(self.embedding(input_ids, position_ids))

    def scaled(self, embeddings: Tensor) -> Tensor:
        """Apply the family's factor, which has the embeddings' precision in Hugging Face too."""
        scale = self.shape.embedding_scale
        return embeddings if scale is None else embeddings * embeddings.new_tensor(scale)

    def local_logits(self, hidden_states: Tensor) -> Tensor:
        """Return this rank's part of the logits [s, b, rows / tp] of [s, b, h] ([s / tp, b, h] with sequence
        parallelism); those of padding rows are the lowest finite number."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden_states, weight)
        self._mask_padding(logits)
        return logits

    def loss_or_logits(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """GPTModel's output processor.

        Returns:
            Without labels the logits [b, s, vocabulary]. With labels and a loss mask the sum of mask * loss, [],
            for which no logits are kept; `context` is then the number of tokens in the mask, or None. With labels
            alone the loss of every token [b, s], from whole logits.
        """
        layer, weight = kwargs["output_layer"], kwargs["output_weight"]
        labels: Tensor | None = kwargs["labels"]
        mask: Tensor | None = kwargs["loss_mask"]
        if labels is not None and mask is not None:
            num_trained: int | None = kwargs["context"]
            total, losses = layer(
                hidden_states,
                weight,
                labels=labels,
                token_weights=mask,
                vocab_size=self.true_vocab_size,
                num_trained=num_trained,
            )
            add_token_losses(losses, mask)
            return total
        logits, _ = layer(hidden_states, weight)  # [s, b, rows / tp]
        if labels is not None:
            self._mask_padding(logits)
            return self.compute_language_model_loss(labels, logits)
        full = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
        return full[..., : self.true_vocab_size].transpose(0, 1).contiguous()

    def _mask_padding(self, logits: Tensor) -> None:
        """Set the logits of padding rows to the lowest number, in place. logits: [s, b, rows / tp]."""
        num_local = logits.shape[-1]
        first_padding = self.true_vocab_size - self.pg_collection.tp.rank() * num_local
        if first_padding < num_local:
            padding = logits[..., max(first_padding, 0) :]
            padding.data.fill_(torch.finfo(logits.dtype).min)


def require_deepstack_layers(num_deepstack: int, num_layers: int) -> None:
    """Raise ConfigError if the tower's inner features belong to layers of a later stage, which would not get them.

    Args:
        num_layers: decoder layers beside the tower.
    """
    advice = "use fewer stages, or give the first one more layers (Stages.first)"
    problems = check_deepstack(num_deepstack, num_layers, "this model", "a stage without all of them", advice)
    if problems:
        raise ConfigError(problems[0])


def require_within(window: int | None, length: int | None) -> None:
    """Raise ConfigError for a sequence in which some tokens would see more than in Hugging Face's model.

    Args:
        window: a sliding window that is not computed (see `limiting_window`).
        length: of the longest sequence; None: unknown.
    """
    if window is not None and length is not None and length > window:
        raise ConfigError(
            f"a sequence of {length} tokens exceeds the sliding attention window of {window} of this model, which is "
            "not supported yet: shorten it"
        )


def insert_features(embeddings: Tensor, features: Tensor, positions: Tensor, *, is_part: bool = False) -> Tensor:
    """Copy image features [i * n, h] over the embeddings [s, b, h] at flat [b * s] indices; no host sync.

    Args:
        features: of i tiles, n of each.
        is_part: context-parallel ranks divide the tokens: the index b * s stands for those of other ranks.
    """
    s, b, h = embeddings.shape
    flat = embeddings.transpose(0, 1).reshape(b * s, h)
    if is_part:  # a row that is dropped
        flat = torch.nn.functional.pad(flat, (0, 0, 0, 1))
    # index_copy keeps the gradient of an empty `features` connected, which an early return would not.
    placed = flat.index_copy(0, positions, features.to(flat.dtype))
    return placed[: b * s].view(b, s, h).transpose(0, 1).contiguous()


def scatter_each(x: Tensor) -> Tensor:
    """Return this rank's part [k, s / tp, b, h] of [k, s, b, h]."""
    return torch.stack([tensor_parallel.scatter_to_sequence_parallel_region(part) for part in x.unbind()])
