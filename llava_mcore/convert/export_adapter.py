"""The adapter of a checkpoint as a PEFT folder, or in the weights of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from llava_mcore.adapters.adapter_record import Base, holds_adapters
from llava_mcore.adapters.peft_config import CONFIG, write_config
from llava_mcore.adapters.peft_tensors import WEIGHTS
from llava_mcore.adapters.vllm_rules import vllm_problems, with_one_scale
from llava_mcore.checkpoint import layout
from llava_mcore.convert.adapters import CheckpointAdapters
from llava_mcore.convert.companions import text_companions
from llava_mcore.convert.jobs import compare_digests
from llava_mcore.errors import ConfigError, ConversionError, problems
from llava_mcore.files.atomic import written_beside
from llava_mcore.files.hf_files import copy_files
from llava_mcore.files.hf_folder import HfFolder, plan_file, write_tensors
from llava_mcore.files.regular import read_object
from llava_mcore.files.tensor_bytes import Writer, as_bytes, sha256
from llava_mcore.models.architectures.registry import architecture_of
from llava_mcore.weights.table import MappingTable


@dataclass(frozen=True)
class PeftFolder:
    """The options of a PEFT folder.

    `adapter`: its name, None: the trained one. `base_model`: name or folder of the model, None: the folder that was
    imported. `tokenizer_dir`: copy tokenizer and processor from here instead of from the checkpoint. `dtype`: cast to
    this, None: as saved.
    """

    adapter: str | None = None
    base_model: str | None = None
    tokenizer_dir: Path | None = None
    dtype: torch.dtype | None = None


def check_adapter_options(
    checkpoint: Path, *, merge: bool, adapter: str | None, base_dir: Path | None, base_model: str | None
) -> None:
    """Raise ConfigError for options that have no effect on what a checkpoint holds."""
    peft: dict[str, object] = {"--adapter": adapter, "--base-model": base_model}
    merging: dict[str, object] = {"--base-dir": base_dir}
    if not holds_adapters(checkpoint):
        kind, without_effect = "a whole model", {"--merge": merge or None} | peft | merging
    elif merge:
        kind, without_effect = "an adapter, which --merge puts into the model", peft
    else:
        kind, without_effect = "an adapter, which becomes a PEFT folder", merging
    errors = [f"{flag} has no effect: omit it" for flag, value in without_effect.items() if value is not None]
    if errors:
        raise ConfigError(problems(f"{checkpoint} holds {kind}", errors))


def write_peft_folder(
    adapters: CheckpointAdapters,
    checkpoint: Path,
    target: Path,
    options: PeftFolder,
    *,
    verify: bool,
    say: Callable[[str], None],
) -> None:
    """Write adapter_config.json, adapter_model.safetensors, and the files of tokenizer and processor.

    Args:
        verify: read the tensors back and compare them.
        say: called with a line for each feature that vLLM does not compute.

    Raises:
        ConversionError: no adapter of that name, or nothing says what the base model is.
    """
    # The tensors, scaled so that vLLM computes the same where that changes no bits.
    plan, base = adapters.plan(options.adapter), options.base_model or _imported(adapters.base, checkpoint)
    dtype = options.dtype or adapters.dtype
    written, factors = with_one_scale(plan, may_change_b=dtype != torch.float16)  # where small numbers lose bits
    tensors = {key: x.to(dtype) for key, x in adapters.peft_tensors(plan, factors).items()}
    file = plan_file(Path(WEIGHTS), {key: (x.dtype, tuple(x.shape)) for key, x in tensors.items()})
    # Weights, config and tokenizer; the folder appears when all are there and verified.
    with written_beside(target, num_bytes=file.size, activity="the export") as partial:
        write_tensors(file.moved_to(partial / WEIGHTS), tensors.items())
        write_config(partial, written, adapters.layers, base, architecture_of(adapters.hf).model_class)
        copy_files(text_companions(options.tokenizer_dir or layout.hf_folder(checkpoint)), partial)
        if verify:
            file_again = HfFolder.of_file(partial / WEIGHTS)
            actual = {name: sha256((file_again.where(name),)) for name in file_again.tensors}
            expected = {name: sha256(x) for name, x in tensors.items()}
            compare_digests(actual, expected, title="the file does not hold what the checkpoint does")
        for problem in vllm_problems(read_object(partial / CONFIG, ConversionError)):
            say(f"note: vLLM cannot serve this adapter beside its model: {problem}; export-hf --merge writes a model")


def _imported(base: Base, checkpoint: Path) -> str:
    """Return the Hugging Face folder whose weights adapters belong to.

    Raises:
        ConversionError: they belong to weights that were trained after the import, or no folder is known.
    """
    manifest = layout.read_manifest(layout.hf_folder(checkpoint))
    if not base.is_import:
        raise ConversionError(
            f"{checkpoint}: the adapter was trained on {base.folder}, not on an imported folder: write that checkpoint "
            f"with export-hf --megatron-dir {base.folder}, and name the folder with --base-model"
        )
    if manifest is None:
        raise ConversionError(f"{checkpoint} does not say which folder was imported: name it with --base-model")
    return manifest.source


def write_merged(adapters: CheckpointAdapters, table: MappingTable, folder: Path, *, hashed: bool) -> dict[str, str]:
    """Put adapters into the weights of a folder that has the base's; return the SHA-256 of changed tensors if `hashed`.

    Args:
        table: of the folder.
    """
    weights, digests = HfFolder.open(folder), {}
    with Writer() as writer:
        for name, tensor in adapters.merged_tensors(weights, table):
            at = weights.where(name)
            writer.write(at.path, at.offset, as_bytes(tensor))
            if hashed:
                digests[name] = sha256(tensor)
    return digests
