"""docs/extend/data_format.md, followed in a copy of the package."""

from __future__ import annotations

import json
import shlex
import tarfile
from pathlib import Path

from PIL import Image

from tests.helpers.out_of_tree import Copy, blocks

PREPARE = "llava_mcore/prepare/"
LAYOUTS = 'ROW_LAYOUTS: dict[str, Callable[[Any, RowMedia], ListedTurns]] = {"texts": from_pairs}\n'
LAST_KIND = '    ".tar": lambda path, name, folder, how: TarShard(path, name, folder, how.most_bytes),\n'


def read_samples(shards: Path) -> tuple[list[list[tuple[str, str]]], list[str]]:
    """Return the turns of all samples, and the names of their images."""
    messages, pictures = [], []
    for shard in sorted(shards.glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar.getmembers():
                file = tar.extractfile(member)
                assert file is not None
                if member.name.endswith(".json"):
                    messages.append([(turn["role"], turn["content"]) for turn in json.loads(file.read())["messages"]])
                else:
                    pictures.append(member.name)
    return messages, pictures


def test_the_page_adds_a_layout_and_a_kind_of_file(tmp_path: Path) -> None:
    function, import_function, table, csv_file, import_file, entry = blocks("data_format.md", "python")
    copy = Copy(tmp_path)
    turns = PREPARE + "record_turns.py"
    copy.write(turns, f"{(tmp_path / turns).read_text()}\n\n{function}")
    copy.add_imports(PREPARE + "record_layouts.py", import_function)
    copy.replace(PREPARE + "record_layouts.py", LAYOUTS, table)
    assert len(copy.touched) == 2

    copy.write(PREPARE + "sources/csv_files.py", csv_file)
    copy.add_imports(PREPARE + "sources/detect.py", import_file)
    copy.replace(PREPARE + "sources/detect.py", LAST_KIND, LAST_KIND + entry)
    assert len(copy.touched) == 4

    (row,), (rows,), (command,) = (blocks("data_format.md", language) for language in ("json", "csv", "shell"))
    (tmp_path / "rows.jsonl").write_text(row)
    (tmp_path / "table.csv").write_text(rows)
    Image.new("RGB", (40, 30), "gray").save(tmp_path / "seven.png")
    python, *arguments = shlex.split(command)
    assert python == "python"
    copy.run(*arguments)
    messages, pictures = read_samples(tmp_path / "shards")
    assert sorted(messages) == [
        [("user", "<image>\nWhich digit is this?"), ("assistant", "A seven.")],
        [("user", "What is 1 + 1?"), ("assistant", "2"), ("user", "And 2 + 2?"), ("assistant", "4")],
    ]
    assert [name.rpartition(".")[2] for name in pictures] == ["png"]
