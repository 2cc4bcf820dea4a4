"""Products that run beside ours: they get the conversations of our shards, under ids that they have built in."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from PIL import Image
from transformers import AutoProcessor

from benchmarks import train_step
from benchmarks.material import make_shards
from benchmarks.peers import meter, run, stubs
from benchmarks.peers.flash_interface import apply_rotary_emb, pad_input, unpad_input, write_package
from benchmarks.peers.prepare import make_lists, make_peer_folder
from benchmarks.peers.products import PRODUCTS
from benchmarks.peers.tokens import FIRST_SPECIAL, SPECIAL
from benchmarks.runs import parse_with_overrides
from benchmarks.shapes import SHAPES
from benchmarks.train_step_options import make_parser
from benchmarks.train_step_rows import Entry

SHAPE = "tiny-qwen3-vl-moe"
QWEN = "tiny-qwen2.5-vl"


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
    sharegpt = [json.loads(line) for line in (tmp_path / "lists/veomni.jsonl").read_text().splitlines()]
    assert [line["images"] for line in sharegpt] == [line["images"] for line in lines]
    make_peer_folder(tmp_path / "hf", SHAPE, seq_length=512, layers=None, weights=False)
    processor = AutoProcessor.from_pretrained(tmp_path / "hf")
    ids = processor.tokenizer("".join(SPECIAL))["input_ids"]
    assert ids == list(range(FIRST_SPECIAL, FIRST_SPECIAL + len(SPECIAL)))


def test_lengths_for_packing_are_those_of_the_processor(tmp_path: Path) -> None:
    """NeMo Automodel packs by text tokens and image sizes: together as long as what the processor makes of them."""
    make_lists(tmp_path, QWEN, 12)
    make_peer_folder(tmp_path / "hf", QWEN, seq_length=512, layers=None, weights=False)
    processor = AutoProcessor.from_pretrained(tmp_path / "hf")
    for line in (json.loads(line) for line in (tmp_path / "automodel.jsonl").read_text().splitlines()):
        images = [Image.open(file) for file in line["images"]] or [Image.new("RGB", (56, 56))]
        messages = [dict(message) for message in line["messages"]]
        parts = [{"type": "image"}, {"type": "text", "text": messages[0]["content"].removeprefix("<image>")}]
        text = processor.apply_chat_template([{"role": "user", "content": parts}, messages[1]])
        inputs = processor(text=[text], images=images, return_tensors="pt")
        sizes = line.get("mm_inputs_meta", {}).get("images_meta", [])
        assert sizes == [[image.height, image.width] for image in images if line["images"]]
        of_image = int(inputs["image_grid_thw"].prod()) // 4 if line["images"] else 0
        assert line["_text_tokens"] + of_image == inputs["input_ids"].shape[1]


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


def written(folder: Path, name: str, recompute: bool, *more: str) -> dict[str, Any]:
    """The YAML file that a product reads."""
    (folder / name).mkdir(exist_ok=True)
    args = parse_with_overrides(make_parser(), ["--shape", QWEN, "--peer", name, "--gpus", "2", *more])
    entry = Entry(QWEN, name, 1, 1, 2, 32)
    file = Path(PRODUCTS[name].command(args, entry, "qwen2_5_vl", folder, folder / name, recompute)[-1])
    found: dict[str, Any] = yaml.safe_load(file.read_text())
    return found


def test_yaml_files_are_those_of_ours(tmp_path: Path) -> None:
    """Sizes, learning rate, what is trained and how memory is saved follow our command line."""
    config = written(tmp_path, "automodel", False, "--seq-length", "2048", "--lr", "3e-5")
    assert config["step_scheduler"]["global_batch_size"] == 32 and config["step_scheduler"]["local_batch_size"] == 2
    assert config["packed_sequence"]["pack_size"] == 2048 and config["optimizer"]["lr"] == 3e-5
    assert config["freeze_config"]["freeze_vision_tower"] and not config["distributed"]["reshard_after_forward"]
    config = written(tmp_path, "automodel", True, "--train-vision")
    assert not config["freeze_config"]["freeze_vision_tower"] and config["distributed"]["activation_checkpointing"]
    config = written(tmp_path, "veomni", False, "--seq-length", "2048", "--lr", "3e-5", "--train-vision")
    train = config["train"]
    assert (train["micro_batch_size"], train["global_batch_size"], config["data"]["max_seq_len"]) == (2, 32, 2048)
    assert train["vit_lr"] == train["optimizer"]["lr"] == 3e-5 and not train["freeze_vit"]
    assert not train["gradient_checkpointing"]["enable"] and train["init_device"] == "meta"
    train = written(tmp_path, "veomni", True, "--train-vision")["train"]
    assert train["gradient_checkpointing"]["enable"] and train["accelerator"]["fsdp_config"]["reshard_after_forward"]
    config = written(tmp_path, "lmms", False, "--seq-length", "2048", "--lr", "3e-5", "--train-vision")
    assert config["dataset_config"]["packing_length"] == 2048 and config["trainer_args"]["learning_rate"] == 3e-5
    assert config["trainer_args"]["lr_scheduler_kwargs"] == {"start_factor": 1.0}


def test_one_gpu_has_no_fsdp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There nothing would cast fp32 weights for FlashAttention: the products' weights are in bf16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = written(tmp_path, "automodel", False, "--gpus", "1", "optimizer.exp_avg_dtype=bf16")
    assert config["model"]["torch_dtype"] == "bfloat16" and config["optimizer"]["master_weights"]
    assert config["optimizer"]["exp_avg_dtype"] == "torch.bfloat16"
    config = written(tmp_path, "automodel", False)
    assert config["model"]["torch_dtype"] == "float32" and config["optimizer"]["_target_"] == "torch.optim.AdamW"
    for gpus, mode, device in (("1", "ddp", "cuda"), ("2", "fsdp2", "meta")):
        train = written(tmp_path, "veomni", False, "--gpus", gpus)["train"]
        fsdp = train["accelerator"]["fsdp_config"]
        assert (fsdp["fsdp_mode"], train["init_device"]) == (mode, device)
        assert fsdp["mixed_precision"]["enable"] == (gpus != "1")


def test_meter_sums_a_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its lines have what was counted between two steps, in a world of one too."""
    monkeypatch.setenv(meter.OUT, str(tmp_path / "steps.jsonl"))
    monkeypatch.setenv(meter.STEPS, "3")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = meter.Meter({"name": "x"})
    for number in range(2):
        found.begin()
        found.count(torch.tensor(90 + number), 40, 3, 100)
        found.count(60, 20, 2, 100)
        found.end(2.5)
    dist.destroy_process_group()
    first, second = (json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines())
    assert (first["num_tokens"], first["num_trained"], first["num_conversations"], first["fill"]) == (150, 60, 5, 0.75)
    assert first["stack"] == {"name": "x"} and second["num_tokens"] == 151 and "stack" not in second


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("swift",), "needs --peer-packages"),
        (("lmms", "--peer-packages", "."), "has no folder lmms"),
        (("hf", "--lora-r", "8"), "with swift alone"),
        (("swift", "--peer-packages", "PACKAGES", "--images", "3"), "one image a conversation"),
        (("lmms", "--peer-packages", "PACKAGES", "--train-vision"), "is qwen3_vl_moe"),
        (("automodel", "--peer-packages", "PACKAGES", "--shape", QWEN, "--lora-r", "8"), "leave out --lora-r"),
        (("veomni", "--peer-packages", "PACKAGES", "--shape", QWEN), "add --train-vision"),
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
