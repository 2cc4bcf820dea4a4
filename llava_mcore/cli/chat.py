"""Chat with a Hugging Face folder's model in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence

import torch

from llava_mcore.cli.common import conversion_main
from llava_mcore.cli.flags.chat import parser
from llava_mcore.cli.generate import quantization_of, reading_of, sampling_of
from llava_mcore.inference.answering.chat import Chat
from llava_mcore.inference.answering.hf_model import HfModel
from llava_mcore.inference.generation.settings import read_settings, require_streaming
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.prepare.sampling import Sampling

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  (lines can then be edited and repeated)


def run(args: argparse.Namespace) -> int:
    """Chat until the end of the input; returns 0."""
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
    chat = Chat(model, settings, Sampling(args.video_fps, args.video_max_frames), _say)
    for path in args.image:
        chat.show_picture(str(path))
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


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    return conversion_main(parser(), run, sys.argv[1:] if argv is None else list(argv))
