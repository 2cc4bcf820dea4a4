"""Read a run's configuration: file < `key.sub=value` < flags. All mistakes are reported together."""

from __future__ import annotations

import difflib
import json
import os
import tempfile
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from llava_mcore.config.schema import RunConfig
from llava_mcore.config.trainer_list import translate
from llava_mcore.errors import ConfigError, problems


def config_fields(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield (dotted key, field) for every value of the configuration, in the order of the schema."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from config_fields(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, field


SECTIONS = {key.split(".")[0] for key, _ in config_fields() if "." in key}


def load_run_config(
    config_file: Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
    flag_names: Mapping[str, str] | None = None,
) -> RunConfig:
    """Return the configuration made of a file, `key.sub=value` texts and flags; later ones win.

    `flags` maps dotted keys to values, as text or typed. `flag_names` (dotted key -> "--flag") only serves the
    messages. Raises one ConfigError that lists every unknown key and every wrong value with its origin.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    found: list[str] = []
    if config_file is not None:
        content = read_config_file(config_file)
        if isinstance(content, list):
            translated, refused = translate(content, config_file)
            found += refused
            for dotted, value, theirs in translated:
                _put(values, origin, dotted, value, f"{theirs} in {config_file}")
        else:
            for dotted, value in _flatten(content):
                _put(values, origin, dotted, value, f"in {config_file}")
    for text in overrides:
        dotted, equals, value = text.partition("=")
        if not equals or not dotted:
            found.append(f"{text!r}: expected key=value, such as training.seed=7{suggest_key(text)}")
            continue
        _put(values, origin, dotted.strip(), _parse(value), f"from {text!r}")
    for dotted, value in (flags or {}).items():
        _put(values, origin, dotted, value, f"from {(flag_names or {}).get(dotted, 'a flag')}")
    try:
        config = RunConfig.model_validate(_nest(values, found, origin))
    except ValidationError as error:
        found += [_explain(detail, origin) for detail in error.errors()]
        raise ConfigError(problems("The configuration is not valid", found)) from error
    if found:
        raise ConfigError(problems("The configuration is not valid", found))
    return config


def save_run_config(config: RunConfig, path: Path) -> None:
    """Write the whole configuration as YAML, so that `load_run_config(path)` gives an equal object."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Every node of a run writes the same file: a name of its own for each, and a whole file at any moment.
    number, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with os.fdopen(number, "w", encoding="utf-8") as handle:
        handle.write(run_config_yaml(config))
    os.chmod(partial, 0o644)
    os.replace(partial, path)


def run_config_yaml(config: RunConfig) -> str:
    """Return the whole configuration as YAML text, in the order of the schema."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def read_config_file(path: Path) -> dict[str, Any] | list[Any]:
    """Read a YAML or JSON file that holds one mapping, or a list (see trainer_list).

    Raises ConfigError, also for a key given twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a configuration file: {error}") from error
    try:
        if path.suffix == ".json":
            content = json.loads(text, object_pairs_hook=_unique_pairs)
        else:
            content = yaml.load(text, Loader=_UniqueKeyLoader)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not valid {'JSON' if path.suffix == '.json' else 'YAML'}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict | list):
        raise ConfigError(f"{path}: expected a mapping of sections to values, found a {type(content).__name__}")
    return content


def suggest_key(dotted: str) -> str:
    """Return ' (did you mean X?)' for a key that does not exist, or ''."""
    known = [key for key, _ in config_fields()]
    by_leaf = {key.rsplit(".", 1)[-1]: key for key in known}
    close = difflib.get_close_matches(dotted, known, n=1, cutoff=0.75)
    leaf = dotted.rsplit(".", 1)[-1]
    close = close or [by_leaf[name] for name in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.6)]
    return f" (did you mean {close[0]}?)" if close else ""


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys without a word; here that is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is given twice")
    return content


def _flatten(content: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested mappings; a section without any key says nothing and is dropped."""
    for key, value in content.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{dotted}.")
        elif value not in (None, {}) or dotted not in SECTIONS:
            yield dotted, value


def _parse(text: str) -> object:
    """Return the value of an override: None for null, else the text, which the schema converts to its type."""
    return None if text.strip().lower() in ("null", "none", "~", "") else text.strip()


def _put(values: dict[str, Any], origin: dict[str, str], dotted: str, value: object, source: str) -> None:
    values[dotted], origin[dotted] = value, source


def _nest(values: Mapping[str, Any], found: list[str], origin: Mapping[str, str]) -> dict[str, Any]:
    """Return nested sections; unknown keys go to `found` instead."""
    known = dict(config_fields())
    nested: dict[str, Any] = {}
    for dotted, value in values.items():
        if dotted in known:
            *path, leaf = dotted.split(".")
            section = nested.setdefault(path[0], {}) if path else nested
            section[leaf] = value
        elif dotted in SECTIONS:
            found.append(f"{dotted} ({origin[dotted]}): a section, expected a mapping of keys, found {value!r}")
        else:
            found.append(f"{dotted} ({origin[dotted]}): no such key{suggest_key(dotted)}")
    return nested


def _explain(detail: Any, origin: Mapping[str, str]) -> str:
    """Return one line for a pydantic error: key, origin, what was found, what is allowed."""
    dotted = ".".join(str(part) for part in detail["loc"])
    allowed = detail["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    return f"{dotted} ({origin.get(dotted, 'default')}): found {detail['input']!r}, {allowed}"
