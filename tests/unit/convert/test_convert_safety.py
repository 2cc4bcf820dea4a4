"""A conversion that is interrupted, or wrong, leaves nothing that looks finished."""

from __future__ import annotations

import itertools
import os
import random
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llava_mcore.checkpoint import layout
from llava_mcore.cli import export_hf as export_command
from llava_mcore.cli import import_hf as import_command
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.convert.io import export_jobs, streamed_save
from llava_mcore.errors import ConversionError
from llava_mcore.files import atomic
from llava_mcore.files import tensor_bytes as raw
from llava_mcore.files.hf_folder import HfFolder
from tests.helpers.conversions import kill_after, time_convert
from tests.helpers.tiny_hf import make_hf_llava

LAYER = "language_model.model.layers.2."


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Hugging Face folder and the checkpoint imported from it."""
    root = tmp_path_factory.mktemp("safety")
    make_hf_llava(root / "hf")
    import_hf(root / "hf", root / "m", tensor_parallel=2)
    return root / "hf", root / "m"


def flip(path: Path, position: int) -> None:
    """Change one bit."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def test_killed_anywhere_and_run_again(folders: tuple[Path, Path], tmp_path: Path) -> None:
    hf, megatron = folders
    draw = random.Random(0)
    steps: list[tuple[str, Path, str]] = [("import", hf, "m"), ("export", megatron, "out")]
    for step, source, name in steps:
        options: dict[str, Any] = {"tensor_parallel": 2}
        seconds = time_convert(step, source, tmp_path / "timing", options)
        shutil.rmtree(tmp_path / "timing")
        interrupted = 0
        for _ in range(4):
            target = tmp_path / name
            hit = kill_after(draw.uniform(0.3, 1) * seconds, step, source, target, options)
            interrupted += hit
            seconds *= 1 if hit else 0.7  # the machine was busier when it was timed
            if target.exists():  # then it is whole
                assert_whole(step, hf, target, tmp_path / "check")
                shutil.rmtree(target)
        assert interrupted >= 1
        {"import": import_hf, "export": export_hf}[step](source, tmp_path / name, **options)
        assert_whole(step, hf, tmp_path / name, tmp_path / "check")
        assert sorted(p.name for p in tmp_path.iterdir()) == [name]
        shutil.rmtree(tmp_path / name)


def assert_whole(step: str, hf: Path, target: Path, scratch: Path) -> None:
    """Check a finished folder against the source."""
    exported = target
    if step == "import":
        exported = scratch
        export_hf(target, scratch)
    assert (exported / "model.safetensors").read_bytes() == (hf / "model.safetensors").read_bytes()
    shutil.rmtree(scratch, ignore_errors=True)


@pytest.fixture
def file_size_limit() -> Iterator[None]:
    """Let no file grow beyond 300 kB, in this process and its children."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("file_size_limit")
def test_a_failed_write_is_one_message_and_leaves_nothing(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, megatron = folders
    for main, argv in (
        (import_command.main, ["--hf-dir", str(hf), "--megatron-dir", str(tmp_path / "m")]),
        (export_command.main, ["--megatron-dir", str(megatron), "--hf-dir", str(tmp_path / "out")]),
    ):
        assert main([*argv, "--workers", "1"]) == 2
        text = capsys.readouterr().err
        assert (
            "failed, and its files were removed: [Errno 27]" in text and "free some" in text and "Traceback" not in text
        )
        assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.getuid() != 0, reason="only root mounts a small disk")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """A disk that is too small is refused at once; one that fills up meanwhile is one message, and no file is left."""
    hf, megatron = folders
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=False).returncode:
        pytest.skip("cannot mount a small disk here")
    try:
        with pytest.raises(ConversionError, match=r"import needs 68.7 MB, but [0-9.]+ MB are free there"):
            import_hf(hf, disk / "m", workers=workers)
        # Somebody else fills the disk meanwhile:
        monkeypatch.setattr(atomic, "require_room", lambda *_, **__: None)
        monkeypatch.setattr(streamed_save, "FILE_BYTES", 200_000)
        with pytest.raises(ConversionError, match=r"failed, and its files were removed: .*No space left"):
            import_hf(hf, disk / "m", workers=workers)
        with pytest.raises(ConversionError, match=r"failed, and its files were removed: .*No space left"):
            export_hf(megatron, disk / "out", workers=workers)
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", disk], check=True)


def test_verification_names_a_tensor_that_was_written_wrongly(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf, megatron = folders
    as_saved = streamed_save.as_saved
    squares = itertools.count()

    def wrong(data: raw.Data, shape: Any, dtype: Any) -> Iterator[torch.Tensor]:
        if shape[-2:] == (64, 64) and next(squares) == 2:
            data = torch.cat([x.map().reshape(-1) for x in data]) if isinstance(data, tuple) else data.reshape(-1)
            data[65] += 1
        return as_saved(data, shape, dtype)

    monkeypatch.setattr(streamed_save, "as_saved", wrong)
    with pytest.raises(ConversionError, match=r"differs from what was imported[\s\S]*: SHA-256 .*, expected"):
        import_hf(hf, tmp_path / "m", verify=True)
    monkeypatch.undo()

    def transposed(data: raw.Data) -> Iterator[torch.Tensor]:
        x = data[0].map() if isinstance(data, tuple) else data
        return raw.as_bytes(x.mT if x.shape[-2:] == (64, 64) and x.flatten()[0] == first else data)

    first = HfFolder.open(hf).get(LAYER + "self_attn.o_proj.weight")[0, 0]
    monkeypatch.setattr(export_jobs, "as_bytes", transposed)
    with pytest.raises(ConversionError) as caught:
        export_hf(megatron, tmp_path / "out", verify=True)
    assert "(1 problem)" in str(caught.value) and LAYER + "self_attn.o_proj.weight: SHA-256" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_verification_names_a_tensor_that_rotted_in_the_checkpoint(folders: tuple[Path, Path], tmp_path: Path) -> None:
    hf, _ = folders
    megatron = tmp_path / "m"
    checkpoint = import_hf(hf, megatron)
    tensor = HfFolder.open(hf).get(LAYER + "mlp.down_proj.weight")
    path = checkpoint / "__0_1.distcp"
    flip(path, path.read_bytes().index(tensor.numpy().tobytes()) + 100)
    with pytest.raises(ConversionError) as caught:
        export_hf(megatron, tmp_path / "out", verify=True, verify_checkpoint=False)
    assert "differs from what was imported (1 problem)" in str(caught.value)
    assert LAYER + "mlp.down_proj.weight" in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]


def test_a_checkpoint_that_lacks_numbers_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    hf, _ = folders
    checkpoint = import_hf(hf, tmp_path / "m")
    (layout.hf_folder(checkpoint) / layout.UNUSED).unlink()
    with pytest.raises(ConversionError, match=r"unused\.safetensors cannot be read"):
        export_hf(tmp_path / "m", tmp_path / "out")
