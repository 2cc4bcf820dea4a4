#!/usr/bin/env python3
"""Hugging Face LLaVA folder → Megatron checkpoint; the same as `python -m llava_mcore import-hf`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llava_mcore.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["import-hf", *sys.argv[1:]]))
