"""The README's commands, run as they stand (on small folders), and the quickstart in short."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import ROOT, read_metrics
from tests.helpers.shards import write_shards
from tests.helpers.tiny_hf import CHAT_TEMPLATE, make_tokenizer, text_config, vision_config

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


@pytest.mark.long
def test_readme_commands(tmp_path: Path) -> None:
    make_sources(tmp_path)
    two_commands, *steps = shell_blocks(README)
    assert two_commands.split("\n")[:2] == ["make quickstart", "make test"]  # the second runs this very test
    assert len(steps) == 4
    places = {"TEXT_MODEL": "text", "VISION_MODEL": "vision", "SHARDS": "shards", "WORK": "work"}
    for name in places:
        assert f"{name}=" in README, "the README tells the reader to set it"
    env = os.environ | {name: str(tmp_path / folder) for name, folder in places.items()}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(steps)],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "bit for bit" in done.stdout
    for stage in ("stage1", "stage2"):
        assert len(read_metrics(tmp_path / "work" / "runs" / stage)) == 2


@pytest.mark.long
def test_quickstart_in_short(tmp_path: Path) -> None:
    """All stages with a few iterations: everything is written, and the missed goal is said."""
    out = tmp_path / "quickstart"
    flags = ["--out", str(out), "--train-iters", "3", "--num-samples", "300"]
    command = [sys.executable, str(ROOT / "examples" / "quickstart" / "run.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1, (done.stdout + done.stderr)[-6000:]
    assert "below 95%" in done.stderr
    results = json.loads((out / "results.json").read_text())
    assert results["loss"]["first"] > 0 and "which digit" in results["exact_match"]
    for name in ("loss.png", "predictions.png", "export/model.safetensors"):
        assert (out / name).stat().st_size > 1000
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").touch()
    flags = ["--out", str(tmp_path / "foreign")]
    refused = subprocess.run([*command[:2], *flags], capture_output=True, text=True, cwd=ROOT, check=False)
    assert refused.returncode == 1 and "choose another folder" in refused.stderr
