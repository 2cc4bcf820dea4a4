"""Names of transformers' modules in checkpoint files, which of its attentions to choose, and its private names."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    get_verbosity,
    is_progress_bar_enabled,
    set_verbosity,
    set_verbosity_error,
)

from llava_mcore.compat.required import required

if TYPE_CHECKING:
    from transformers import BaseVideoProcessor

_DINOV2 = ("dinov2", "dinov2_with_registers")
_RENAMED = {
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "mlp.down_proj": "mlp.weights_out",
}
"""DINOv2's modules since transformers 5.18, which still reads and writes files with the old names."""
_GATE, _UP, _FUSED = "mlp.gate_proj", "mlp.up_proj", "mlp.weights_in"


def exact_attention(text: PretrainedConfig) -> str:
    """Return the attention with which transformers computes what a language model's config says.

    Its default, "sdpa", silently ignores Gemma 2's cap on attention scores.
    """
    return "eager" if "attn_logit_softcapping" in text.to_dict() else "sdpa"


def model_without_weights(model_class: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Return a model on the meta device, for the names of its modules."""
    with torch.device("meta"):
        model: PreTrainedModel = required(model_class, "_from_config")(config)
    return model


def not_filled(
    model_class: type[PreTrainedModel], config: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Return a line for every parameter that transformers would not fill from a folder's tensors, but with random
    numbers: those that are missing, and those of another shape.

    transformers itself loads tensors of the same names and shapes that take no memory.
    """
    # Tensors of the right shapes, all of one number.
    dtype = config.dtype or torch.float32
    nothing = {name: torch.zeros((), dtype=dtype).expand(shape) for name, shape in shapes.items()}
    # transformers loads them quietly and says what was missing.
    before, showed_progress = get_verbosity(), is_progress_bar_enabled()
    set_verbosity_error()  # it reports the same
    disable_progress_bar()  # nothing is loaded
    try:
        with no_init_weights():
            _, info = model_class.from_pretrained(
                None,
                config=deepcopy(config),
                state_dict=nothing,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    finally:
        set_verbosity(before)
        if showed_progress:
            enable_progress_bar()
    # Its findings, a line each.
    lines = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    return lines + [
        f"{name} is {tuple(shape)}, but config.json gives {tuple(expected)}"
        for name, shape, expected in sorted(info["mismatched_keys"])
    ]


def encoded_lengths(encoder: type[PreTrainedModel], num_frames: int) -> tuple[int, int]:
    """Return the lengths that an audio encoder's class computes for a clip: before and after pooling."""
    nothing: Any = None  # the method does not use its model
    hidden, features = required(encoder, "_get_feat_extract_output_lengths")(nothing, torch.tensor(num_frames))
    return int(hidden), int(features)


def video_processor_class(config: PretrainedConfig) -> type[BaseVideoProcessor]:
    """Return a model's class of video processors. transformers 5.23 has one per backend, 5.17 that of torchvision."""
    from transformers.models.auto.video_processing_auto import (
        VIDEO_PROCESSOR_MAPPING,  # torchvision's import takes long
    )

    entry = VIDEO_PROCESSOR_MAPPING[type(config)]
    kind: type[BaseVideoProcessor] = entry["torchvision"] if isinstance(entry, dict) else entry
    return kind


def tower_names_in_files(outputs: dict[str, Tensor], prefix: str, tower: str, *, dim: int = -1) -> dict[str, Tensor]:
    """Return the outputs of a model's modules under the names of its tensors in files.

    Args:
        outputs: module name -> output [..., features].
        prefix: prefix of the tower's modules; others keep their names.
        tower: the tower's model_type.
        dim: the dim of the features.
    """
    if tower not in _DINOV2:
        return outputs
    named = {_old_name(name) if name.startswith(prefix) else name: x for name, x in outputs.items()}
    for name in [x for x in named if x.startswith(prefix) and x.endswith(_GATE)]:
        layer = name.removesuffix(_GATE)
        named[layer + _FUSED] = torch.cat([named.pop(name), named.pop(layer + _UP)], dim=dim)
    return named


def tower_tensors_in_files(tensors: dict[str, Tensor], prefix: str, tower: str) -> dict[str, Tensor]:
    """Return a model's tensors under their names in files. `prefix`, `tower`: as above."""
    result = {name: x for name, x in tensors.items() if "." not in name}
    for kind in dict.fromkeys(name.rpartition(".")[2] for name in tensors if "." in name):
        end = f".{kind}"
        modules = {name.removesuffix(end): x for name, x in tensors.items() if name.endswith(end)}
        result |= {name + end: x for name, x in tower_names_in_files(modules, prefix, tower, dim=0).items()}
    return result


def _old_name(name: str) -> str:
    for new, old in _RENAMED.items():
        if name.endswith("." + new):
            return name.removesuffix(new) + old
    return name
