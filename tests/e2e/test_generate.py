"""`generate`: a checkpoint at tp x pp, in processes of its own, writes the same file as transformers on its folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llava_mcore.cli import generate as generate_command
from llava_mcore.convert.import_hf import import_hf
from tests.helpers.commands import ROOT
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_hf import make_hf_llava

NUM_PICTURES = 60


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, its checkpoint, and a dataset whose first part has as many images."""
    root = tmp_path_factory.mktemp("generate")
    make_hf_llava(root / "hf")
    import_hf(root / "hf", root / "megatron")
    make_dataset(root / "data", num_samples=2 * NUM_PICTURES)
    split = "split_parts: {train: [000001.tar], val: [000000.tar], test: []}\nexclude: []\n"
    (root / "data" / ".nv-meta" / "split.yaml").write_text(split)
    return root


def generate(*arguments: object, expect: int = 0) -> str:
    """Run the command and return its output and errors."""
    command = [sys.executable, "-m", "llava_mcore", "generate", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=900)
    assert done.returncode == expect, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


def answers(root: Path, name: str, *model: object) -> bytes:
    out = root / f"{name}.jsonl"
    asked = ("--data-path", root / "data", "--num-samples", NUM_PICTURES, "--max-new-tokens", 4)
    arguments = [str(argument) for argument in (*model, *asked, "--out", out)]
    assert generate_command.main(arguments) == 0
    return out.read_bytes()


def test_answers_at_every_layout(root: Path) -> None:
    """The command runs here; the processes that it starts are forked from the tests' server."""
    expected = answers(root, "hf", "--hf-dir", root / "hf")
    lines = [json.loads(line) for line in expected.splitlines()]
    assert len(lines) == NUM_PICTURES and len({line["answer"] for line in lines}) > 3
    for tp, cp, pp in ((1, 1, 1), (2, 1, 2), (1, 2, 1)):  # the others: tests/parallel/test_generate.py
        layout = ("--tp", tp, "--cp", cp, "--pp", pp)
        found = answers(root, f"{tp}{cp}{pp}", "--megatron-dir", root / "megatron", *layout)
        assert found == expected, layout
    found = answers(root, "replicas", "--megatron-dir", root / "megatron", "--tp", 2, "--replicas", 2)
    assert found == expected, "replicas"
    sampled = ("--megatron-dir", root / "megatron", "--temperature", 1)
    one = answers(root, "sampled", *sampled)
    assert answers(root, "sampled2", *sampled, "--replicas", 2) == one != expected
    assert not list(root.glob("*.partial*"))


def test_replicas_have_one_message(root: Path, tmp_path: Path) -> None:
    """A shard that cannot be read stops all of them, and no file takes the name of --out."""
    shutil.copytree(root / "data", tmp_path / "data")
    (tmp_path / "data" / "000000.tar").unlink()
    out = tmp_path / "x.jsonl"
    given = ("--megatron-dir", root / "megatron", "--replicas", 2, "--data-path", tmp_path / "data", "--out", out)
    text = generate(*given, expect=2)
    assert text.count("error:") == 1 and "Traceback" not in text and "000000.tar" in text
    assert not out.exists()


def test_what_fails_in_the_processes_is_one_message(root: Path) -> None:
    given = ("--megatron-dir", root / "megatron", "--tp", 2, "--data-path", root / "no", "--out", root / "x.jsonl")
    text = generate(*given, expect=2)
    assert text.count("error:") == 1 and "Traceback" not in text and "does not exist" in text
    assert len(text.strip().splitlines()) == 1
