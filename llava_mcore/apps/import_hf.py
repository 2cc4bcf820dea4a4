"""Hugging Face folder → Megatron checkpoint. Needs no GPU; the result loads at any layout."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlavaConfig

from llava_mcore.checkpoint import hf_files, layout
from llava_mcore.checkpoint.hf_config import load_hf_config, model_dims
from llava_mcore.checkpoint.megatron import save_state
from llava_mcore.checkpoint.weights import check_shard_rules, parameter_shapes, sharded_weights
from llava_mcore.config.rules import check_layout
from llava_mcore.conversion.mapping import MappingTable, check_coverage
from llava_mcore.errors import ConfigError, ConversionError, problems
from llava_mcore.models.language.decoder import padded_vocab_size
from llava_mcore.models.meta import meta_model
from llava_mcore.models.names import detect_names
from llava_mcore.models.parts import check_families
from llava_mcore.models.table import mapping_table
from llava_mcore.models.vlm import VisionLanguageModel
from llava_mcore.parallel.groups import single_process

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
VOCAB_DIVISIBLE_BY = 128


def import_hf(hf_dir: Path, megatron_dir: Path, *, tp: int = 1, pp: int = 1, dtype: torch.dtype | None = None) -> Path:
    """Convert one folder and return the iteration folder that was written.

    Args:
        tp: each parallel tensor is stored in this many chunks, and the vocabulary is padded for it.
        pp: only checked: a checkpoint holds its layers one by one.
        dtype: cast every weight to this; None keeps each tensor's own.

    Raises:
        ConversionError, ConfigError: before anything is written.
    """
    hf_files.require_absent(megatron_dir, what="the import")
    hf, folder = open_folder(hf_dir, tp=tp, pp=pp)
    with single_process():
        model, table = model_and_table(hf, folder, tp=tp)
        partial = hf_files.partial_sibling(megatron_dir)
        checkpoint = layout.iteration_folder(partial, 0)
        checkpoint.mkdir()
        state = sharded_weights(table, model.sharded_state_dict(), folder.get, tp_size=tp, dtype=dtype)
        save_state({"iteration": 0, "model": state}, checkpoint)
    _write_companions(folder, table, checkpoint, tp=tp, pp=pp)
    layout.write_tracker(partial, 0)
    hf_files.publish(partial, megatron_dir)
    return layout.iteration_folder(megatron_dir, 0)


def open_folder(hf_dir: Path, *, tp: int, pp: int) -> tuple[LlavaConfig, hf_files.HfFolder]:
    """Read config and headers of a folder and check that the model is known and can be cut.

    Raises:
        ConversionError, ConfigError: lists everything that does not fit.
    """
    hf = load_hf_config(hf_dir)
    check_families(hf, source=str(hf_dir))
    folder = hf_files.HfFolder.open(hf_dir)
    wrong = check_layout(model_dims(hf), tp, pp, str(hf_dir))
    if wrong:
        raise ConfigError(problems(f"{hf_dir} cannot be cut into tp {tp} x pp {pp}", wrong))
    return hf, folder


def model_and_table(hf: LlavaConfig, folder: hf_files.HfFolder, *, tp: int) -> tuple[VisionLanguageModel, MappingTable]:
    """Return the model without memory, its vocabulary padded for `tp`, and the folder's table, checked against it.

    Process groups of one must exist.

    Raises:
        ConversionError: lists everything that does not fit.
    """
    rows = padded_vocab_size(hf.text_config.vocab_size, divisible_by=VOCAB_DIVISIBLE_BY, tensor_model_parallel_size=tp)
    model = meta_model(hf, num_vocab_rows=rows)
    table = checked_table(hf, folder, parameter_shapes(model), rows)
    check_shard_rules(table, model)
    return model, table


def checked_table(
    hf: LlavaConfig, folder: hf_files.HfFolder, megatron_shapes: dict[str, tuple[int, ...]], rows: int
) -> MappingTable:
    """Return the folder's table after comparing names, shapes and dtypes with the model.

    Raises:
        ConversionError: lists everything that does not fit.
    """
    names = detect_names(folder.tensors, source=str(folder.path))
    table = mapping_table(hf, names, hf_tensors=folder.tensors, padded_vocab_size=rows)
    check_coverage(table, hf_shapes=folder.shapes, megatron_shapes=megatron_shapes, source=str(folder.path))
    found = []
    for entry in table.entries.values():
        dtypes = {folder.tensors[name].dtype for name in entry.hf_names}
        if len(dtypes) > 1:
            found.append(f"{', '.join(entry.hf_names)} become one tensor, but have dtypes {', '.join(sorted(dtypes))}")
    for copy, original in table.copies.items():
        if not torch.equal(folder.get(copy), folder.get(original)):
            found.append(f"{copy} differs from {original}, but config.json ties them (tie_word_embeddings)")
    if found:
        raise ConversionError(problems(f"{folder.path} cannot be converted exactly", found))
    return table


def _write_companions(folder: hf_files.HfFolder, table: MappingTable, checkpoint: Path, *, tp: int, pp: int) -> None:
    """Let config, tokenizer, processor and unused tensors travel inside the checkpoint."""
    target = layout.hf_folder(checkpoint)
    hf_files.copy_companions(folder.path, target)
    save_file({name: folder.get(name) for name in table.unused}, target / layout.UNUSED, metadata={"format": "pt"})
    record = {"layout": {"tp": tp, "pp": pp}, "unused": dict(table.unused), "tensors": folder.record()}
    layout.write_record(checkpoint, record)


def parser() -> argparse.ArgumentParser:
    """Flags of convert_hf_to_megatron.py (seed names)."""
    p = argparse.ArgumentParser(
        prog="convert_hf_to_megatron.py",
        allow_abbrev=False,
        description="Convert a Hugging Face LLaVA folder into a Megatron checkpoint (torch_dist), exactly and without "
        "a GPU. The checkpoint loads at any tensor x pipeline x data parallel size.",
    )
    p.add_argument("--hf-dir", type=Path, required=True, help="Hugging Face LLaVA folder to read")
    p.add_argument("--megatron-dir", type=Path, required=True, help="folder to write; must not exist or be empty")
    p.add_argument("--tp", type=int, default=1, help="tensor-parallel size to cut and pad for (default 1)")
    p.add_argument("--pp", type=int, default=1, help="pipeline-parallel size to check for (default 1)")
    p.add_argument("--dtype", choices=DTYPES, help="cast the weights (default: keep each tensor's own dtype)")
    p.add_argument("--sif-path", type=Path, help="run the same command inside this Singularity image")
    return p


def run(args: argparse.Namespace) -> int:
    """Convert as the flags say."""
    start = time.perf_counter()
    dtype = DTYPES[args.dtype] if args.dtype else None
    written = import_hf(args.hf_dir, args.megatron_dir, tp=args.tp, pp=args.pp, dtype=dtype)
    print(f"imported {args.hf_dir} -> {written} in {time.perf_counter() - start:.1f} s (cut for tp {args.tp})")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    from llava_mcore.apps.cli import conversion_main

    return conversion_main(parser(), run, sys.argv[1:] if argv is None else list(argv))
