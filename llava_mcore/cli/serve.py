"""`serve`: a Hugging Face folder with OpenAI's interface."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import socket
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from llava_mcore.cli.base.entry import command_main
from llava_mcore.cli.base.shared_flags import port
from llava_mcore.errors import ConfigError, ConversionError, problems
from llava_mcore.files.hf_files import ADAPTER_CONFIG
from llava_mcore.files.regular import read_object
from llava_mcore.inference.serving.engines import Served, adapter_command, engine_command, installed_command
from llava_mcore.processes.control import run_child

if TYPE_CHECKING:
    from llava_mcore.inference.serving.requests import ServedModel

ENGINES = ("transformers", "vllm", "sglang")
MAX_REQUEST_BYTES = 1 << 25
DEFAULT_PORT = 8000
PACKAGES = ("accelerate", "fastapi", "openai", "uvicorn")
GRACE_SECONDS = 3
"""After Ctrl-C, until open connections are closed."""


def parser() -> argparse.ArgumentParser:
    """Flags of `python -m llava_mcore serve`."""
    p = argparse.ArgumentParser(
        prog="python -m llava_mcore serve",
        usage="%(prog)s --hf-dir DIR [FLAG …]",
        allow_abbrev=False,
        description="Serve a Hugging Face folder with OpenAI's interface (POST /v1/chat/completions, images as data "
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
        help="refuse larger requests, images included (default %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--dry-run", action="store_true",
        help="check the folder, print the commands of vLLM and SGLang, and start nothing",
    )  # fmt: skip
    return p


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it."""
    check_flags(args)
    name = args.served_model_name or args.hf_dir.resolve().name
    if args.engine == "transformers" and not args.dry_run:
        with closing(_listening(args.host, args.port)) as sock:  # a port that is taken is told at once
            return _serve(args, name, sock)

    from llava_mcore.files.hf_files import holds_adapter_only
    from llava_mcore.models.whole_folder import open_whole_folder

    served = Served(args.hf_dir, name, args.host, args.port)
    commands = {engine: engine_command(engine, served) for engine in ENGINES[1:]}
    if args.dry_run:
        if holds_adapter_only(args.hf_dir):
            return _show_adapter(args.hf_dir, served)
        open_whole_folder(args.hf_dir, with_our_config=False)
        print("\n".join(shlex.join(command) for command in commands.values()))
        return 0
    _checked(args.hf_dir, name)
    command = installed_command(args.engine, served)
    print(f"running: {shlex.join(command)}", flush=True)
    return run_child(command)


def _checked(folder: Path, name: str) -> ServedModel:
    """Return what requests are checked against. Raises ConversionError or DataError if the folder cannot be served."""
    from llava_mcore.data.encode.assets import load_assets
    from llava_mcore.inference.serving.requests import ServedModel
    from llava_mcore.models.whole_folder import open_whole_folder

    hf, _ = open_whole_folder(folder, with_our_config=False)
    assets = load_assets(folder)
    return ServedModel(name, int(hf.get_text_config().max_position_embeddings), assets.chat.special_in, assets.to_rgb)


def _show_adapter(folder: Path, served: Served) -> int:
    """Print vLLM's command for a PEFT folder, and what it would refuse of it or compute differently; return 0 or 2."""
    from llava_mcore.adapters.vllm_rules import vllm_problems, vllm_rank

    config = read_object(folder / ADAPTER_CONFIG, ConversionError)
    errors = vllm_problems(config)
    if errors:
        print(
            problems(f"error: vLLM cannot serve {folder} beside its model: export-hf --merge", errors),
            file=sys.stderr,
        )
        return 2
    base = config.get("base_model_name_or_path")
    if not base:
        raise ConversionError(
            f"{folder / ADAPTER_CONFIG}: base_model_name_or_path is {base!r}, so the model that the adapter "
            "belongs to is not known: write its folder, or its name on the hub, there"
        )
    print(shlex.join(adapter_command(str(base), vllm_rank(config), served)))
    return 0


def check_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that cannot work, or missing packages."""
    if args.max_request_bytes < 1:
        raise ConfigError("--max-request-bytes must be at least 1")
    _check_device(args.device)
    if "@" in str(args.hf_dir):
        raise ConfigError(
            f"--hf-dir {args.hf_dir}: transformers' server takes what is after @ for a revision; rename it"
        )
    if args.engine == "transformers" and any(importlib.util.find_spec(package) is None for package in PACKAGES):
        raise ConfigError('transformers\' server needs more packages: pip install "llava-mcore[serve]"')


def _check_device(name: str) -> None:
    if name == "auto":
        return
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device {name}: expected auto, cpu, cuda or cuda:N") from None
    num_gpus = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise ConfigError(f"--device {name}: there are {num_gpus} GPUs here; choose one of them, or cpu")


def _serve(args: argparse.Namespace, name: str, sock: socket.socket) -> int:
    """Serve by transformers at a socket that listens already. Standard error says what takes time."""
    print("starting: importing torch and transformers, checking the folder", file=sys.stderr, flush=True)
    model = _checked(args.hf_dir, name)
    import uvicorn
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    from llava_mcore.compat.transformers_serving import load_handler
    from llava_mcore.inference.serving.app import build_app

    disable_progress_bar()
    set_verbosity_error()  # otherwise it logs every request as a warning
    print(f"loading the weights of {args.hf_dir}", file=sys.stderr, flush=True)
    handler = load_handler(args.hf_dir, model.name, model.most_tokens, args.device)
    app = build_app(handler, model, max_request_bytes=args.max_request_bytes)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_SECONDS)
    print(f"serving {name} at http://{args.host}:{sock.getsockname()[1]}/v1; Ctrl-C ends it", flush=True)
    uvicorn.Server(config).run(sockets=[sock])
    return 0


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens, before the model is loaded. ConfigError if the address cannot be used."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ConfigError(
            f"{host}:{port} cannot be listened on: {error.strerror or error}; choose another --host or --port"
        ) from error


main = command_main(parser, run)
