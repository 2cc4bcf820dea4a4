#!/usr/bin/env python3
"""Conversations in any usual format → energon shards; the same as `python -m llava_mcore prepare`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llava_mcore.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["prepare", *sys.argv[1:]]))
