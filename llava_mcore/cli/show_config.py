"""`show-config`: print the configuration that results from flags, overrides and a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from llava_mcore.config.flags import parse_command_line
from llava_mcore.config.load import run_config_yaml
from llava_mcore.processes.messages import with_messages


def main(argv: Sequence[str] | None = None) -> int:
    """Print the configuration as YAML, which `--config` reads again; return 2 if it is not valid."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    description = "Print the configuration that results from flags, overrides and a file."
    return with_messages(lambda: _print(arguments, description))


def _print(arguments: Sequence[str], description: str) -> int:
    print(run_config_yaml(parse_command_line(arguments, "show-config", description, dry_run=False).load()), end="")
    return 0
