"""A failure after the workers have started ends all of them, within a minute, with one clear message.

One such run is started as a user does. Ranks of the others are forked, and end by themselves: tests of torchrun, which
ends those that do not, are in test_operations.py.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from llava_mcore.checkpoint.checksums import of_file
from llava_mcore.convert.import_hf import import_hf
from tests.helpers.commands import read_metrics, run
from tests.helpers.exploits import Exploit, torch_saved
from tests.helpers.forked_training import train_forked
from tests.helpers.shards import jpeg, make_dataset
from tests.helpers.tiny_hf import make_hf_llava

SECONDS = 150


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("errors")
    make_hf_llava(root / "hf")
    import_hf(root / "hf", root / "megatron")
    make_dataset(root / "data")
    return root


def train(
    root: Path,
    *more: object,
    megatron: str = "megatron",
    hf: str = "hf",
    data: str = "data",
    fails: bool = True,
    as_typed: bool = False,
) -> str:
    """Train on two data-parallel ranks, expect failure unless told otherwise, and return what was printed."""
    start = time.monotonic()
    places = ("--megatron-load-dir", root / megatron, "--tokenizer-load-dir", root / hf, "--data-path", root / data)
    sizes = ("--train-iters", 12, "--micro-batch-size", 2, "--global-batch-size", 4, "--seq-length", 64)
    flags = ("-g", 2, *places, *sizes, "--save-dir", root / "save", "data.num_workers=1", *more)
    expect = 2 if fails else 0
    text = run("train/run.py", *flags, expect=expect) if as_typed else train_forked(*flags, expect=expect)
    assert time.monotonic() - start < SECONDS
    assert text.count("error: ") == (1 if fails else 0), text
    return text


@pytest.mark.long
def test_a_checkpoint_of_another_model(root: Path) -> None:
    """The message names the tensors that do not fit."""
    shutil.copytree(root / "megatron", root / "other")
    path = root / "other" / "iter_0000000" / "hf" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["intermediate_size"] = 192
    path.write_text(json.dumps(config))
    text = train(root, "--no-verify-checkpoint", megatron="other", as_typed=True)
    assert "is a checkpoint of another model" in text
    assert "mlp.linear_fc1.weight" in text and "mlp.linear_fc2.weight" in text


@pytest.mark.long
def test_a_damaged_checkpoint_is_passed_over_and_a_foreign_one_runs_nothing(root: Path) -> None:
    own = ("--name", "own", "--save-interval", 2, "--save-optim")
    assert "files match their checksums" in train(root, *own, "--train-iters", 4, fails=False)
    newest = root / "save" / "own" / "iter_0000004"
    place = newest / "loader" / "dp_00001.pt"
    whole = place.read_bytes()
    place.write_bytes(torch_saved({"x": Exploit(root / "proof")}))
    content = json.loads((newest / "run.json").read_text())
    content["files"]["loader/dp_00001.pt"] = place.stat().st_size
    content["checksums"]["files"]["loader/dp_00001.pt"] = of_file(place)
    (newest / "run.json").write_text(json.dumps(content))
    text = train(root, *own, "--load-optim", "--train-iters", 6)
    assert f"{place}: holds the Python object posix.mkdir, which could execute code" in text
    assert "weights_only" not in text and "Traceback" not in text and not (root / "proof").exists()
    place.write_bytes(whole[:-100] + b"x" + whole[-99:])
    content["files"]["loader/dp_00001.pt"] = place.stat().st_size
    (newest / "run.json").write_text(json.dumps(content))
    text = train(root, *own, "--load-optim", "--train-iters", 6, fails=False)
    assert f"{newest}: loader/dp_00001.pt is damaged" in text and "resumed at iteration 2" in text
    assert "the schedule has 24 samples instead of 16; to keep it, --lr-decay-style constant --lr" in text
    assert [line["iteration"] for line in read_metrics(root / "save" / "own")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.long
def test_a_folder_without_tokenizer(root: Path) -> None:
    """The message names the folder."""
    shutil.copytree(root / "hf", root / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (root / "bare" / name).unlink()
    text = train(root, hf="bare")
    assert str(root / "bare") in text and "tokenizer" in text


@pytest.mark.long
def test_pictures_that_fit_into_no_sample(root: Path) -> None:
    """Only one of the two ranks loads data; both end with its message."""
    text = train(root, "--name", "unfit", "--tp", 2, "--seq-length", 16, "data.max_media_tokens=3")
    assert "data.seq_length is 16, but an image alone has at least 16 tokens" in text
    assert "data.max_media_tokens is 3, but the smallest image has 16 patches" in text
    assert not (root / "save" / "unfit" / "metrics.jsonl").exists()


@pytest.mark.long
def test_broken_pictures_are_left_out_until_they_are_too_many(root: Path) -> None:
    """Two of 40 samples are broken. Each is named and counted; a rate that forbids them ends all ranks."""
    make_dataset(root / "broken", replace={i: {"jpg": jpeg(i)[:400]} for i in (17, 30)})
    text = train(root, "--max-skip-rate", 0.0, data="broken")
    assert "more than data.max_skip_rate = 0 (--max-skip-rate) allows" in text
    error = text[text.index("error: ") :]
    assert "sample000" in error and ".tar" in error and "the image cannot be decoded" in error
    text = train(root, "--packing", fails=False, data="broken")
    assert "skipped: " in text and "sample00017" in text and "000001.tar" in text
    metrics = read_metrics(root / "save" / "run")
    assert sum(m["num_skipped"] for m in metrics) >= 2 and all(m["loss"] > 0 for m in metrics)
    assert all(m["num_conversations"] > 4 for m in metrics), "packs of several samples"
