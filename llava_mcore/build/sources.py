"""Sources of the parts: local folders, GGUF files, or tags of the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from llava_mcore.errors import ConfigError, ConversionError, problems
from llava_mcore.files.hf_files import VOCABULARY_FILES, choose_weight_files, has_weights, refuse_adapter
from llava_mcore.files.torch_files import why_not_loaded

_TAG = re.compile(r"[\w.-]+(/[\w.-]+)?")
_LIBRARY_ERRORS = (StrictDataclassError, SafetensorError)
_READ_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, *_LIBRARY_ERRORS)


@dataclass(frozen=True)
class ModelSource:
    """A folder or a hub tag (`name`), and the GGUF file in it that holds the weights, if any."""

    name: str
    gguf_file: str | None = None

    def __str__(self) -> str:
        return f"{self.name}/{self.gguf_file}" if self.gguf_file else self.name

    @property
    def folder(self) -> Path | None:
        """The local folder; None for a hub tag."""
        path = Path(self.name)
        return path if path.is_dir() else None

    @property
    def load_arguments(self) -> dict[str, Any]:
        """Keyword arguments of every `from_pretrained` that reads this source."""
        # Without it, transformers asks on the terminal whether to run a folder's own code.
        safe = {"trust_remote_code": False}
        return safe | {"gguf_file": self.gguf_file} if self.gguf_file else safe


def find_source(name: str, flag: str, *, gguf_file: str | None = None, may_be_gguf: bool = False) -> ModelSource:
    """Return the source that `name` refers to.

    Args:
        name: a folder, a hub tag, or (with `may_be_gguf`) a GGUF file.
        flag: its flag, for messages.
        gguf_file: the GGUF file of the folder to read.
        may_be_gguf: use the only GGUF file of a folder without other weights.

    Raises:
        ConfigError: the folder or file does not exist, or there are several GGUF files.
    """
    path = Path(name).expanduser()
    if may_be_gguf and path.is_file() and path.suffix == ".gguf":
        return ModelSource(str(path.parent), path.name)
    if path.is_file():
        raise ConfigError(f"{flag} {name}: is a file; expected a folder with config.json and weights, or a hub tag")
    if path.is_dir():
        return ModelSource(str(path), _gguf_in(path, flag, gguf_file) if may_be_gguf else None)
    if not _TAG.fullmatch(name) or name.startswith("."):
        raise ConfigError(f"{flag} {name}: no such folder (and not a hub tag, which looks like owner/model)")
    return ModelSource(name, gguf_file)


def _gguf_in(folder: Path, flag: str, gguf_file: str | None) -> str | None:
    """Return the GGUF file of a folder: the requested one, or the only one if there are no other weights."""
    if gguf_file is not None:
        if not (folder / gguf_file).is_file():
            raise ConfigError(f"--gguf-file {gguf_file}: {folder} has no such file")
        return gguf_file
    names = sorted(path.name for path in folder.glob("*.gguf"))
    other_weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    if other_weights or not names:
        return None
    if len(names) > 1:
        raise ConfigError(f"{flag} {folder}: holds several GGUF files; choose one with --gguf-file: {', '.join(names)}")
    return names[0]


def require_clear_weights(source: ModelSource) -> None:
    """Refuse a local folder with an adapter or a second copy of the weights: which would be used is not clear.

    Raises:
        ConversionError: what is in the way.
    """
    if source.folder is None or source.gguf_file is not None:
        return
    refuse_adapter(source.folder)
    if has_weights(source.folder):
        choose_weight_files(source.folder)


@contextmanager
def reading(part: str, source: ModelSource, hint: str = "") -> Iterator[None]:
    """Turn errors of transformers while reading into one ConversionError."""
    try:
        yield
    except _READ_ERRORS as error:
        kind = "" if source.folder else " (no folder of that name, so it was looked up on the Hugging Face hub)"
        advice = f"\n{hint}" if hint else ""
        raise ConversionError(f"{source}{kind}: {part} cannot be read: {why_not_loaded(error)}{advice}") from error


def require_tokenizer_files(source: ModelSource, hint: str) -> None:
    """Refuse a local folder without tokenizer files, for which transformers may invent an empty tokenizer.

    Raises:
        ConversionError: none of the known files exists.
    """
    if source.folder is None or source.gguf_file is not None:
        return
    if not any((source.folder / name).is_file() for name in VOCABULARY_FILES):
        raise ConversionError(f"{source}: has no tokenizer (none of {', '.join(VOCABULARY_FILES)}). {hint}")


def check_loaded(source: ModelSource, part: str, missing: set[str]) -> None:
    """Refuse a model whose files lack some weights: transformers would initialize them randomly.

    Raises:
        ConversionError: lists the missing tensors.
    """
    if missing:
        listed = [*sorted(missing)[:20], *([f"… and {len(missing) - 20} more"] if len(missing) > 20 else [])]
        raise ConversionError(problems(f"{source}: the {part} lacks weights that its config.json requires", listed))
