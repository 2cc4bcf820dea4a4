"""Opens a Hugging Face folder with the weights of a whole model, for commands that let transformers load it."""

from __future__ import annotations

import logging
from pathlib import Path

from transformers import PretrainedConfig

from llava_mcore.compat.transformers import not_filled
from llava_mcore.errors import ConversionError, problems
from llava_mcore.files.hf_folder import HfFolder
from llava_mcore.models.architectures.hf_config import VALUE_ERRORS, load_hf_config
from llava_mcore.models.architectures.registry import architecture_of
from llava_mcore.models.tied_weights import settle_ties

logger = logging.getLogger(__name__)
_LISTED = 20  # tensors in one message


def open_whole_folder(hf_dir: Path, *, with_our_config: bool = True) -> tuple[PretrainedConfig, HfFolder]:
    """Return config and weights of a folder, from headers alone.

    Args:
        with_our_config: the model is built with the config that is returned, which says correctly whether embeddings
            are tied; else with the folder's config.json.

    Raises:
        ConversionError: the folder is not of a supported class, or lists every parameter that transformers would fill
            with random numbers.
    """
    hf, folder = load_hf_config(hf_dir), HfFolder.open(hf_dir)
    folder.warn_of_ignored()
    untrue = settle_ties(hf, folder)
    if untrue is not None:
        logger.warning("warning: %s", untrue)
    config = hf if with_our_config else load_hf_config(hf_dir)
    try:
        lines = not_filled(architecture_of(hf).model_class, config, folder.shapes)
    except (*VALUE_ERRORS, RuntimeError, ImportError) as error:
        raise ConversionError(f"{hf_dir}: transformers cannot build the model ({error!r})") from error
    if lines:
        listed = [*lines[:_LISTED], *([f"… and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else [])]
        title = f"{hf_dir}: the weights do not fill the model of config.json, and the rest would be random numbers"
        raise ConversionError(problems(title, listed))
    return hf, folder
