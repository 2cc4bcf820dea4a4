"""examples/small-vlm in short: what is missing is said at once; all stages run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
TABLE = Path("/usr/share/unicode/emoji/emoji-test.txt")


def run(*flags: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / "small-vlm" / "run.py"), *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_what_is_missing_is_said_at_once(tmp_path: Path) -> None:
    done = run("--out", tmp_path / "out", "--font", tmp_path / "no.ttf", "--table", tmp_path / "no.txt")
    assert done.returncode == 1 and not (tmp_path / "out").exists()
    assert "apt-get install fonts-noto-color-emoji unicode-data" in done.stderr
    assert "no.ttf" in done.stderr and "no.txt" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.long
def test_all_stages_in_short(tmp_path: Path) -> None:
    """Everything is written, and that so short a run does not win is said."""
    if not FONT.is_file() or not TABLE.is_file():
        pytest.skip("apt-get install fonts-noto-color-emoji unicode-data")
    out = tmp_path / "out"
    done = run("--out", out, "--train-iters", 2, "--num-views", 1, "--num-held-out", 4)
    assert done.returncode == 1, (done.stdout + done.stderr)[-6000:]
    assert "not better than the baselines" in done.stderr
    results = json.loads((out / "results.json").read_text())
    assert set(results["loss"]) == {"stage1", "stage2", "text_only"}
    assert set(results["exact_match"]["after stage 2"]) == set(results["questions"])
    for name in ("loss.png", "predictions.png", "exports/stage2/model.safetensors"):
        assert (out / name).stat().st_size > 1000
    example = json.loads((out / "exam" / "questions.jsonl").read_text().splitlines()[0])
    assert (out / "exam" / example["image"]).is_file() and "<image>" not in example["question"]
