"""docs/flags.md, generated from the schema: `python -m llava_mcore.config.flag_table > docs/flags.md`."""

from __future__ import annotations

from pydantic.fields import FieldInfo

from llava_mcore.config.flags import ALL_FLAGS, ALWAYS_ON_FLAGS, FLAGS, default_text, name_of
from llava_mcore.config.load import config_fields
from llava_mcore.config.needs import NEEDS, words_of

_HEAD = """\
# Flags and configuration keys

Generated from the code (`python -m llava_mcore.config.flag_table`). A value comes from a flag, else from
`key.sub=value` on the command line, else from the file of `--config`, else it is the default. Besides the flags
below there are `--config FILE`, `--dry-run` (print configuration and command, start nothing), `--submit`
([SLURM, Kubernetes, Vertex AI](clusters.md)) and `--help`.
"""


def flag_table() -> str:
    """Return the page: tables of each group of flags, keys without a flag, keys that need another, and what is always
    on."""
    fields = dict(config_fields())
    # Flags by group, in the order of --help.
    lines = [_HEAD]
    for title, flags in FLAGS.items():
        lines += [f"## {title[0].upper()}{title[1:]}", "", "| flag | key | default | meaning |", "|---|---|---|---|"]
        for flag in flags:
            names = ", ".join(f"`{name}`" for name in reversed(flag.names))
            value = f" = {flag.value}" if flag.value else ""
            lines.append(f"| {names} | `{flag.key}`{value} | {default_text(flag.key)} | {_meaning(fields[flag.key])} |")
        lines.append("")
    # Then the keys that only --config and key=value reach.
    flagged = {flag.key for flag in ALL_FLAGS}
    lines += ["## Keys without a flag", "", "| key | default | meaning |", "|---|---|---|"]
    for key, field in fields.items():
        if key not in flagged:
            lines.append(f"| `{key}` | {default_text(key)} | {_meaning(field)} |")
    # Then what belongs together, and what other launchers have.
    lines += [
        "",
        "## Keys that need another",
        "",
        "Setting such a key without the other is an error.",
        "",
    ]
    lines += ["| key | has an effect only with |", "|---|---|"]
    lines += [f"| {_both_names(key)} | {words_of(needs)} |" for key, needs in NEEDS.items()]
    lines += ["", "## Always on", "", "Flags of other launchers whose feature is always on here.", ""]
    lines += ["| flag | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {reason} |" for name, reason in ALWAYS_ON_FLAGS.items()]
    return "\n".join(lines) + "\n"


def _both_names(key: str) -> str:
    return f"`{key}`" if name_of(key) == key else f"`{name_of(key)}` (`{key}`)"


def _meaning(field: FieldInfo) -> str:
    """Return a field's documentation as one table cell."""
    return " ".join(str(field.description).split()).replace("|", "\\|")


if __name__ == "__main__":
    print(flag_table(), end="")
