"""Checkpoints of strangers: whatever a pickle in them names is not run, and one message says so."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import llava_mcore.parallel  # noqa: F401  isort: skip
from llava_mcore.checkpoint.checksums import write_checksums
from llava_mcore.checkpoint.dist import load_state, load_weights
from llava_mcore.checkpoint.layout import hf_folder, iteration_folder
from llava_mcore.cli import check, export_hf, inspect_folder
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.convert.io.megatron_lm import LegacyTensors
from llava_mcore.errors import CheckpointError
from llava_mcore.files.torch_files import load_tensors
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.configs import ModelOptions
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.parallel.groups import single_process
from tests.helpers import exploits
from tests.helpers.tiny_hf import make_hf_llava


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("imported")
    make_hf_llava(root / "hf")
    import_hf(root / "hf", root / "m")
    return root / "m"


@pytest.fixture
def megatron(imported: Path, tmp_path: Path) -> Path:
    shutil.copytree(imported, tmp_path / "m")
    return tmp_path / "m"


def load(checkpoint: Path) -> None:
    """Load the weights as a training does."""
    with single_process():
        config = load_hf_config(hf_folder(checkpoint))
        load_weights([VisionLanguageModel(config, ModelOptions(initialize=False, on_cpu=True))], checkpoint)


PLACES: list[tuple[Callable[[Path, Path], None], bool]] = [
    (exploits.in_metadata, True),
    (exploits.in_common_state, False),
    (exploits.in_common_file, False),
    (exploits.in_a_tensor, True),
]
"""Where a pickle is, and whether an export comes there."""


@pytest.mark.parametrize(("put", "exported"), PLACES)
def test_nothing_is_run_by_any_command(
    put: Callable[[Path, Path], None],
    exported: bool,
    megatron: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint, proof = iteration_folder(megatron, 0), tmp_path / "proof"
    put(checkpoint, proof)
    write_checksums(checkpoint, {})  # a stranger's are right
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint)
    message = str(caught.value)
    assert str(checkpoint) in message and "posix.mkdir" in message and "could execute code" in message
    assert "weights_only" not in message and not proof.exists()
    capsys.readouterr()
    codes = [
        inspect_folder.main([str(megatron)]),
        check.main(["--megatron-dir", str(megatron)]),
        export_hf.main(["--megatron-dir", str(megatron), "--hf-dir", str(tmp_path / "out")]),
    ]
    said = capsys.readouterr()
    assert not proof.exists() and "weights_only" not in said.err + said.out and "Traceback" not in said.err
    assert codes == ([2 if put is exploits.in_metadata else 0, 2, 2] if exported else [0, 0, 0])
    assert exported == ("could execute code" in said.err)


def test_entries_that_are_no_tensors_are_not_run(tmp_path: Path) -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    from llava_mcore.checkpoint.dist import save_state

    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    with single_process():
        state = {"random": ShardedObject("random_state", {"torch": torch.zeros(2)}, (1,), (0,))}
        save_state(dict(state), folder)
        assert torch.equal(load_state(dict(state), folder)["random"]["torch"], torch.zeros(2))
        exploits.in_every_object(folder, tmp_path / "proof")
        with pytest.raises(CheckpointError, match=r"iter_0000001: holds the Python object posix\.mkdir"):
            load_state(dict(state), folder)
    assert not (tmp_path / "proof").exists()


def test_an_optimizer_may_name_its_own_classes(tmp_path: Path) -> None:
    """As megatron-core's does that is on the host, in every group of parameters."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    from llava_mcore.checkpoint.dist import save_state

    with single_process():
        state = {"groups": ShardedObject("groups", [{"cpu_optimizer_cls": torch.optim.AdamW}], (1,), (0,))}
        save_state(dict(state), tmp_path)
        assert load_state(dict(state), tmp_path)["groups"] == [{"cpu_optimizer_cls": torch.optim.AdamW}]


@pytest.mark.parametrize("mmap", [False, True])
def test_files_of_torch_save(tmp_path: Path, mmap: bool) -> None:
    """The place in the data, and what is on a node's own disk."""
    path = tmp_path / "dp_00000.pt"
    torch.save({"x": [1, "two", torch.ones(3)]}, path)
    assert load_tensors(path, mmap=mmap)["x"][:2] == [1, "two"]
    whole = path.read_bytes()
    path.write_bytes(exploits.torch_saved({"x": exploits.Exploit(tmp_path / "proof")}))
    with pytest.raises(CheckpointError, match=r"dp_00000\.pt: holds the Python object posix\.mkdir") as caught:
        load_tensors(path, mmap=mmap)
    assert "weights_only" not in str(caught.value) and not (tmp_path / "proof").exists()
    for damaged in (b"", whole[:100], whole[:-30], b"x" * 1000, pickle.dumps({"x": 1}, protocol=5)):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"dp_00000\.pt: damaged"):
            load_tensors(path, mmap=mmap)
    path.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        load_tensors(path)
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        load_tensors(path)


def test_older_files_run_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "mp_rank_00"
    folder.mkdir()
    content = {"model": {"a": torch.ones(2)}, "args": exploits.Exploit(tmp_path / "proof")}
    (folder / "model_optim_rng.pt").write_bytes(exploits.torch_saved(content))
    assert list(LegacyTensors.open(tmp_path)) == ["a"] and not (tmp_path / "proof").exists()


def test_every_test_that_the_page_names_is_there() -> None:
    tests = Path(__file__).parents[2]
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (tests.parent / "docs" / "security.md").read_text("utf-8"))
    assert len(named) > 10
    for file, test in named:
        (path,) = tests.rglob(file)
        assert f"def {test}(" in path.read_text("utf-8"), (file, test)


def test_metadata_that_is_damaged_or_names_other_files(megatron: Path) -> None:
    checkpoint = iteration_folder(megatron, 0)
    path = checkpoint / ".metadata"
    whole = path.read_bytes()
    for damaged in (b"", whole[:-100], b"\x80\x04" + bytes(300), b"(" * 5000, pickle.dumps({"a": 1})):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"\.metadata: damaged"):
            load(checkpoint)
    for name in ("../other.distcp", "/etc/passwd", ".."):
        path.write_bytes(whole)
        metadata = exploits.read(checkpoint)
        next(iter(metadata.storage_data.values())).relative_path = name
        exploits.write(checkpoint, metadata)
        with pytest.raises(CheckpointError, match="names files outside of its folder"):
            load(checkpoint)
    path.write_bytes(whole)
    with (checkpoint / "__0_1.distcp").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match=r"is damaged[^\n]*\n.*__0_1\.distcp has 1000 bytes"):
        load(checkpoint)
    (checkpoint / "__0_1.distcp").unlink()
    os.mkfifo(checkpoint / "__0_1.distcp")
    with pytest.raises(CheckpointError, match="not a regular file"):
        load(checkpoint)
