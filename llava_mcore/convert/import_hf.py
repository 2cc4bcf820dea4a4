"""Hugging Face folder → Megatron checkpoint. Needs no GPU; the result loads at any layout."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PretrainedConfig

from llava_mcore.checkpoint import layout
from llava_mcore.checkpoint.checksums import write_checksums
from llava_mcore.config.rules.all_rules import check_layout
from llava_mcore.config.rules.experts import check_expert_layout
from llava_mcore.convert.io.parameters import check_shard_rules, meta_model, parameter_shapes, planned_weights
from llava_mcore.convert.io.streamed_save import Streamed, save_streamed
from llava_mcore.convert.jobs import compare_digests
from llava_mcore.convert.megatron_weights import CheckpointWeights, HfSide
from llava_mcore.errors import ConfigError, ConversionError, problems
from llava_mcore.files.atomic import require_absent, written_beside
from llava_mcore.files.hf_files import companion_files, copy_companions
from llava_mcore.files.hf_folder import HfFolder, plan_file, write_tensors
from llava_mcore.files.tensor_bytes import sha256
from llava_mcore.models.architectures.hf_config import load_hf_config, model_dims
from llava_mcore.models.language.decoder import padded_vocab_size
from llava_mcore.models.language.families.registry import embedding_rows
from llava_mcore.models.model_table import detect_names, mapping_table
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.tied_weights import settle_ties, write_ties
from llava_mcore.parallel.groups import single_process
from llava_mcore.weights.table import MappingTable, check_coverage

logger = logging.getLogger(__name__)

VOCAB_DIVISIBLE_BY = 128
_LISTED = 20  # tensors in one message
_DESCRIPTION_BYTES = 64 << 20  # bytes for metadata, records, manifest and file headers, a generous estimate


def import_hf(
    hf_dir: Path | str,
    megatron_dir: Path | str,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: int = 1,
    dtype: torch.dtype | None = None,
    workers: int = 1,
    verify: bool = False,
) -> Path:
    """Convert one folder and return the iteration folder that was written.

    Examples:
        >>> import_hf("hf", "megatron", tensor_parallel=2, verify=True)
        PosixPath('megatron/iter_0000000')

    Args:
        hf_dir: Hugging Face folder.
        megatron_dir: folder to write; must be new or empty.
        tensor_parallel: number of chunks of each parallel tensor; the vocabulary is padded for it.
        pipeline_parallel: only checked: a checkpoint stores layers separately.
        expert_parallel: number of chunks of the experts of a layer.
        dtype: cast every weight to this; None keeps each tensor's own.
        workers: number of threads; the files are the same for any.
        verify: read the checkpoint back and compare the SHA-256 of every tensor, before it is complete.

    Raises:
        ConversionError, ConfigError: nothing was written, or it was removed again.
    """
    hf_dir, megatron_dir = Path(hf_dir), Path(megatron_dir)
    tp, pp, ep = tensor_parallel, pipeline_parallel, expert_parallel
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    # 1. Config and headers of the folder: the model is known, and tp x pp divides it.
    require_absent(megatron_dir, activity="the import")
    hf, folder = open_folder(hf_dir, tp=tp, pp=pp, ep=ep)
    with single_process():
        # 2. The model without memory and its mapping table, which names and shapes of the folder fit.
        model, table = model_and_table(hf, folder, tp=tp)
        # 3. The plan: pieces of every parameter, and where the values of each are.
        sources = {name: folder.where(name) for name in folder.tensors}
        stored = model.sharded_state_dict()
        state, entries = planned_weights(table, stored, sources, tp_size=tp, ep_size=ep, dtype=dtype)
        room = _room_beside(hf_dir) + sum(x.num_bytes for x in entries)
        room += sum(sources[name].num_bytes for name in table.unused)
        # 4. A locked, empty folder beside the target, which gets the target's name at the end.
        with written_beside(megatron_dir, num_bytes=room, activity="the import") as partial:
            checkpoint = layout.iteration_folder(partial, 0)
            checkpoint.mkdir()
            # 5. The bytes: threads transform, hash and write one file after the other.
            streamed = save_streamed({"iteration": 0, "model": state}, entries, checkpoint, workers=workers)
            # 6. Companions of the weights: config, tokenizer, unused tensors, the manifest, checksums.
            digests = _write_beside(streamed, hf, folder, table, checkpoint, tp=tp, pp=pp, dtype=name)
            # 7. The comparison, if it was asked for; then the checkpoint is complete.
            if verify:
                _verify(checkpoint, digests, tp=tp, workers=workers)
            layout.write_tracker(partial, 0)
    _warn_of_values(hf_dir, streamed.not_finite, "" if name is None else f" as {name}")
    return layout.iteration_folder(megatron_dir, 0)


def _warn_of_values(hf_dir: Path, names: Sequence[str], cast: str) -> None:
    """Warn about weights that are not finite, with which training fails; they are imported as they are."""
    if names:
        listed = ", ".join(sorted(names)[:_LISTED]) + (" …" if len(names) > _LISTED else "")
        logger.warning("warning: %d tensors of %s hold NaN or infinite values%s: %s", len(names), hf_dir, cast, listed)


def _room_beside(hf_dir: Path) -> int:
    """Return the size in bytes of the files other than weights, and of the checkpoint's metadata."""
    return sum(x.stat().st_size for x in companion_files(hf_dir)) + _DESCRIPTION_BYTES


