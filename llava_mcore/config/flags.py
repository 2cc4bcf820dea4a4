"""The command-line flags of a run: a parser generated from the schema.

Names, help, defaults and types of the flags are written beside the fields, so they always match the behavior.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo

from llava_mcore.config.load import config_fields, load_run_config
from llava_mcore.config.schema import STAGE_DEFAULTS, RunConfig
from llava_mcore.config.sections.base import Flag, Section
from llava_mcore.errors import ConfigError

GROUPS = (
    "GPU",
    "logging",
    "save and load",
    "several machines",
    "SLURM",
    "Kubernetes and Vertex AI",
    "data",
    "parallel",
    "training",
    "adapters",
    "validation",
    "faults and limits",
)
"""Headings of the flags in --help and docs/flags.md, in their order."""
ALWAYS_ON_FLAGS = {
    "--dist-ckpt": "all checkpoints are distributed and load at any layout",
}
"""Flags of other launchers whose feature is always on here."""
TRAINER_NAMES = {
    "--bf16": "--precision bf16",
    "--epochs": "--train-epochs",
    "--freeze-vision": "model.freeze_vision_model=true, which is the default",
    "--gpus-per-node": "--gpus",
    "--gradient-accumulation-steps": "--global-batch-size, the samples of one optimizer step",
    "--learning-rate": "--lr",
    "--logging-steps": "--log-interval",
    "--max-steps": "--train-iters",
    "--model-name-or-path": "--megatron-load-dir, a folder that import-hf writes",
    "--nnodes": "--node",
    "--nodes": "--node",
    "--nproc-per-node": "--gpus",
    "--num-gpus": "--gpus",
    "--num-nodes": "--node",
    "--num-train-epochs": "--train-epochs",
    "--output-dir": "--save-dir",
    "--per-device-train-batch-size": "--micro-batch-size",
    "--pipeline-model-parallel-size": "--pp",
    "--pipeline-parallel-size": "--pp",
    "--save-steps": "--save-interval",
    "--tensor-model-parallel-size": "--tp",
    "--tensor-parallel-size": "--tp",
    "--warmup-ratio": "optimizer.lr_warmup_fraction=X",
    "--weight-decay": "optimizer.weight_decay=X",
}
"""Flags of other trainers, torchrun and SLURM -> what to write instead. Underscores count as dashes."""

_ORDER_OF_SOURCES = "Each value is taken from a flag, else from key.sub=value, else from the file, else its default."
_FLAGS_OF_TRAIN = "All flags of a run are taken too: python -m llava_mcore train --help lists them."


@dataclass(frozen=True)
class KeyFlag(Flag):
    """A flag with the dotted key that it sets, and its group, also where that is the section's."""

    key: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All names, as for argparse: the long one last."""
        return (*reversed(self.aliases), self.name)


def _declared() -> Iterator[KeyFlag]:
    """Yield the flags beside the fields, in the order of the schema."""
    kinds = {name: info.annotation for name, info in RunConfig.model_fields.items()}
    groups = {name: x.flag_group for name, x in kinds.items() if isinstance(x, type) and issubclass(x, Section)}
    for key, info in config_fields():
        for flag in info.metadata:
            if isinstance(flag, Flag):
                group = flag.group or groups.get(key.split(".")[0], "")
                assert group in GROUPS, f"{flag.name}: no such group: {group!r}"
                yield KeyFlag(**vars(flag) | {"key": key, "group": group})


def _listed(flags: Iterable[KeyFlag]) -> tuple[KeyFlag, ...]:
    """Return a group's flags in the order of the schema, except those with `after`."""
    listed: list[KeyFlag] = []
    moved: list[list[KeyFlag]] = []
    section, target = "", listed
    # Flags follow the previous one of their section, so that one with `after` takes the next ones with it.
    for flag in flags:
        if flag.after:
            target = []
            moved.append(target)
        elif flag.key.split(".")[0] != section:
            target = listed
        section = flag.key.split(".")[0]
        target.append(flag)
    # One may be listed after another one that is moved itself.
    while moved:
        names = [flag.name for flag in listed]
        chain = next((chain for chain in moved if chain[0].after in names), None)
        assert chain is not None, f"after: no such flag in the group: {moved[0][0].after}"
        position = names.index(chain[0].after) + 1
        listed[position:position] = chain
        moved.remove(chain)
    return tuple(listed)


