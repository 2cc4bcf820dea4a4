"""Megatron checkpoint → Hugging Face folder, under the names and in the files the weights came from."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from llava_mcore.apps.checkpoint_weights import CheckpointWeights
from llava_mcore.apps.import_hf import DTYPES
from llava_mcore.checkpoint import hf_files, layout
from llava_mcore.checkpoint.hf_config import load_hf_config, model_dims
from llava_mcore.config.rules import check_layout
from llava_mcore.errors import ConfigError, ConversionError, problems
from llava_mcore.models.parts import check_families
from llava_mcore.parallel.groups import single_process


def export_hf(
    megatron_dir: Path,
    hf_dir: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    tokenizer_dir: Path | None = None,
    dtype: torch.dtype | None = None,
) -> int:
    """Write one Hugging Face folder from the newest checkpoint and return its iteration.

    Args:
        tp: the weights are read as this many tensor-parallel ranks hold them, and joined by the table's rules.
        pp: only checked.
        tokenizer_dir: take tokenizer, processor and template files from here instead of the checkpoint.
        dtype: cast every trained weight; None keeps the checkpoint's.

    Raises:
        CheckpointError, ConversionError, ConfigError: before anything is written.
    """
    hf_files.require_absent(hf_dir, what="the export")
    checkpoint, iteration = layout.latest_checkpoint(megatron_dir)
    companions = layout.hf_folder(checkpoint)
    infos = hf_files.infos_from_record(layout.read_record(checkpoint)["tensors"])
    hf = load_hf_config(companions)
    check_families(hf, source=str(companions))
    wrong = check_layout(model_dims(hf), tp, pp, str(companions))
    if wrong:
        raise ConfigError(problems(f"{checkpoint} cannot be read as tp {tp} x pp {pp}", wrong))
    if tokenizer_dir is not None and not (tokenizer_dir / "tokenizer_config.json").is_file():
        raise ConversionError(f"--tokenizer-dir {tokenizer_dir}: no tokenizer_config.json")
    with single_process():
        weights = CheckpointWeights(hf, checkpoint, infos, tp)
        partial = hf_files.partial_sibling(hf_dir)
        dtypes = _write_weights(weights, partial, dtype)
    _write_companions(companions, tokenizer_dir, partial, dtypes)
    hf_files.publish(partial, hf_dir)
    return iteration


def _write_weights(weights: CheckpointWeights, target: Path, dtype: torch.dtype | None) -> set[torch.dtype]:
    """Write all weight files and the index; return the dtypes of what training may have changed."""
    trained = weights.trained_names()
    dtypes: set[torch.dtype] = set()
    total = 0
    for file, tensors in weights.files(dtype):
        hf_files.write_weights(target, tensors, file)
        total += sum(x.numel() * x.element_size() for x in tensors.values())
        dtypes |= {x.dtype for name, x in tensors.items() if name in trained}
    files = {name: info.file for name, info in weights.infos.items()}
    if set(files.values()) != {hf_files.SINGLE}:
        hf_files.write_index(target, files, total)
    return dtypes


def _write_companions(source: Path, tokenizer_dir: Path | None, target: Path, dtypes: set[torch.dtype]) -> None:
    """Copy config, tokenizer and processor files; the config changes only where the dtype did."""
    hf_files.copy_companions(source, target, skip=layout.companion_skip())
    if tokenizer_dir is not None:
        for path in hf_files.companion_files(tokenizer_dir):
            if path.name not in ("config.json", "generation_config.json"):
                shutil.copyfile(path, target / path.name)
    if len(dtypes) != 1:
        return
    name = str(next(iter(dtypes))).removeprefix("torch.")
    path = target / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if config.get(key, name) != name:
        config[key] = name
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    """Flags of convert_megatron_to_hf.py (seed names)."""
    p = argparse.ArgumentParser(
        prog="convert_megatron_to_hf.py",
        allow_abbrev=False,
        description="Convert the newest Megatron checkpoint of a folder into a Hugging Face LLaVA folder.",
    )
    p.add_argument("--megatron-dir", type=Path, required=True, help="folder with latest_checkpointed_iteration.txt")
    p.add_argument("--hf-dir", type=Path, required=True, help="folder to write; must not exist or be empty")
    p.add_argument("--tp", type=int, default=1, help="read the weights as this many tensor-parallel ranks (default 1)")
    p.add_argument("--pp", type=int, default=1, help="pipeline-parallel size to check for (default 1)")
    p.add_argument("--tokenizer-dir", type=Path, help="take tokenizer and processor files from here")
    p.add_argument("--dtype", choices=DTYPES, help="cast the weights (default: as in the checkpoint)")
    p.add_argument("--sif-path", type=Path, help="run the same command inside this Singularity image")
    return p


def run(args: argparse.Namespace) -> int:
    """Convert as the flags say."""
    start = time.perf_counter()
    dtype = DTYPES[args.dtype] if args.dtype else None
    iteration = export_hf(
        args.megatron_dir, args.hf_dir, tp=args.tp, pp=args.pp, tokenizer_dir=args.tokenizer_dir, dtype=dtype
    )
    seconds = time.perf_counter() - start
    print(f"exported iteration {iteration} of {args.megatron_dir} -> {args.hf_dir} in {seconds:.1f} s")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    from llava_mcore.apps.cli import conversion_main

    return conversion_main(parser(), run, sys.argv[1:] if argv is None else list(argv))
