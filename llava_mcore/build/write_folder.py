"""The last steps of every build: the vocabulary, the folder on disk, and reading it back.

For programs with transformers 4, the folder has rotary settings under their old names, and a README.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoProcessor, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from llava_mcore.build import language
from llava_mcore.build.options import BuildOptions, Say
from llava_mcore.errors import ConfigError, ConversionError
from llava_mcore.files.atomic import locked, partial_sibling, publish
from llava_mcore.files.hf_files import CONFIG
from llava_mcore.files.regular import read_object

PROBE = "How many of the 12 houses, 家, are red?  3."
_SIZE = re.compile(r"[1-9]\d*(KB|MB|GB)")


@dataclass(frozen=True)
class Part:
    """One row of the summary. `shape` is a short description; tied `parameters` are counted once."""

    name: str
    source: str
    shape: str
    parameters: int


def require_size(options: BuildOptions) -> None:
    """Raise ConfigError unless max_shard_size is a valid size."""
    if not _SIZE.fullmatch(options.max_shard_size):
        raise ConfigError(f"--max-shard-size {options.max_shard_size}: expected a size such as 500MB or 5GB")


def fit_vocabulary(model: Any, tokenizer: PreTrainedTokenizerBase, *, pad: bool, say: Say) -> None:
    """Grow the vocabulary of a language model if the tokenizer (or --vocab-size-padding) needs it."""
    before = model.config.vocab_size
    rows = language.wanted_vocab_size(tokenizer, before, pad=pad)
    used = max(tokenizer.get_vocab().values()) + 1
    if rows == before:
        say(f"  vocabulary: {before} rows, {used} used; unchanged")
        return
    language.grow_vocabulary(model, rows)
    say(f"  vocabulary: {before} rows -> {rows}, {used} used; new rows are the mean of the others")


def write_folder(
    model: PreTrainedModel,
    tensors: Mapping[str, Tensor],
    processor: ProcessorMixin,
    options: BuildOptions,
    check: Callable[[Path], None],
) -> None:
    """Write everything next to the target, check it, and rename it; leave nothing after a failure.

    Args:
        tensors: of the model, by their names in files.
        check: raises ConversionError if a folder does not read back as it was written.

    Raises:
        ConversionError: the disk failed, or the check did.
        FolderInUse: another process is writing there.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(options.save_dir, activity="a build"))
            partial = partial_sibling(options.save_dir)
        except OSError as error:
            raise ConversionError(f"{options.save_dir}: its folder cannot be created: {error}") from error
        _write_into(partial, model, tensors, processor, options, check)


def _write_into(
    partial: Path,
    model: PreTrainedModel,
    tensors: Mapping[str, Tensor],
    processor: ProcessorMixin,
    options: BuildOptions,
    check: Callable[[Path], None],
) -> None:
    try:
        model.save_pretrained(
            partial,
            state_dict=dict(one_by_one(tensors)),
            save_original_format=False,  # which would rename again
            max_shard_size=options.max_shard_size,
        )
        processor.save_pretrained(partial)
        describe_for_older(partial)
        _make_readable(partial)
        check(partial)
        publish(partial, options.save_dir)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConversionError(f"{options.save_dir}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def one_by_one(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of files, which have a matrix of each expert where transformers' model has all in one."""
    parts = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}
    for name, tensor in tensors.items():
        end = next((end for end in parts if name.endswith(end)), None)
        if end is None:
            yield name, tensor
            continue
        for i, matrix in enumerate(tensor):
            for part, rows in zip(parts[end], matrix.chunk(len(parts[end])), strict=True):
                yield f"{name.removesuffix(end)}.experts.{i}.{part}.weight", rows.clone()


def _make_readable(folder: Path) -> None:
    """Give all files the mode of a normal new file: safetensors makes its files readable by their owner only."""
    mode = (folder / "config.json").stat().st_mode
    for path in folder.iterdir():
        path.chmod(mode)


def check_text(
    folder: Path, tokenizer: PreTrainedTokenizerBase, processor: ProcessorMixin, probe: str = PROBE
) -> tuple[ProcessorMixin, list[str]]:
    """Return the folder's processor, and how its tokenizer and template differ from those that were written.

    Args:
        tokenizer: the folder's.
        processor: that was written.
        probe: a text to tokenize.
    """
    errors = []
    if language.token_ids(tokenizer) != language.token_ids(processor.tokenizer):
        errors.append(f"tokenizer: {language.token_ids(tokenizer)}, was {language.token_ids(processor.tokenizer)}")
    if tokenizer(probe).input_ids != processor.tokenizer(probe).input_ids:
        errors.append(f"tokenizer: splits {probe!r} differently")
    read_processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    if not tokenizer.chat_template == read_processor.chat_template == processor.chat_template:
        errors.append("chat template: differs")
    return read_processor, errors


def count(module: torch.nn.Module) -> int:
    """Return the number of a module's parameters."""
    return sum(p.numel() for p in module.parameters())


README = "README.md"
_OWN_KEYS = ("rope_theta", "partial_rotary_factor")
"""Settings that are keys of the config itself in transformers 4; the others are in its rope_scaling."""
_TEXT = """\
Built by llava_mcore. Open it with transformers 5 or later: version 4 reads neither its tokenizer class nor the settings
of its processor. config.json has the rotary settings of the language model under the names of both versions.
"""


def describe_for_older(folder: Path) -> None:
    """Add version 4's names of the language model's `rope_parameters` beside them, and write a README.

    transformers 4 reads only those; without them it silently uses defaults, such as a base of 10,000 and no scaling.
    """
    path = folder / CONFIG
    values = read_object(path, ConversionError)
    text = values.get("text_config")
    rope = text.get("rope_parameters") if isinstance(text, dict) else None
    if isinstance(text, dict) and isinstance(rope, dict):
        text |= _older_names(rope)
        path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / README).write_text(_TEXT, encoding="utf-8")


def _older_names(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings under their names in transformers 4. `rope`: one set, or Gemma 3's per kind of layer."""
    if isinstance(rope.get("full_attention"), dict):
        names = _older_names(rope["full_attention"])
        local = rope.get("sliding_attention") or {}
        return names | ({"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {})
    names = {name: rope[name] for name in _OWN_KEYS if name in rope}
    if rope.get("rope_type", "default") != "default":
        names["rope_scaling"] = {name: value for name, value in rope.items() if name not in _OWN_KEYS}
    return names