def _verify(checkpoint: Path, expected: dict[str, str], *, tp: int, workers: int) -> None:
    """Read a checkpoint back as an export does, and compare the tensors with the imported ones."""
    weights = CheckpointWeights(HfSide.carried(checkpoint), checkpoint, tp)
    actual = weights.digests("verify", workers=workers)
    compare_digests(actual, expected, title="the checkpoint differs from what was imported")


def open_folder(hf_dir: Path, *, tp: int, pp: int, ep: int = 1) -> tuple[PretrainedConfig, HfFolder]:
    """Read config and headers of a folder and check that the model is known and can be split.

    `ep` divides experts alone. The tower need not divide: ranks may have all of it (`vision_data_parallel`).

    Raises:
        ConversionError, ConfigError: lists everything that does not fit.
    """
    hf = load_hf_config(hf_dir)
    folder = HfFolder.open(hf_dir)
    folder.warn_of_ignored()
    untrue = settle_ties(hf, folder)
    if untrue is not None:
        logger.warning("warning: %s", untrue)
    dims = model_dims(hf)
    wrong = check_layout(dims, tp, pp, str(hf_dir), vision_data_parallel=True)
    wrong += check_expert_layout(dims, ep, 1, str(hf_dir))
    if wrong:
        experts = f" x ep {ep}" if ep > 1 else ""
        raise ConfigError(problems(f"{hf_dir} cannot be split into tp {tp} x pp {pp}{experts}", wrong))
    return hf, folder


def model_and_table(hf: PretrainedConfig, folder: HfFolder, *, tp: int) -> tuple[VisionLanguageModel, MappingTable]:
    """Return the model without memory, its vocabulary padded for `tp`, and the folder's table, checked against it.

    Process groups of one process must exist.

    Raises:
        ConversionError: lists everything that does not fit.
    """
    rows = padded_vocab_size(embedding_rows(hf), divisible_by=VOCAB_DIVISIBLE_BY, tensor_model_parallel_size=tp)
    model = meta_model(hf, num_vocab_rows=rows)
    table = checked_table(hf, folder, parameter_shapes(model), rows)
    check_shard_rules(table, model)
    return model, table


def checked_table(
    hf: PretrainedConfig, folder: HfFolder, megatron_shapes: dict[str, tuple[int, ...]], rows: int
) -> MappingTable:
    """Return the folder's table after comparing names, shapes and dtypes with the model.

    Raises:
        ConversionError: lists everything that does not fit.
    """
    names = detect_names(hf, folder.tensors, source=str(folder.path))
    table = mapping_table(hf, names, hf_tensors=folder.tensors, padded_vocab_size=rows)
    check_coverage(table, hf_shapes=folder.shapes, megatron_shapes=megatron_shapes, source=str(folder.path))
    errors = []
    for entry in table.entries.values():
        dtypes = {folder.tensors[name].dtype for name in entry.hf_names}
        if len(dtypes) > 1:
            errors.append(f"{', '.join(entry.hf_names)} become one tensor, but have dtypes {', '.join(sorted(dtypes))}")
    if errors:
        raise ConversionError(problems(f"{folder.path} cannot be converted exactly", errors))
    return table


def _write_beside(
    streamed: Streamed,
    hf: PretrainedConfig,
    folder: HfFolder,
    table: MappingTable,
    checkpoint: Path,
    *,
    tp: int,
    pp: int,
    dtype: str | None,
) -> dict[str, str]:
    """Write everything but the weights, and return the SHA-256 of every tensor of the folder."""
    digests = streamed.digests | {copy: streamed.digests[x] for copy, x in table.copies.items()}
    digests |= _write_companions(hf, folder, table, checkpoint, tp=tp, pp=pp)
    manifest = layout.make_manifest(folder.path, table, digests, dtype=dtype, tp=tp, pp=pp)
    layout.write_manifest(layout.hf_folder(checkpoint), manifest)
    write_checksums(checkpoint, streamed.checksums)
    return digests


def _write_companions(
    hf: PretrainedConfig, folder: HfFolder, table: MappingTable, checkpoint: Path, *, tp: int, pp: int
) -> dict[str, str]:
    """Store config, tokenizer, processor and unused tensors in the checkpoint; return the SHA-256 of these tensors."""
    target = layout.hf_folder(checkpoint)
    copy_companions(folder.path, target)
    write_ties(hf, target)
    sources = {name: folder.where(name) for name in table.unused}
    plan = plan_file(target / layout.UNUSED, {name: (x.dtype, x.shape) for name, x in sources.items()})
    write_tensors(plan, ((name, x.map()) for name, x in sources.items()))
    record = {"layout": {"tp": tp, "pp": pp}, "unused": dict(table.unused), "tensors": folder.record()}
    layout.write_record(checkpoint, record)
    return {name: sha256((x,)) for name, x in sources.items()}
