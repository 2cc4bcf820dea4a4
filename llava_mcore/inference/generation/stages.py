"""Runs a model with a cache through the stages of its pipeline: first prompts, then token by token.

r: sequences (rows), s: tokens, h: hidden size, v: rows of the vocabulary.
"""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor

from llava_mcore.inference.generation.graphs import PassGraphs, TokenGraph, can_capture, has_tiles, tower_graphs
from llava_mcore.inference.generation.rows import CachedRows
from llava_mcore.models.language.decoder import LanguageModel
from llava_mcore.models.language.layers import TwoRopeSelfAttention
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.rotary import Rotation
from llava_mcore.parallel.batch import MicroBatch
from llava_mcore.parallel.context import place_of
from llava_mcore.parallel.groups import Groups


class TokenAngles:
    """A language model's rotary angles by position, and those of its layers with other frequencies."""

    def __init__(self, model: LanguageModel, device: torch.device) -> None:
        self._embedding = model.rotary_pos_emb
        shape = model.shape
        self._frequencies: tuple[Tensor, Tensor] | None = None
        """Rotary frequencies of all layers, and those of the sliding-window layers, if they differ."""
        if shape.local_rope is not None:
            self._frequencies = shape.rope.inv_freq.to(device), shape.local_rope.inv_freq.to(device)
        attentions = [layer.self_attention for layer in model.decoder.layers]
        self._local_layers = [x for x in attentions if isinstance(x, TwoRopeSelfAttention) and x.local_rope is not None]

    @contextlib.contextmanager
    def of(self, position_ids: Tensor) -> Iterator[Tensor | Rotation]:
        """Return the angles [s, 1, 1, d] of one row, positions int64 [1, s] or [axes, 1, s].

        In the context, layers with frequencies of their own take the angles of these positions.
        """
        if self._frequencies is None:
            yield Rotation(self._embedding(position_ids))
            return
        shared, local = (_angles(position_ids, x) for x in self._frequencies)
        for layer in self._local_layers:
            layer.local_angles = local
        try:
            yield shared
        finally:
            for layer in self._local_layers:
                layer.local_angles = None


def _angles(position_ids: Tensor, inv_freq: Tensor) -> Tensor:
    """Return angles float32 [s, 1, 1, d], as megatron-core's RotaryEmbedding computes them."""
    angles = torch.outer(position_ids[0].float(), inv_freq)
    return torch.cat((angles, angles), dim=-1)[:, None, None]


PROMPT_MULTIPLE = 128
"""Prompts that graphs read are padded to a multiple of this."""
MOST_TOKENS = 4096
"""The longest prompt that is a graph: longer ones take the GPU longer than the host."""

Start = Callable[[VisionLanguageModel], tuple[Tensor, dict[str, Tensor]]]
"""Computes the input of the first stage's layers, and by its name what they take beside it."""


