"""`check`: a Hugging Face folder, a Megatron checkpoint compared with it, or a dataset. Exit code 0: no problems."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from llava_mcore.cli.base.entry import command_main, skip_unused_here
from llava_mcore.cli.base.shared_flags import (
    BASE_DIR_HELP,
    LOGITS_HELP,
    add_pixel_flags,
    add_sample_flags,
    default_workers,
    limits_of,
    pixels_of,
    positive,
    video_pixels_of,
)
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.errors import ConfigError
from llava_mcore.templates.named import NAMES

if TYPE_CHECKING:
    from llava_mcore.check_data.check import DataCheck

DEFAULTS = DataConfig()
NEEDS_TOKENIZER = "--data-path needs --tokenizer-load-dir, the Hugging Face folder to train with"


def parser() -> argparse.ArgumentParser:
    """Flags of `python -m llava_mcore check`."""
    p = argparse.ArgumentParser(
        prog="python -m llava_mcore check",
        usage="%(prog)s (--data-path DIR --tokenizer-load-dir DIR | --hf-dir DIR | --megatron-dir DIR) [FLAG …]",
        allow_abbrev=False,
        description="Check that a Hugging Face folder can be converted completely; with --megatron-dir, also that the "
        "newest checkpoint there holds exactly the folder's weights; with --logits, also that it computes the same. "
        "--megatron-dir alone compares a checkpoint with its checksums, and an import also with its manifest. "
        "--data-path checks a dataset as training will read it. Exit code 0: no problems, 2: problems.",
    )
    model = p.add_argument_group("a model")
    model.add_argument("--hf-dir", type=Path, help="Hugging Face folder")
    model.add_argument("--megatron-dir", type=Path, help="folder of Megatron checkpoints to compare with it")
    model.add_argument("--tp", type=int, default=1, help="tensor-parallel size to check and read for (default 1)")
    model.add_argument("--pp", type=int, default=1, help="pipeline-parallel size to check for (default 1)")
    model.add_argument("--ep", type=int, default=1, help="with --logits: expert-parallel size (default 1)")
    model.add_argument("--cp", type=positive, default=1, help="with --logits: context-parallel size (default 1)")
    model.add_argument("--logits", type=Path, metavar="FILE", help=LOGITS_HELP)
    model.add_argument("--base-dir", type=Path, metavar="DIR", help=f"with --logits: {BASE_DIR_HELP}")
    _add_data_flags(p)
    return p


def _add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for data; they have the same meaning as for training."""
    p = parser.add_argument_group("a dataset")
    # The settings of training that decide which samples are used.
    p.add_argument("--data-path", type=Path, help="prepared folder, or a blend's .yaml, to check")
    p.add_argument("--tokenizer-load-dir", type=Path, help="Hugging Face folder with tokenizer and processor")
    p.add_argument("--chat-template", help=f"template to train with: {', '.join(NAMES)}, or a .jinja file")
    p.add_argument("--lang", choices=("jp", "en"), help="language of prompts for data without questions")
    p.add_argument(
        "--seq-length", type=int, default=DEFAULTS.seq_length, help="maximum tokens of a sample (default 2048)"
    )
    p.add_argument(
        "--sample-multiple",
        type=positive,
        default=1,
        metavar="M",
        help="round lengths of packed samples up to a multiple of M; for training with --cp, use 2 x cp "
        "(data.sample_multiple; default 1)",
    )
    p.add_argument(
        "--max-media-tokens",
        type=positive,
        metavar="N",
        help="maximum patches (for audio, 20 ms frames) of a sample and of a pack (data.max_media_tokens; default: no "
        "limit)",
    )
    add_sample_flags(p)
    add_pixel_flags(p)
    rate = DEFAULTS.max_skip_rate
    p.add_argument(
        "--max-skip-rate", type=float, default=rate, help="fraction of samples that may be skipped (default 0.01)"
    )
    # How much is checked and shown.
    p.add_argument("--full", action="store_true", help="check every sample instead of a few per shard")
    p.add_argument("--num-workers", type=int, default=0, help="worker processes (default 0: this process)")
    p.add_argument(
        "--show",
        type=_examples,
        default=1,
        metavar="N|KEY",
        help="conversations to print, of different kinds if there are some (default 1); or show only the sample with "
        "this key, such as 000000017 or 000003.tar/17",
    )
    p.add_argument("--json", type=Path, help="also write the report to this file")


