"""Megatron checkpoint → Hugging Face folder, with the names and files of the import."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from llava_mcore.adapters.adapter_record import holds_adapters
from llava_mcore.checkpoint import layout
from llava_mcore.checkpoint.verify import require_undamaged
from llava_mcore.config.rules.all_rules import check_layout
from llava_mcore.convert.adapters import CheckpointAdapters
from llava_mcore.convert.companions import model_companions, update_config
from llava_mcore.convert.export_adapter import PeftFolder, check_adapter_options, write_merged, write_peft_folder
from llava_mcore.convert.io.export_jobs import export_all, hash_files
from llava_mcore.convert.jobs import compare_digests
from llava_mcore.convert.megatron_weights import CheckpointWeights, HfSide
from llava_mcore.errors import ConfigError, ConversionError, problems
from llava_mcore.files.atomic import require_absent, written_beside
from llava_mcore.files.hf_files import SINGLE, copy_files, write_index
from llava_mcore.files.hf_folder import HfFolder, PlannedFile, plan_file
from llava_mcore.files.tensor_bytes import Writer, as_bytes, sha256
from llava_mcore.models.architectures.hf_config import model_dims
from llava_mcore.parallel.groups import single_process


def export_hf(
    megatron_dir: Path | str,
    hf_dir: Path | str,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    hf_config: Path | None = None,
    tokenizer_dir: Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: str | None = None,
    workers: int = 1,
    verify: bool = False,
    verify_checkpoint: bool = True,
    merge: bool = False,
    adapter: str | None = None,
    base_dir: Path | None = None,
    base_model: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> int:
    """Write one Hugging Face folder from the newest checkpoint and return its iteration.

    Examples:
        >>> export_hf("megatron", "exported", verify=True)
        0

    Args:
        megatron_dir: folder of checkpoints.
        hf_dir: folder to write; must be new or empty.
        tensor_parallel: only checked, like `pipeline_parallel`: every parameter must be divisible.
        hf_config: a Hugging Face folder of the same model, from which names, files and unused tensors are taken instead
            of from the checkpoint. For checkpoints of Megatron-LM. With config.json alone, names are llava-hf's and
            tensors that training does not use are not written.
        tokenizer_dir: copy tokenizer, processor and template files from here instead of from the checkpoint.
        dtype: cast every trained weight; None keeps the checkpoint's dtype.
        max_shard_size: maximum size of a file, such as "5GB"; None keeps the files of the import.
        workers: number of threads; the files are the same for any.
        verify: read the files back and compare the SHA-256 of every tensor, before the folder is complete.
        verify_checkpoint: first compare the checkpoint's files with their checksums.
        merge: of a run with an adapter, write the whole model with all its adapters in it; else a PEFT folder.
        adapter: name of the adapter that goes into the PEFT folder; None: the one that was trained.
        base_dir: folder of checkpoints with the weights that the adapter belongs to; None: where they were.
        base_model: name or folder of the base model that the PEFT folder refers to; None: the folder of the import.
        say: called with the result of that comparison, and with what vLLM does not compute of an adapter.

    Raises:
        CheckpointError, ConversionError, ConfigError: nothing was written, or it was removed again.
    """
    # Find the checkpoint, and check that the options fit its adapters.
    require_absent(Path(hf_dir), activity="the export")
    checkpoint, iteration = layout.latest_readable(Path(megatron_dir))
    check_adapter_options(checkpoint, merge=merge, adapter=adapter, base_dir=base_dir, base_model=base_model)
    # Options for writing.
    how = _FolderExport(
        tensor_parallel, pipeline_parallel, hf_config, tokenizer_dir, dtype, max_shard_size, workers, verify
    )
    verified = partial(_say_undamaged, say) if verify_checkpoint else _not_verified
    peft = None if merge else PeftFolder(adapter, base_model, tokenizer_dir, dtype)
    _export(checkpoint, Path(hf_dir), how, peft, base_dir, verified, say, is_import=iteration == 0)
    return iteration


@dataclass(frozen=True)
class _FolderExport:
    """How a folder is written (see `export_hf`)."""

    tp: int
    pp: int
    hf_config: Path | None
    tokenizer_dir: Path | None
    dtype: torch.dtype | None
    max_shard_size: str | None
    workers: int
    verify: bool


def _say_undamaged(say: Callable[[str], None], checkpoint: Path) -> None:
    say(require_undamaged(checkpoint))


def _not_verified(checkpoint: Path) -> None:
    """Do not compare a checkpoint with its checksums."""


def _export(
    checkpoint: Path,
    hf_dir: Path,
    how: _FolderExport,
    peft: PeftFolder | None,
    base_dir: Path | None,
    verified: Callable[[Path], None],
    say: Callable[[str], None],
    *,
    is_import: bool,
) -> None:
    """Write one iteration's checkpoint, or its adapters alone.

    Args:
        peft: what becomes of adapters; None: they go into the model's weights.
        verified: compares a checkpoint with its checksums.
        say: called with lines for the user.
        is_import: whether the checkpoint was imported, not trained.
    """
    # 1. Adapters: written alone, or merged into the weights that they belong to.
    adapters, base, companions = None, checkpoint, None
    if holds_adapters(checkpoint):
        verified(checkpoint)
        adapters = CheckpointAdapters.open(checkpoint)
        if peft is not None:
            write_peft_folder(adapters, checkpoint, hf_dir, peft, verify=how.verify, say=say)
            return
        base, companions = adapters.base.found_at(base_dir), layout.hf_folder(checkpoint)
    # 2. Everything is planned from metadata: files, sizes and what is copied.
    side = _hf_side(base, how.hf_config, tp=how.tp, pp=how.pp)
    copied = model_companions(companions or side.files, how.tokenizer_dir)
    with single_process():
        weights = CheckpointWeights(side, base, how.tp)
    files = planned_files(weights, how.dtype, how.max_shard_size)
    room = sum(x.size for x in files.values()) + sum(x.stat().st_size for x in copied.values())
    # 3. Weights are written and, if wanted, read back.
    verified(base)
    with written_beside(hf_dir, num_bytes=room, activity="the export") as target:
        digests = _write_weights(weights, files, target, how)
        if adapters is not None:
            digests |= write_merged(adapters, weights.table, target, hashed=how.verify)
        if how.verify:
            _verify(target, digests, workers=how.workers)
            if is_import and how.dtype is None and adapters is None:
                _compare_with_import(side.files, digests)
        # 4. Config, tokenizer and processor; config.json says what the weight files are.
        trained = weights.trained_names()
        dtypes = {x for name, x in weights.dtypes(how.dtype).items() if name in trained}
        copy_files(copied, target)
        update_config(target, str(next(iter(dtypes))).removeprefix("torch.") if len(dtypes) == 1 else None)


def _hf_side(checkpoint: Path, hf_config: Path | None, *, tp: int, pp: int) -> HfSide:
    """Return the Hugging Face side of the checkpoint. Raises ConfigError for a layout that the model does not
    support."""
    side = HfSide.carried(checkpoint) if hf_config is None else HfSide.of_folder(hf_config)
    wrong = check_layout(model_dims(side.hf), tp, pp, str(side.files), vision_data_parallel=True)
    if wrong:
        raise ConfigError(problems(f"{checkpoint} cannot be read as tp {tp} x pp {pp}", wrong))
    return side


def planned_files(
    weights: CheckpointWeights, dtype: torch.dtype | None, max_shard_size: str | None
) -> dict[str, PlannedFile]:
    """Return the name and contents of each weight file; paths are relative to the folder.

    Raises:
        ConversionError: `max_shard_size` is not a size.
    """
    dtypes = weights.dtypes(dtype)
    missing = sorted(weights.infos.keys() - dtypes.keys())
    if missing:
        raise ConversionError(problems(f"{weights.checkpoint} lacks tensors that {layout.RECORD} names", missing))
    files = {name: info.file for name, info in weights.infos.items()}
    if max_shard_size is not None:
        sizes = {name: math.prod(x.shape) * dtypes[name].itemsize for name, x in weights.infos.items()}
        files = _files_of_at_most(max_shard_size, sizes)
    members: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
    for name, info in weights.infos.items():
        members.setdefault(files[name], {})[name] = (dtypes[name], info.shape)
    return {file: plan_file(Path(file), tensors) for file, tensors in members.items()}


def _files_of_at_most(size: str, sizes: dict[str, int]) -> dict[str, str]:
    """Return the file of each tensor, split and named as transformers would."""
    try:
        split = split_state_dict_into_shards_factory(
            sizes, get_storage_size=lambda x: x, filename_pattern="model{suffix}.safetensors", max_shard_size=size
        )
    except ValueError as error:
        raise ConversionError(f"--max-shard-size {size!r}: expected a number and KB, MB, GB or TB ({error})") from error
    return split.tensor_to_filename


def _write_weights(
    weights: CheckpointWeights,
    files: dict[str, PlannedFile],
    target: Path,
    how: _FolderExport,
) -> dict[str, str]:
    """Write all weight files and the index; return the SHA-256 of every tensor if they are to be verified."""
    placed = {file: plan.moved_to(target / file) for file, plan in files.items()}
    for plan in placed.values():
        plan.create()
    targets = {name: at for plan in placed.values() for name, at in plan.tensors.items()}
    digests = export_all("export", weights.reads(how.dtype, targets), hashed=how.verify, workers=how.workers)
    with Writer() as writer:
        for name in weights.table.unused:
            data = weights.unused.get(name)
            writer.write(targets[name].path, targets[name].offset, as_bytes(data))
            if how.verify:
                digests[name] = sha256(data)
    if how.verify:
        digests |= {copy: digests[original] for copy, original in weights.table.copies.items()}
    if set(files) != {SINGLE}:
        names = {name: file for file, plan in files.items() for name in plan.tensors}
        write_index(target, names, sum(x.num_bytes for x in targets.values()))
    return digests


def _verify(target: Path, expected: dict[str, str], *, workers: int) -> None:
    """Read the written files and compare them with the tensors of the checkpoint."""
    folder = HfFolder.open(target)
    actual = hash_files("verify", {name: folder.where(name) for name in folder.tensors}, workers=workers)
    compare_digests(actual, expected, title="the files differ from the checkpoint")


def _compare_with_import(companions: Path, digests: dict[str, str]) -> None:
    """Check that an untrained checkpoint exports the imported tensors, whichever version imported it."""
    manifest = layout.read_manifest(companions)
    if manifest is not None:
        compare_digests(digests, manifest.digests, title="the export differs from what was imported")
