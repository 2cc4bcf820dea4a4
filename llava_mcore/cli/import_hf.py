"""`import-hf`: Hugging Face folder → Megatron checkpoint. Needs no GPU."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from llava_mcore.cli.base.entry import command_main, skip_unused_here
from llava_mcore.cli.base.shared_flags import add_conversion_flags


def parser() -> argparse.ArgumentParser:
    """Flags of `import-hf`."""
    p = argparse.ArgumentParser(
        prog="python -m llava_mcore import-hf",
        usage="%(prog)s --hf-dir DIR --megatron-dir DIR [--verify] [FLAG …]",
        allow_abbrev=False,
        description="Convert a Hugging Face folder into a Megatron checkpoint (torch_dist), exactly and without "
        "a GPU. The checkpoint loads at any tensor x pipeline x expert x data parallel size.",
    )
    p.add_argument("--hf-dir", type=Path, required=True, help="Hugging Face folder to read")
    p.add_argument("--megatron-dir", type=Path, required=True, help="folder to write; must be new or empty")
    p.add_argument("--tp", type=int, default=1, help="tensor-parallel size for chunks and padding (default 1)")
    p.add_argument("--pp", type=int, default=1, help="pipeline-parallel size to check for (default 1)")
    p.add_argument("--ep", type=int, default=1, help="expert-parallel size for chunks of experts (default 1)")
    add_conversion_flags(p, source="each tensor in the source")
    return p


def run(args: argparse.Namespace) -> int:
    """Run the conversion."""
    from llava_mcore.files.atomic import require_absent
    from llava_mcore.files.hf_folder import require_source

    start = time.perf_counter()
    # A wrong path is reported before the imports that take seconds.
    require_absent(args.megatron_dir, activity="the import")
    require_source(args.hf_dir)
    skip_unused_here(reads_media=args.logits is not None)
    from llava_mcore.convert.import_hf import import_hf
    from llava_mcore.convert.jobs import DTYPES

    dtype = DTYPES[args.dtype] if args.dtype else None
    written = import_hf(
        args.hf_dir,
        args.megatron_dir,
        tensor_parallel=args.tp,
        pipeline_parallel=args.pp,
        expert_parallel=args.ep,
        dtype=dtype,
        workers=args.workers,
        verify=args.verify,
    )
    verified = ", every tensor read back and equal" if args.verify else ""
    seconds = time.perf_counter() - start
    print(f"imported {args.hf_dir} -> {written} in {seconds:.1f} s (split for tp {args.tp}{verified})")
    if args.logits is not None:
        from llava_mcore.convert.compare_logits import check_logits
        from llava_mcore.convert.logits_worker import LogitsLayout

        print(check_logits(args.hf_dir, args.megatron_dir, args.logits, layout=LogitsLayout(args.tp, args.pp)))
    return 0


main = command_main(parser, run)
