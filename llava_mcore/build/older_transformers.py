"""Files of a built folder for programs with transformers 4: rotary settings under their old names, and a README."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llava_mcore.errors import ConversionError
from llava_mcore.files.hf_files import CONFIG
from llava_mcore.files.regular import read_object

README = "README.md"
_OWN_KEYS = ("rope_theta", "partial_rotary_factor")
"""Settings that are keys of the config itself in transformers 4; the others are in its rope_scaling."""
_TEXT = """\
Built by llava_mcore. Open it with transformers 5 or later: version 4 reads neither its tokenizer class nor the settings
of its processor. config.json has the rotary settings of the language model under the names of both versions.
"""


def describe_for_older(folder: Path) -> None:
    """Add version 4's names of the language model's `rope_parameters` beside them, and write a README.

    transformers 4 reads only those, and without them takes its defaults, such as a base of 10,000 and no scaling,
    without a word.
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
