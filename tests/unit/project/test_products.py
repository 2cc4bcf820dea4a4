"""Products that run beside ours: they get the conversations of our shards, under ids that they have built in."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from transformers import AutoProcessor

from benchmarks import train_step
from benchmarks.material import make_shards
from benchmarks.peers import run, stubs
from benchmarks.peers.flash_interface import apply_rotary_emb, pad_input, unpad_input, write_package
from benchmarks.peers.prepare import make_lists, make_peer_folder
from benchmarks.peers.products import PRODUCTS
from benchmarks.peers.tokens import FIRST_SPECIAL, SPECIAL
from benchmarks.shapes import SHAPES
from benchmarks.train_step_rows import Entry

SHAPE = "tiny-qwen3-vl-moe"


def parsed(monkeypatch: pytest.MonkeyPatch, *words: str) -> train_step.argparse.Namespace:
    """The command line of train_step."""
    monkeypatch.setattr(sys, "argv", ["train_step", "--shape", SHAPE, *words])
    return train_step.parse()


def test_lists_are_the_shards(tmp_path: Path) -> None:
    """The same images and texts in the same order; the tokens of an image are as many as ours."""
    sizes = SHAPES[SHAPE].sizes
    make_lists(tmp_path / "lists", SHAPE, 12)
    make_shards(tmp_path / "shards", num_samples=12, num_shards=1, sizes=sizes)
    lines = [json.loads(line) for line in (tmp_path / "lists/swift.jsonl").read_text().splitlines()]
    others = [json.loads(line) for line in (tmp_path / "lists/lmms.jsonl").read_text().splitlines()]
    with tarfile.open(tmp_path / "shards/00000.tar") as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}  # type: ignore[union-attr]
    assert len(lines) == 12
    for number, (line, other) in enumerate(zip(lines, others, strict=True)):
        messages = json.loads(files[f"{number:08d}.json"])["messages"]
        image = files.get(f"{number:08d}.0.jpg")
        assert [Path(file).read_bytes() for file in line["images"]] == ([] if image is None else [image])
        assert line["messages"][1]["content"] == messages[1]["content"]
        assert other["messages"][1]["content"] == [{"type": "text", "text": messages[1]["content"]}]
        assert line["messages"][0]["content"].count("<image>") == messages[0]["content"].count("<image>")
    make_peer_folder(tmp_path / "hf", SHAPE, seq_length=512, layers=None, weights=False)
    processor = AutoProcessor.from_pretrained(tmp_path / "hf")
    ids = processor.tokenizer("".join(SPECIAL))["input_ids"]
    assert ids == list(range(FIRST_SPECIAL, FIRST_SPECIAL + len(SPECIAL)))


def test_settings_are_those_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sizes, moments, experts and what is trained follow our command line."""
    (tmp_path / "swift").mkdir()
    words = ("--peer", "swift", "--peer-packages", str(tmp_path), "--ep", "4", "--gpus", "4", "--layouts", "1,2")
    more = ("router.force_balance=true", "optimizer.exp_avg_dtype=bf16")
    args = parsed(monkeypatch, *words, "--micro-batch-size", "2", "--global-batch-size", "32", *more)
    entry = next(entry for entry in train_step.planned(args, SHAPE) if entry.what == "swift")
    assert (entry.tp, entry.pp, entry.micro_batch_size) == (1, 2, 2)
    flags = PRODUCTS["swift"].command(args, entry, "qwen3_vl_moe", tmp_path, tmp_path, False)[1:]
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    expected = {"--freeze_vit": "true", "--freeze_aligner": "false", "--exp_avg_dtype": "bf16"}
    expected |= {"--expert_model_parallel_size": "4", "--pipeline_model_parallel_size": "2", "--micro_batch_size": "2"}
    expected |= {"--megatron_extra_kwargs": '{"moe_router_force_load_balancing": true}', "--tuner_type": "full"}
    assert {name: given[name] for name in expected} == expected
    args.lora_r = 8
    flags = PRODUCTS["swift"].command(args, entry, "qwen3_vl_moe", tmp_path, tmp_path, True)[1:]
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert given["--tuner_type"] == "lora" and given["--lora_alpha"] == "16"
    assert given["--recompute_granularity"] == "full"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("swift",), "needs --peer-packages"),
        (("lmms", "--peer-packages", "."), "has no folder lmms"),
        (("hf", "--lora-r", "8"), "with swift alone"),
        (("swift", "--peer-packages", "PACKAGES", "--images", "3"), "one image a conversation"),
        (("lmms", "--peer-packages", "PACKAGES", "--train-vision"), "is qwen3_vl_moe"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    for name in PRODUCTS:
        (tmp_path / name).mkdir()
    with pytest.raises(SystemExit):
        parsed(monkeypatch, "--peer", *(word.replace("PACKAGES", str(tmp_path)) for word in words))
    assert message in capsys.readouterr().err


def test_stand_ins_are_in_every_process_and_are_not_used(tmp_path: Path) -> None:
    """A package that is missing can be imported, by children too; using it says that it is a stand-in."""
    product = PRODUCTS["swift"]
    environment = run.environment(tmp_path, product, tmp_path, 3)
    program = (
        "import modelscope.hub.api, importlib.metadata as m, importlib.util as u\n"
        "assert u.find_spec('flash_attn') and m.version('flash_attn')\n"
        "class Mine(modelscope.HubApi): pass\n"
        "Mine()\n"
        "modelscope.HubApi()\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert "modelscope.HubApi is a stand-in for a package that is not installed" in done.stderr
    assert stubs.FOR_CHILDREN in environment


def test_interface_of_flash_attention(tmp_path: Path) -> None:
    """Padding is undone, and rotation is that of complex numbers."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 3, generator=draw)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    tokens, indices, bounds, longest, _ = unpad_input(x, mask)
    assert tokens.shape == (8, 3) and bounds.tolist() == [0, 3, 8] and longest == 5
    torch.testing.assert_close(pad_input(tokens, indices, 2, 5), x * mask[..., None])
    angle = torch.rand(5, 4, generator=draw)
    heads = torch.randn(1, 5, 2, 8, generator=draw)
    found = apply_rotary_emb(heads, angle.cos(), angle.sin())
    expected = torch.complex(*heads.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)[:, None]
    torch.testing.assert_close(found, torch.cat((expected.real, expected.imag), -1))
    write_package(tmp_path)
    assert (tmp_path / "flash_attn" / "bert_padding.py").exists()


def test_row_of_a_product(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Our row has the ratio; the product's says what was changed, and has no MFU that nobody counted."""
    (tmp_path / "swift").mkdir()
    args = parsed(monkeypatch, "--peer", "swift", "--peer-packages", str(tmp_path), "--gpus", "1")
    step = {"seconds": 1.0, "tokens": 300, "samples": 3, "memory": 2.0, "fill": 0.9}
    ours = Entry(SHAPE, "none", 1, 1, 1, 16, steps=[step | {"tflops": 1.0, "mfu": 0.1, "waited": 0.0}], losses=[1.0])
    swift = Entry(SHAPE, "swift", 1, 1, 1, 16, steps=[step | {"tokens": 200}], losses=[1.0], stack="changed: x")
    assert train_step.row_of(args, ours, [ours, swift])["÷ swift"] == 1.5
    row = train_step.row_of(args, swift, [ours, swift])
    assert row["what"] == "Megatron-SWIFT" and row["stack"] == "changed: x" and "MFU %" not in row
