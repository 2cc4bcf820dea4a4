"""Check that a Hugging Face folder can be converted, and that a checkpoint has its weights or those of its import."""

from __future__ import annotations

from pathlib import Path

import torch

from llava_mcore.adapters.adapter_record import holds_adapters, read_base
from llava_mcore.checkpoint import layout
from llava_mcore.checkpoint.checksums import recorded
from llava_mcore.checkpoint.verify import require_undamaged
from llava_mcore.config.rules.all_rules import tower_divides
from llava_mcore.convert.import_hf import model_and_table, open_folder
from llava_mcore.convert.jobs import compare_digests
from llava_mcore.convert.megatron_weights import CheckpointWeights, HfSide
from llava_mcore.errors import CheckpointError, ConversionError, problems
from llava_mcore.files.hf_folder import HfFolder
from llava_mcore.models.architectures.hf_config import model_dims
from llava_mcore.parallel.groups import single_process


def check_folder(hf_dir: Path, *, tp: int, pp: int) -> str:
    """Check that a Hugging Face folder can be converted completely and fits a layout; return a summary.

    Raises:
        ConversionError, ConfigError: lists everything that does not fit.
    """
    hf, folder = open_folder(hf_dir, tp=tp, pp=pp)
    with single_process():
        _, table = model_and_table(hf, folder, tp=tp)
    dims = model_dims(hf)
    on_first_stage = dims.num_deepstack_layers if dims.num_layers // pp < dims.num_deepstack_layers else 0
    conditions = [] if tower_divides(dims, tp) else ["--vision-data-parallel"]
    conditions += [f"{on_first_stage} decoder layers on the first stage or more"] if on_first_stage else []
    return (
        f"{hf_dir}: {len(folder.tensors)} tensors = {len(table.entries)} Megatron parameters, "
        f"{len(table.unused)} unused by training, {len(table.copies)} tied copies; fits tp {tp} x pp {pp}"
        f"{' with ' if conditions else ''}{' and '.join(conditions)}"
    )


def check_checkpoint(hf_dir: Path, megatron_dir: Path, *, tp: int) -> str:
    """Compare the newest checkpoint's weights with a Hugging Face folder, bit for bit; return a summary.

    One tensor is in memory at a time. For checkpoints of other programs, names and tensors that training does not use
    come from the folder itself. If the import cast tensors (`--dtype`), they are compared with the cast originals.

    Raises:
        CheckpointError: it is not a readable checkpoint of this model.
        ConversionError: lists every tensor that differs.
    """
    # Both sides, by names and shapes.
    checkpoint, iteration = layout.latest_readable(megatron_dir)
    if holds_adapters(checkpoint):
        raise CheckpointError(
            f"{checkpoint} holds an adapter, not a model's weights: compare what it computes with --logits, or write "
            "the whole model with export-hf --merge"
        )
    side = HfSide.of_checkpoint(checkpoint, hf_dir)
    infos, manifest = side.infos, layout.read_manifest(side.files)
    cast = None if manifest is None or manifest.dtype is None else getattr(torch, manifest.dtype)
    folder = HfFolder.open(hf_dir)
    # Names first, then values, one tensor at a time.
    differences = [f"{name}: only in {hf_dir}" for name in sorted(folder.tensors.keys() - infos.keys())]
    differences += [f"{name}: only in {checkpoint}" for name in sorted(infos.keys() - folder.tensors.keys())]
    with single_process():
        weights = CheckpointWeights(side, checkpoint, tp)
        for name, megatron_tensor in weights.tensors():
            if name in folder.tensors:
                hf_tensor = folder.get(name)
                keeps_dtype = cast is None or name in weights.table.unused
                differences += _difference(name, megatron_tensor, hf_tensor if keeps_dtype else hf_tensor.to(cast))
    if differences:
        raise ConversionError(problems(f"iteration {iteration} of {megatron_dir} is not {hf_dir}", differences))
    # The summary, for a user.
    after = "" if cast is None else f" after a cast to {cast}"
    return (
        f"{megatron_dir}: iteration {iteration} equals {hf_dir} bit for bit{after} "
        f"({len(infos)} tensors, read at tp {tp})"
    )


def check_manifest(megatron_dir: Path, *, tp: int, workers: int) -> str:
    """Compare a checkpoint's files with their checksums, and an import's tensors with its manifest; return a summary.

    Raises:
        CheckpointError: it is not a readable checkpoint, is damaged, or there is nothing to compare with.
        ConversionError: lists every tensor that differs.
    """
    checkpoint, iteration = layout.latest_checkpoint(megatron_dir)
    summary = require_undamaged(checkpoint)
    if holds_adapters(checkpoint):
        return f"{summary}\n{megatron_dir}: iteration {iteration} holds an adapter on {read_base(checkpoint).folder}"
    side = HfSide.carried(checkpoint)
    manifest = layout.read_manifest(side.files)
    if (manifest is None or iteration) and recorded(checkpoint) is not None:
        return summary
    if manifest is None or iteration:
        raise CheckpointError(
            f"iteration {iteration} of {megatron_dir} has nothing to compare with (no checksums, and it was "
            f"trained or has no {layout.MANIFEST}): give --hf-dir"
        )
    with single_process():
        weights = CheckpointWeights(side, checkpoint, tp)
    title = f"{checkpoint} differs from what was imported from {manifest.source}"
    compare_digests(weights.digests("check", workers=workers), manifest.digests, title=title)
    return (
        f"{summary}\n{megatron_dir}: {len(side.infos)} tensors match the SHA-256 of their import from {manifest.source}"
    )


def _difference(name: str, megatron_tensor: torch.Tensor, hf_tensor: torch.Tensor) -> list[str]:
    if megatron_tensor.dtype != hf_tensor.dtype or megatron_tensor.shape != hf_tensor.shape:
        return [
            f"{name}: {megatron_tensor.dtype} {tuple(megatron_tensor.shape)} in the checkpoint, "
            f"{hf_tensor.dtype} {tuple(hf_tensor.shape)}"
        ]
    if torch.equal(megatron_tensor, hf_tensor):
        return []
    largest = (megatron_tensor.double() - hf_tensor.double()).abs().max().item()
    return [f"{name}: largest difference {largest:.3g}"]
