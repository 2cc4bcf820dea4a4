"""Flags of `serve`."""

from __future__ import annotations

import argparse
from pathlib import Path

ENGINES = ("transformers", "vllm", "sglang")
MAX_REQUEST_BYTES = 1 << 25
DEFAULT_PORT = 8000


def parser() -> argparse.ArgumentParser:
    """Flags of `python -m llava_mcore serve`."""
    p = argparse.ArgumentParser(
        prog="python -m llava_mcore serve",
        allow_abbrev=False,
        description="Serve a Hugging Face folder with OpenAI's interface (POST /v1/chat/completions, pictures as data "
        "URLs) until Ctrl-C. There is no authentication: anyone who can reach the address can ask.",
    )
    p.add_argument("--hf-dir", type=Path, required=True, help="Hugging Face folder, such as an export")
    p.add_argument("--host", default="localhost", help="address to listen on (default %(default)s: this machine only)")
    p.add_argument("--port", type=port, default=DEFAULT_PORT, help="port (default %(default)s; 0: any free one)")
    p.add_argument("--served-model-name", metavar="NAME", help="name for clients (default: the folder's name)")
    p.add_argument(
        "--engine", choices=ENGINES, default="transformers",
        help="program that serves (default %(default)s); vllm and sglang have to be installed",
    )  # fmt: skip
    p.add_argument(
        "--device", default="auto",
        help="as in transformers: auto, cpu, cuda:0 (default %(default)s); other engines choose their own",
    )  # fmt: skip
    p.add_argument(
        "--max-request-bytes", type=int, default=MAX_REQUEST_BYTES, metavar="N",
        help="refuse larger requests, pictures included (default %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--dry-run", action="store_true",
        help="check the folder, print the commands of vLLM and SGLang, and start nothing",
    )  # fmt: skip
    return p


def port(text: str) -> int:
    """Return a port's number, of an argument."""
    value = int(text)
    if not 0 <= value < 1 << 16:
        raise argparse.ArgumentTypeError(f"{value} is not a port: 0 to 65535")
    return value
