"""`build`: language model + vision tower → Hugging Face folder of a vision-language model.

Works offline on local folders.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llava_mcore.build.options import ARCHITECTURES, CONNECTORS, DEFAULT_VISION_MODEL, DTYPE_NAMES, BuildOptions
from llava_mcore.cli.base.entry import command_main
from llava_mcore.config.rules.trainer_list import MODEL_CLASSES
from llava_mcore.errors import ConfigError

if TYPE_CHECKING:
    from llava_mcore.build.write_folder import Part


def parser() -> argparse.ArgumentParser:
    """Flags of `build`."""
    p = argparse.ArgumentParser(
        prog="python -m llava_mcore build",
        usage="%(prog)s --save-dir DIR (--text-model M --vision-model M | --tiny CLASS | --model DIR) [FLAG …]",
        allow_abbrev=False,
        description="Compose a complete Hugging Face folder of LLaVA, InternVL, Idefics2, Idefics3, SmolVLM or "
        "Qwen2-Audio (config, weights, tokenizer with placeholders and a pad token, processor, chat template) from a "
        "language model and a vision tower or Whisper's encoder (see docs/build.md). Only the projector is new. "
        "Nothing is downloaded when folders are given. --tiny writes a small random model of any class instead.",
    )
    # Instead of parts: a tiny model, or a whole one with more layers.
    p.add_argument(
        "--tiny",
        choices=MODEL_CLASSES,
        metavar="CLASS",
        help="write a tiny model of this class with random weights, to try the other commands without any weights; "
        f"takes only --save-dir and --seed: {', '.join(MODEL_CLASSES)}",
    )
    p.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="folder of a complete model, for --expand-layers; takes only --save-dir and --expand-layers",
    )
    p.add_argument(
        "--expand-layers",
        metavar="LIST|every:N",
        help="write --model with more decoder layers: a copy after each of these layers (3,7,11: numbers as in the "
        "files) or after each N-th. A copy adds nothing until it is trained, with train --train-expanded",
    )
    _add_parts(p.add_argument_group("parts"))
    _add_shape(p.add_argument_group("shape"))
    _add_output(p.add_argument_group("output"))
    return p


def _add_parts(group: argparse._ArgumentGroup) -> None:
    # The parts: language model and tower.
    group.add_argument(
        "--text-model",
        metavar="TAG_OR_DIR",
        help="language model (required, without --tiny); a folder may hold a GGUF file instead of safetensors",
    )
    group.add_argument(
        "--gguf-file",
        metavar="FILE",
        help="GGUF file in the folder of --text-model (default: the only one, if the folder has no other weights)",
    )
    group.add_argument(
        "--vision-model",
        default=DEFAULT_VISION_MODEL,
        metavar="TAG_OR_DIR",
        help="vision tower, or a CLIP or SigLIP model with a tower (default: %(default)s)",
    )
    group.add_argument(
        "--audio-model",
        metavar="TAG_OR_DIR",
        help="Whisper model whose encoder is used: builds a Qwen2-Audio folder, without a vision tower",
    )
    # How text and images reach them; by default each part brings its own.
    group.add_argument("--tokenizer", metavar="TAG_OR_DIR", help="tokenizer (default: the text model's)")
    group.add_argument(
        "--image-processor",
        metavar="TAG_OR_DIR",
        help="folder with preprocessor_config.json (default: the vision model's)",
    )
    group.add_argument(
        "--chat-template",
        type=Path,
        metavar="NAME|FILE",
        help="chat template by name (vicuna, llama-2, llama-3, chatml, llm-jp, mistral, plain) or a Jinja file "
        "(default: the tokenizer's own; if it has none, a plain USER: ASSISTANT: one)",
    )


def _add_shape(group: argparse._ArgumentGroup) -> None:
    # The class of the folder.
    group.add_argument(
        "--connector",
        choices=CONNECTORS,
        help="connects tower and language model, and determines the class of the folder: mlp for LLaVA, pixel_shuffle "
        "for InternVL, Idefics3 and SmolVLM, which split images into tiles, perceiver for Idefics2, which keeps "
        "their aspect ratio (default: that of the architecture)",
    )
    group.add_argument(
        "--architecture",
        choices=ARCHITECTURES,
        help="Hugging Face class of the folder: llava (1.5) uses one tile per image, llava_next (1.6) and "
        "llava_onevision a base view and a grid of tiles, idefics3 and smolvlm a grid of tiles and the whole image "
        "(default: llava; internvl with pixel_shuffle, idefics2 with perceiver)",
    )
    group.add_argument(
        "--vocab-size-padding",
        action="store_true",
        help="round the vocabulary up to a multiple of 128",
    )
    group.add_argument(
        "--upcycle",
        type=_two_numbers,
        metavar="E,K",
        help="turn each MLP of a Qwen3 into E identical experts, of which each token uses K; before training, the "
        "model computes the same",
    )
    group.add_argument(
        "--expand-projector",
        action="store_true",
        help="let the projector read a second layer of the tower, half as deep as the first, which makes its input "
        "twice as wide",
    )
    # Which images the tower takes, and which of its features the language model gets.
    group.add_argument(
        "--image-size",
        type=int,
        metavar="N",
        help="use images of N x N pixels: the tower's positions are interpolated as in transformers, and the "
        "image processor is set to N (default: the image processor's size)",
    )
    group.add_argument(
        "--vision-feature-layer",
        type=int,
        nargs="+",
        metavar="N",
        help="hidden state of the tower that becomes the image's tokens: 0 is its embedding, -1 its last layer; "
        "several are concatenated (default: -2; -1 with pixel_shuffle and perceiver)",
    )
    group.add_argument(
        "--vision-feature-select-strategy",
        choices=("default", "full"),
        help="default: all positions but the first, the class token; full: all positions (default: 'default' for "
        "CLIP, 'full' for SigLIP, which has no class token)",
    )


def _two_numbers(text: str) -> tuple[int, int]:
    """Return two whole numbers that a comma divides. Raises ValueError, which argparse reports."""
    first, second = text.split(",")
    return int(first), int(second)


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--save-dir", type=Path, required=True, metavar="DIR", help="folder to write; must be new or empty"
    )
    group.add_argument(
        "--dtype",
        choices=DTYPE_NAMES,
        default="auto",
        help="dtype of all weights (default: auto, the text model's own)",
    )
    group.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="maximum size of a file (default: %(default)s)"
    )
    group.add_argument(
        "--seed",
        type=int,
        default=1234,
        metavar="N",
        help="seed of the projector's initial weights and of new routers, with --tiny of all weights (default: "
        "%(default)s)",
    )
    group.add_argument("--sif-path", type=Path, metavar="FILE", help="run the same command in this Singularity image")


def run(args: argparse.Namespace) -> int:
    """Run the build."""
    _check(args)
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # its load reports repeat the lines below
    transformers_logging.disable_progress_bar()
    start = time.perf_counter()
    if args.tiny is not None:
        _write_tiny(args.tiny, args.save_dir, args.seed)
    else:
        parts = _build(args) if args.model is None else _expand(args)
        _print_table([(p.name, p.shape, p.source, p.parameters) for p in parts])
    print(f"built {args.save_dir} in {time.perf_counter() - start:.1f} s")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError without a language model, or for a flag that --tiny does not read."""
    if args.tiny is None and args.text_model is None and args.model is None:
        raise ConfigError(
            "give --text-model, the language model; --tiny CLASS for a tiny model of random weights; or --model DIR, "
            "to give a whole model more layers"
        )
    if (args.model is None) != (args.expand_layers is None):
        raise ConfigError("--model and --expand-layers belong together: give both, or omit both")
    if args.tiny is not None:
        _refuse_others(args, ("tiny", "save_dir", "seed", "sif_path"), "--tiny has parts of its own")
    if args.model is not None:
        _refuse_others(args, ("model", "expand_layers", "save_dir", "sif_path"), "--model has all parts already")


