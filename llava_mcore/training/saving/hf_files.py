"""Files of a checkpoint beside its state: those of Hugging Face, for its export, run.yaml and the adapter record.

The Hugging Face files are written once, at the start of a run, and copied into each of its checkpoints.
"""

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

from llava_mcore.adapters.adapter_record import write_record
from llava_mcore.checkpoint import layout
from llava_mcore.checkpoint.checksums import of_folder
from llava_mcore.checkpoint.choose_start import StartPoint
from llava_mcore.checkpoint.layout import RUN_FILE
from llava_mcore.config.load import save_run_config
from llava_mcore.config.schema import RunConfig
from llava_mcore.config.sections.data import PixelRange
from llava_mcore.data.encode.assets import ALL_TOKENIZER_FILES, Assets
from llava_mcore.data.encode.chat_template import write_chat_template
from llava_mcore.data.processors.load import PROCESSOR_FILES, VIDEO_FILE
from llava_mcore.data.processors.pixel_range import FRAMES, IMAGES, write_pixel_range
from llava_mcore.errors import CheckpointError
from llava_mcore.files.hf_files import SINGLE, copy_companions, has_weights, is_weight_file, require_own_files
from llava_mcore.files.hf_folder import HfFolder, TensorInfo, to_record
from llava_mcore.files.regular import read_object
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.architectures.registry import architecture_of, ties_embeddings
from llava_mcore.models.language.families.registry import embedding_rows
from llava_mcore.models.model_table import detect_names, mapping_table
from llava_mcore.models.tied_weights import settle_ties, write_ties
from llava_mcore.parallel.groups import Groups
from llava_mcore.training.setup import Trainer

GENERATION_FILE = "generation_config.json"
_DTYPE = "F32"


def carried_files(run: RunConfig, groups: Groups, start: StartPoint, assets: Assets | None) -> Path:
    """Return the folder of Hugging Face files for the run's checkpoints; rank 0 writes it."""
    if not run.checkpoint.saves or groups.rank != 0:
        return start.hf_dir
    assert assets is not None, "rank 0 loads data"
    target = run.run_dir / "hf"
    write_carried_folder(
        start,
        target,
        seed=run.training.seed,
        chat_template=assets.chat.template,
        tokenizer_dir=run.checkpoint.hf_dir,
    )
    write_stop_token(target, assets.eos_token_id)
    if run.data.pixels != PixelRange():
        write_pixel_range(target, assets.pixels, IMAGES)
    if run.data.video_pixels != PixelRange():
        write_pixel_range(target, assets.video_pixels, FRAMES)
    return target


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

    The stop tokens may belong to another tokenizer or template; then generation would not stop at the end of an answer.
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
    folder = HfFolder.open(hf_dir) if has_weights(hf_dir) else None
    if folder is not None:
        settle_ties(hf, folder)
        write_ties(hf, target)
    infos = _planned_tensors(hf) if folder is None else folder.tensors
    names = detect_names(hf, infos, source=str(hf_dir))
    table = mapping_table(hf, names, hf_tensors=infos, padded_vocab_size=embedding_rows(hf))
    generator = torch.Generator().manual_seed(seed)
    unused = {
        name: folder.get(name) if folder is not None else _initial(name, infos[name].shape, generator)
        for name in table.unused
    }
    save_file(unused, target / layout.UNUSED, metadata={"format": "pt"})
    tensors: dict[str, Any] = to_record(infos)
    layout.write_record_file(target, {"unused": dict(table.unused), "tensors": tensors})
    return target


def _planned_tensors(hf: PretrainedConfig) -> dict[str, TensorInfo]:
    """Return names and shapes of the model that transformers would build, without allocating memory."""
    with torch.device("meta"):
        model = architecture_of(hf).model_class(hf)
    tied = {"lm_head.weight"} if ties_embeddings(hf) else set()
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items() if name not in tied}
    return {name: TensorInfo(SINGLE, _DTYPE, shape) for name, shape in shapes.items()}


def _initial(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return a common initial value: ones for norms, zeros for biases, else small normal values."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "norm" in name and len(shape) == 1:
        return torch.ones(shape)
    return 0.02 * torch.randn(shape, generator=generator)


def write_description(trainer: Trainer, checkpoint: Path, hf_source: Path) -> dict[str, str]:
    """Write these files into a checkpoint; return checksums of the Hugging Face files, by path relative to it.

    Args:
        hf_source: folder of these files.
    """
    hf, adapter_setup = layout.hf_folder(checkpoint), trainer.adapter_setup
    shutil.copytree(hf_source, hf, ignore=_without_weights if adapter_setup is None else _without_tensors)
    save_run_config(trainer.run, checkpoint / RUN_FILE)
    if adapter_setup is not None:
        write_record(checkpoint, adapter_setup.base, adapter_setup.plans, adapter_setup.layers)
    return {f"{hf.name}/{name}": text for name, text in of_folder(hf, {})["files"].items()}


def _without_weights(folder: str, names: list[str]) -> list[str]:
    """Return the weight files, which are not copied when a run started from a Hugging Face folder."""
    return [name for name in _without_tensors(folder, names) if name != layout.UNUSED]


def _without_tensors(folder: str, names: list[str]) -> list[str]:
    """Return all files of tensors: none is copied beside an adapter, whose base has them."""
    return [name for name in names if is_weight_file(Path(name))]
