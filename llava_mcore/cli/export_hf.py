"""`export-hf`: Megatron checkpoint → Hugging Face folder. Needs no GPU."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from llava_mcore.cli.base.entry import command_main, skip_unused_here
from llava_mcore.cli.base.shared_flags import BASE_DIR_HELP, add_conversion_flags
from llava_mcore.errors import ConfigError


def parser() -> argparse.ArgumentParser:
    """Flags of `export-hf`."""
    p = argparse.ArgumentParser(
        prog="python -m llava_mcore export-hf",
        usage="%(prog)s --megatron-dir DIR --hf-dir DIR [--verify] [FLAG …]",
        allow_abbrev=False,
        description="Convert the newest Megatron checkpoint of a folder into a Hugging Face folder.",
    )
    p.add_argument("--megatron-dir", type=Path, required=True, help="folder with latest_checkpointed_iteration.txt")
    p.add_argument("--hf-dir", type=Path, required=True, help="folder to write; must be new or empty")
    p.add_argument("--tp", type=int, default=1, help="tensor-parallel size to check for (default 1)")
    p.add_argument("--pp", type=int, default=1, help="pipeline-parallel size to check for (default 1)")
    p.add_argument(
        "--hf-config", type=Path, metavar="DIR",
        help="Hugging Face folder of the same model (config.json is enough), for a checkpoint that llava_mcore did "
        "not write",
    )  # fmt: skip
    p.add_argument("--tokenizer-dir", type=Path, help="copy tokenizer and processor files from this folder")
    p.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        help="maximum size of a file, such as 5GB (default: the files of the import)",
    )
    p.add_argument(
        "--no-verify-checkpoint", action="store_true",
        help="do not compare the checkpoint's files with their checksums",
    )  # fmt: skip
    # A run with an adapter has two forms of export.
    group = p.add_argument_group("runs with an adapter", "are exported as a PEFT folder, unless --merge is given")
    group.add_argument("--merge", action="store_true", help="write the whole model, with its adapters merged")
    group.add_argument("--adapter", metavar="NAME", help="which of several adapters (default: the trained one)")
    group.add_argument(
        "--base-model",
        metavar="NAME",
        help="the adapter's base model in the PEFT folder (default: the imported folder)",
    )
    group.add_argument("--base-dir", type=Path, metavar="DIR", help=f"with --merge: {BASE_DIR_HELP}")
    add_conversion_flags(p, source="the checkpoint")
    return p


def run(args: argparse.Namespace) -> int:
    """Run the conversion."""
    from llava_mcore.checkpoint.layout import latest_checkpoint, latest_readable
    from llava_mcore.files.atomic import require_absent

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
        from llava_mcore.convert.logits_worker import LogitsLayout

        layout = LogitsLayout(args.tp, args.pp)
        print(check_logits(args.hf_dir, args.megatron_dir, args.logits, layout=layout, base_dir=args.base_dir))
    return 0


main = command_main(parser, run)
