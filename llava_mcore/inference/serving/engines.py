"""Commands of other programs that serve an export with OpenAI's interface."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from llava_mcore.errors import ConfigError


@dataclass(frozen=True)
class Served:
    """A folder, the name that clients use for its model, and where the server listens."""

    hf_dir: Path
    name: str
    host: str
    port: int


def engine_command(engine: str, served: Served) -> list[str]:
    """Return the command of an engine, vllm or sglang."""
    if engine == "vllm":
        start = ["vllm", "serve", str(served.hf_dir)]
    else:
        start = ["python", "-m", "sglang.launch_server", "--model-path", str(served.hf_dir)]
    return [*start, "--host", served.host, "--port", str(served.port), "--served-model-name", served.name]


def adapter_command(base: str, rank: int, served: Served) -> list[str]:
    """Return vLLM's command for a PEFT folder beside its base model. `rank`: its --max-lora-rank."""
    command = engine_command("vllm", replace(served, hf_dir=Path(base), name=Path(base).name))
    return [*command, "--enable-lora", "--max-lora-rank", str(rank), "--lora-modules", f"{served.name}={served.hf_dir}"]


def installed_command(engine: str, served: Served) -> list[str]:
    """Return the same with its program's path. ConfigError if the engine is not installed here."""
    command = engine_command(engine, served)
    program = shutil.which("vllm")
    if engine == "sglang":
        program = None if importlib.util.find_spec("sglang") is None else sys.executable
    if program is None:
        raise ConfigError(
            f"--engine {engine}: {engine} is not installed here. It needs its own versions of torch and others; "
            f"install it in a separate environment, and run there:\n  {shlex.join(command)}"
        )
    return [program, *command[1:]]
