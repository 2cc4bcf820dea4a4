"""`inspect`: the contents of a Hugging Face folder or a folder of Megatron checkpoints, from headers alone."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llava_mcore.cli.base.entry import command_main, skip_unused_here
from llava_mcore.files.sizes import size_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from llava_mcore.convert.inventory import Inventory, InventoryRow

WIDE = 160  # columns without a terminal, so that names are not truncated


def parser() -> argparse.ArgumentParser:
    """Flags of `python -m llava_mcore inspect`."""
    p = argparse.ArgumentParser(
        prog="python -m llava_mcore inspect",
        allow_abbrev=False,
        description="Show the contents of a Hugging Face folder or a folder of Megatron checkpoints: parts, what is "
        "trained, dtypes, layout, iteration, shapes. Reads headers only.",
    )
    p.add_argument("dir", type=Path, metavar="DIR", help="a Hugging Face folder, or one with Megatron checkpoints")
    return p


def run(args: argparse.Namespace) -> int:
    """Detect the kind of folder and show its contents.

    Raises:
        ConversionError: it is neither a Hugging Face folder nor one of checkpoints.
    """
    from rich.console import Console

    skip_unused_here()
    from llava_mcore.convert.inventory import of_folder

    inventory = of_folder(args.dir)
    console = Console()
    show(inventory, console if console.is_terminal else Console(width=WIDE))
    return 0


def show(inventory: Inventory, console: Console) -> None:
    """Print the kind of folder, its parts, the shape of every tensor, and the tensors that training ignores."""
    console.print("\n".join(inventory.facts), highlight=False, markup=False)
    console.print(_parts(inventory.rows))
    console.print(_shapes([row for row in inventory.rows if not row.ignored]))
    ignored = [row for row in inventory.rows if row.ignored]
    if ignored:
        console.print(_ignored(ignored))
    else:
        console.print("training ignores nothing", highlight=False)


def _table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _parts(rows: Sequence[InventoryRow]) -> Table:
    """One line per part and state."""
    right = ("tensors", "parameters", "size")
    table = _table("\nparts", "part", "training", "dtype", *right, right=right)
    groups: dict[tuple[str, str], list[InventoryRow]] = {}
    for row in rows:
        groups.setdefault((row.part, row.state), []).append(row)
    for (part, state), members in groups.items():
        dtypes = ", ".join(sorted({x.dtype for x in members}))
        table.add_row(part, state, dtypes, *_sums(members))
    table.add_row("all", "", "", *_sums(rows))
    return table


def _sums(rows: Sequence[InventoryRow]) -> tuple[str, str, str]:
    tensors, parameters = sum(x.count for x in rows), sum(x.parameters for x in rows)
    return f"{tensors:,}", f"{parameters:,}", size_text(sum(x.num_bytes for x in rows))


def _shapes(rows: Sequence[InventoryRow]) -> Table:
    """One line per kind of tensor."""
    table = _table("\ntensors", "name", "shape", "dtype", "times", "training", right=("times",))
    for row in rows:
        table.add_row(row.name, " x ".join(map(str, row.shape)) or "scalar", row.dtype, str(row.count), row.state)
    return table


def _ignored(rows: Sequence[InventoryRow]) -> Table:
    table = _table("\ntraining ignores", "name", "times", "because", right=("times",))
    for row in rows:
        table.add_row(row.name, str(row.count), row.ignored)
    return table


main = command_main(parser, run)
