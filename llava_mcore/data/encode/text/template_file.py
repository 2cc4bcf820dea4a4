"""The chat template in the Hugging Face folder of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from llava_mcore.errors import CheckpointError
from llava_mcore.files.regular import read_object

FILE = "chat_template.jinja"
LEGACY_FILE = "chat_template.json"
CONFIGS = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
"""Files with an older copy under "chat_template", which some readers of Hugging Face folders prefer."""


def write_chat_template(folder: Path, template: str) -> None:
    """Make `template` the folder's only chat template, for both tokenizer and processor."""
    (folder / FILE).write_text(template, encoding="utf-8")
    (folder / LEGACY_FILE).unlink(missing_ok=True)
    for name in CONFIGS:
        path = folder / name
        config = read_object(path, CheckpointError) if path.is_file() else {}
        if "chat_template" in config:
            del config["chat_template"]
            path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def require_same_template(folder: Path, template: str) -> None:
    """Refuse to resume with another template than a checkpoint was trained with.

    Args:
        folder: the checkpoint's Hugging Face files.
        template: what the run would train with.

    Raises:
        CheckpointError: they differ.
    """
    path = folder / FILE
    before = path.read_text(encoding="utf-8") if path.is_file() else None
    if before is not None and before != template:
        raise CheckpointError(
            f"{folder.parent} cannot be resumed with another chat template: it was trained with {path}. Give the same "
            "--chat-template, --lang and --tokenizer-load-dir; to continue with another template, start a run with "
            "another --name from these weights (--megatron-load-dir)"
        )
