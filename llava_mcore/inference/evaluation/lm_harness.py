"""Tasks of EleutherAI's lm-eval on a Hugging Face folder."""

from __future__ import annotations

import difflib
import gc
import logging
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from llava_mcore.errors import ConfigError, DataError, problems
from llava_mcore.inference.evaluation.languages import NO_LIBRARIES
from llava_mcore.inference.evaluation.tasks import TaskResult, TaskSettings, task_result

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, ImportError)
"""Errors that lm-eval and datasets raise for a task whose data cannot be found or read."""


def find_tasks(settings: TaskSettings) -> TaskManager:
    """Return lm-eval's index of tasks.

    Raises:
        ConfigError: lm-eval is not installed.
        DataError: a folder or a task does not exist.
    """
    settings.check_folders()
    manager = _index(settings.folders)
    errors = []
    for name in settings.names:
        if not manager.match_tasks([name]):
            close = difflib.get_close_matches(name, manager.all_tasks, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            errors.append(f"{name}: no such task{hint}; --include-path names folders with tasks of your own")
    if errors:
        raise DataError(problems("tasks cannot be found", errors))
    return manager


def require_data(settings: TaskSettings) -> None:
    """Read the data of tasks, and download what is missing, before a model is loaded or exported.

    Raises:
        ConfigError: lm-eval is not installed.
        DataError: a folder or a task does not exist, or its data cannot be read.
    """
    manager = find_tasks(settings)
    _only_errors()
    try:
        manager.load(list(settings.names))
    except LOAD_ERRORS as error:
        raise _unusable(settings, error) from error


def _unusable(settings: TaskSettings, error: Exception) -> DataError:
    return DataError(f"the tasks {', '.join(settings.names)} cannot be run: {type(error).__name__}: {error}")


def _only_errors() -> None:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


@cache
def _index(folders: tuple[Path, ...]) -> TaskManager:
    """Read all task files, which takes seconds."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(NO_LIBRARIES) from error
    return TaskManager(include_path=list(folders) or None)


def run_tasks(hf_dir: Path, max_length: int, dtype: str, settings: TaskSettings) -> list[TaskResult]:
    """Answer tasks with a folder's model, on the GPU if there is one; prompts have the folder's chat template.

    Args:
        max_length: positions of the model.
        dtype: of the weights, as of transformers.

    Raises:
        ConfigError: lm-eval is not installed.
        DataError: a task does not exist, or its data cannot be read.
    """
    # Unknown tasks are found before a model is loaded.
    manager = find_tasks(settings)
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.hf_vlms import HFMultimodalLM

    class TemplatedModel(HFMultimodalLM):
        """The text of a chat template has its BOS already; the base class lets the tokenizer add a second one."""

        def tok_batch_multimodal_encode(self, strings: list[str], images: list[Any], *rest: Any, **options: Any) -> Any:
            processor: Any = self.processor
            bos = processor.tokenizer.bos_token
            if bos is not None and all(text.startswith(bos) for text in strings):
                self.processor: Any = _WithoutSpecialTokens(processor)
            try:
                return super().tok_batch_multimodal_encode(strings, images, *rest, **options)
            finally:
                self.processor = processor

    # The model, on the GPU if there is one.
    _only_errors()
    model = TemplatedModel(
        str(hf_dir), batch_size=settings.batch_size, max_length=max_length, dtype=dtype,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )  # fmt: skip
    # All tasks in one call; problems with their data become one message.
    gc.freeze()  # lm-eval collects garbage after every batch, which takes half a second with all that is imported
    try:
        results = simple_evaluate(
            model, tasks=list(settings.names), task_manager=manager, limit=settings.limit,
            apply_chat_template=True, bootstrap_iters=0,
        )  # fmt: skip
    except LOAD_ERRORS as error:
        raise _unusable(settings, error) from error
    finally:
        gc.unfreeze()
    assert results is not None, "this process is rank 0"
    return [task_result(task, results["results"][task], documents) for task, documents in results["samples"].items()]


class _WithoutSpecialTokens:
    """A processor that adds no special tokens to a text."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __call__(self, **inputs: Any) -> Any:
        return self._processor(**inputs, add_special_tokens=False)
