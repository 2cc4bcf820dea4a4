"""Print what an image adds to NVIDIA's PyTorch image: our pinned packages without those that the base brings.

`python environments/image_lock.py > environments/image.lock.txt`
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from lock import closure

ROOT = Path(__file__).parents[1]
IN_BASE = re.compile(r"torch|torchvision|triton|numpy|nvidia-.*|cuda-.*|transformer-engine.*|setuptools")
"""The base's builds of these fit its CUDA and each other; another torch would take its Transformer Engine away."""


def main() -> int:
    """Print the lock; return 1 and name what is missing if the environment is not complete."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["remote"]]
    found, missing = closure(wanted, own=project["name"])
    if missing:
        print(f"not installed: {', '.join(sorted(missing))}", file=sys.stderr)
        return 1
    print("# What the images add to their base, without what that brings; made by environments/image_lock.py.")
    for name in sorted(found):
        if not IN_BASE.fullmatch(name):
            print(f"{name}=={found[name]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
