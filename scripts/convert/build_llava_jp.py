"""Compose a Hugging Face LLaVA folder: `build_llava_jp.py --help` lists the flags."""

from __future__ import annotations

import sys
from pathlib import Path

# A host that runs everything inside an image (--sif-path) need not have the package installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llava_mcore.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["build", *sys.argv[1:]]))
