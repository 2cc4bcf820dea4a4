"""Check a Hugging Face folder, compare a Megatron checkpoint with it, or check a dataset. Exit code 0: no problems."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from llava_mcore.checkpoint.layout import latest_readable
from llava_mcore.cli.common import conversion_main, skip_unused_here
from llava_mcore.cli.flags.check import parser
from llava_mcore.cli.flags.conversion import default_workers
from llava_mcore.errors import ConfigError
from llava_mcore.files.hf_source import require_source


def run(args: argparse.Namespace) -> int:
    """Run the check; errors mean failure."""
    is_model = args.hf_dir is not None or args.megatron_dir is not None
    if is_model == (args.data_path is not None):
        raise ConfigError("give either a model to check (--hf-dir, --megatron-dir) or data (--data-path)")
    if args.logits is not None and (args.hf_dir is None or args.megatron_dir is None):
        raise ConfigError("--logits compares two models: give --hf-dir and --megatron-dir")
    if args.base_dir is not None and args.logits is None:
        raise ConfigError("--base-dir is for --logits: nothing else reads the weights below an adapter")
    if args.data_path is not None:
        from llava_mcore.cli import check_data

        return check_data.run(args)
    # A wrong path is reported before the imports that take seconds.
    if args.hf_dir is not None:
        require_source(args.hf_dir)
    checkpoint = None if args.megatron_dir is None else latest_readable(args.megatron_dir)[0]
    skip_unused_here(reads_media=args.logits is not None)
    from llava_mcore.adapters.adapter_record import check_base_dir, holds_adapters
    from llava_mcore.convert.check import check_checkpoint, check_folder, check_manifest

    is_adapter = checkpoint is not None and holds_adapters(checkpoint)
    if checkpoint is not None and args.logits is not None:
        check_base_dir(checkpoint, args.base_dir)
    if args.hf_dir is None:
        print(check_manifest(args.megatron_dir, tp=args.tp, workers=default_workers()))
        return 0
    print(check_folder(args.hf_dir, tp=args.tp, pp=args.pp))
    if args.megatron_dir is not None and not (args.logits is not None and is_adapter):
        print(check_checkpoint(args.hf_dir, args.megatron_dir, tp=args.tp))
    if args.logits is not None:
        from llava_mcore.convert.compare_logits import check_logits

        layout = {"tp": args.tp, "pp": args.pp}
        print(check_logits(args.hf_dir, args.megatron_dir, args.logits, base_dir=args.base_dir, **layout))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    return conversion_main(parser(), run, sys.argv[1:] if argv is None else list(argv))
