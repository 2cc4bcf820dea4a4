"""`chat`: chat with a Hugging Face folder's model in the terminal."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from llava_mcore.cli.base.entry import command_main
from llava_mcore.cli.base.shared_flags import (
    add_answer_flags,
    add_frame_flags,
    add_loading_flags,
    frame_sampling_of,
    quantization_of,
    reading_of,
    sampling_of,
)

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  (lines can then be edited and repeated)


def parser() -> argparse.ArgumentParser:
    """Flags of `python -m llava_mcore chat`."""
    p = argparse.ArgumentParser(
        prog="python -m llava_mcore chat",
        usage="%(prog)s --hf-dir DIR [--image FILE] [FLAG …]",
        allow_abbrev=False,
        description="Chat about images, videos or audio with a Hugging Face folder's model in the terminal. /help "
        "lists the commands, such as /image FILE. Runs on a GPU if there is one.",
    )
    p.add_argument("--hf-dir", type=Path, required=True, help="Hugging Face folder")
    p.add_argument(
        "--image", type=Path, action="append", default=[], metavar="FILE", help="image of the first question"
    )
    add_loading_flags(p)
    add_frame_flags(p)
    add_answer_flags(p)
    p.add_argument("--sif-path", type=Path, help="run the same command inside this Singularity image")
    return p


def run(args: argparse.Namespace) -> int:
    """Chat until the end of the input; returns 0."""
    import torch

    from llava_mcore.inference.answering.chat import Chat
    from llava_mcore.inference.answering.hf_model import HfModel
    from llava_mcore.inference.generation.settings import read_settings, require_streaming
    from llava_mcore.models.architectures.hf_config import load_hf_config

    quantization, sampling = quantization_of(args), sampling_of(args)
    require_streaming(args.hf_dir, load_hf_config(args.hf_dir))
    model = HfModel.load(args.hf_dir, reading_of(args), dtype=args.dtype, quantization=quantization)
    settings = read_settings(
        args.hf_dir,
        model.model.config,
        model.assets.eos_token_id,
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
    )
    torch.manual_seed(args.seed)
    chat = Chat(model, settings, frame_sampling_of(args), _say)
    for path in args.image:
        chat.add_image(str(path))
    _say(f"{args.hf_dir} on {model.model.device}; /help lists the commands\n")
    chat.run(_lines())
    return 0


def _say(text: str) -> None:
    print(text, end="", flush=True)


def _lines() -> Iterator[str]:
    """Yield the lines that are typed; Ctrl-C at the prompt discards the line."""
    while True:
        try:
            yield input("> ")
        except EOFError:
            _say("\n")
            return
        except KeyboardInterrupt:
            _say("\n")


main = command_main(parser, run)
