"""Install the products, each into a folder of its own, as published on PyPI.

    python -m benchmarks.peers.install --to FOLDER swift lmms

PyTorch, transformers, Transformer Engine and megatron-core are those of this environment, unless a product needs
another version. Give the folder to `train_step --peer-packages`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.products import PRODUCTS


def main() -> None:
    """Install what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("products", nargs="+", choices=PRODUCTS)
    parser.add_argument("--to", type=Path, required=True)
    args = parser.parse_args()
    for name in args.products:
        subprocess.run(command(name, args.to), check=True)


def command(name: str, to: Path) -> list[str]:
    """Return pip's command for a product."""
    return [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(to / name), *PRODUCTS[name].packages]


if __name__ == "__main__":
    main()
