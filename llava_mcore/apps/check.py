"""Check a Hugging Face folder, a Megatron checkpoint against it, or a dataset. Exit code 0: all is well."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from llava_mcore.apps import check_data
from llava_mcore.apps.checkpoint_weights import CheckpointWeights
from llava_mcore.apps.import_hf import model_and_table, open_folder
from llava_mcore.checkpoint import hf_files, layout
from llava_mcore.checkpoint.hf_config import load_hf_config
from llava_mcore.errors import ConfigError, ConversionError, problems
from llava_mcore.parallel.groups import single_process


def check_folder(hf_dir: Path, *, tp: int, pp: int) -> str:
    """Check that a Hugging Face folder converts completely and fits a layout; return a summary.

    Raises:
        ConversionError, ConfigError: lists everything that does not fit.
    """
    hf, folder = open_folder(hf_dir, tp=tp, pp=pp)
    with single_process():
        _, table = model_and_table(hf, folder, tp=tp)
    return (
        f"{hf_dir}: {len(folder.tensors)} tensors = {len(table.entries)} Megatron parameters, "
        f"{len(table.unused)} unused by training, {len(table.copies)} tied copies; fits tp {tp} x pp {pp}"
    )


def check_checkpoint(hf_dir: Path, megatron_dir: Path, *, tp: int) -> str:
    """Compare the newest checkpoint's weights with a Hugging Face folder, bit for bit; return a summary.

    Raises:
        CheckpointError: not a readable checkpoint of this model.
        ConversionError: lists every tensor that differs.
    """
    checkpoint, iteration = layout.latest_checkpoint(megatron_dir)
    infos = hf_files.infos_from_record(layout.read_record(checkpoint)["tensors"])
    folder = hf_files.HfFolder.open(hf_dir)
    found = [f"{name}: only in {hf_dir}" for name in sorted(folder.tensors.keys() - infos.keys())]
    found += [f"{name}: only in {checkpoint}" for name in sorted(infos.keys() - folder.tensors.keys())]
    compared = 0
    with single_process():
        weights = CheckpointWeights(load_hf_config(layout.hf_folder(checkpoint)), checkpoint, infos, tp)
        for _, tensors in weights.files():
            for name, x in tensors.items():
                if name in folder.tensors:
                    found += _difference(name, x, folder.get(name))
                    compared += 1
    if found:
        raise ConversionError(problems(f"iteration {iteration} of {megatron_dir} is not {hf_dir}", found))
    return f"{megatron_dir}: iteration {iteration} equals {hf_dir} bit for bit ({compared} tensors, read at tp {tp})"


def _difference(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> list[str]:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return [f"{name}: {ours.dtype} {tuple(ours.shape)} in the checkpoint, {theirs.dtype} {tuple(theirs.shape)}"]
    if torch.equal(ours, theirs):
        return []
    largest = (ours.double() - theirs.double()).abs().max().item()
    return [f"{name}: largest difference {largest:.3g}"]


def parser() -> argparse.ArgumentParser:
    """Flags of `python -m llava_mcore check`."""
    p = argparse.ArgumentParser(
        prog="python -m llava_mcore check",
        allow_abbrev=False,
        description="Check that a Hugging Face LLaVA folder converts completely; with --megatron-dir, also that the "
        "newest checkpoint there holds exactly the folder's weights. Or, with --data-path, look a dataset over as "
        "training will read it. Exit code 0 means yes, 2 no.",
    )
    model = p.add_argument_group("a model")
    model.add_argument("--hf-dir", type=Path, help="Hugging Face LLaVA folder")
    model.add_argument("--megatron-dir", type=Path, help="folder of Megatron checkpoints to compare with it")
    model.add_argument("--tp", type=int, default=1, help="tensor-parallel size to check and read for (default 1)")
    model.add_argument("--pp", type=int, default=1, help="pipeline-parallel size to check for (default 1)")
    check_data.add_flags(p)
    return p


def run(args: argparse.Namespace) -> int:
    """Check as the flags say; errors mean failure."""
    if (args.hf_dir is None) == (args.data_path is None):
        raise ConfigError("say what to check: --hf-dir (a model) or --data-path (a dataset), one of them")
    if args.data_path is not None:
        return check_data.run(args)
    print(check_folder(args.hf_dir, tp=args.tp, pp=args.pp))
    if args.megatron_dir is not None:
        print(check_checkpoint(args.hf_dir, args.megatron_dir, tp=args.tp))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    from llava_mcore.apps.cli import conversion_main

    return conversion_main(parser(), run, sys.argv[1:] if argv is None else list(argv))
