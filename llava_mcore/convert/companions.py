"""Config, tokenizer and processor files of an export: which it carries, and what changes in config.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llava_mcore.checkpoint import layout
from llava_mcore.data.encode import chat_template
from llava_mcore.errors import ConversionError
from llava_mcore.files.hf_files import CONFIG, EXPLICIT, VOCABULARY_FILES, companion_files
from llava_mcore.files.regular import read_object

MODEL_FILES = (CONFIG, "generation_config.json")
"""Files of a whole model: a tokenizer's folder may have those of another, and an adapter has none."""
TEMPLATE_FILES = (chat_template.FILE, chat_template.LEGACY_FILE)
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    *("merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json"),
)
_DTYPE_KEYS = ("dtype", "torch_dtype")
"""transformers' name of the key, and the name before version 4.56; a file may have both."""


def model_companions(source: Path, tokenizer_dir: Path | None) -> dict[str, Path]:
    """Return the files beside a whole model's weights, by name.

    Args:
        source: folder of the model's files.
        tokenizer_dir: folder of another tokenizer and processor, whose files replace the model's.

    Raises:
        ConversionError: `tokenizer_dir` has no readable tokenizer_config.json.
    """
    replaced = () if tokenizer_dir is None else _replaced(tokenizer_dir)
    files = {name: path for name, path in _carried(source).items() if name not in replaced}
    return files if tokenizer_dir is None else files | text_companions(tokenizer_dir)


def text_companions(source: Path) -> dict[str, Path]:
    """Return the files of tokenizer and processor in a folder, by name."""
    return {name: path for name, path in _carried(source).items() if name not in MODEL_FILES}


def _carried(source: Path) -> dict[str, Path]:
    return {path.name: path for path in companion_files(source) if path.name not in layout.companion_skip()}


def _replaced(tokenizer_dir: Path) -> tuple[str, ...]:
    """Return the names of the model's files that contradict those of another tokenizer's folder.

    Raises:
        ConversionError: it has no readable tokenizer_config.json.
    """
    path = tokenizer_dir / "tokenizer_config.json"
    try:
        config = read_object(path, ConversionError)
    except ConversionError as error:
        raise ConversionError(f"--tokenizer-dir {tokenizer_dir}: no tokenizer_config.json ({error})") from error
    names = {path.name for path in companion_files(tokenizer_dir)}
    has_template = bool(config.get("chat_template")) or not names.isdisjoint(TEMPLATE_FILES)
    tokenizer = () if names.isdisjoint(VOCABULARY_FILES) else TOKENIZER_FILES
    return tokenizer + (TEMPLATE_FILES if has_template else ())


def update_config(folder: Path, dtype: str | None) -> None:
    """Make an export's config.json match its weight files.

    Args:
        dtype: torch's name of the dtype of all weights; None if they have several.
    """
    path = folder / CONFIG
    config = read_object(path, ConversionError)
    changed = config.pop(EXPLICIT, None) is not None  # the export has the usual names
    for section in _sections(config) if dtype is not None else ():
        for key in _DTYPE_KEYS:
            if key in section and section[key] != dtype:
                section[key], changed = dtype, True
    if changed:
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sections(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a config and the configs of its parts. How weights are quantized has dtypes of its own."""
    yield config
    for key, value in config.items():
        if isinstance(value, dict) and key != "quantization_config":
            yield from _sections(value)
