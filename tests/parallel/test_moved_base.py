"""The checkpoint that an adapter was trained on has moved: --base-dir of every command, run as a user does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image
from sklearn.datasets import load_sample_image

from llava_mcore.checkpoint.layout import TRACKER, hf_folder, latest_checkpoint
from llava_mcore.cli import check, evaluate, export_hf
from llava_mcore.convert.import_hf import import_hf
from tests.helpers.cases import make_inputs
from tests.helpers.generating import generate_here
from tests.helpers.peft_models import make_peft_folder, open_hf
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import run_world
from tests.parallel import adapter_checks


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, the run of an adapter on its import, which has moved afterwards, an image and a dataset."""
    root = tmp_path_factory.mktemp("moved")
    make_hf_llava(root / "hf")
    import_hf(root / "hf", root / "before")
    make_peft_folder(root / "hf", root / "adapter", r=3, lora_alpha=5, target_modules="all-linear")
    inputs = make_inputs(open_hf(root / "hf"))
    companions = str(hf_folder(latest_checkpoint(root / "before")[0]))
    given = {"checkpoint": str(root / "before"), "save_dir": str(root), "hf": companions, "inputs": inputs}
    run_world(1, adapter_checks.load_and_save, tp=1, pp=1, adapters={"run": str(root / "adapter")}, **given)
    (root / "before").rename(root / "moved")
    Image.fromarray(load_sample_image("china.jpg")).save(root / "china.jpg")
    make_dataset(root / "data", num_samples=8)
    return root


def test_answers(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` needs --base-dir for a run whose base was moved, and only for that."""
    ask, base = generate_here(capsys, monkeypatch), ("--base-dir", root / "moved")
    question = ("--question", "Which digit?", "--image", root / "china.jpg", "--max-new-tokens", 6)
    code, _, message = ask("--megatron-dir", root / "run", *question)
    assert code == 2 and "are no longer there; say where with --megatron-load-dir (training) or --base-dir" in message
    for layout in (), ("--tp", 2):
        code, adapted, message = ask("--megatron-dir", root / "run", *base, *question, *layout)
        assert code == 0, message
    code, whole, _ = ask("--megatron-dir", root / "moved", *question)
    assert code == 0 and whole != adapted
    code, _, message = ask("--megatron-dir", root / "moved", *base, *question)
    assert code == 2 and "holds a whole model: --base-dir has no effect" in message
    code, _, message = ask("--hf-dir", root / "hf", *base, *question)
    assert code == 2 and "--base-dir is for --megatron-dir" in message


def test_scores(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So does `evaluate`."""
    data = ["--data-path", str(root / "data"), "--split", "train", "--max-new-tokens", "4"]
    adapter, whole = (["--megatron-dir", str(root / name)] for name in ("run", "moved"))
    base, out = ["--base-dir", str(root / "moved")], tmp_path / "scores.json"
    assert evaluate.main([*adapter, *whole, *base, *data, "--json", str(out)]) == 0
    answers = [[x["answer"] for x in model["data"]["samples"]] for model in json.loads(out.read_text())["models"]]
    assert answers[0] != answers[1]
    capsys.readouterr()
    for flags, message in (
        ([*whole, *adapter, *data], "are no longer there"),
        ([*whole, *base, *data], "--base-dir has no effect: no checkpoint holds an adapter"),
        (["--hf-dir", str(root / "hf"), *base, *data], "--base-dir: only for --megatron-dir"),
    ):
        assert evaluate.main(flags) == 2
        assert message in capsys.readouterr().err


def test_merges(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So do export and check."""
    merged, picture = tmp_path / "merged", str(root / "china.jpg")
    run, base = ["--megatron-dir", str(root / "run")], ["--base-dir", str(root / "moved")]
    assert export_hf.main([*run, "--hf-dir", str(merged), "--merge"]) == 2
    assert "are no longer there" in capsys.readouterr().err and not merged.exists()
    assert export_hf.main([*run, "--hf-dir", str(merged), "--logits", picture]) == 2
    assert "so give --merge too" in capsys.readouterr().err and not merged.exists()
    assert export_hf.main([*run, "--hf-dir", str(merged), "--merge", *base, "--logits", picture]) == 0
    assert "computes the logits of" in capsys.readouterr().out
    assert check.main(["--hf-dir", str(merged), *run, *base, "--logits", picture]) == 0
    assert "computes the logits of" in capsys.readouterr().out
    assert check.main(run) == 0
    assert f"holds an adapter on {root / 'before'}" in capsys.readouterr().out
    for flags, message in (
        ([*base], "--base-dir is for --logits"),
        ([], "holds an adapter, not a model's weights: compare what it computes with --logits"),
        (["--logits", picture], "are no longer there"),
    ):
        assert check.main(["--hf-dir", str(merged), *run, *flags]) == 2
        assert message in capsys.readouterr().err


def test_one_iteration(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of one iteration, and one whose newest iteration holds other weights."""
    for base in (root / "moved" / "iter_0000000", trained_further(root, tmp_path)):
        merged = tmp_path / f"merged-{base.name}"
        flags = ["--megatron-dir", str(root / "run" / "iter_0000000"), "--merge", "--base-dir", str(base)]
        assert export_hf.main([*flags, "--hf-dir", str(merged)]) == 0, capsys.readouterr().err
    whole = ["--megatron-dir", str(root / "moved" / "iter_0000000")]
    assert check.main(["--hf-dir", str(root / "hf"), *whole]) == 0 and check.main(whole) == 0
    capsys.readouterr()
    assert export_hf.main(["--megatron-dir", str(root / "hf"), "--hf-dir", str(tmp_path / "x")]) == 2
    assert "it is a Hugging Face folder: import a model first" in capsys.readouterr().err
    for folder in (root / "moved", root / "moved" / "iter_0000000"):
        assert check.main(["--hf-dir", str(folder)]) == 2
        assert "holds Megatron checkpoints: give it as --megatron-dir" in capsys.readouterr().err


def trained_further(root: Path, tmp_path: Path) -> Path:
    """Return a folder of the base, and of a newer iteration with other weights."""
    folder = tmp_path / "further"
    shutil.copytree(root / "moved", folder)
    make_hf_llava(tmp_path / "other", seed=1)
    import_hf(tmp_path / "other", tmp_path / "imported")
    shutil.copytree(tmp_path / "imported" / "iter_0000000", folder / "iter_0000002")
    (folder / TRACKER).write_text("2\n")
    return folder
