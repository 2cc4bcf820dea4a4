"""The commands of README.md and of docs/build.md on small folders, and the quickstart in short."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import ROOT, read_metrics
from tests.helpers.shards import jpeg, write_shards
from tests.helpers.tiny_hf import CHAT_TEMPLATE, make_hf_llava, make_tokenizer, text_config, vision_config
from tests.helpers.warm_python import warm_python

README = (ROOT / "README.md").read_text(encoding="utf-8")


def shell_blocks(text: str) -> list[str]:
    """Return the commands of every ```shell block."""
    return re.findall(r"```shell\n(.*?)```", text, flags=re.DOTALL)


def make_sources(root: Path) -> None:
    """Write a text model, a vision model and shards, as a user would have them."""
    from transformers import CLIPImageProcessor, CLIPVisionModel, LlamaForCausalLM

    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(root / "text")
    LlamaForCausalLM(text_config("llama", max_position_embeddings=1024)).save_pretrained(root / "text")
    config = vision_config("clip")
    CLIPVisionModel(config).save_pretrained(root / "vision")
    size = {"height": config.image_size, "width": config.image_size}
    CLIPImageProcessor(size={"shortest_edge": config.image_size}, crop_size=size).save_pretrained(root / "vision")
    write_shards(root / "shards")


def run_commands(blocks: list[str], folder: Path, *, python: str = sys.executable, **variables: str) -> str:
    """Run blocks of commands in a folder with this Python; return what they print."""
    env = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    env["PATH"] = f"{Path(python).parent}:{Path(sys.executable).parent}:{env['PATH']}"
    commands = ["bash", "-euo", "pipefail", "-c", "\n".join(blocks)]
    done = subprocess.run(commands, env=env, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


@pytest.mark.long
def test_readme_commands(tmp_path: Path) -> None:
    """From a Hugging Face folder to an answer, with fewer and smaller steps."""
    (block,) = shell_blocks(README)
    for written, short in (
        ("--train-iters 1000", "--train-iters 2"),
        ("--global-batch-size 16", "--global-batch-size 2"),
    ):
        assert block.count(written) == 1
        block = block.replace(written, short)
    make_hf_llava(tmp_path / "llava", text_overrides={"max_position_embeddings": 4096})
    (tmp_path / "images").mkdir()
    turns = [{"from": "human", "value": "<image>\nWhat is this?"}, {"from": "gpt", "value": "An image of noise."}]
    rows = [{"id": str(i), "image": f"{i}.jpg", "conversations": turns} for i in range(12)]
    for i in range(12):
        (tmp_path / "images" / f"{i}.jpg").write_bytes(jpeg(i))
    (tmp_path / "photo.jpg").write_bytes(jpeg(3))
    (tmp_path / "conversations.json").write_text(json.dumps(rows))
    run_commands([block], tmp_path)
    assert len(read_metrics(tmp_path / "runs" / "my-run")) == 2
    assert (tmp_path / "trained" / "model.safetensors").is_file()


@pytest.mark.long
def test_another_trainers_configuration_runs_as_it_is(tmp_path: Path) -> None:
    """docs/hf_configs.md: one epoch, two samples at a time."""
    page = (ROOT / "docs" / "hf_configs.md").read_text(encoding="utf-8")
    with warm_python() as python:
        run_commands(shell_blocks(page), tmp_path, python=str(python))
    metrics = read_metrics(tmp_path / "output" / "test_run")
    assert sum(line["num_conversations"] for line in metrics) >= 24
    assert max(line["lr"] for line in metrics) == pytest.approx(5e-5) and metrics[-1]["loss"] < 8
    assert (tmp_path / "output" / "test_run" / "wandb").is_dir()
    assert (tmp_path / "trained" / "model.safetensors").is_file()


@pytest.mark.long
def test_a_tiny_model_goes_all_the_way(tmp_path: Path) -> None:
    """The steps in docs/quickstart.md as they are: at the end the model knows the color."""
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    page = page.split("## Every step, with a tiny model")[1].split("\n## ")[0]
    with warm_python() as python:
        printed = run_commands(shell_blocks(page), tmp_path, python=str(python))
    assert "It is green." in printed.splitlines()
    losses = [m["loss"] for m in read_metrics(tmp_path / "runs" / "colors")]
    assert len(losses) == 63 and losses[0] > 5 and losses[-1] < 1
    assert "63 iterations" in printed and "as a Hugging Face folder: python -m llava_mcore export-hf" in printed


@pytest.mark.long
def test_commands_from_parts_to_a_trained_model(tmp_path: Path) -> None:
    """docs/build.md: a language model and a vision tower become a LLaVA that is trained in two stages."""
    make_sources(tmp_path)
    page = (ROOT / "docs" / "build.md").read_text(encoding="utf-8")
    section = page.split("## From parts to a trained model")[1].split("\n## ")[0]
    steps = shell_blocks(section)
    assert len(steps) == 4
    places = {"TEXT_MODEL": "text", "VISION_MODEL": "vision", "SHARDS": "shards", "WORK": "work"}
    for name in places:
        assert f"{name}=" in section, "the page tells the reader to set it"
    variables = {name: str(tmp_path / folder) for name, folder in places.items()}
    with warm_python() as python:
        printed = run_commands(steps, tmp_path, python=str(python), **variables)
    assert "bit for bit" in printed
    for stage in ("stage1", "stage2"):
        assert len(read_metrics(tmp_path / "work" / "runs" / stage)) == 2


@pytest.mark.long
def test_quickstart_in_short(tmp_path: Path) -> None:
    """All stages with a few iterations: everything is written, and the missed goal is said."""
    out = tmp_path / "quickstart"
    flags = ["--out", str(out), "--train-iters", "3", "--num-samples", "300"]
    with warm_python() as python:
        command = [str(python), str(ROOT / "examples" / "quickstart" / "run.py"), *flags]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1, (done.stdout + done.stderr)[-6000:]
    assert "below 95%" in done.stderr
    results = json.loads((out / "results.json").read_text())
    assert results["loss"]["first"] > 0 and "which digit" in results["exact_match"]
    for name in ("loss.png", "predictions.png", "export/model.safetensors"):
        assert (out / name).stat().st_size > 1000
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").touch()
    again = [sys.executable, command[1], "--out", str(tmp_path / "foreign")]
    refused = subprocess.run(again, capture_output=True, text=True, cwd=ROOT, check=False)
    assert refused.returncode == 1 and "choose another folder" in refused.stderr
