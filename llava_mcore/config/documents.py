"""Reads YAML and JSON files written by users, with limits on size, depth and expanded aliases.

Such a file may be untrusted. It is only parsed: no tag creates an object, and nothing in it is executed.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava_mcore.errors import ConfigError

if TYPE_CHECKING:
    import yaml

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_VALUES = 20_000
"""Maximum number of values with expanded aliases: a few lines of aliases can expand to billions."""


def read_document(path: Path, kind_of_document: str = "a configuration file") -> Any:
    """Return the contents of a file: JSON if its name ends in .json, else YAML; None if it is empty.

    Raises:
        ConfigError: not a regular file of UTF-8, too large, nested too deeply, a key given twice, or not valid.
    """
    text = _read_text(path, kind_of_document)
    kind = "JSON" if path.suffix == ".json" else "YAML"
    try:
        return _parse_json(text) if kind == "JSON" else parse_yaml(text)
    except RecursionError as error:
        raise ConfigError(f"{path}: not valid {kind}: {_too_deep()}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid {kind}: {error}") from error


def _read_text(path: Path, kind_of_document: str) -> str:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            raise ConfigError(f"{path}: cannot be read as {kind_of_document}: it is {kind}")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path}: cannot be read as {kind_of_document}: it has more than {MAX_BYTES:,} bytes")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: cannot be read as {kind_of_document}: not UTF-8 (byte {error.start}); save it as UTF-8"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as {kind_of_document}: {error}") from error


def _parse_json(text: str) -> Any:
    """Parse JSON. Raises ValueError or RecursionError."""
    if not text.strip():
        return None
    content = json.loads(text, object_pairs_hook=_unique_pairs)
    level, depth, values = [content], 0, 0
    while level:
        depth, values = depth + 1, values + len(level)
        if depth > MAX_DEPTH:
            raise ValueError(_too_deep())
        if values > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES:,} values")
        level = [child for value in level for child in _children(value)]
    return content


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"{name!r} is given twice")
        content[name] = value
    return content


def parse_yaml(text: str) -> Any:
    """Parse one YAML document. Raises ValueError or RecursionError."""
    import yaml

    try:
        loader = _loader_class()(text)
        loader.name = "the file"  # which its messages show with line and column
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _loader_class() -> type[yaml.SafeLoader]:
    """Return PyYAML's safe loader with our limits. A function, because a host that only starts containers may lack
    PyYAML."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses duplicate keys, of which PyYAML would keep the last, and counts values while it builds the
        document."""

        def __init__(self, stream: str) -> None:
            super().__init__(stream)
            self._depth = 0
            self._sizes: dict[yaml.Node, int] = {}
            self._heights: dict[yaml.Node, int] = {}

        def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
            # An alias repeats a value that is complete; one inside its own value would never end.
            mark = self.peek_event().start_mark
            is_alias = self.check_event(yaml.AliasEvent)
            self._depth += 1
            node: yaml.Node | None = super().compose_node(parent, index)
            self._depth -= 1
            assert node is not None
            if not is_alias:
                self._measure(node, mark)
            elif node not in self._sizes:
                raise yaml.composer.ComposerError(None, None, "an alias (*) is inside the value that it repeats", mark)
            if self._depth + self._heights[node] > MAX_DEPTH:
                raise yaml.composer.ComposerError(None, None, _too_deep(), mark)
            return node

        def _measure(self, node: yaml.Node, mark: yaml.Mark) -> None:
            """Record the number of values in a complete node, and its depth."""
            parts = _parts(node)
            self._sizes[node] = 1 + sum(self._sizes[part] for part in parts)
            self._heights[node] = 1 + max((self._heights[part] for part in parts), default=0)
            if max(self._sizes[node], len(self._sizes)) > MAX_VALUES:
                problem = f"more than {MAX_VALUES:,} values after expanding aliases (*)"
                raise yaml.composer.ComposerError(None, None, problem, mark)

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            seen: set[Hashable] = set()
            for key, _ in node.value:
                if key.tag == "tag:yaml.org,2002:merge":
                    continue
                name = self.construct_object(key, deep=True)
                if not isinstance(name, Hashable):
                    raise yaml.constructor.ConstructorError(None, None, "a key is a list or a mapping", key.start_mark)
                if name in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{name!r} is given twice", node.start_mark)
                seen.add(name)
            return super().construct_mapping(node, deep)

    return Loader


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if not isinstance(node.value, list):
        return []
    return [part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,))]


def _too_deep() -> str:
    return f"nested more than {MAX_DEPTH} levels deep"
