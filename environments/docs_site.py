"""Build the documentation site into build/docs/site; `make docs` runs it in .venv-docs.

Pages link to files of the repository, such as ../benchmarks/results/loader.md. So the site is built from a copy that
has the repository's layout: README.md, docs/, and what these link to, directly or through other pages. No link is
rewritten; | in the code of tables alone is written differently on GitHub.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "build" / "docs" / "source"
SITE = ROOT / "build" / "docs" / "site"
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"""\]\((?!https?:|mailto:)([^)\s#]+)|<img src="(?!https?:)([^"]+)""")
TABLE_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
COLORS = re.compile(r"\x1b\[[0-9;]*m")
DOCSTRING_WARNING = re.compile(r"^(griffe|mkdocs\w*): ", re.MULTILINE)


def main() -> int:
    """Build the site; return 1 if a page links to a file that does not exist, or if zensical warns."""
    files = linked_files([ROOT / "README.md", *sorted(x for x in (ROOT / "docs").rglob("*") if x.is_file())])
    missing = [f"{page}: {file} does not exist" for file, page in files.items() if not file.is_file()]
    if missing:
        print(*missing, sep="\n", file=sys.stderr)
        return 1
    shutil.rmtree(SOURCE, ignore_errors=True)
    for file in files:
        target = SOURCE / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".md":
            target.write_text(for_python_markdown(file.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            shutil.copy(file, target)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = COLORS.sub("", done.stdout)
    if "Aborted because --strict flag is set" in output:
        output = output.partition("Traceback")[0]  # the warnings before it say all
    print(output, end="")
    # Warnings about docstrings are printed, but do not end a strict build.
    if done.returncode or DOCSTRING_WARNING.search(output):
        print("the site has warnings", file=sys.stderr)
        return 1
    print(f"open {(SITE / 'index.html').relative_to(ROOT)}")
    return 0


def for_python_markdown(text: str) -> str:
    r"""Return a page with | for \| in the code of tables: GitHub needs the backslash, Python-Markdown would show it."""
    return TABLE_ROW.sub(lambda row: CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0]), text)


def linked_files(starts: list[Path]) -> dict[Path, Path]:
    """Return these files and those that pages among them link to, directly or not, each with a page that names it."""
    files: dict[Path, Path] = {}
    waiting = [(file, ROOT) for file in starts]
    while waiting:
        file, page = waiting.pop()
        if file not in files:
            files[file] = page
            waiting += [(target, file) for target in links(file)] if file.suffix == ".md" and file.is_file() else []
    return files


def links(page: Path) -> Iterator[Path]:
    """Yield the files that a page links to."""
    for match in LINK.finditer(CODE.sub("", page.read_text(encoding="utf-8"))):
        yield (page.parent / (match[1] or match[2])).resolve()


if __name__ == "__main__":
    sys.exit(main())
