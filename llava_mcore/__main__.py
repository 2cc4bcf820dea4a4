"""`python -m llava_mcore COMMAND …`: run one of the commands (`cli/base/entry.py`)."""

from __future__ import annotations

import sys

from llava_mcore.cli.base.entry import main

if __name__ == "__main__":
    sys.exit(main())