_DECLARED = tuple(_declared())
FLAGS = {group: _listed(flag for flag in _DECLARED if flag.group == group) for group in GROUPS}
"""Groups of flags, as --help lists them."""
ALL_FLAGS = tuple(flag for group in FLAGS.values() for flag in group)
_NAMES = {flag.key: flag.name for flag in ALL_FLAGS if flag.value is None}


def name_of(key: str) -> str:
    """Return the name by which users set a key: its flag, if there is one."""
    return _NAMES.get(key, key)


@dataclass(frozen=True)
class CommandLine:
    """The command line: a file, `key=value` strings, and flags as dotted key -> string (True for a switch)."""

    config_file: Path | None = None
    overrides: tuple[str, ...] = ()
    flags: dict[str, object] = field(default_factory=dict)
    dry_run: bool = False
    submit: bool = False
    notices: tuple[str, ...] = ()
    """Messages about flags without an effect."""
    arguments: tuple[str, ...] = ()
    """Everything as it was typed."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> CommandLine:
        """Return what `make_parser(…).parse_args(…)` has parsed."""
        typed = vars(args)
        overrides = [*typed["overrides"], *_take_overrides(typed)]
        return cls(
            config_file=typed["config"],
            overrides=tuple(overrides),
            flags={flag.key: typed[flag.key] for flag in ALL_FLAGS if typed[flag.key] is not None},
            dry_run=typed["dry_run"],
            submit=typed["submit"],
            notices=tuple(f"{name} is always on: {reason}" for name, reason in ALWAYS_ON_FLAGS.items() if typed[name]),
            arguments=tuple(typed["arguments"]),
        )

    @property
    def typed(self) -> frozenset[str]:
        """The keys that flags set."""
        return frozenset(self.flags)

    def load(self) -> RunConfig:
        """Return the run's configuration. Raises ConfigError with every mistake at once."""
        names = {flag.key: flag.name for flag in ALL_FLAGS}
        return load_run_config(self.config_file, self.overrides, self.flags, names)


def parse_command_line(
    argv: Sequence[str], prog: str, description: str = "Train a vision-language model.", *, dry_run: bool = True
) -> CommandLine:
    """Parse flags and overrides. Raises ConfigError for a flag that does not exist; --help exits.

    `dry_run` says whether the command has a --dry-run switch.
    """
    return CommandLine.of(make_parser(prog, description, dry_run=dry_run).parse_args(list(argv)))


def _take_overrides(typed: dict[str, Any]) -> list[str]:
    """Join the values of flags that take several, and return the key=value strings that followed flags."""
    overrides: list[str] = []
    fields = dict(config_fields())
    for flag in (flag for flag in ALL_FLAGS if flag.alone is not None and typed[flag.key] is not None):
        # argparse takes the next word for the value, which may be an override or a file.
        if typed[flag.key] not in get_args(fields[flag.key].annotation):
            overrides.append(typed[flag.key])
            typed[flag.key] = flag.alone
    for flag in (flag for flag in ALL_FLAGS if flag.many and typed[flag.key] is not None):
        values = [text for text in typed[flag.key] if "=" not in text]
        if not values:
            raise ConfigError(f"{flag.name}: expected at least one value, found {typed[flag.key][0]!r}")
        overrides += [text for text in typed[flag.key] if "=" in text]
        typed[flag.key] = ",".join(values)
    return overrides


