"""`generate`: answer questions from a Hugging Face folder or a Megatron checkpoint."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llava_mcore.cli.base.entry import command_main
from llava_mcore.cli.base.shared_flags import (
    BASE_DIR_HELP,
    SPLITS,
    add_answer_flags,
    add_frame_flags,
    add_layout_flags,
    add_loading_flags,
    frame_sampling_of,
    positive,
    quantization_of,
    reading_of,
    sampling_of,
)
from llava_mcore.errors import ConfigError, DataError

if TYPE_CHECKING:
    from llava_mcore.data.samples import Conversation
    from llava_mcore.inference.answering.job import DataJob, ReadOptions
    from llava_mcore.inference.generation.records import Record

ROWS = 8
"""Questions of a dataset that are answered at the same time, unless the user says."""
MOST_PROBLEMS = 10
"""Problems of samples that are printed."""


def parser() -> argparse.ArgumentParser:
    """Flags of `python -m llava_mcore generate`."""
    p = argparse.ArgumentParser(
        prog="python -m llava_mcore generate",
        usage="%(prog)s (--hf-dir DIR | --megatron-dir DIR) (--question Q [--image FILE] | --data-path DIR) [FLAG …]",
        allow_abbrev=False,
        description="Answer a question about images, videos or audio clips, or all questions of a prepared dataset. "
        "A Hugging Face folder is run by transformers, a Megatron checkpoint by tp x cp x pp processes with a "
        "key/value cache. Both give the same tokens. Runs on GPUs if there are any.",
    )
    # Which model answers.
    model = p.add_argument_group("the model: one of --hf-dir and --megatron-dir")
    model.add_argument("--hf-dir", type=Path, help="Hugging Face folder")
    model.add_argument("--megatron-dir", type=Path, help="Megatron checkpoint, or a folder of them (newest is used)")
    add_layout_flags(model, default=1, replicas=True)
    model.add_argument(
        "--batch-size", type=positive, metavar="N",
        help="questions of a dataset that a Megatron checkpoint answers at the same time (default 8)",
    )  # fmt: skip
    model.add_argument("--base-dir", type=Path, metavar="DIR", help=BASE_DIR_HELP)
    add_loading_flags(model)
    # What it is asked: one question, or those of a dataset.
    one = p.add_argument_group("one question")
    one.add_argument("--question", help="text; <image>, <video> and <audio> may mark positions (default: at the start)")
    one.add_argument("--image", type=Path, action="append", default=[], metavar="FILE", help="image; may be repeated")
    one.add_argument("--video", type=Path, action="append", default=[], metavar="FILE", help="video; may be repeated")
    one.add_argument("--audio", type=Path, action="append", default=[], metavar="FILE", help="clip; may be repeated")
    add_frame_flags(one)
    many = p.add_argument_group("the questions of a dataset")
    many.add_argument("--data-path", help="prepared folder or a blend's .yaml")
    many.add_argument("--split", choices=SPLITS, help="split (default val)")
    many.add_argument("--num-samples", type=positive, metavar="N", help="ask only N questions, evenly distributed")
    many.add_argument(
        "--every-answer", action="store_true",
        help="ask every question of a conversation, after the true earlier answers (default: only the last one)",
    )  # fmt: skip
    many.add_argument("--out", type=Path, metavar="FILE", help="jsonl to write: key, question, reference, answer")
    add_answer_flags(p)
    p.add_argument("--sif-path", type=Path, help="run the same command inside this Singularity image")
    return p


def run(args: argparse.Namespace) -> int:
    """Answer; returns 0."""
    from llava_mcore.inference.answering.answer_file import finish, partial_of
    from llava_mcore.inference.answering.job import Job, Layout
    from llava_mcore.inference.answering.megatron_answers import answer_checkpoint
    from llava_mcore.inference.answering.transformers_answers import answer_folder

    _check_flags(args)
    reading = reading_of(args)
    partial = None if args.out is None else partial_of(args.out)
    job = Job(_asked(args, reading), reading, sampling_of(args), args.max_new_tokens, args.dtype, partial)
    start = time.perf_counter()
    if args.hf_dir is not None:
        records = answer_folder(args.hf_dir, job, quantization=quantization_of(args))
    else:
        layout = Layout(args.tp, args.pp, _num_rows(args), cp=args.cp, replicas=args.replicas)
        records = answer_checkpoint(args.megatron_dir, job, layout, args.base_dir)
    if args.data_path is None:
        if records[0].problem is not None:
            raise DataError(records[0].problem)
        print(records[0].answer)
        return 0
    finish(args.out)
    print(_summary(records, args.out, time.perf_counter() - start))
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError with everything that does not go together."""
    errors = []
    # The model, and what is asked.
    if (args.hf_dir is None) == (args.megatron_dir is None):
        errors.append("give one of --hf-dir and --megatron-dir")
    if (args.question is None) == (args.data_path is None):
        errors.append("give one of --question and --data-path")
    if (args.data_path is None) != (args.out is None):
        errors.append("--data-path and --out need each other")
    if args.data_path is not None and (args.image or args.video or args.audio):
        errors.append("--image, --video and --audio belong to --question")
    if args.data_path is None and (args.split is not None or args.num_samples is not None or args.every_answer):
        errors.append("--split, --num-samples and --every-answer belong to --data-path")
    if args.batch_size is not None and (args.megatron_dir is None or args.data_path is None):
        errors.append("--batch-size is for the questions of --data-path to --megatron-dir")
    if args.replicas > 1 and (args.megatron_dir is None or args.data_path is None):
        errors.append("--replicas is for the questions of --data-path to --megatron-dir")
    # Flags of one kind of model.
    if args.hf_dir is not None and args.tp * args.cp * args.pp > 1:
        errors.append(
            "--tp, --cp and --pp are for --megatron-dir: transformers runs a Hugging Face folder in one process"
        )
    if args.hf_dir is not None and args.base_dir is not None:
        errors.append("--base-dir is for --megatron-dir")
    if args.megatron_dir is not None and (args.load_in_4bit or args.load_in_8bit):
        errors.append("--load-in-4bit and --load-in-8bit are for --hf-dir: run export-hf first")
    if args.out is not None and not args.out.parent.is_dir():
        errors.append(f"--out {args.out}: there is no folder {args.out.parent}; create it first")
    if args.out is not None and args.out.is_dir():
        errors.append(f"--out {args.out} is a folder: give the name of a file in it")
    quantization_of(args)
    if errors:
        raise ConfigError("; ".join(errors))


