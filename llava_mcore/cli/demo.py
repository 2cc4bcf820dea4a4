"""`demo`: a chat page for a model."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import llava_mcore
from llava_mcore.cli.base.entry import command_main
from llava_mcore.cli.base.shared_flags import port
from llava_mcore.errors import ConfigError
from llava_mcore.inference.serving import child
from llava_mcore.inference.serving.examples import check_examples
from llava_mcore.processes.control import INTERRUPTED, run_child

ROOT = Path(llava_mcore.__file__).parents[1]
PAGE = Path(child.__file__).with_name("page.py")
OWN_PYTHON = ROOT / ".venv-page" / "bin" / "python"
HAS_GRADIO = "import importlib.util, sys; sys.exit(importlib.util.find_spec('gradio') is None)"
NO_GRADIO = (
    "{python} has no Gradio. Gradio needs another Pillow than training, so it has an environment of its own: run "
    "`make page`, or `pip install -r environments/page.lock.txt` in an environment that --python names"
)
DEFAULT_PORT = 7860


def parser() -> argparse.ArgumentParser:
    """Flags of `python -m llava_mcore demo`."""
    p = argparse.ArgumentParser(
        prog="python -m llava_mcore demo",
        allow_abbrev=False,
        description="Show a chat page (Gradio) for a model: upload an image, ask about it. Give the model's folder, "
        "or a server that is already running.",
    )
    which = p.add_mutually_exclusive_group(required=True)
    which.add_argument("--hf-dir", type=Path, help="Hugging Face folder; `serve` is started for it")
    which.add_argument("--server", metavar="URL", help="address of a running server, such as http://localhost:8000/v1")
    p.add_argument(
        "--examples", type=Path, metavar="DIR",
        help='folder with images and a questions.jsonl, lines of {"image": "NAME.jpg", "question": "…"}',
    )  # fmt: skip
    p.add_argument("--host", default="localhost", help="address of the page (default %(default)s: this machine only)")
    p.add_argument("--port", type=port, default=DEFAULT_PORT, help="port of the page (default %(default)s)")
    p.add_argument(
        "--python", type=Path,
        help="Python of the environment with Gradio (default: .venv-page/bin/python, of `make page`, else this one)",
    )  # fmt: skip
    p.add_argument("--device", default="auto", help="with --hf-dir: as for `serve` (default %(default)s)")
    return p


def run(args: argparse.Namespace) -> int:
    """Show the page until a signal ends it."""
    python = _python(args.python)
    page = ["--host", args.host, "--port", str(args.port)]
    if args.examples is not None:
        check_examples(args.examples)
        page += ["--examples", str(args.examples)]
    running = contextlib.nullcontext(_url(args.server)) if args.hf_dir is None else child.server(_serve_flags(args))
    with running as url:
        env = os.environ | {"GRADIO_ANALYTICS_ENABLED": "False"}
        code = run_child([python, "-P", str(PAGE), "--server", url, *page], env)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return code


def _serve_flags(args: argparse.Namespace) -> list[str]:
    return ["--hf-dir", str(args.hf_dir), "--device", args.device]


def _url(text: str) -> str:
    """Return a server's address without a slash at its end. ConfigError if it is not an address."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--server {text}: an address such as http://localhost:8000/v1 is needed")
    return text.rstrip("/")


def _python(python: Path | None) -> str:
    """Return a Python that has Gradio. ConfigError if there is none."""
    chosen = python or (OWN_PYTHON if OWN_PYTHON.is_file() else Path(sys.executable))
    try:
        done = subprocess.run([str(chosen), "-c", HAS_GRADIO], check=False)
    except OSError as error:
        raise ConfigError(f"--python {chosen} cannot be run: {error.strerror}") from error
    if done.returncode:
        raise ConfigError(NO_GRADIO.format(python=chosen))
    return str(chosen)


main = command_main(parser, run)
