"""A tiny folder of Mllama."""

from __future__ import annotations

from pathlib import Path

import transformers as hf

from llava_mcore.build.tiny.parts import PATCH, chat_template, make_tokenizer, text_values, tower_values, write

_IMAGE = "<|image|>"
_SIDE = 2 * PATCH


def write_mllama(name: str, folder: Path, seed: int) -> None:
    """Images of up to 4 tiles; the second and the fourth layer attend to them."""
    tokenizer = make_tokenizer({})
    text = text_values(tokenizer) | {"cross_attention_layers": [1, 3], "rope_parameters": _ROPE}
    tokenizer.add_special_tokens({"extra_special_tokens": [_IMAGE]})  # beyond what the output layer predicts
    processor = hf.MllamaProcessor(
        image_processor=hf.MllamaImageProcessor(size={"height": _SIDE, "width": _SIDE}, max_image_tiles=4),
        tokenizer=tokenizer,
        chat_template="{{ bos_token }}" + chat_template({"image": _IMAGE}),
    )
    tower = tower_values() | {"image_size": _SIDE, "num_hidden_layers": 3, "num_global_layers": 2}
    chosen = {"intermediate_layers_indices": [0, 2], "vision_output_dim": 3 * tower["hidden_size"]}
    config = hf.MllamaConfig(
        vision_config=tower | chosen,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(_IMAGE),
    )
    write(hf.MllamaForConditionalGeneration, config, processor, folder, seed)


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