def _examples(text: str) -> int | str:
    """Return a number of samples, or a sample's key. A number that begins with 0 is a key, as `prepare` writes them."""
    return int(text) if re.fullmatch(r"0|-?[1-9]\d*", text) else text


def run(args: argparse.Namespace) -> int:
    """Run the check; errors mean failure."""
    from llava_mcore.checkpoint.layout import latest_readable
    from llava_mcore.files.hf_folder import require_source

    is_model = args.hf_dir is not None or args.megatron_dir is not None
    if is_model == (args.data_path is not None):
        raise ConfigError("give either a model to check (--hf-dir, --megatron-dir) or data (--data-path)")
    if args.logits is not None and (args.hf_dir is None or args.megatron_dir is None):
        raise ConfigError("--logits compares two models: give --hf-dir and --megatron-dir")
    if args.ep != 1 and args.logits is None:
        raise ConfigError("--ep is for --logits: nothing else divides experts over processes")
    if args.cp != 1 and args.logits is None:
        raise ConfigError("--cp is for --logits: nothing else divides tokens over processes")
    if args.base_dir is not None and args.logits is None:
        raise ConfigError("--base-dir is for --logits: nothing else reads the weights below an adapter")
    if args.data_path is not None:
        return _check_data(args)
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
        from llava_mcore.convert.logits_worker import LogitsLayout

        layout = LogitsLayout(args.tp, args.pp, args.ep, args.cp)
        print(check_logits(args.hf_dir, args.megatron_dir, args.logits, layout=layout, base_dir=args.base_dir))
    return 0


def _check_data(args: argparse.Namespace) -> int:
    """Check a dataset. ConfigError for invalid flags; DataError if the tokenizer folder cannot be used."""
    _check_data_flags(args)
    from llava_mcore.check_data.check import check_data
    from llava_mcore.data.encode.assets import load_assets

    assets = load_assets(
        args.tokenizer_load_dir,
        chat_template=args.chat_template,
        lang=args.lang,
        special_tokens_in_text=args.special_tokens_in_text,
        limits=limits_of(args),
        pixels=pixels_of(args),
        video_pixels=video_pixels_of(args),
    )
    return check_data(data_check(args), assets)


def data_check(args: argparse.Namespace) -> DataCheck:
    """Return what to check, from the flags."""
    from llava_mcore.check_data.check import DataCheck

    return DataCheck(
        args.data_path,
        args.tokenizer_load_dir,
        args.seq_length,
        args.max_media_tokens,
        args.max_skip_rate,
        args.full,
        args.num_workers,
        args.show if isinstance(args.show, int) else 0,
        args.show if isinstance(args.show, str) else None,
        args.json,
        args.sample_multiple,
    )


def _check_data_flags(args: argparse.Namespace) -> None:
    if args.tokenizer_load_dir is None:
        raise ConfigError(NEEDS_TOKENIZER)
    lowest = {"seq_length": 1, "num_workers": 0, "max_skip_rate": 0}
    if isinstance(args.show, int):
        lowest["show"] = 0
    wrong = [f"--{name.replace('_', '-')} must be at least {least}" for name, least in lowest.items()
             if vars(args)[name] < least]  # fmt: skip
    if args.seq_length % args.sample_multiple:
        wrong.append(f"--seq-length {args.seq_length} is not a multiple of --sample-multiple {args.sample_multiple}")
    if args.full and isinstance(args.show, str):
        wrong.append(f"--full checks every sample, and --show {args.show} only that one: give one of them")
    if args.max_skip_rate > 1:
        wrong.append("--max-skip-rate is a fraction, from 0 to 1")
    if wrong:
        raise ConfigError("; ".join(wrong))


main = command_main(parser, run)
