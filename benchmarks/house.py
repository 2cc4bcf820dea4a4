"""Counts how the code is laid out, and how many files a reader passes on the main ways through it.

    python -m benchmarks.house [--root CHECKOUT] [--markdown FILE]

It writes benchmarks/results/house.md, or with --root only prints. The first table is counted from the sources. The
ways come from two commands on a tiny model, an import and two steps of training, whose processes note their own
files (benchmarks/house_trace/sitecustomize.py).
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.shards import make_dataset
from tests.helpers.tiny_hf import make_hf_llava

PACKAGE = "llava_mcore"
SMALL, LONG, MOST_LINES = 40, 30, 300
"""Lines: a small file has fewer, a long function as many or more, and no file has more than the last."""
LARGE_FOLDER = 16
DANGLING = re.compile(r"(Of|What|Whose)\b")
Function = ast.FunctionDef | ast.AsyncFunctionDef
RESULT = Path(__file__).with_name("results") / "house.md"
Row = tuple[str, str, str]
"""What is counted, what it is here, and the goal."""

BEFORE = {
    "files": "506",
    "lines of a file, median": "100",
    "files of more than 300 lines": "3",
    "files of fewer than 40 lines": "58",
    "modules that one other imports": "135",
    "file names in several folders": "29",
    "lines of imports": "13.0%",
    "lines of a function, median / 90 % / most": "7 / 21 / 75",
    "functions of 30 lines and more without a comment": "102",
    "docstrings that begin with Of, What, Whose": "126",
    "`run.py` to the loss: files on the call stacks of its three processes": "17",
    "a sample from storage to the loss: files with a function that runs": "52",
    "a weight at import: files with a function that runs": "35",
    "`--lora-r`: files that name it": "4",
    "using a model: packages": "4",
}
"""Rows of the commit before packages were moved and names changed."""

HEAD = """\
# Files, functions and ways

Written by `python -m benchmarks.house` (`--root` prints the figures of another checkout). "Before" is the commit before
packages were moved and names changed. A way is counted by tracing real commands on a tiny model.
"""
TEXT = """\
The script counts more exactly than it did for "before": bodies of classes no longer count as functions (12 files of
an import), and commands that megatron-core runs while it is imported no longer count as a start (2 files of the first
way). About 11 of the modules that no one imports any more are classes that the register loads by name.

A sample passed 42 files before the order of samples, the mixture of datasets and packing became this project's own:
files of energon are not counted. The goal of its way and the limit of a file exclude each other: its lines would fill
more files than the goal has. Most pairs of neighbors (`turns.py` and `open_streams.py`, the two files of `order/`)
would exceed the limit together, `sample_problems.py` and `sample_reader.py` would import what imports them, and what
is small (`marks.py`, `activations.py`) has readers elsewhere. An import's lines would fit, but only by joining topics
of five packages.

