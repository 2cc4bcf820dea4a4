"""Files of a built folder for programs with transformers 4: rotary settings under their old names, and a README."""

from __future__ import annotations

import json
from pathlib import Path

from llava_mcore.errors import ConversionError
from llava_mcore.files.companions import CONFIG
from llava_mcore.files.json_files import read_object

README = "README.md"
_TEXT = """\
Built by llava_mcore. Open it with transformers 5 or later: version 4 reads neither its tokenizer class nor the settings
of its processor. config.json has the rotary settings of the language model under the names of both versions.
"""


def describe_for_older(folder: Path) -> None:
    """Add `rope_theta` and `rope_scaling` to the language model's `rope_parameters`, and write a README.

    transformers 4 reads only the former, and without them takes a base of 10,000 and no scaling, without a word.
    """
    path = folder / CONFIG
    values = read_object(path, ConversionError)
    text = values.get("text_config")
    rope = text.get("rope_parameters") if isinstance(text, dict) else None
    if isinstance(text, dict) and isinstance(rope, dict) and "rope_theta" in rope:
        text["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            text["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
        path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / README).write_text(_TEXT, encoding="utf-8")
