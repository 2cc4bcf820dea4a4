"""`export-hf`: Megatron checkpoint → Hugging Face folder. Needs no GPU."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from llava_mcore.checkpoint.layout import latest_readable
from llava_mcore.cli.common import conversion_main, skip_unused_here
from llava_mcore.cli.flags.export_hf import parser
from llava_mcore.errors import ConfigError
from llava_mcore.files.hf_folder import require_absent


def run(args: argparse.Namespace) -> int:
    """Run the conversion."""
    start = time.perf_counter()
    # A wrong path is reported before the imports that take seconds.
    require_absent(args.hf_dir, what="the export")
    latest_readable(args.megatron_dir)
    skip_unused_here()
    from llava_mcore.adapters.peft_config import CONFIG
    from llava_mcore.convert.export_hf import export_hf
    from llava_mcore.convert.jobs import DTYPES

    dtype = DTYPES[args.dtype] if args.dtype else None
    iteration = export_hf(
        args.megatron_dir,
        args.hf_dir,
        tensor_parallel=args.tp,
        pipeline_parallel=args.pp,
        hf_config=args.hf_config,
        tokenizer_dir=args.tokenizer_dir,
        dtype=dtype,
        max_shard_size=args.max_shard_size,
        workers=args.workers,
        verify=args.verify,
        verify_checkpoint=not args.no_verify_checkpoint,
        merge=args.merge,
        adapter=args.adapter,
        base_dir=args.base_dir,
        base_model=args.base_model,
        say=lambda line: print(line, flush=True),
    )
    seconds = time.perf_counter() - start
    verified = " (every tensor read back and equal)" if args.verify else ""
    print(f"exported iteration {iteration} of {args.megatron_dir} -> {args.hf_dir} in {seconds:.1f} s{verified}")
    if args.logits is not None and (args.hf_dir / CONFIG).is_file():
        raise ConfigError(f"{args.hf_dir} is a PEFT folder: --logits compares whole models, so give --merge too")
    if args.logits is not None:
        from llava_mcore.convert.compare_logits import check_logits

        print(check_logits(args.hf_dir, args.megatron_dir, args.logits, tp=args.tp, pp=args.pp))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    return conversion_main(parser(), run, sys.argv[1:] if argv is None else list(argv))
