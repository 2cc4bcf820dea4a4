"""A vision-language model of any architecture: vision tower → connector → language model, on megatron-core parts.

Hugging Face's convention: the data already has one placeholder token per image feature, so positions, labels
and lengths are known before the model runs, and the model only copies features to their positions.

b: samples, s: tokens, i: tiles, n: features per tile, h: language hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter
from transformers import PretrainedConfig

from llava_mcore.media.batch_fields import (
    FEATURE_POSITIONS,
    FEATURE_ROWS,
    IMAGE_POSITIONS,
    NEWLINE_POSITIONS,
    PIXEL_SCALE,
    PIXEL_VALUES,
    RESIZED_POSITIONS,
    RESIZED_ROWS,
    RESIZED_WEIGHTS,
    normalize,
)
from llava_mcore.models.architectures.registry import architecture_of, ties_embeddings, tower_config
from llava_mcore.models.configs import ModelOptions, part_configs
from llava_mcore.models.language.cross_attention import image_context
from llava_mcore.models.language.decoder import (
    LanguageModel,
    insert_features,
    padded_vocab_size,
    require_deepstack_layers,
    require_within,
    scatter_each,
)
from llava_mcore.models.language.families.registry import embedding_rows, language_family, limiting_window
from llava_mcore.models.language.router import token_weights
from llava_mcore.models.vision.families.registry import vision_family
from llava_mcore.models.vision.replicated import as_replicas, mark_replicated, run_divided
from llava_mcore.parallel.items import MediaLengths


class VisionLanguageModel(MegatronModule):
    """One pipeline stage; the first one also has the tower and the connector.

    Its children and parameters have the names of megatron-core's LLaVAModel.
    """

    def __init__(
        self,
        hf: PretrainedConfig,
        options: ModelOptions,
        *,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
    ) -> None:
        configs = part_configs(hf, options)
        super().__init__(config=configs.language)
        self.hf = hf
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.share_embeddings_and_output_weights = ties_embeddings(hf)
        self.divides_media = options.vision_data_parallel
        if pre_process:
            # Tower and connector are on the first stage only.
            architecture, vision = architecture_of(hf), tower_config(hf)
            features = architecture.features(hf)
            tower = vision_family(vision)
            self.vision_model = tower.build(vision, configs.vision, features)
            if options.vision_data_parallel:
                mark_replicated(self.vision_model)
            width = tower.hidden_size(vision) * len(features.layers)
            self.connector, self.num_deepstack = architecture.connector(hf), architecture.num_deepstack(hf)
            self.vision_projection = self.connector.build(hf, configs.projection, input_size=width)
            if architecture.has_newline:
                self.vision_projection.image_newline = new_newline(configs.projection)
        self.language_model = LanguageModel(
            configs.language,
            hf.text_config,
            language_family(hf.text_config).shape(hf.text_config),
            tied=ties_embeddings(hf),
            num_rows=padded_vocab_size(
                embedding_rows(hf),
                divisible_by=options.make_vocab_size_divisible_by,
                tensor_model_parallel_size=options.tensor_model_parallel_size,
            ),
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            plain_linears=options.plain_linears,
        )
        if pre_process:
            # Features of inner layers are added after the first decoder layers, which must be here too.
            needed = min(self.num_deepstack, hf.text_config.num_hidden_layers)
            require_deepstack_layers(needed, len(self.language_model.decoder.layers))
        self.attends_to_images = bool(self.language_model.shape.cross_layers)
        self.window = limiting_window(hf.text_config)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        media: Mapping[str, Tensor],
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        num_trained: int | None = None,
        max_media_seqlen: int = 0,
        media_lengths: MediaLengths | None = None,
    ) -> Tensor:
        """Run this stage.

        Args:
            input_ids: int64 [b, s], with the tokens of every image.
            position_ids: int64 [b, s], or [axes, b, s].
            media: the architecture's fields (see `batch_fields`); only read on the first stage.
            labels: int64 [b, s], already shifted.
            loss_mask: float32 [b, s], 1 where the loss counts.
            packed_seq_params: where the packed sequences of the only row begin; they do not see each other.
            num_trained: tokens that loss_mask counts, where the host knows: the others then skip the output layer.
            max_media_seqlen: the largest of MEDIA_SEQLENS.
            media_lengths: of fields in `items.LENGTHS` the values, if the host knows them: a model that divides
                images over ranks otherwise waits for the device to tell them.

        Returns:
            On the last stage the summed loss of the tokens that count if labels and loss_mask are given, the loss of
            every token [b, s] with labels alone, else logits [b, s, vocabulary]; on the others hidden states [s, b, h],
            [s / tp, b, h] with sequence parallelism, for which s must be a multiple of tp.
        """
        # Windows of some families are not computed, so that no sequence may exceed them.
        length = input_ids.shape[1] * self.config.context_parallel_size
        require_within(self.window, length if packed_seq_params is None else packed_seq_params.max_seqlen_q)
        # The first stage puts features over the embeddings of their placeholders.
        decoder_input, beside = None, dict[str, Tensor]()
        if self.pre_process:
            decoder_input, beside = self.decoder_input(
                input_ids, position_ids, media, max_media_seqlen, media_lengths, packed_seq_params
            )
        return self.language_model(
            input_ids,
            position_ids,
            attention_mask=None,
            decoder_input=decoder_input,
            labels=labels,
            loss_mask=loss_mask,
            packed_seq_params=packed_seq_params,
            padding_mask=token_weights(self.config, loss_mask, packed_seq_params),
            extra_block_kwargs=beside,
            output_processor=self.language_model.loss_or_logits,
            output_processor_context=num_trained,
        )

    def decoder_input(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        media: Mapping[str, Tensor],
        max_media_seqlen: int = 0,
        media_lengths: MediaLengths | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what the first stage's decoder layers take; the arguments are those of `forward`.

        Returns:
            Embeddings with features [s, b, h]; with sequence parallelism this rank's part of the tokens. And by its
            name what layers take beside them: `context`, which is added after the first layers [k, s, b, h], or which
            tokens attend to, with `context_mask`.
        """
        # In this order the backward pass ends with the tower, as the list of parameters begins with it: gradients are
        # reduced in the reverse order of that list, while earlier parts are still computed.
        features = self.image_features(media, max_media_seqlen, media_lengths)
        embeddings = self.language_model.embed(input_ids, position_ids)
        if self.attends_to_images:
            decoder_input, deepstack = embeddings, None
        else:
            decoder_input, deepstack = self._with_features(embeddings, features, media)
        if torch.is_grad_enabled() and not decoder_input.requires_grad and self._needs_input_gradient():
            decoder_input.requires_grad_()
        if self.config.sequence_parallel:  # each rank continues with its part of the tokens, [s / tp, b, h]
            decoder_input = tensor_parallel.scatter_to_sequence_parallel_region(decoder_input)
            if deepstack is not None:
                deepstack = scatter_each(deepstack)
        if self.attends_to_images:
            real = self.vision_model.real_features(media)
            return decoder_input, image_context(features, media[IMAGE_POSITIONS], real, input_ids, packed_seq_params)
        return decoder_input, {} if deepstack is None else {"context": deepstack}

    def _with_features(
        self, embeddings: Tensor, features: Tensor, media: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the embeddings [s, b, h] with features, newlines and resized features at their positions.

        Also returns what is added after the first layers [k, s, b, h], where the architecture has such features.
        """
        deepstack, is_part = None, self.config.context_parallel_size > 1
        if self.num_deepstack:
            features, *inner = features.chunk(1 + self.num_deepstack, dim=-1)
            zero = torch.zeros_like(embeddings)
            deepstack = torch.stack(
                [insert_features(zero, x, media[FEATURE_POSITIONS], is_part=is_part) for x in inner]
            )
        chosen = features[media[FEATURE_ROWS]] if FEATURE_ROWS in media else features
        features_in_order, positions = [chosen], [media[FEATURE_POSITIONS]]
        if NEWLINE_POSITIONS in media:
            positions.append(media[NEWLINE_POSITIONS])
            features_in_order.append(
                self.vision_projection.get_parameter("image_newline").expand(len(positions[-1]), -1)
            )
        if RESIZED_ROWS in media:
            positions.append(media[RESIZED_POSITIONS])
            weights = media[RESIZED_WEIGHTS].unsqueeze(-1)  # products in fp32, as torch's interpolate
            features_in_order.append((features[media[RESIZED_ROWS]] * weights).sum(1).to(features.dtype))
        if len(features_in_order) > 1:  # of one tensor, cat would be a copy
            chosen, positions = torch.cat(features_in_order), [torch.cat(positions)]
        return insert_features(embeddings, chosen, positions[0], is_part=is_part), deepstack

    def image_features(
        self, media: Mapping[str, Tensor], max_media_seqlen: int = 0, media_lengths: MediaLengths | None = None
    ) -> Tensor:
        """Return the features [features, h] of all images; [features, h * (1 + k)] with those of k inner layers.

        Without images the parts run on a blank one of which nothing is kept (0 rows are returned, tied to the graph),
        so that every rank's collectives and gradients stay aligned with those that have some.
        """
        is_blank = not len(media[PIXEL_VALUES])
        if is_blank:
            if not any(p.requires_grad for p in self._image_parameters()):
                width = self.config.hidden_size * (1 + self.num_deepstack)
                return media[PIXEL_VALUES].new_empty(0, width, dtype=self.config.params_dtype)
            media, max_media_seqlen = self._blank(media)
        trained = any(p.requires_grad for p in self.vision_model.parameters())
        with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
            if self.divides_media and not is_blank:
                hidden = run_divided(self.vision_model, self._tower_features, self._blank, media, media_lengths)
            else:
                hidden = self._tower_features(media, max_media_seqlen)
        features = self.connector.run(self.vision_projection, hidden, media, max_media_seqlen).flatten(0, -2)
        return features[:0] + 0.0 * features.sum() if is_blank else features

    def _blank(self, media: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
        """Return the fields of one blank image, and the largest of its MEDIA_SEQLENS."""
        none = normalize(media[PIXEL_VALUES][:0], media[PIXEL_SCALE])
        pixels, fields, max_media_seqlen = self.vision_model.blank(none, media)
        return {**fields, PIXEL_VALUES: pixels, PIXEL_SCALE: media[PIXEL_SCALE]}, max_media_seqlen

    def _tower_features(self, media: Mapping[str, Tensor], max_media_seqlen: int) -> Tensor:
        """Return what the tower makes of images that are not normalized yet."""
        pixels = normalize(media[PIXEL_VALUES], media[PIXEL_SCALE])
        hidden: Tensor = self.vision_model(pixels.to(self.config.params_dtype), media, max_media_seqlen)
        return hidden

    def _needs_input_gradient(self) -> bool:
        """Return whether gradients must reach the first layer although nothing before it is trained.

        A pipeline's backward pass runs through all stages, and recomputation skips layers without an input with a
        gradient.
        """
        return self.config.pipeline_model_parallel_size > 1 or self.config.recompute_granularity is not None

    def _image_parameters(self) -> list[torch.nn.Parameter]:
        return [*self.vision_model.parameters(), *self.vision_projection.parameters()]

    def has_whole(self, name: str) -> bool:
        """Return whether every tensor-parallel rank has all of a module or parameter, although its kind is divided."""
        return self.divides_media and name.partition(".")[0] == "vision_model"

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Take the previous stage's output (called by megatron-core's schedules)."""
        self.language_model.set_input_tensor(input_tensor)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return every parameter as it is divided (called by megatron-core), whole towers as copies."""
        state: ShardedStateDict = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return as_replicas(state, f"{prefix}vision_model.") if self.divides_media else state

    def shared_embedding_or_output_weight(self) -> Tensor:
        """Return the tied embedding of this stage (called by megatron-core's gradient finalization)."""
        return self.language_model.shared_embedding_or_output_weight()


def new_newline(config: TransformerConfig) -> Parameter:
    """Return a newline [h] initialized as in transformers: normal, std 1 / sqrt(h)."""
    width = config.hidden_size
    return Parameter(torch.randn(width, dtype=config.params_dtype) / math.sqrt(width))
