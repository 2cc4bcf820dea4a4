"""Names of a folder's tensors in files: those of the classes' own checkpoints on the hub."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from llava_mcore.compat.transformers import tower_tensors_in_files
from llava_mcore.models.architectures.registry import ties_embeddings, tower_config
from llava_mcore.models.vision.registry import vision_family


def tensors_to_write(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the model's tensors by their names in files; a tied lm_head is omitted."""
    tower = "vision_tower.vision_model." if vision_family(tower_config(model.config)).wrapped else "vision_tower."
    prefixes = {
        "model.vision_tower.": tower,
        "model.audio_tower.": "audio_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "model.image_newline": "image_newline",
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
    }
    named = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and ties_embeddings(model.config):
            continue
        prefix = next(x for x in prefixes if name.startswith(x))
        named[prefixes[prefix] + name.removeprefix(prefix)] = tensor
    return tower_tensors_in_files(named, tower, tower_config(model.config).model_type)