class CachedModel:
    """The chunks of a model on this rank, with the keys and values of several rows; every method is a collective call
    of the model's ranks."""

    def __init__(
        self,
        models: Sequence[VisionLanguageModel],
        groups: Groups,
        rows: CachedRows,
        *,
        multiple: int = 1,
        graphs: bool = False,
    ) -> None:
        """multiple: numbers of tokens are padded to a multiple of this (sequence parallelism, FP8). graphs: run
        passes as CUDA graphs where the model can."""
        self.models, self.groups, self.rows = models, groups, rows
        self.config = models[0].config
        is_divided = self.config.sequence_parallel
        self._parts = groups.tp_size if is_divided else 1
        multiple = math.lcm(multiple, self._parts)
        self._prompt_multiple = math.lcm(multiple, PROMPT_MULTIPLE)
        self.num_tokens = math.ceil(rows.num_rows / multiple) * multiple
        """Tokens of a pass that gives each row its next token, with padding."""
        self._angles = [TokenAngles(model.language_model, groups.device) for model in models]
        self._ring = dist.get_process_group_ranks(groups.pipeline_parallel)
        captures = graphs and can_capture(models, groups.device)
        self._graph = TokenGraph(rows, self._logits) if captures else None
        self._prompts = PassGraphs(self._prompt_states, MOST_TOKENS) if captures else None
        self._growths = 0
        """Growths of the caches that the graphs of prompts write to."""
        self._tower = tower_graphs(models[0]) if captures and has_tiles(models[0]) else None

    def close(self) -> None:
        """Free what is left when no more tokens are read."""
        if self._tower is not None:
            del vars(self.models[0].vision_model)["forward"]
        for graphs in (self._graph, self._prompts, self._tower):
            if graphs is not None:
                graphs.destroy()

    def padded(self, batch: MicroBatch) -> MicroBatch:
        """Return a prompt with more padding where graphs read prompts, so that these have few lengths."""
        missing = -batch.input_ids.shape[1] % self._prompt_multiple
        if self._prompts is None or not missing:
            return batch
        ids, positions = (torch.nn.functional.pad(x, (0, missing)) for x in (batch.input_ids, batch.position_ids))
        return replace(batch, input_ids=ids, position_ids=positions)

    def read_prompt(self, batch: MicroBatch, length: int, row: int) -> Tensor | None:
        """Read one prompt into a row.

        Args:
            batch: the prompt alone, padded on the right, which causal attention does not see; with context parallelism
                this rank's tokens of it.
            length: its tokens without padding.

        Returns:
            On the last stage this rank's part of the next token's logits, [1, v / tp].
        """
        self.rows.prefilled, self.rows.prompt_length = row, length
        self.rows.row.fill_(row)

        def start(model: VisionLanguageModel) -> tuple[Tensor, dict[str, Tensor]]:
            hidden, beside = model.decoder_input(
                batch.input_ids, batch.position_ids, batch.media, batch.max_media_seqlen, batch.media_lengths
            )
            if model.attends_to_images:
                self.rows.sees_images[row] = beside["context_mask"][length - 1, -1]
            return hidden, beside

        if self._prompts is None:
            hidden = self._run(start, batch.position_ids)
        else:
            if self._growths != self.rows.num_growths:
                self._prompts.destroy()
                self._growths = self.rows.num_growths
            decoder_input, beside = start(self.models[0])
            hidden = self._prompts(decoder_input, batch.position_ids, *beside.values())
        self.rows.prefilled = None
        if hidden is None:
            return None
        if self._parts > 1:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
        return self.models[-1].language_model.local_logits(self._of_token(hidden, length - 1))[:1, 0]

    def _of_token(self, hidden: Tensor, token: int) -> Tensor:
        """Return the hidden states [1, 1, h] of a token of the prompt, of which this rank has [s, 1, h]."""
        if self.rows.contexts is None:
            return hidden[token : token + 1]
        cp_size = self.groups.cp_size
        owner, index = place_of(token, len(hidden) * cp_size, cp_size)
        of_token = hidden[index : index + 1].contiguous()
        dist.broadcast(of_token, group=self.rows.contexts, group_src=owner)
        return of_token

    def prompt_ids(self, batch: MicroBatch, length: int) -> Tensor:
        """Return the ids int64 [1, length] of a prompt, of `read_prompt`'s arguments."""
        divided = self.rows.divided(batch.input_ids[0])
        return (batch.input_ids if divided is None else divided.gather(batch.input_ids[0])[None])[:, :length]

    def read_tokens(self, tokens: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor | None:
        """Read one more token of every row.

        Args:
            tokens: int64 [r].
            positions: int64 [r], the same along all axes, as for all text.
            lengths: tokens of every row before.

        Returns:
            On the last stage this rank's part of the next tokens' logits, [r, v / tp].
        """
        rows, padding = self.rows, (0, self.num_tokens - len(tokens))
        rows.num_columns = max(lengths) + 1
        rows.lengths.copy_(torch.tensor(lengths))
        ids = torch.nn.functional.pad(tokens, padding)[None]
        position_ids = torch.nn.functional.pad(positions, padding)[None]
        axes = self.models[0].language_model.shape.rope.axes
        by_axis = position_ids if axes is None else position_ids.expand(int(axes.max()) + 1, 1, -1)

        def start(model: VisionLanguageModel) -> tuple[Tensor, dict[str, Tensor]]:
            embeddings = model.language_model.embed(ids, position_ids)
            if self._parts > 1:
                embeddings = tensor_parallel.scatter_to_sequence_parallel_region(embeddings)
            seen = torch.nn.functional.pad(rows.sees_images, padding)[:, None]
            return embeddings, {"context_mask": seen} if model.attends_to_images else {}

        if self._graph is not None:
            return self._graph.run(start(self.models[0])[0], by_axis)[: rows.num_rows, 0]
        hidden = self._run(start, by_axis)
        return None if hidden is None else self.models[-1].language_model.local_logits(hidden)[: rows.num_rows, 0]

    def _prompt_states(self, decoder_input: Tensor, position_ids: Tensor, *deepstack: Tensor) -> Tensor:
        """Return the last layer's hidden states [s, 1, h] of a model that is one chunk. deepstack: one tensor, what is
        added after its first layers, if it has such features."""
        beside = {"context": deepstack[0]} if deepstack else {}
        hidden = self._run(lambda _: (decoder_input, beside), position_ids)
        assert hidden is not None
        return hidden

    def _logits(self, embeddings: Tensor, position_ids: Tensor) -> Tensor:
        """Return this rank's logits [s, 1, v / tp] of a model that is one chunk."""
        hidden = self._run(lambda _: (embeddings, {}), position_ids)
        assert hidden is not None
        return self.models[0].language_model.local_logits(hidden)

    def _run(self, start: Start, position_ids: Tensor) -> Tensor | None:
        """Run all chunks of this rank, one row of tokens; the last stage returns hidden states [s, 1, h]."""
        self.rows.masks.clear()
        hidden: Tensor | None = None
        for model, angles in zip(self.models, self._angles, strict=True):
            beside = dict[str, Tensor]()
            if model.pre_process:
                hidden, beside = start(model)
            else:
                hidden = self._received(position_ids.shape[-1])
                model.set_input_tensor(hidden)
            with angles.of(position_ids) as rotary:
                hidden = model.language_model.decoder(
                    hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary, **beside
                )
            if not model.post_process:
                self._send(hidden)
                hidden = None
        return hidden

    def _received(self, num_tokens: int) -> Tensor:
        shape = (num_tokens // self._parts, 1, self.config.hidden_size)
        buffer = torch.empty(shape, dtype=self.config.pipeline_dtype, device=self.groups.device)
        dist.recv(buffer, self._ring[self.groups.pp_rank - 1], group=self.groups.pipeline_parallel)
        return buffer

    def _send(self, hidden: Tensor) -> None:
        following = self._ring[(self.groups.pp_rank + 1) % len(self._ring)]
        dist.send(hidden.contiguous(), following, group=self.groups.pipeline_parallel)

    def from_last_stage(self, tokens: Tensor | None, count: int) -> Tensor:
        """Return the tokens int64 [count] that the last stage has chosen, on all stages. Context-parallel ranks, which
        compute the same, take those of the first."""
        if tokens is not None and self.rows.contexts is not None:
            dist.broadcast(tokens, group=self.rows.contexts, group_src=0)
        if len(self._ring) == 1:
            assert tokens is not None
            return tokens
        if tokens is None:
            tokens = torch.empty(count, dtype=torch.int64, device=self.groups.device)
        dist.broadcast(tokens, self._ring[-1], group=self.groups.pipeline_parallel)
        return tokens
