"""The command line of a run for the containers of a job, which do not have this machine's files."""

from __future__ import annotations

import json
from typing import Any

from llava_mcore.config.flags import ALL_FLAGS, CommandLine, KeyFlag, parse_command_line
from llava_mcore.config.load import settings_of_file
from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import ConfigError

OF_THE_JOB = ("launch.k8s", "launch.vertex", "launch.image", "launch.volumes", "launch.job_options")
"""Keys that say how a job is written: the run itself does not have them."""


def job_arguments(command_line: CommandLine) -> list[str]:
    """Return arguments with which `train` runs the same configuration; a file's values become overrides.

    Raises:
        ConfigError: a value cannot be written as an override.
    """
    overrides: list[str] = []
    if command_line.config_file is not None:
        overrides += [f"{key}={_text(value)}" for key, value in settings_of_file(command_line.config_file)]
    overrides += command_line.overrides
    arguments = [text for text in overrides if text.partition("=")[0].strip() not in OF_THE_JOB]
    for flag in ALL_FLAGS:
        if flag.key in command_line.flags and flag.key not in OF_THE_JOB:
            arguments += _typed(flag, command_line.flags[flag.key])
    # Equal values prove that nothing was lost in the conversion.
    expected = _without_job(command_line.load())
    rebuilt = _without_job(parse_command_line(arguments, "run.py").load())
    if rebuilt != expected:
        different = [key for key in expected if expected[key] != rebuilt[key]]
        raise ConfigError(
            f"{command_line.config_file}: what it says in {', '.join(different)} cannot be written as arguments: give "
            "these keys as key.sub=value"
        )
    return arguments


def _typed(flag: KeyFlag, value: object) -> list[str]:
    """Return a flag as typed on a command line; nothing if another flag with the same key was set."""
    if flag.value is not None:
        return [flag.name] if value == flag.value else []
    if value is True:
        return [flag.name]
    text = str(value)
    if flag.many:
        return [flag.name, *text.split(",")]
    return [f"{flag.name}={text}"] if text.startswith("-") else [flag.name, text]


def _text(value: Any) -> str:
    """Return a value of a file as the text of an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list) and not any(isinstance(item, dict | list) for item in value):
        return ",".join(map(str, value))
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _without_job(run: RunConfig) -> dict[str, Any]:
    nothing = {key.removeprefix("launch."): None for key in OF_THE_JOB} | {"volumes": ()}
    return run.model_copy(update={"launch": run.launch.model_copy(update=nothing)}).model_dump(mode="json")
