"""`export-hf`: Megatron checkpoint → Hugging Face folder. Needs no GPU."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from llava_mcore.checkpoint.layout import latest_checkpoint, latest_readable
from llava_mcore.cli.common import conversion_main, skip_unused_here
from llava_mcore.cli.flags.export_hf import parser
from llava_mcore.errors import ConfigError
from llava_mcore.files.hf_folder import require_absent


def run(args: argparse.Namespace) -> int:
    """Run the conversion."""
    start = time.perf_counter()
    # A wrong path is reported before the imports that take seconds.
    require_absent(args.hf_dir, activity="the export")
    latest_readable(args.megatron_dir)
    skip_unused_here(reads_media=args.logits is not None)
    from llava_mcore.adapters.adapter_record import holds_adapters
    from llava_mcore.convert.export_hf import export_hf
    from llava_mcore.convert.jobs import DTYPES

    if args.logits is not None and not args.merge and holds_adapters(latest_checkpoint(args.megatron_dir)[0]):
        raise ConfigError("an adapter becomes a PEFT folder: --logits compares whole models, so give --merge too")
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
    if args.logits is not None:
        from llava_mcore.convert.compare_logits import check_logits

        layout = {"tp": args.tp, "pp": args.pp}
        print(check_logits(args.hf_dir, args.megatron_dir, args.logits, base_dir=args.base_dir, **layout))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    return conversion_main(parser(), run, sys.argv[1:] if argv is None else list(argv))