def _asked(args: argparse.Namespace, reading: ReadOptions) -> Conversation | DataJob:
    from llava_mcore.data.storage.dataset_path import VALIDATION
    from llava_mcore.inference.answering.job import DataJob
    from llava_mcore.inference.answering.user_files import MediaFiles, conversation_of_files

    if args.data_path is None:
        sampling = frame_sampling_of(args)
        files = MediaFiles(args.image, args.video, args.audio)
        return conversation_of_files(args.question, files, reading.limits, sampling)
    path = args.data_path if "://" in args.data_path else Path(args.data_path)
    return DataJob(path, args.split or VALIDATION, args.num_samples, args.every_answer)


def _num_rows(args: argparse.Namespace) -> int:
    return 1 if args.data_path is None else args.batch_size or ROWS


def _summary(records: Sequence[Record], out: Path, seconds: float) -> str:
    problems = [record for record in records if record.problem is not None]
    num_tokens = sum(record.num_tokens for record in records)
    lines = [
        f"{len(records) - len(problems)} answers with {num_tokens} tokens in {seconds:.1f} s -> {out}"
        + (f"; questions that could not be asked: {len(problems)}" if problems else "")
    ]
    lines += [f"  - {record.key}: {record.problem}" for record in problems[:MOST_PROBLEMS]]
    if len(problems) > MOST_PROBLEMS:
        lines.append(f"  - … and {len(problems) - MOST_PROBLEMS} more, see the file")
    return "\n".join(lines)


main = command_main(parser, run)
