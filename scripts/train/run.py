"""Train a vision-language model: `run.py --help` lists the flags."""

from __future__ import annotations

import sys
from pathlib import Path

# A host that runs everything inside an image (--sif-path) need not have the package installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llava_mcore.__main__ import main
from llava_mcore.processes.control import exit_now

if __name__ == "__main__":
    exit_now(main(["train", *sys.argv[1:]]))
