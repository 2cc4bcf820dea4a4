"""Flags of `demo`."""

from __future__ import annotations

import argparse
from pathlib import Path

from llava_mcore.cli.flags.serve import port

DEFAULT_PORT = 7860


def parser() -> argparse.ArgumentParser:
    """Flags of `python -m llava_mcore demo`."""
    p = argparse.ArgumentParser(
        prog="python -m llava_mcore demo",
        allow_abbrev=False,
        description="Show a chat page (Gradio) for a model: upload a picture, ask about it. Give the model's folder, "
        "or a server that is already running.",
    )
    which = p.add_mutually_exclusive_group(required=True)
    which.add_argument("--hf-dir", type=Path, help="Hugging Face folder; `serve` is started for it")
    which.add_argument("--server", metavar="URL", help="address of a running server, such as http://localhost:8000/v1")
    p.add_argument(
        "--examples", type=Path, metavar="DIR",
        help='folder with pictures and a questions.jsonl, lines of {"picture": "NAME.jpg", "question": "…"}',
    )  # fmt: skip
    p.add_argument("--host", default="localhost", help="address of the page (default %(default)s: this machine only)")
    p.add_argument("--port", type=port, default=DEFAULT_PORT, help="port of the page (default %(default)s)")
    p.add_argument(
        "--python", type=Path,
        help="Python of the environment with Gradio (default: .venv-page/bin/python, of `make page`, else this one)",
    )  # fmt: skip
    p.add_argument("--device", default="auto", help="with --hf-dir: as for `serve` (default %(default)s)")
    return p
