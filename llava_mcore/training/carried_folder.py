"""The Hugging Face files that are stored in every checkpoint of a run, so that it can be exported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig

from llava_mcore.checkpoint import layout
from llava_mcore.checkpoint.choose_start import StartPoint
from llava_mcore.data.encode.assets import ALL_TOKENIZER_FILES
from llava_mcore.data.encode.chat_template import write_chat_template
from llava_mcore.data.processors.load import PROCESSOR_FILES, VIDEO_FILE
from llava_mcore.errors import CheckpointError
from llava_mcore.files import hf_folder as hf_files
from llava_mcore.files.companions import copy_companions, require_own_files
from llava_mcore.files.json_files import read_object
from llava_mcore.files.weight_files import SINGLE, has_weights
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.architectures.registry import architecture_of, ties_embeddings
from llava_mcore.models.model_table import detect_names, mapping_table
from llava_mcore.models.tied_weights import settle_ties, write_ties

GENERATION_FILE = "generation_config.json"
_DTYPE = "F32"


def write_carried_folder(
    start: StartPoint, target: Path, *, seed: int, chat_template: str, tokenizer_dir: Path | None = None
) -> Path:
    """Write the Hugging Face files for the run's checkpoints to `target`, replacing its contents, and return it.

    The files are those of the checkpoint that the run starts from, or, from random weights, of the folder that
    describes the model; tokenizer, processors and chat template are those used for training.

    Args:
        tokenizer_dir: the folder of the tokenizer, and of processors if it has any; None: the checkpoint's own.
    """
    if target.exists():
        shutil.rmtree(target)
    if start.kind == "init":
        write_init_folder(start.hf_dir, target, seed)
    else:
        require_own_files(start.hf_dir)
        shutil.copytree(start.hf_dir, target)
        if tokenizer_dir is not None:
            for names in (ALL_TOKENIZER_FILES, PROCESSOR_FILES, (VIDEO_FILE,)):
                _replace_files(names, tokenizer_dir, target)
    write_chat_template(target, chat_template)
    return target


def write_stop_token(folder: Path, eos_token_id: int) -> None:
    """Add the token that trained answers end with to the stop tokens of generation_config.json, if it is not one.

    They may be those of a model that was trained with another tokenizer or template; answers would not end there.
    """
    file = folder / GENERATION_FILE
    if file.is_file():
        values = read_object(file, CheckpointError)
    else:
        values = {"eos_token_id": GenerationConfig.from_model_config(load_hf_config(folder)).eos_token_id}
    listed = values.get("eos_token_id")
    ids = [] if listed is None else [listed] if isinstance(listed, int) else list(listed)
    if eos_token_id not in ids:
        values["eos_token_id"] = [eos_token_id, *ids] if ids else eos_token_id
        file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _replace_files(names: Sequence[str], source: Path, target: Path) -> None:
    """Replace files that belong together, if `source` has any of them."""
    file_names = [name for name in names if (source / name).is_file()]
    if file_names:
        for name in names:
            (target / name).unlink(missing_ok=True)
        for name in file_names:
            shutil.copyfile(source / name, target / name)


def write_init_folder(hf_dir: Path, target: Path, seed: int) -> Path:
    """Write config, tokenizer and processor files, the tensors' names, and random unused tensors to `target`.

    Names and unused tensors come from the folder's weights; without weights they are those of transformers.
    """
    hf = load_hf_config(hf_dir)
    copy_companions(hf_dir, target)
    folder = hf_files.HfFolder.open(hf_dir) if has_weights(hf_dir) else None
    if folder is not None:
        settle_ties(hf, folder)
        write_ties(hf, target)
    infos = _planned_tensors(hf) if folder is None else folder.tensors
    names = detect_names(hf, infos, source=str(hf_dir))
    table = mapping_table(hf, names, hf_tensors=infos, padded_vocab_size=hf.text_config.vocab_size)
    generator = torch.Generator().manual_seed(seed)
    unused = {
        name: folder.get(name) if folder is not None else _initial(name, infos[name].shape, generator)
        for name in table.unused
    }
    save_file(unused, target / layout.UNUSED, metadata={"format": "pt"})
    tensors: dict[str, Any] = hf_files.to_record(infos)
    layout.write_record_file(target, {"unused": dict(table.unused), "tensors": tensors})
    return target


def _planned_tensors(hf: PretrainedConfig) -> dict[str, hf_files.TensorInfo]:
    """Return names and shapes of the model that transformers would build, without allocating memory."""
    with torch.device("meta"):
        model = architecture_of(hf).model_class(hf)
    tied = {"lm_head.weight"} if ties_embeddings(hf) else set()
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items() if name not in tied}
    return {name: hf_files.TensorInfo(SINGLE, _DTYPE, shape) for name, shape in shapes.items()}


def _initial(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return a common initial value: ones for norms, zeros for biases, else small normal values."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "norm" in name and len(shape) == 1:
        return torch.ones(shape)
    return 0.02 * torch.randn(shape, generator=generator)
