"""`show-config`: print the configuration that results from flags, overrides and a file."""

from __future__ import annotations

import argparse

from llava_mcore.cli.base.entry import command_main
from llava_mcore.config.flags import CommandLine, make_parser
from llava_mcore.config.load import run_config_yaml


def parser() -> argparse.ArgumentParser:
    """Flags of a run."""
    description = "Print the configuration that results from flags, overrides and a file."
    return make_parser("python -m llava_mcore show-config", description, dry_run=False, lists_flags=False)


def run(args: argparse.Namespace) -> int:
    """Print the configuration as YAML, which `--config` reads again. ConfigError if it is not valid."""
    print(run_config_yaml(CommandLine.of(args).load()), end="")
    return 0


main = command_main(parser, run, warns_of_versions=False)
