"""Tasks of lmms-eval, which asks our own server.

lmms-eval pins older versions of wandb and protobuf, so it has an environment of its own. Its model type `openai` needs
no model there, and works for every class that the server answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from llava_mcore.errors import ConfigError, DataError
from llava_mcore.inference.evaluation.tasks import TaskResult, TaskSettings, task_result
from llava_mcore.inference.serving.child import server

NAME = "model"
HAS_LMMS = "import importlib.util, sys; sys.exit(importlib.util.find_spec('lmms_eval') is None)"
FAILED = "[LMMS_EVAL_REQUEST_FAILED"
"""Beginning of the answer that lmms-eval scores if the server refuses a question."""


def require_lmms(python: Path) -> None:
    """Raise ConfigError if a Python does not have lmms-eval."""
    try:
        done = subprocess.run([str(python), "-c", HAS_LMMS], check=False)
    except OSError as error:
        raise ConfigError(f"--lmms-python {python} cannot be run: {error.strerror}") from error
    if done.returncode:
        raise ConfigError(
            f"--lmms-python {python} has no lmms-eval: `pip install lmms_eval` in an environment of its own"
        )


def run_lmms_tasks(hf_dir: Path, python: Path, settings: TaskSettings) -> Iterator[TaskResult]:
    """Start a server for a folder, and let lmms-eval ask it one question at a time.

    Yields the tasks whose questions were all asked before it raises an error for the others.

    Raises:
        ConfigError: the server cannot start.
        DataError: lmms-eval failed, or a question could not be asked.
    """
    with tempfile.TemporaryDirectory(prefix="llava_mcore-") as name:
        output = Path(name)
        with server(["--hf-dir", str(hf_dir), "--served-model-name", NAME]) as url:
            _run(_command(python, url, settings, output), output)
        yield from _results(output)


def _command(python: Path, url: str, settings: TaskSettings, output: Path) -> list[str]:
    model = f"model_version={NAME},base_url={url},api_key=none,num_concurrent=1,max_retries=1"
    command = [str(python), "-m", "lmms_eval", "--model", "openai", "--model_args", model]
    command += ["--tasks", ",".join(settings.names), "--batch_size", "1", "--log_samples", "--output_path", str(output)]
    command += [text for folder in settings.folders for text in ("--include_path", str(folder.absolute()))]
    return command if settings.limit is None else [*command, "--limit", str(settings.limit)]


def _run(command: list[str], output: Path) -> None:
    log = output / "log.txt"
    env = os.environ | {"OPENAI_API_KEY": "none"}
    with log.open("w") as file:
        # Run it in its own folder: it reads .env files and writes caches where it is started.
        done = subprocess.run(command, cwd=output, env=env, stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode or not list(output.rglob("*_results.json")):
        lines = log.read_text(errors="replace").splitlines()
        print("\n".join(lines[-20:]), file=sys.stderr)
        raise DataError(f"lmms-eval failed with exit code {done.returncode}; the end of its output is above")


def _results(output: Path) -> Iterator[TaskResult]:
    (file,) = output.rglob("*_results.json")
    metrics = json.loads(file.read_text(encoding="utf-8"))["results"]
    refused = []
    for samples in sorted(output.rglob("*_samples_*.jsonl")):
        task = samples.stem.partition("_samples_")[2]
        documents = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
        result = task_result(task, metrics[task], documents)
        failed = [sample for sample in result.samples if sample.answer.startswith(FAILED)]
        if failed:
            failed_share = f"{len(failed)} of {result.num_samples} questions could not be asked"
            refused.append(f"{task}: {failed_share}; the first one: {failed[0].answer}")
        else:
            yield result
    if refused:
        raise DataError("; ".join(refused))
