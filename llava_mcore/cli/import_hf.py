"""`import-hf`: Hugging Face folder → Megatron checkpoint. Needs no GPU."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from llava_mcore.cli.common import conversion_main, skip_unused_here
from llava_mcore.cli.flags.import_hf import parser
from llava_mcore.files.hf_folder import require_absent
from llava_mcore.files.hf_source import require_source


def run(args: argparse.Namespace) -> int:
    """Run the conversion."""
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
        dtype=dtype,
        workers=args.workers,
        verify=args.verify,
    )
    verified = ", every tensor read back and equal" if args.verify else ""
    seconds = time.perf_counter() - start
    print(f"imported {args.hf_dir} -> {written} in {seconds:.1f} s (split for tp {args.tp}{verified})")
    if args.logits is not None:
        from llava_mcore.convert.compare_logits import check_logits

        print(check_logits(args.hf_dir, args.megatron_dir, args.logits, tp=args.tp, pp=args.pp))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    return conversion_main(parser(), run, sys.argv[1:] if argv is None else list(argv))
