"""train_step: its command line, and what it leaves on the disk."""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks import runs, train_step
from benchmarks.material import Sample, make_videos, pair_tokens, with_videos
from benchmarks.record import ROOT
from benchmarks.runs import parse_with_overrides
from benchmarks.shapes import make_hf_folder
from benchmarks.train_step_options import parse
from benchmarks.train_step_rows import Entry
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.loader.train_loader import TrainLoader

STEP = {"step_seconds": 1.0, "num_tokens": 90, "num_conversations": 2, "tflops_per_device": 1.0, "mfu": None}
STEP |= {"data_wait_seconds": 0.0, "fill": 1.0, "memory_gib": None, "loss": 2.0}


def parsed(monkeypatch: pytest.MonkeyPatch, *words: str) -> argparse.Namespace:
    """The command line, read."""
    monkeypatch.setattr(sys, "argv", ["train_step", "--shape", "tiny", *words])
    return parse()


def test_overrides_are_no_values_of_the_option_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they stand; a folder with = in its name is still one."""
    words = ("--cuda-graphs", "off", "on", "router.force_balance=true", "--work", "/x/a=b", "optimizer.muon.lr=1")
    args = parsed(monkeypatch, *words)
    assert args.cuda_graphs == ["off", "on"] and args.work == Path("/x/a=b")
    assert args.more == ["router.force_balance=true", "optimizer.muon.lr=1"]


def test_overrides_are_no_numbers_either() -> None:
    """As in `muon_loss --lr 1e-4 3e-4 model.cuda_graphs=true`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, nargs="+")
    args = parse_with_overrides(parser, ["--lr", "1e-4", "3e-4", "model.cuda_graphs=true"])
    assert args.lr == [1e-4, 3e-4] and args.more == ["model.cuda_graphs=true"]


def test_no_processes_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(monkeypatch, "--gpus", "0")
    assert "--gpus must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--shape", "tiny", "tiny-qwen2.5-vl"), "tiny takes no videos here; shapes that do: qwen2.5-vl-7b, "),
        (("--shape", "tiny-onevision"), "tiny-onevision takes no videos here"),
        (("--shape", "tiny-qwen2.5-vl", "--peer", "hf"), "leave out --peer hf, whose data has images only"),
        (("--shape", "tiny-qwen3.5", "--seq-length", "512"), "--seq-length 598 or more"),
        (("--shape", "tiny-qwen3.5", "--videos", "1"), "at least 2 frames"),
    ],
)
def test_videos_that_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: Sequence[str], reason: str
) -> None:
    with pytest.raises(SystemExit):
        parsed(monkeypatch, "--videos", "16", *words)
    assert reason in capsys.readouterr().err


def test_videos_fit_in_half_a_pack() -> None:
    """An even number of frames of one size, each different, between half and twice as many as asked for."""
    videos = make_videos(4, 1200)
    sizes = [Image.open(io.BytesIO(video[0])).size for video in videos]
    assert len(set(sizes)) == 3 and {len(video) for video in videos} == {2, 4, 6}  # the cut ones had 8
    for size, video in zip(sizes, videos, strict=True):
        assert len(set(video)) == len(video) and len(video) // 2 * pair_tokens(*size) <= 600
        assert {Image.open(io.BytesIO(frame)).size for frame in video} == {size}


def test_one_of_three_conversations_has_a_video() -> None:
    """The others are as they were; with another length of packs, data has another name."""
    plain = [Sample("<image>\nWhat is this?", "x" * 3000, b"image") for _ in range(300)]
    blend = with_videos(plain, 2, 1200)
    changed = [new for old, new in zip(plain, blend, strict=True) if new is not old]
    assert 80 < len(changed) < 120 and len({new.video for new in changed}) > 10
    assert all(new.picture is None and new.video and len(new.answer) < 600 for new in changed)


@pytest.mark.parametrize("shape", ["tiny-qwen2.5-vl", "tiny-qwen3-vl-moe"])
def test_blend_of_videos_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shape: str) -> None:
    """By the shape's own folder, without a sample that is skipped."""
    words = ("--videos", "4", "--seq-length", "2048", "--samples", "16", "--images", "2", "--train-vision")
    args = parsed(monkeypatch, "--shape", shape, *words)
    data = train_step.made_data(args, shape, tmp_path)
    assert data.name == f"{shape}-16-2-images-4-frames-2048"
    make_hf_folder(tmp_path / "hf", shape, seq_length=2048)
    config = DataConfig(path=data, seq_length=2048, num_workers=0, packing=False)
    assets = load_assets(tmp_path / "hf")
    loader = TrainLoader(config, assets, micro_batch_size=1, dp_rank=0, dp_size=1, seed=0)
    batches = [next(loader) for _ in range(16)]
    loader.close()
    video = assets.plan.video_token_id
    with_video = sum(bool((batch.input_ids == video).any()) for batch in batches)
    assert with_video > 2 and not any(batch.skipped for batch in batches)


