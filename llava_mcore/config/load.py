"""Read a run's configuration: file < `key.sub=value` < flags. All mistakes are reported together."""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from reprlib import Repr
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from llava_mcore.config.documents import read_document
from llava_mcore.config.rules.trainer_list import translate
from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import ConfigError, problems


def config_fields(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield (dotted key, field) for every value of the configuration, in the order of the schema."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from config_fields(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, field


MAX_PROBLEMS = 50
"""Maximum number of problems in one message."""
_LONGEST = 120
_SHORT = Repr(maxstring=_LONGEST, maxother=_LONGEST, maxlist=6, maxdict=6)
_NONE_IS_A_CHOICE = {key for key, field in config_fields() if "none" in get_args(field.annotation)}
"""Keys of which "none" is one of the choices."""
REMOVED_KEYS = {"training.fp8_maximum_over": "all"}
"""Keys of earlier versions, each with the value under which a run is as it is now: runs saved with it still load."""
RENAMED_KEYS = {"data.max_picture_pixels": "data.max_image_pixels"}
"""Keys of earlier versions -> what they are called now. Files with the old name are read; who types it is told."""
SECTIONS = {key.split(".")[0] for key, _ in config_fields() if "." in key}


def load_run_config(
    config_file: Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
    flag_names: Mapping[str, str] | None = None,
) -> RunConfig:
    """Return the configuration from a file, `key.sub=value` strings and flags; later ones win.

    `flags` maps dotted keys to values, as text or typed. `flag_names` (dotted key -> "--flag") is for messages
    only. Raises one ConfigError that lists every unknown key and every wrong value with its origin.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    errors: list[str] = []
    # The file, in our form or as command lines of another trainer.
    if config_file is not None:
        typed = {text.partition("=")[0].strip() for text in overrides} | set(flags or {})
        settings, refused = _settings(config_file, typed)
        errors += refused
        for dotted, value, source in settings:
            _put(values, origin, dotted, value, source)
    # What was typed replaces what the file says.
    for text in overrides:
        dotted, equals, value = text.partition("=")
        if not equals or not dotted:
            errors.append(f"{excerpt(text)}: expected key=value, such as training.seed=7{suggest_key(text)}")
            continue
        dotted = dotted.strip()
        _put(values, origin, dotted, _parse(dotted, value), f"from {excerpt(text)}")
    for dotted, value in (flags or {}).items():
        _put(values, origin, dotted, value, f"from {(flag_names or {}).get(dotted, 'a flag')}")
    # All problems are reported at once, each with its origin.
    try:
        config = RunConfig.model_validate(_nest(values, errors, origin))
    except ValidationError as error:
        errors += [_explain(detail, origin) for detail in error.errors()]
        raise _not_valid(errors) from error
    if errors:
        raise _not_valid(errors)
    return config


def settings_of_file(config_file: Path) -> list[tuple[str, Any]]:
    """Return (dotted key, value) of what a valid file sets, in our form or in that of another trainer."""
    return [(dotted, value) for dotted, value, _ in _settings(config_file, ())[0]]


def _settings(config_file: Path, typed: Collection[str]) -> tuple[list[tuple[str, Any, str]], list[str]]:
    """Return (dotted key, value, origin) of what a file sets, and what of another trainer's list is refused."""
    content = read_config_file(config_file)
    if isinstance(content, list):
        translated, refused = translate(content, config_file, typed)
        return [
            (dotted, value, f"{trainer_key} in {config_file}") for dotted, value, trainer_key in translated
        ], refused
    return [(dotted, value, f"in {config_file}") for dotted, value in _renamed(content)], []


def as_run_config(config: RunConfig | Mapping[str, Any] | Path | str) -> RunConfig:
    """Return a configuration from an object, nested sections and keys, or a file.

    Raises:
        ConfigError: lists every unknown key and every wrong value with its origin.
    """
    if isinstance(config, RunConfig):
        return config
    if isinstance(config, Path | str):
        return load_run_config(Path(config))
    values = dict(_renamed(config))
    return load_run_config(flags=values, flag_names=dict.fromkeys(values, "the mapping"))


def save_run_config(config: RunConfig, path: Path) -> None:
    """Write the whole configuration as YAML, so that `load_run_config(path)` gives an equal object."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Every node of a run writes the same file: each uses its own temporary name, so that the file is always complete.
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
        handle.write(run_config_yaml(config))
    os.chmod(partial, 0o644)
    os.replace(partial, path)


def run_config_yaml(config: RunConfig) -> str:
    """Return the whole configuration as YAML text, in the order of the schema."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def read_config_file(path: Path) -> dict[Any, Any] | list[Any]:
    """Read a YAML or JSON file that holds one mapping, or a list (see trainer_list).

    Raises ConfigError (see `read_document`).
    """
    content = read_document(path)
    if content is None:
        return {}
    if not isinstance(content, dict | list):
        raise ConfigError(f"{path}: expected a mapping of sections to values, found a {type(content).__name__}")
    return content


def excerpt(value: object) -> str:
    """Return the repr of a value for a message; long ones are shortened in the middle."""
    return _SHORT.repr(value)


def suggest_key(dotted: str) -> str:
    """Return ' (did you mean X?)' for a key that does not exist, or ''."""
    if len(dotted) > _LONGEST:
        return ""
    if dotted in RENAMED_KEYS:
        return f" (did you mean {RENAMED_KEYS[dotted]}?)"
    known = [key for key, _ in config_fields()]
    by_leaf = {key.rsplit(".", 1)[-1]: key for key in known}
    close = difflib.get_close_matches(dotted, known, n=1, cutoff=0.75)
    leaf = dotted.rsplit(".", 1)[-1]
    close = close or [by_leaf[name] for name in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.6)]
    return f" (did you mean {close[0]}?)" if close else ""


