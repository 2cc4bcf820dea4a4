"""Mllama (Llama 3.2 Vision): layers of the decoder attend to the features of an image's tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import MllamaConfig, MllamaForConditionalGeneration, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.mllama.image_processing_mllama import get_all_supported_aspect_ratios

from llava_mcore.errors import ConversionError
from llava_mcore.media.batch_fields import ATTENDED_FIELDS, Fields, MediaWork
from llava_mcore.media.media import MediaPlan, Processing
from llava_mcore.media.tiled_plan import TiledPlan, TileGrid
from llava_mcore.models.architectures.base import Architecture
from llava_mcore.models.connectors.connector import Connector
from llava_mcore.models.connectors.linear import LinearConnector
from llava_mcore.models.language.families.dense import head_dim
from llava_mcore.models.language.families.mllama import cross_layers
from llava_mcore.models.vision.features import FeatureChoice, image_side, num_patches
from llava_mcore.weights.names import HfNames, KnownNames

NAMES = KnownNames(
    vision=("model.vision_model.", "vision_model."),
    projection=("model.multi_modal_", "multi_modal_"),
    text=("model.language_model.", "language_model.model."),
    lm_head={"language_model.model.": "language_model.lm_head.weight", "model.language_model.": "lm_head.weight"},
    styles=(
        HfNames("vision_model.", "multi_modal_", "language_model.model.", "language_model.lm_head.weight"),
        HfNames("model.vision_model.", "model.multi_modal_", "model.language_model.", "lm_head.weight"),
    ),
)


class Mllama(Architecture):
    """MllamaForConditionalGeneration."""

    config_class = MllamaConfig
    model_class = MllamaForConditionalGeneration
    names: ClassVar[KnownNames] = NAMES
    fields: ClassVar[Fields] = ATTENDED_FIELDS
    towers = ("mllama_vision_model",)
    texts = ("mllama_text_model",)
    may_tie_embeddings = False

    def connector(self, hf: PretrainedConfig) -> Connector:
        """Return the linear layer."""
        return LinearConnector("projector")

    def features(self, hf: PretrainedConfig) -> FeatureChoice:
        """Return the output of the global layers, then those of local layers that are chosen.

        Raises:
            ConversionError: a layer does not exist, or vision_output_dim is not the width of all of them.
        """
        vision = hf.vision_config
        count = vision.num_hidden_layers
        chosen = [int(i) for i in vision.intermediate_layers_indices]
        if not all(-count <= i < count for i in chosen):
            raise ConversionError(
                f"vision_config.intermediate_layers_indices = {chosen}: there are layers 0 to {count - 1}"
            )
        width = vision.hidden_size * (1 + len(chosen))
        if vision.vision_output_dim != width:
            raise ConversionError(
                f"vision_config.vision_output_dim = {vision.vision_output_dim}, but {1 + len(chosen)} outputs of "
                f"{vision.hidden_size} are {width}"
            )
        inner = (i % count + 1 for i in chosen)
        return FeatureChoice((count + vision.num_global_layers, *inner), drop_first_token=False)

    def media(self, hf: PretrainedConfig, processing: Processing) -> MediaPlan:
        """Return the plan of tiles.

        Raises:
            ConversionError: the image processor makes other grids than the tower has embeddings for.
        """
        vision, images = hf.vision_config, processing.image_processor
        side, max_tiles = image_side(vision), vision.max_num_tiles
        if images.max_image_tiles != max_tiles or images.size["height"] != side:
            raise ConversionError(
                f"the image processor makes up to {images.max_image_tiles} tiles of {images.size['height']} pixels, "
                f"but config.json has max_num_tiles {max_tiles} and image_size {side}: correct the processor's settings"
            )
        numbered = [list(x) for x in get_all_supported_aspect_ratios(max_tiles)]
        if numbered != [list(x) for x in vision.supported_aspect_ratios]:
            raise ConversionError(
                "vision_config.supported_aspect_ratios are not those of the image processor, which numbers all grids "
                f"of up to {max_tiles} tiles"
            )
        patches = num_patches(vision)
        return TiledPlan(hf.image_token_id, TileGrid(side, max_tiles, patches, patches + 1))

    def placeholder(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return the placeholder token of an image in text."""
        return str(tokenizer.special_tokens_map.get("image_token", "<|image|>"))

    def pixel_shape(self, hf: PretrainedConfig) -> tuple[int, ...]:
        """Return the shape of a tile, [3, height, width]."""
        side = image_side(hf.vision_config)
        return (3, side, side)

    def connector_products(self, hf: PretrainedConfig, work: MediaWork) -> list[int]:
        """Return the FLOPs of the projection, and of the keys and values that layers of the decoder make of it."""
        text, rows = hf.text_config, self.connector_rows(hf, work)
        keys_and_values = 2 * head_dim(text) * text.num_key_value_heads
        return [
            2 * rows * hf.vision_config.vision_output_dim * text.hidden_size,
            len(cross_layers(text)) * 2 * rows * text.hidden_size * keys_and_values,
        ]

    def connector_rows(self, hf: PretrainedConfig, work: MediaWork) -> int:
        """Return how many features the connector reads, those of padding too."""
        vision = hf.vision_config
        return int(work.num_sequences * vision.max_num_tiles * (num_patches(vision) + 1))

    def processor_problems(self, hf: PretrainedConfig, settings: Mapping[str, Any]) -> list[str]:
        """Return nothing: an image is one token."""
        return []