def run_main(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> list[tuple[list[str], list[str]]]:
    """Run train_step without its runs; return the command of each, and what is then in the folder."""
    seen: list[tuple[list[str], list[str]]] = []

    def fake(command: Sequence[str], result: Path) -> tuple[list[dict[str, Any]], str]:
        inner = next(x for x in folder.iterdir() if x.name.startswith("tmp"))
        seen.append((list(command), sorted(x.name for x in inner.iterdir())))
        if "import-hf" in command:
            Path(command[command.index("--megatron-dir") + 1]).mkdir()
        else:
            result.parent.mkdir(parents=True)
        return [STEP] * 2, ""

    monkeypatch.setattr(train_step, "run_command", fake)
    monkeypatch.setattr(train_step, "make_weights", lambda where: (where / "model.safetensors").touch())
    monkeypatch.setattr(train_step, "make_data", lambda where, *_, **__: where.mkdir())
    words = ("--gpus", "1", "--iters", "2", "--warm-up", "1", "--work", str(folder), *words)
    monkeypatch.setattr(sys, "argv", ["train_step", "--shape", "tiny", *words])
    train_step.main()
    return seen


def test_adapters_get_imported_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All layouts load them; a run's folder is gone when the next one starts, and everything is at the end."""
    seen = run_main(monkeypatch, tmp_path, "--lora-r", "8", "--fp8", "none", "delayed")
    (convert, _), (first, of_first), (second, of_second) = seen
    assert "import-hf" in convert
    for command in (first, second):
        assert "--init" not in command and command[command.index("--lora-r") + 1] == "8"
        assert Path(command[command.index("--megatron-load-dir") + 1]).name == "tiny-megatron"
    assert of_first == of_second == ["tiny", "tiny-4000", "tiny-megatron"]
    assert not list(tmp_path.iterdir())


def test_weights_go_with_their_last_row(tmp_path: Path) -> None:
    """Ours after the last of ours, the products' after the last product; another shape's stay."""
    for name in ("a-megatron", "a-products", "b-megatron"):
        (tmp_path / name).mkdir()
    ours, swift, hf = (Entry("a", what, 1, 1, 1, 16) for what in ("none", "swift", "hf"))
    train_step.remove_weights(tmp_path, "a", [ours, swift, hf])
    assert (tmp_path / "a-megatron").exists() and (tmp_path / "a-products").exists()
    train_step.remove_weights(tmp_path, "a", [swift, hf])
    assert not (tmp_path / "a-megatron").exists() and (tmp_path / "a-products").exists()
    train_step.remove_weights(tmp_path, "a", [hf, Entry("b", "swift", 1, 1, 1, 16)])
    assert [x.name for x in tmp_path.iterdir()] == ["b-megatron"]


def test_full_disk_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a run, and before one, where the rows after it still run."""
    program = f"print('start'); print('OSError: {runs.DISK_FULL}: x'); print('more'); raise SystemExit(1)"
    lines, error = runs.run_command([sys.executable, "-c", program], tmp_path / "none")
    assert (lines, error) == ([], f"the disk was full: OSError: {runs.DISK_FULL}: x")

    def full(where: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(train_step, "make_hf_folder", lambda where, *_, **__: full(where))
    assert run_main(monkeypatch, tmp_path, "--fp8", "none", "delayed") == []
    assert capsys.readouterr().out.count('"error": "the disk was full: ') == 2


@pytest.mark.parametrize("numbers", [(signal.SIGKILL,), (signal.SIGINT, signal.SIGINT)])
def test_work_folder_goes_with_its_process(tmp_path: Path, numbers: Sequence[signal.Signals]) -> None:
    """Killed, or interrupted twice as by `timeout`."""
    program = (
        "import pathlib, time\nfrom benchmarks.work_folder import work_folder\n"
        f"with work_folder(pathlib.Path({str(tmp_path)!r})) as folder:\n"
        "    (folder / 'weights').touch()\n    print(flush=True)\n    time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() and list(tmp_path.iterdir())
    for number in numbers:
        process.send_signal(number)
    process.communicate(timeout=60)
    end = time.monotonic() + 60
    while list(tmp_path.iterdir()) and time.monotonic() < end:
        time.sleep(0.05)
    assert not list(tmp_path.iterdir())
