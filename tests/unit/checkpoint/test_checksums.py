"""What is not what was written is found: before it is loaded, exported or called well."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llava_mcore.checkpoint import checksums
from llava_mcore.checkpoint.checksums import damaged_files, of_bytes, of_file, recorded, write_checksums
from llava_mcore.checkpoint.complete import write_run_json
from llava_mcore.checkpoint.layout import hf_folder, iteration_folder
from llava_mcore.checkpoint.verify import require_undamaged
from llava_mcore.cli import check, export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.errors import CheckpointError
from tests.helpers.tiny_hf import make_hf_llava


def flip(path: Path, position: int) -> None:
    """Change a bit, as disks and networks do."""
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 16
    path.write_bytes(data)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("imported")
    make_hf_llava(root / "hf")
    import_hf(root / "hf", root / "m", tensor_parallel=2)
    return root


@pytest.fixture
def megatron(imported: Path, tmp_path: Path) -> Path:
    shutil.copytree(imported / "m", tmp_path / "m")
    return tmp_path / "m"


def test_an_import_has_the_checksum_of_every_file(imported: Path) -> None:
    checkpoint = iteration_folder(imported / "m", 0)
    names = {p.relative_to(checkpoint).as_posix() for p in checkpoint.rglob("*") if p.is_file()}
    found = recorded(checkpoint)
    assert found is not None and found.keys() == names - {checksums.FILE}
    assert {".metadata", "__0_0.distcp", "__0_1.distcp", "hf/config.json", "hf/unused.safetensors"} <= found.keys()
    assert found["__0_1.distcp"] == of_file(checkpoint / "__0_1.distcp")  # made while it was written
    assert require_undamaged(checkpoint).startswith(f"{checkpoint}: {len(found)} files match their checksums")


def test_a_file_that_another_rank_has_written_is_recorded_before_it_is_seen(tmp_path: Path) -> None:
    """A network file system may list it late; one that was lost is missed by whoever reads the checkpoint."""
    (tmp_path / "here").write_bytes(b"here")
    write_checksums(tmp_path, {"__1_0.distcp": of_bytes(b"elsewhere")})
    expected = recorded(tmp_path)
    assert expected is not None and expected.keys() == {"here", "__1_0.distcp"}
    assert damaged_files(tmp_path, expected) == ["__1_0.distcp cannot be read: No such file or directory"]


@pytest.mark.parametrize(
    "name", ["__0_1.distcp", "__0_0.distcp", ".metadata", "hf/unused.safetensors", "hf/config.json"]
)
def test_no_command_takes_a_damaged_import(
    name: str, megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = iteration_folder(megatron, 0)
    flip(checkpoint / name, 5000 if name.endswith(".distcp") else -30)
    flags = ["--megatron-dir", str(megatron)]
    assert check.main(flags) == 2
    said = capsys.readouterr().err
    assert f"{name} is damaged: xxh3_64" in said and "--no-verify-checkpoint" in said
    if name not in (".metadata", "hf/config.json"):  # else another check may be the first
        assert export_hf.main([*flags, "--hf-dir", str(tmp_path / "out")]) == 2
        assert f"{name} is damaged" in capsys.readouterr().err and not (tmp_path / "out").exists()
    if name == "__0_1.distcp":
        assert export_hf.main([*flags, "--hf-dir", str(tmp_path / "out"), "--no-verify-checkpoint"]) == 0


def test_without_checksums_a_line_says_so(megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (iteration_folder(megatron, 0) / checksums.FILE).unlink()
    assert export_hf.main(["--megatron-dir", str(megatron), "--hf-dir", str(tmp_path / "out")]) == 0
    assert "has no checksums: it cannot be verified" in capsys.readouterr().out


def make_run_checkpoint(folder: Path) -> None:
    (folder / "hf").mkdir(parents=True)
    for name in ("metadata.json", "__0_0.distcp", "hf/config.json"):
        (folder / name).write_bytes(name.encode() * 1000)
    write_run_json(folder, {checksums.KEY: checksums.of_folder(folder, {})})


def test_run_json_has_them_beside_the_sizes(tmp_path: Path) -> None:
    make_run_checkpoint(tmp_path)
    content = json.loads((tmp_path / "run.json").read_text())
    assert content["files"].keys() == content["checksums"]["files"].keys()
    assert recorded(tmp_path) == {n: of_bytes(n.encode() * 1000) for n in content["files"]}
    assert damaged_files(tmp_path, recorded(tmp_path) or {}) == []
    (tmp_path / "hf" / "config.json").unlink()
    flip(tmp_path / "__0_0.distcp", 77)
    first, second = sorted(damaged_files(tmp_path, recorded(tmp_path) or {}))
    assert (
        first.startswith("__0_0.distcp is damaged")
        and second == "hf/config.json cannot be read: No such file or directory"
    )


def change_record(change: Callable[[dict[str, object]], object], folder: Path) -> None:
    content = json.loads((folder / checksums.FILE).read_text())
    change(content)
    (folder / checksums.FILE).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.update(algorithm="md5"), "checksums of 'md5'"),
        (lambda x: x.pop("files"), "not a list of checksums"),
        (lambda x: x.update(files=[1]), "not a list of checksums"),
        (lambda x: x["files"].update({"../x": "0"}), r"outside of the folder: \['../x'\]"),
        (lambda x: x["files"].update({"/etc/passwd": "0"}), "outside of the folder"),
    ],
)
def test_records_that_cannot_be_used(
    change: Callable[[dict[str, object]], object], message: str, tmp_path: Path
) -> None:
    (tmp_path / "x").write_text("x")
    write_checksums(tmp_path, {})
    change_record(change, tmp_path)
    with pytest.raises(CheckpointError, match=message):
        recorded(tmp_path)


def test_the_companions_of_an_import_count_too(megatron: Path) -> None:
    (hf_folder(iteration_folder(megatron, 0)) / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(CheckpointError, match=r"or has been changed.*\n.*hf/chat_template\.jinja is damaged"):
        require_undamaged(iteration_folder(megatron, 0))
