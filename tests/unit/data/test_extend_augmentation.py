"""docs/extend/augmentation.md, followed in a copy of the package."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from tests.helpers.out_of_tree import Copy, blocks

FILE = "llava_mcore/data/encode/augment.py"
TABLE = "OWN_TRANSFORMS: dict[str, type[OwnTransform]] = {}\n"
PROGRAM = """\
import json, sys
import torch
from llava_mcore.config.load import load_run_config
from llava_mcore.data.encode.augment import Augmentation, ImageKey
from llava_mcore.errors import ConfigError

transforms = load_run_config(None, [sys.argv[1]]).data.augment
augmentation, pixels = Augmentation(transforms), torch.full((3, 60, 80), 200, dtype=torch.uint8)
results = [augmentation(pixels, ImageKey(1, 0, key, 0, 0)) for key in "aab"]
problem = ""
try:
    Augmentation(load_run_config(None, [sys.argv[2]]).data.augment)
except ConfigError as error:
    problem = str(error)
print(json.dumps({
    "repeats": torch.equal(results[0], results[1]),
    "differs": not torch.equal(results[0], results[2]),
    "center": results[0][0, 30, 40].item(),
    "corner": results[0][0, 0, 0].item(),
    "problem": problem,
}))
"""


def test_the_page_adds_a_transform_in_one_file(tmp_path: Path) -> None:
    transform, imports, table = blocks("augmentation.md", "python")
    copy = Copy(tmp_path)
    copy.replace(FILE, TABLE, f"{transform}\n\n{table}")
    copy.add_imports(FILE, imports)
    assert copy.touched == {FILE}

    (command,) = blocks("augmentation.md", "shell")
    override = next(word for word in shlex.split(command) if word.startswith("data.augment="))
    result = json.loads(copy.run("-c", PROGRAM, override, re.sub(r"strength: [\d.]+", "strength: 5", override)))
    assert result["repeats"] and result["differs"]
    assert result["center"] > 195 and result["corner"] < result["center"]
    problem = "data.augment.0 (Vignette): strength must be between 0 and 1, found 5; its arguments: strength"
    assert problem in result["problem"] and ", Vignette (1 problem)" in result["problem"]
