"""Run the rough trials: `python -m tests.e2e.rough_trials [--only PATTERN] [--markdown FILE]`.

Each is a command as a user types it, in a fresh process, on files that something is wrong with; see
tests/helpers/rough.py for what every one must keep to. The rows are in tests/e2e/rough_rows. What only a GPU or a
killed process shows is in other tests. Exit code 0 means that all ended as they must.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.rough_rows import TRIALS
from tests.helpers.rough import CannotBeTried, Shared, Trial, try_it


def chosen(patterns: Sequence[str]) -> list[Trial]:
    """Return the trials whose name or row matches a shell pattern."""
    return [x for x in TRIALS if any(fnmatch.fnmatch(text, p) for text in (x.name, x.row) for p in patterns)]


def main() -> int:
    """Run what is asked for and print one line for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.rough_trials", description=__doc__)
    parser.add_argument(
        "--only", default=["*"], nargs="+", metavar="PATTERN", help="names or rows, such as 'folders/*' or 'S1'"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write a table of what came out")
    parser.add_argument(
        "--patience", type=float, default=1, metavar="X", help="allow X times as long, on a busy machine"
    )
    parser.add_argument("--verbose", action="store_true", help="print what failing trials said")
    args = parser.parse_args()
    lines, failed = [], 0
    with tempfile.TemporaryDirectory(prefix="rough-") as folder:
        shared = Shared(Path(folder, "shared"))
        shared.root.mkdir()
        for trial in chosen(args.only):
            try:
                outcome, found = try_it(
                    trial, shared, Path(folder, trial.name.replace("/", "_")), patience=args.patience
                )
            except CannotBeTried as reason:
                print(f"----  {trial.name}: {reason}", flush=True)
                continue
            failed += bool(found)
            result = "; ".join(found) or "as it must"
            print(f"{'FAIL' if found else 'ok  '}  {trial.name} ({outcome.seconds:.1f} s): {result}", flush=True)
            if found and args.verbose:
                print("      " + outcome.text[-3000:].replace("\n", "\n      "), flush=True)
            said = outcome.last_message.strip().splitlines()
            lines.append((trial.name, trial.row, str(outcome.code), said[0][:160] if said else "", result))
    if args.markdown is not None:
        args.markdown.write_text(_table(lines), encoding="utf-8")
    print(f"{len(lines)} trials, {failed} of them wrong")
    return 1 if failed else 0


def _table(lines: list[tuple[str, ...]]) -> str:
    head = ("trial", "row", "exit code", "message", "verdict")
    rows = [head, tuple("---" for _ in head), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
