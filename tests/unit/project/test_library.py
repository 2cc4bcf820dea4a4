"""The functions of `llava_mcore` for programs: examples of docstrings and of docs/library.md run as they stand."""

from __future__ import annotations

import doctest
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration

import llava_mcore
from llava_mcore.errors import ConfigError
from llava_mcore.parallel.groups import shut_down
from tests.helpers.forked_training import ranks_are_forked
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_hf import make_hf_llava

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder, shards and a photo."""
    root = tmp_path_factory.mktemp("library")
    make_hf_llava(root / "llava")
    make_dataset(root / "shards", num_samples=8)
    Image.new("RGB", (70, 50), "red").save(root / "photo.jpg")
    return root


@pytest.fixture
def here(material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a copy of the material."""
    shutil.copytree(material, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_the_page(here: Path) -> None:
    """Untrained logits are Hugging Face's, and a run of two iterations comes back as another model.

    The ranks of the run are forked; tests/e2e start them as the page does.
    """
    found: dict[str, Any] = {}
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL))
    try:
        with ranks_are_forked():
            exec(code, found)
    finally:
        shut_down()
    assert found["checkpoint"] == Path("llava-megatron/iter_0000000") and found["checkpoint"].is_dir()
    assert not found["model"].training
    hf = LlavaForConditionalGeneration.from_pretrained(here / "llava")
    with torch.no_grad():
        expected = hf(**found["inputs"]).logits
    assert (found["logits"] - expected).abs().max().item() <= 1e-5
    assert found["iteration"] == 2
    assert weights(here / "llava-trained") != weights(here / "llava")
    assert (here / "runs" / "first" / "run.yaml").is_file()


def test_the_docstrings(here: Path) -> None:
    """The examples in docstrings run as they stand."""
    (here / "llava").rename("hf")
    runner = doctest.DocTestRunner()
    try:
        for function in (llava_mcore.import_hf, llava_mcore.load_model, llava_mcore.export_hf):
            (test,) = doctest.DocTestFinder(recurse=False).find(function, globs={**vars(llava_mcore), "torch": torch})
            test.globs |= {"model_inputs": llava_mcore.model_inputs, "AutoProcessor": AutoProcessor}
            test.globs[function.__name__] = function
            assert runner.run(test) == (0, len(test.examples)) and test.examples
        half = llava_mcore.load_model(here / "megatron" / "iter_0000000", dtype=torch.bfloat16)
        assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    finally:
        shut_down()
    assert weights(here / "exported") == weights(here / "hf")


def test_train_says_what_keeps_a_run_from_starting(here: Path) -> None:
    """From a mapping, a file and a configuration; the mapping that the docstring shows is a valid one."""
    (example,) = doctest.DocTestParser().get_examples(llava_mcore.train.__doc__ or "")
    with pytest.raises(ConfigError, match="megatron: no such folder") as raised:
        eval(example.source, {"train": llava_mcore.train})
    assert "no such key" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"training\.sede \(from the mapping\): no such key \(did you mean"):
        llava_mcore.train({"training": {"sede": 1}})
    with pytest.raises(ConfigError, match=r"no\.yaml"):
        llava_mcore.train("no.yaml")
    with pytest.raises(ConfigError, match="run this program inside it"):
        llava_mcore.train({"launch": {"sif_path": "image.sif"}})


def test_a_process_of_another_world_is_refused(here: Path) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match=r"torch\.distributed is already in use"):
            llava_mcore.import_hf("llava", "llava-megatron")
    finally:
        torch.distributed.destroy_process_group()


def test_importing_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, llava_mcore\n"
        "heavy = [x for x in ('torch', 'transformers', 'megatron', 'numpy') if x in sys.modules]\n"
        "print(heavy, hasattr(llava_mcore, 'nothing'), sorted(llava_mcore.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[] False ['export_hf', 'import_hf', 'load_model', 'model_inputs', 'train']"
