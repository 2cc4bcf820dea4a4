"""Folders as they were published before processors had one file: preprocessor_config.json holds all their settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoImageProcessor

SETTINGS = "processor_config.json"


def as_published(source: Path, target: Path, **changes: Any) -> Path:
    """Copy a folder without its settings for videos.

    Args:
        changes: of preprocessor_config.json, such as `max_pixels`, which has no size then, as Qwen's.
    """
    shutil.copytree(source, target)
    own = json.loads((target / SETTINGS).read_text())
    AutoImageProcessor.from_pretrained(source).save_pretrained(target)
    (target / SETTINGS).unlink()
    flat = {key: value for key, value in own.items() if not isinstance(value, dict)}
    if flat.keys() != {"processor_class"}:  # LLaVA-OneVision has the number of tokens there, Qwen no file
        (target / SETTINGS).write_text(json.dumps(flat))
    if changes:
        file = target / "preprocessor_config.json"
        settings = json.loads(file.read_text()) | changes
        settings.pop("size")
        file.write_text(json.dumps(settings))
    return target
