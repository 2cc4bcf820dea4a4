"""Whether a folder's embedding and output layer are one matrix: config.json and the weights may disagree."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

from transformers import PretrainedConfig

from llava_mcore.errors import ConversionError
from llava_mcore.files.hf_files import CONFIG
from llava_mcore.files.hf_folder import HfFolder
from llava_mcore.files.regular import read_object
from llava_mcore.files.tensor_bytes import sha256
from llava_mcore.models.architectures.registry import architecture_of, ties_embeddings
from llava_mcore.models.model_table import detect_names

TIE = "tie_word_embeddings"


def settle_ties(hf: PretrainedConfig, folder: HfFolder) -> str | None:
    """Make a config say whether the folder's weights are tied, and return a warning if it said something else.

    Two different matrices are not tied, as in transformers 5. A folder without an output layer whose text_config ties
    them is tied, as in transformers 4: that wrote no other key, and some classes of transformers 5 do not read it.

    Args:
        hf: the folder's config; changed in place.

    Raises:
        ConversionError: a part of the model is missing.
    """
    names, tensors = detect_names(hf, folder.tensors, source=str(folder.path)), folder.tensors
    has_embedding, has_head = names.embedding in tensors, names.lm_head in tensors
    if ties_embeddings(hf) and has_embedding and has_head and not same_tensor(folder, names.lm_head, names.embedding):
        _set(hf, tied=False)
        return (
            f"{folder.path}: config.json ties {names.lm_head} to {names.embedding} ({TIE}, which is true by default in "
            "some classes), but they differ: both are used, as in transformers 5"
        )
    may_tie = architecture_of(hf).may_tie_embeddings and bool(hf.text_config.to_dict().get(TIE))
    if may_tie and not ties_embeddings(hf) and has_embedding != has_head:
        _set(hf, tied=True)
        return (
            f"{folder.path}: no {names.lm_head if has_embedding else names.embedding}, and config.json has {TIE} in "
            "text_config only: the two are tied, as in transformers 4. transformers 5 would fill one with random "
            f"numbers: set {TIE} to true at the top of config.json"
        )
    return None


def same_tensor(folder: HfFolder, a: str, b: str) -> bool:
    """Compare two tensors, one in memory at a time."""
    x, y = folder.where(a), folder.where(b)
    return (x.shape, x.dtype) == (y.shape, y.dtype) and sha256((x,)) == sha256((y,))


def _set(hf: PretrainedConfig, *, tied: bool) -> None:
    hf.tie_word_embeddings = hf.text_config.tie_word_embeddings = tied


def write_ties(hf: PretrainedConfig, folder: Path) -> None:
    """Write to a folder's config.json whether the weights are tied, if it says something else."""
    if not architecture_of(hf).may_tie_embeddings:
        return
    path = folder / CONFIG
    values = read_object(path, ConversionError)
    tied = bool(hf.tie_word_embeddings)
    if bool(type(hf).from_dict(deepcopy(values)).tie_word_embeddings) == tied:
        return
    values[TIE] = tied
    if isinstance(values.get("text_config"), dict):
        values["text_config"][TIE] = tied
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
