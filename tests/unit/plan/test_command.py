"""`plan` as a user calls it: `train` accepts its layouts, and its errors say what to do."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llava_mcore.cli import plan
from llava_mcore.config.flags import parse_command_line
from llava_mcore.config.rules.all_rules import check_run
from llava_mcore.plan.hardware.gpus import GPUS
from llava_mcore.plan.sizes.read_config import read_model

LLAVA_7B: dict[str, Any] = {
    "model_type": "llava",
    "text_config": {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096},
    "vision_config": {
        "model_type": "clip_vision_model",
        **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
        **{"image_size": 336, "patch_size": 14},
    },
}
PACKS = ("--packing", "--seq-length", "4096", "--global-batch-size", "128")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """LLaVA-1.5-7B's config.json as the hub has it: values that are defaults of Llama are missing."""
    (tmp_path / "llava").mkdir()
    (tmp_path / "llava" / "config.json").write_text(json.dumps(LLAVA_7B), encoding="utf-8")
    return tmp_path / "llava"


def test_the_best_command_is_one_that_run_accepts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--hf-dir", str(folder), "--gpus", "8", "--gpu", "h100", *PACKS]
    assert plan.main([*arguments, "--best"]) == 0
    line = capsys.readouterr().out
    command = shlex.split(line)
    assert command[:4] == ["python", "-m", "llava_mcore", "train"]
    assert plan.main([*arguments, "--save-dir", "runs"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "to run it, add --megatron-load-dir, --data-path"
    more = ["--save-dir", "runs", "--train-iters", "1"]
    run = parse_command_line([*command[4:], *more], "train").load()
    assert run.launch.num_gpus == 8
    assert check_run(run, read_model(folder).dims(), 8, device_available=True) == []


def test_every_layout_of_the_table_passes_the_rules_and_fits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--hf-dir", str(folder / "config.json"), "-g", "4", "--gpu", "h100", "--vary", "moments", *PACKS]
    assert plan.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    speeds = [x["tokens_per_second"] for x in found["fitting"]]
    assert speeds == pytest.approx(sorted(speeds, reverse=True), abs=1)
    dims = read_model(folder).dims()
    for layout in found["fitting"][::9]:
        assert layout["gib"] <= GPUS["h100"].usable
        assert sum(layout["layers"]) == 32
        changes = [f"{key}={'null' if x is None else str(x).lower()}" for key, x in layout["changes"].items()]
        typed = [*PACKS, "--save-dir", "runs", "--train-iters", "1", *changes]
        assert check_run(parse_command_line(typed, "train").load(), dims, 4, device_available=True) == []
    assert all(x["gib"] > GPUS["h100"].usable for x in found["too_large"])
    assert any("bf16" in str(x["changes"]) for x in found["fitting"])


def test_the_text_has_stages_reasons_and_assumptions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--hf-dir", str(folder), "--gpus", "8", "--gpu", "b200", *PACKS[:-1], "8"]) == 0
    text = capsys.readouterr().out
    for part in (
        "7.05 billion",
        "nothing was measured on b200",
        "assumed: conversations",
        "GiB of a GPU by stage",
        "ms of",
    ):
        assert part in text
    assert "an interleaved pipeline needs" in text
    assert plan.main(["--hf-dir", str(folder), "--gpus", "2", "--as-given", *PACKS, "--tp", "2"]) == 0
    assert "tp 2, pp 1, dp 1" in capsys.readouterr().out


@pytest.mark.parametrize("earlier", [False, True], ids=["now", "0.1.0"])
def test_data_comes_from_a_manifest(
    earlier: bool, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    histogram = {"bins": [[72, 50], [80, 50]], "number": 100, "total": 80_000, "largest": 1100}
    sides = {"bins": [[74, 200]], "number": 200, "total": 128_000, "largest": 640}
    names = ("pictures", "sounds", "sound_seconds") if earlier else ("images", "audios", "audio_seconds")
    totals = {"conversations": 100, "frames": 0} | dict(zip(names, (200, 0, 0), strict=True))
    totals |= {"tokens": histogram, "sides": sides}
    (data / "manifest.json").write_text(json.dumps({"totals": totals}), encoding="utf-8")
    arguments = [
        "--hf-dir",
        str(folder),
        "-g",
        "2",
        "--as-given",
        *PACKS,
        "--data-path",
        str(data),
        "--json",
        "--dist-optim",
    ]
    plan.main(arguments)
    with_data = json.loads(capsys.readouterr().out)
    assert "100 conversations, 2.00 images each" in with_data["assumptions"][2]
    plan.main([x for x in arguments if x not in ("--data-path", str(data))])
    assumed = json.loads(capsys.readouterr().out)
    tower = [x["fitting"][0]["stages"][0]["forward"]["tower"] for x in (with_data, assumed)]
    assert tower[0] > 1.3 * tower[1]  # two images in 1,168 tokens beside 0.9 in 762


def test_a_picture_and_two_layouts_side_by_side(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--hf-dir", str(folder), "-g", "4", *PACKS, "--dist-optim", "--pp", "2"]
    for name, start in (("step.png", b"\x89PNG"), ("step.svg", b"<?xml")):
        assert plan.main([*arguments, "--as-given", "--draw", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(start)
    assert "stage 1: 16 layers" in (tmp_path / "step.svg").read_text(encoding="utf-8")
    capsys.readouterr()
    other = "parallel.num_layers_per_virtual_pipeline_stage=4"
    assert plan.main([*arguments, "--compare", other]) == 0
    text = capsys.readouterr().out
    assert "4 chunks" in text
    (bubble,) = (line.split() for line in text.splitlines() if line.startswith("s of bubble"))
    assert float(bubble[-1]) < 0.7  # what remains is the tower, which makes one stage slower
    for wrong, message in (
        (["--compare", "pp"], "expected key=value"),
        (["--compare", "parallel.pipeline=2"], "no such key"),
        (["--compare", "training.micro_batch_size=3"], "train would refuse this"),
        (["--as-given", "--draw", "step.pdf"], "ends in .png or .svg"),
        (["--as-given", "--draw", str(tmp_path / "no" / "step.png")], "its folder does not exist"),
    ):
        assert plan.main([*arguments, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_a_flag_that_the_best_layout_changes_is_not_repeated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["--hf-dir", str(folder), "-g", "8", *PACKS, "--cuda-graphs", "--tp", "8", "--recompute", "full"]
    assert plan.main([*typed, "model.recompute_vision=full", "model.freeze_vision_model=false", "--best"]) == 0
    words = shlex.split(capsys.readouterr().out)
    run = parse_command_line([*words[4:], "--save-dir", "runs", "--train-iters", "1"], "train").load()
    assert run.model.recompute == "none"
    assert run.parallel.tensor_model_parallel_size < 8
    assert check_run(run, read_model(folder).dims(), 8, device_available=True) == []


def test_what_cannot_be_planned_says_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*arguments: str) -> str:
        assert plan.main(list(arguments)) == 2
        return capsys.readouterr().err

    model = ("--hf-dir", str(folder))
    assert "did you mean h200?" in fails(*model, "--gpus", "8", "--gpu", "h20")
    assert "a plan needs the number of GPUs" in fails(*model)
    assert "expected a whole number" in fails(*model, "--gpus", "many")
    assert "give its folder with --hf-dir" in fails("--gpus", "8")
    assert "no such folder" in fails(*model, "--gpus", "8", "--data-path", "/nowhere")
    assert "expected GiB above 0" in fails(*model, "--gpus", "8", "--gpu-memory", "0")
    assert "use a multiple of 3" in fails(*model, "--gpus", "3", *PACKS)
    assert "train would refuse this" in fails(*model, "--gpus", "3", *PACKS, "--as-given")
    small = fails(*model, "--gpus", "1", "--gpu", "l40s", *PACKS)
    assert "no layout fits" in small
    assert "the nearest" in small
    assert "LoRA (--vary adapter)" in small


def test_a_plan_imports_nothing_large() -> None:
    large = {"torch", "transformers", "megatron", "numpy"}
    code = f"import sys, llava_mcore.cli.plan; print(sorted({large} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
