"""`show-config`: print the configuration that flags, overrides and a file make together."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from llava_mcore.config.flags import parse_command_line
from llava_mcore.config.load import run_config_yaml
from llava_mcore.errors import LlavaMcoreError


def main(argv: Sequence[str] | None = None) -> int:
    """Print the configuration as YAML, which `--config` reads again; return 2 if it is not valid."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    description = "Print the configuration that flags, overrides and a file make together."
    try:
        print(run_config_yaml(parse_command_line(arguments, "show-config", description, dry_run=False).load()), end="")
    except LlavaMcoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