def make_parser(prog: str, description: str, *, dry_run: bool, lists_flags: bool = True) -> argparse.ArgumentParser:
    """Return the parser. Values stay strings: the schema converts and checks them together. Without `lists_flags`,
    --help names the command that explains the flags of a run."""
    parser = _Parser(
        prog=prog,
        # argparse would list all flags again, which fills the first screen.
        usage="%(prog)s [FLAG …] [key.sub=value …]",
        description=description,
        epilog=_ORDER_OF_SOURCES if lists_flags else f"{_FLAGS_OF_TRAIN} {_ORDER_OF_SOURCES}",
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="Set a configuration key: docs/flags.md.")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML or JSON file to read first.")
    if dry_run:
        parser.add_argument("--dry-run", action="store_true", help="Print configuration and command, start nothing.")
        submit = "Write SAVE_DIR/NAME/train.sbatch and submit it to SLURM; with --k8s or --vertex, submit that job."
        parser.add_argument("--submit", action="store_true", help=submit)
    parser.set_defaults(dry_run=False, submit=False)
    for name, reason in ALWAYS_ON_FLAGS.items():
        said = f"Always on: {reason}." if lists_flags else argparse.SUPPRESS
        parser.add_argument(name, action="store_true", dest=name, help=said)
    fields = dict(config_fields())
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        one_of: dict[str, argparse._MutuallyExclusiveGroup] = {}
        for flag in flags:
            target: argparse._ActionsContainer = group
            if flag.value is not None:
                target = one_of.get(flag.key) or one_of.setdefault(flag.key, group.add_mutually_exclusive_group())
            silent = {} if lists_flags else {"help": argparse.SUPPRESS}
            target.add_argument(*flag.names, dest=flag.key, **_argument(flag, fields[flag.key]) | silent)
    return parser


def default_text(key: str) -> str:
    """Return the default of a key as text for the help and the documentation; empty if there is none."""
    by_stage = [f"{values[key]:g} in stage {stage}" for stage, values in STAGE_DEFAULTS.items() if key in values]
    if by_stage:
        return ", ".join(by_stage)
    default = dict(config_fields())[key].default
    if default is None:
        return ""
    if isinstance(default, tuple | list):
        return ", ".join(map(str, default)) or "none"
    return {True: "on", False: "off"}[default] if isinstance(default, bool) else str(default)


class _Parser(argparse.ArgumentParser):
    """An argparse parser that takes overrides between flags, and whose errors are ConfigErrors, like those of a
    configuration file."""

    def parse_args(self, args: Sequence[str], namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        parsed, unknown = self.parse_known_intermixed_args(list(args))
        if unknown:
            flags = [text for text in unknown if text.startswith("-")]  # the others are values of these
            raise ConfigError("\n".join(_unknown_flag(text) for text in flags or unknown))
        parsed.arguments = list(args)
        return parsed

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists the flags")


def _argument(flag: KeyFlag, info: FieldInfo) -> dict[str, Any]:
    """Return the keyword arguments of `add_argument` for one flag."""
    default = default_text(flag.key)
    note = f"default: {default}; key: {flag.key}" if default else f"key: {flag.key}"
    help_text = f"{info.description} ({note})".replace("%", "%%")
    if flag.value is not None:
        return {"action": "store_const", "const": flag.value, "help": f"Choose {flag.value}. {help_text}"}
    if info.annotation is bool:
        return {"action": "store_const", "const": True, "help": help_text}
    several: dict[str, Any] = {"nargs": "+"} if flag.many else {}
    if flag.alone is not None:
        several = {"nargs": "?", "const": flag.alone}
    return {"metavar": _metavar(info.annotation), "help": help_text, **several}


def _metavar(annotation: Any) -> str:
    """Return {a,b} for a choice, else N, X, DIR or TEXT."""
    kinds = [kind for kind in (get_args(annotation) or (annotation,)) if kind is not type(None)]
    if get_origin(annotation) is Literal:
        return "{" + ",".join(str(choice) for choice in kinds) + "}"
    if get_origin(kinds[0]) is not None:
        return _metavar(kinds[0])
    return {int: "N", float: "X", Path: "PATH"}.get(kinds[0], "TEXT")


def _unknown_flag(text: str) -> str:
    """Return the message for an unknown flag."""
    name = text.split("=")[0]
    instead = TRAINER_NAMES.get(name.replace("_", "-"))
    if instead is not None:
        return f"{name}: no such flag (did you mean {instead}?)"
    known = [name for flag in ALL_FLAGS for name in flag.names]
    known += [*ALWAYS_ON_FLAGS, "--config", "--dry-run", "--submit", "--help"]
    close = difflib.get_close_matches(name, known, n=1)
    return f"{name}: no such flag" + (f" (did you mean {close[0]}?)" if close else "; --help lists the flags")