`--lora-r` counts `lora_rank`, which adapters used to call `rank`; one of the files is of `plan`, which is newer than
"before". A new flag, metric, loss term, optimizer, connector or class touches one to three files
(`tests/unit/project/test_new_lines.py`). [Tasks from the pages alone](first_hour.md) are another measure.
"""


@dataclass
class Source:
    """One file of the package."""

    path: Path
    module: str
    text: str

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.text)
        self.lines = self.text.count("\n")

    @property
    def code_lines(self) -> int:
        """Lines that are not blank."""
        return sum(bool(line.strip()) for line in self.text.splitlines())

    @property
    def import_lines(self) -> int:
        """Lines of import statements."""
        nodes = (x for x in ast.walk(self.tree) if isinstance(x, ast.Import | ast.ImportFrom))
        return sum((x.end_lineno or x.lineno) - x.lineno + 1 for x in nodes)

    def comment_lines(self) -> set[int]:
        """Return the numbers of lines that hold only a comment."""
        with self.path.open("rb") as file:
            tokens = [x for x in tokenize.tokenize(file.readline) if x.type == tokenize.COMMENT]
        return {x.start[0] for x in tokens if x.line.lstrip().startswith("#")}

    def functions(self) -> Iterator[Function]:
        """Yield all functions and methods."""
        return (x for x in ast.walk(self.tree) if isinstance(x, Function))

    def imported(self) -> set[str]:
        """Return modules of the package that it imports, and packages that it imports from."""
        result: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                result |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                result |= {alias.name for alias in node.names}
        return {name for name in result if name.split(".")[0] == PACKAGE}


def read(root: Path) -> list[Source]:
    """Return all files of the package."""
    result = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        result.append(Source(path, name, path.read_text(encoding="utf-8")))
    return result


def size_of(function: Function) -> int:
    """Return the number of lines of a function, with its decorators and docstring."""
    first = min([function.lineno, *(x.lineno for x in function.decorator_list)])
    return (function.end_lineno or first) - first + 1


def file_rows(sources: list[Source]) -> list[Row]:
    """Count files, lines and functions."""
    importers: collections.Counter[str] = collections.Counter()
    for source in sources:
        importers.update(source.imported())
    modules = [x for x in sources if x.path.name != "__init__.py"]
    names = collections.Counter(x.path.name for x in modules)
    code = sum(x.code_lines for x in sources)
    comments = {x.module: x.comment_lines() for x in sources}
    functions = [(x, f) for x in sources for f in x.functions()]
    sizes = sorted(size_of(f) for _, f in functions)
    uncommented = [
        f
        for x, f in functions
        if size_of(f) >= LONG and not comments[x.module] & set(range(f.lineno, f.end_lineno or 0))
    ]
    docstrings = [
        ast.get_docstring(node)
        for x in sources
        for node in ast.walk(x.tree)
        if isinstance(node, ast.Module | ast.ClassDef | Function)
    ]
    share = sum(x.import_lines for x in sources) / code
    return [
        ("files", f"{len(sources)}", "fewer"),
        ("lines of a file, median", f"{statistics.median(x.lines for x in modules):.0f}", "100 to 250"),
        (f"files of more than {MOST_LINES} lines", f"{sum(x.lines > MOST_LINES for x in sources)}", "0"),
        (f"files of fewer than {SMALL} lines", f"{sum(x.lines < SMALL for x in modules)}", "fewer"),
        ("modules that one other imports", f"{sum(importers[x.module] == 1 for x in modules)}", "fewer"),
        ("file names in several folders", f"{sum(count > 1 for count in names.values())}", "fewer"),
        (f"folders of more than {LARGE_FOLDER} modules", ", ".join(large_folders(modules)) or "none", "none"),
        ("lines of imports", f"{share:.1%}", "about 5 %"),
        ("lines of comments", f"{sum(map(len, comments.values())) / code:.1%}", "more"),
        (
            "lines of a function, median / 90 % / most",
            f"{statistics.median(sizes):.0f} / {sizes[len(sizes) * 9 // 10]} / {sizes[-1]}",
            "a screen at most",
        ),
        (f"functions of {LONG} lines and more without a comment", f"{len(uncommented)}", "0"),
        (
            "docstrings that begin with Of, What, Whose",
            f"{sum(bool(DANGLING.match(x or '')) for x in docstrings)}",
            "0",
        ),
    ]


def large_folders(modules: list[Source]) -> list[str]:
    """Return the folders of too many modules."""
    counts = collections.Counter(x.module.rpartition(".")[0].partition(".")[2] for x in modules)
    return [f"{name} {count}" for name, count in counts.most_common() if count > LARGE_FOLDER]


def way_rows(ways: dict[str, set[str]], sources: list[Source]) -> list[Row]:
    """Count the files of each way."""
    flag = [x.path for x in sources if re.search(r"--lora-r\b|adapter\.r\b|\blora_rank\b", x.text)]
    using = ("answering", "generation", "evaluation", "serving", "inference")
    packages = {x.module.split(".")[1] for x in sources if x.module.count(".")} & set(using)
    return [
        ("`run.py` to the loss: files on the call stacks of its three processes", length(ways["stacks"]), "≤ 11"),
        ("a sample from storage to the loss: files with a function that runs", length(ways["step"]), "≤ 22"),
        ("a weight at import: files with a function that runs", length(ways["import"]), "≤ 14"),
        ("`--lora-r`: files that name it", f"{len(flag)}", "≤ 8"),
        ("using a model: packages", f"{len(packages)}", "1"),
    ]


def length(paths: Collection[str]) -> str:
    """Return the number of files of a way, and how many it would be if all were as long as a file may be."""
    lines = sum(Path(path).read_text(encoding="utf-8").count("\n") for path in paths)
    return f"{len(paths)} ({lines:,} lines: {-(-lines // MOST_LINES)} at {MOST_LINES} lines a file)"


def traced(root: Path) -> dict[str, set[str]]:
    """Run an import and a step of training; return the package's files on each way."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        notes = folder / "notes"
        notes.mkdir()
        make_hf_llava(folder / "hf")
        data = make_dataset(folder / "data", num_samples=16, num_shards=1)
        trace = Path(__file__).with_name("house_trace")
        environ = os.environ | {
            "PYTHONPATH": f"{trace}{os.pathsep}{root}",
            "HOUSE_NOTES": str(notes),
            "HOUSE_PACKAGE": str(root / PACKAGE),
            "OMP_NUM_THREADS": "1",
        }
        imported = ["-m", PACKAGE, "import-hf", "--hf-dir", folder / "hf", "--megatron-dir", folder / "megatron"]
        places = ["--megatron-load-dir", folder / "megatron", "--tokenizer-load-dir", folder / "hf"]
        out = ["--save-dir", folder / "runs", "--data-path", data, "--name", "house"]
        sizes = ["--micro-batch-size", "2", "--global-batch-size", "2", "--seq-length", "64", "--train-iters", "2"]
        script = root / "scripts" / "train" / "run.py"
        trained = [script, "-g", "1", *places, *out, *sizes, "data.num_workers=0"]
        for kind, arguments in (("import", imported), ("train", trained)):
            command = [sys.executable, *map(str, arguments)]
            done = subprocess.run(
                command, env=environ | {"HOUSE_KIND": kind}, cwd=root, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        result: dict[str, set[str]] = collections.defaultdict(set)
        for file in notes.glob("*.json"):
            for way, paths in json.loads(file.read_text()).items():
                result[way] |= set(paths)
    return result


def table(title: str, rows: list[Row]) -> str:
    """Return a table of Markdown."""
    body = "".join(f"| {what} | {BEFORE.get(what, '')} | {count} | {goal} |\n" for what, count, goal in rows)
    return f"| {title} | before | now | goal |\n|---|---|---|---|\n{body}"


def page(tables: str) -> str:
    """Return the whole page with the results."""
    return f"{HEAD}\n{tables}\n{TEXT}"


def main() -> None:
    """Print both tables; write them to a file if told to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parents[1]
    parser.add_argument("--root", type=Path, default=here, help="checkout to measure (default: this one)")
    parser.add_argument("--markdown", type=Path, help="file to write (default: the page in results/, none with --root)")
    parser.add_argument("--list", action="store_true", help="print the files of each way")
    args = parser.parse_args()
    sources, ways = read(args.root), traced(args.root)
    text = table("files and functions", file_rows(sources)) + "\n" + table("ways", way_rows(ways, sources))
    print(text)
    if args.list:
        for way, paths in sorted(ways.items()):
            print(way, *sorted(os.path.relpath(x, args.root) for x in paths), sep="\n  ")
    target = args.markdown or (RESULT if args.root == here else None)
    if target is not None:
        target.write_text(page(text), encoding="utf-8")


if __name__ == "__main__":
    main()