def _refuse_others(args: argparse.Namespace, read: Sequence[str], why: str) -> None:
    """Raise ConfigError for a flag that would not be read."""
    others = [name for name, value in vars(args).items() if name not in read and value != parser().get_default(name)]
    if others:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise ConfigError(f"{why}: omit {flags}")


def _write_tiny(name: str, folder: Path, seed: int) -> None:
    from llava_mcore.build.tiny.classes import write_tiny
    from llava_mcore.files.atomic import require_absent

    require_absent(folder, activity="the build")
    write_tiny(name, folder, seed)
    print(f"{MODEL_CLASSES[name].name} with random weights: its answers mean nothing")


def _expand(args: argparse.Namespace) -> Sequence[Part]:
    """Write a whole model with more layers."""
    from llava_mcore.build.expand import expand_folder

    return expand_folder(args.model, args.save_dir, args.expand_layers, say=lambda line: print(line, flush=True))


def _build(args: argparse.Namespace) -> Sequence[Part]:
    """Build a folder from the parts that the flags name."""
    from llava_mcore.build.audio import build_audio
    from llava_mcore.build.folder import build_llava

    options = BuildOptions(
        save_dir=args.save_dir,
        text_model=args.text_model,
        vision_model=args.vision_model,
        audio_model=args.audio_model,
        gguf_file=args.gguf_file,
        tokenizer=args.tokenizer,
        image_processor=args.image_processor,
        chat_template=args.chat_template,
        dtype=args.dtype,
        vocab_size_padding=args.vocab_size_padding,
        expand_projector=args.expand_projector,
        connector=args.connector,
        architecture=args.architecture,
        image_size=args.image_size,
        vision_feature_layers=None if args.vision_feature_layer is None else tuple(args.vision_feature_layer),
        vision_feature_select_strategy=args.vision_feature_select_strategy,
        upcycle=args.upcycle,
        seed=args.seed,
        max_shard_size=args.max_shard_size,
    )
    build = build_llava if options.audio_model is None else build_audio
    return build(options, say=lambda line: print(line, flush=True))


def _print_table(rows: Sequence[tuple[str, str, str, int]]) -> None:
    """Print the parts and their parameter counts."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("part", no_wrap=True)
    table.add_column("shape", overflow="fold")
    table.add_column("from", overflow="fold")
    table.add_column("parameters", justify="right", no_wrap=True)
    for name, shape, source, parameters in rows:
        table.add_row(name, shape, source, f"{parameters:,}")
    table.add_section()
    table.add_row("total", "", "", f"{sum(row[3] for row in rows):,}")
    console = Console()
    if not console.is_terminal:
        console.width = 120  # in a log; rich would assume 80
    console.print(table)


main = command_main(parser, run)
