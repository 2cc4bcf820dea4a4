"""Data that name code: training, `check` and whatever reads a blend refuse them, and nothing of it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from megatron.energon.typed_converter import JsonParser

from llava_mcore.check_data.examiner import Examiner
from llava_mcore.compat.energon import named_code
from llava_mcore.compat.energon.named_code import refuse_named_code
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.loader.train_loader import TrainLoader
from llava_mcore.data.storage.dataset_path import check_dataset
from llava_mcore.errors import DataError
from tests.helpers.bad_data_makers import CRUDE, VQA, good

pytest_plugins = ("tests.helpers.llava_fixtures",)

COMMAND = "{__module__: os, __function__: system, command: touch MARK}"
TYPES = "sample_type: {__module__: megatron.energon, __class__: VQASample}\n"
FILE = "import pathlib\npathlib.Path('MARK').touch()\nsample_loader = part_filter = bool\n"
DATASETS = {
    "a function": f"__module__: os\n__function__: system\n{CRUDE}",
    "a function within": f"{CRUDE}subflavors: {{kind: {COMMAND}}}\n",
    "a function as a field": f"{CRUDE}part_filter: {COMMAND}\n",
    "a class of a module that comes with the data": "__module__: payload\n__class__: CrudeWebdataset\n",
    "a class as type of the samples": VQA.replace("megatron.energon", "payload"),
    "a name that an energon module has imported": VQA.replace(
        "megatron.energon", "megatron.energon.typed_converter"
    ).replace("VQASample", "importlib"),
    "a Python file": f"{TYPES}sample_loader: loader.py:sample_loader\npart_filter: loader.py:part_filter\n",
    "a Python file elsewhere": f"{TYPES}sample_loader: ../payload.py:bool\npart_filter: ../payload.py:bool\n",
}
BLEND = (
    "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: {train: {blend: [{weight: 1, path: ./good%s}]}}\n"
)
BLENDS = {
    "a function": f"__module__: os\n__function__: system\ncommand: touch MARK\n{BLEND % ''}",
    "a function within": BLEND % f", subflavors: {{kind: {COMMAND}}}",
    "a joiner": "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: {train: {join: {a: {path: ./good}, "
    f"b: {{path: ./good}}}}, joiner: {COMMAND}}}}}\n",
    "a blend in a blend": BLEND % "/../inner.yaml",
}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, str], None]:
    """Writes a text in which MARK is the file that must not appear; Python files are wherever they could be found."""
    for folder in (tmp_path, tmp_path / "good", tmp_path / "good" / ".nv-meta"):
        folder.mkdir(exist_ok=True)
    good(tmp_path / "good")
    for file in ("payload.py", "good/payload.py", "good/.nv-meta/loader.py"):
        (tmp_path / file).write_text(FILE.replace("MARK", str(tmp_path / "MARK")), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def replace(path: Path, text: str) -> None:
        path.write_text(text.replace("MARK", str(tmp_path / "MARK")), encoding="utf-8")

    return replace


@pytest.mark.parametrize("text", DATASETS.values(), ids=DATASETS)
def test_dataset_that_names_code(text: str, assets: Assets, tmp_path: Path, write: Callable[[Path, str], None]) -> None:
    write(tmp_path / "good" / ".nv-meta" / "dataset.yaml", text)
    with pytest.raises(DataError, match="good"):
        TrainLoader(
            DataConfig(path=tmp_path / "good", num_workers=0),
            assets,
            micro_batch_size=1,
            dp_rank=0,
            dp_size=1,
            seed=1,
        )
    with pytest.raises(DataError, match="good"):
        Examiner(tmp_path / "good", assets, seq_length=64)
    assert not (tmp_path / "MARK").exists()


@pytest.mark.parametrize("text", BLENDS.values(), ids=BLENDS)
def test_blend_that_names_code(text: str, assets: Assets, tmp_path: Path, write: Callable[[Path, str], None]) -> None:
    write(tmp_path / "inner.yaml", BLENDS["a function within"])
    write(tmp_path / "blend.yaml", text)
    with pytest.raises(DataError, match=r"blend\.yaml"):
        check_dataset(tmp_path / "blend.yaml")
    with pytest.raises(DataError, match=r"blend\.yaml"):
        Examiner(tmp_path / "blend.yaml", assets, seq_length=64)
    assert not (tmp_path / "MARK").exists()


def test_another_energon_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_code, "REPLACED", {JsonParser: "resolve_object"})
    with pytest.raises(AttributeError):
        refuse_named_code()