def _not_valid(errors: Sequence[str]) -> ConfigError:
    more = len(errors) - MAX_PROBLEMS
    listed = errors if more <= 0 else [*errors[:MAX_PROBLEMS], f"… and {more} more"]
    return ConfigError(problems("The configuration is not valid", listed))


def _printable(dotted: str) -> str:
    """Return an untrusted key without control characters for the terminal."""
    text = dotted if len(dotted) <= _LONGEST else f"{dotted[:_LONGEST]}…"
    return text if text.isprintable() else repr(text)


def _flatten(content: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested mappings; empty sections are dropped."""
    for key, value in content.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{dotted}.")
        elif value not in (None, {}) or dotted not in SECTIONS:
            yield dotted, value


def _renamed(content: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    """Return (today's dotted key, value) of nested mappings, which an earlier version may have written."""
    return [(RENAMED_KEYS.get(dotted, dotted), value) for dotted, value in _flatten(content)]


def _parse(dotted: str, text: str) -> object:
    """Return the value of an override: None for null, else the string, which the schema converts to its type."""
    text = text.strip()
    if text == "none" and dotted in _NONE_IS_A_CHOICE:
        return text
    return None if text.lower() in ("null", "none", "~", "") else text


def _put(values: dict[str, Any], origin: dict[str, str], dotted: str, value: object, source: str) -> None:
    values[dotted], origin[dotted] = value, source


def _nest(values: Mapping[str, Any], errors: list[str], origin: Mapping[str, str]) -> dict[str, Any]:
    """Return nested sections; unknown keys go to `errors` instead."""
    known = dict(config_fields())
    nested: dict[str, Any] = {}
    for dotted, value in values.items():
        if dotted in known:
            *path, leaf = dotted.split(".")
            section = nested.setdefault(path[0], {}) if path else nested
            section[leaf] = value
        elif dotted in REMOVED_KEYS:
            if value != REMOVED_KEYS[dotted]:
                errors.append(
                    f"{dotted} ({origin[dotted]}): no such key any more, found {excerpt(value)}; "
                    f"the program now does what {REMOVED_KEYS[dotted]} did: omit it"
                )
        elif dotted in SECTIONS:
            errors.append(f"{dotted} ({origin[dotted]}): a section, expected a mapping of keys, found {excerpt(value)}")
        else:
            hint = suggest_key(dotted) if len(errors) < MAX_PROBLEMS else ""
            errors.append(f"{_printable(dotted)} ({origin[dotted]}): no such key{hint}")
    return nested


def _explain(detail: Any, origin: Mapping[str, str]) -> str:
    """Return one line for a pydantic error: key, origin, what was found, what is allowed."""
    parts = [str(part) for part in detail["loc"]]
    # A part of a value, such as an entry of a list, comes from where the value does.
    keys = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    source = next((origin[key] for key in keys if key in origin), "default")
    allowed = detail["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    return f"{'.'.join(parts)} ({source}): found {excerpt(detail['input'])}, {allowed}"
