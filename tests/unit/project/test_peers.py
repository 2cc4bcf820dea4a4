"""The Hugging Face peers of the benchmarks: what they compute is what transformers computes, and they train."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForImageTextToText, PretrainedConfig

from benchmarks import hf_peer
from benchmarks.material import make_audio_shards, make_shards
from benchmarks.peer_attention import Packs
from benchmarks.peer_classes import CLASSES, IMAGE_GRID
from benchmarks.peer_model import Inputs, Peer, Stack, build
from benchmarks.shapes import SHAPES, make_hf_folder, random_sizes
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.loader.train_loader import TrainLoader
from llava_mcore.media.batch_fields import NO_SCALE, PIXEL_SCALE, PIXEL_VALUES

CPU = torch.device("cpu")
LENGTH = 2048


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """A world of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny shapes, and shards of small images of many sizes."""
    path = tmp_path_factory.mktemp("peers")
    for shape in ("tiny", "tiny-onevision", "tiny-qwen2.5-vl"):
        make_hf_folder(path / shape, shape, seq_length=LENGTH)
    make_shards(path / "data", num_samples=48, num_shards=2, num_pictures=6, sizes=random_sizes(60, 380, 6))
    return path


def reference(config: PretrainedConfig, peer: Peer) -> Any:
    """transformers' model as it comes, with the peer's weights."""
    own = copy.deepcopy(config)  # which from_config changes
    model = AutoModelForImageTextToText.from_config(own, attn_implementation="sdpa", dtype=torch.float32)
    model.load_state_dict({name: x.full_tensor() for name, x in peer.model.state_dict().items()})
    return model


def unshifted(labels: Tensor, loss_mask: Tensor) -> Tensor:
    """Labels that name the token itself, as transformers takes them."""
    found = torch.full_like(labels, -100)
    found[:, 1:] = torch.where(loss_mask[:, :-1] > 0, labels[:, :-1], -100)
    return found


def own_samples_only(cu_seqlens: Tensor) -> Tensor:
    """A causal mask [1, 1, s, s] within samples."""
    number = torch.bucketize(torch.arange(int(cu_seqlens[-1])), cu_seqlens, right=True)
    return ((number[:, None] == number) & torch.ones(len(number), len(number), dtype=torch.bool).tril())[None, None]


@pytest.mark.parametrize("shape", ["tiny", "tiny-onevision"])
def test_loss_and_gradient_of_a_pack_are_those_of_a_mask(folder: Path, shape: str) -> None:
    """Attention by bounds, loss of trained tokens alone: the same as transformers' with a mask and all logits."""
    config = hf_peer.AutoConfig.from_pretrained(folder / shape)
    peer = build(config, Stack(train_vision=True), CPU)
    data = DataConfig(path=folder / "data", seq_length=LENGTH, num_workers=0, packing=True)
    assets = CLASSES[config.model_type].assets(load_assets(folder / shape))
    batch = next(TrainLoader(data, assets, micro_batch_size=1, dp_rank=0, dp_size=1, seed=0))
    inputs = hf_peer.to_hugging_face(config, batch, CPU)
    loss = peer(inputs)
    loss.backward()
    arguments = {name: x for name, x in inputs.text.items() if name != "packs"} | inputs.pictures
    model = reference(config, peer).train()
    mask = own_samples_only(batch.cu_seqlens)
    assert len(batch.sample_keys) > 1 and not mask[0, 0].equal(torch.ones_like(mask[0, 0]).tril())
    labels = unshifted(batch.labels, batch.loss_mask)
    expected = model(**arguments, attention_mask=mask, labels=labels).loss * len(inputs.rows)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for name, ours in peer.model.named_parameters():
        theirs = model.get_parameter(name).grad
        if theirs is None:
            assert ours.grad is None, name
        else:
            found = ours.grad.full_tensor()
            assert (found - theirs).norm() <= 1e-4 * theirs.norm() + 1e-6, name


def test_padded_clips_are_those_of_the_pack(folder: Path) -> None:
    """Out of our rows of packed clips the peer pads what transformers' model takes; one sample alone needs no mask."""
    path = folder / "tiny-qwen2-audio"
    make_hf_folder(path, path.name, seq_length=LENGTH)
    make_audio_shards(folder / "sounds", num_samples=8, num_shards=2, num_clips=4)
    config = hf_peer.AutoConfig.from_pretrained(path)
    peer = build(config, Stack(train_vision=True), CPU)
    data = DataConfig(path=folder / "sounds", seq_length=1024, num_workers=0, packing=False)
    batch = next(TrainLoader(data, load_assets(path), micro_batch_size=1, dp_rank=0, dp_size=1, seed=0))
    inputs = hf_peer.to_hugging_face(config, batch, CPU)
    assert inputs.pictures["input_features"].shape == (1, 128, 3000)
    model = CLASSES["qwen2_audio"].new(copy.deepcopy(config), attn_implementation="sdpa", dtype=torch.float32)
    model.load_state_dict({name: x.full_tensor() for name, x in peer.model.state_dict().items()})
    logits = model(input_ids=batch.input_ids, **inputs.pictures).logits[0]
    expected = torch.nn.functional.cross_entropy(logits[inputs.rows], inputs.targets, reduction="sum")
    text = {"input_ids": batch.input_ids} | packs_of(batch)
    packed = peer(Inputs(text, inputs.pictures, inputs.rows, inputs.targets))
    torch.testing.assert_close(packed, expected, rtol=1e-5, atol=0)


def packs_of(batch: Any) -> dict[str, Any]:
    """The only row as a pack of one sample."""
    length = batch.input_ids.shape[1]
    return {"position_ids": batch.position_ids, "packs": Packs(torch.tensor([0, length], dtype=torch.int32), length)}


def test_pack_of_qwens_pictures_is_as_its_samples(folder: Path) -> None:
    """Packed patches, windows and positions in three directions: the loss is that of the samples one by one."""
    config = hf_peer.AutoConfig.from_pretrained(folder / "tiny-qwen2.5-vl")
    peer = build(config, Stack(), CPU)
    model = reference(config, peer)
    draw = torch.Generator().manual_seed(0)
    ids, masks, positions, grids, patches, expected = [], [], [], [], [], torch.zeros(())
    for length, grid in ((60, (1, 18, 24)), (34, (1, 12, 6))):
        num_patches = grid[1] * grid[2]
        text = torch.randint(8, 200, (length,), generator=draw)
        row = torch.cat([text[:5], torch.full((num_patches // 4,), config.image_token_id), text[5:]])[None]
        mask = torch.zeros(row.shape)
        mask[:, -20:-1] = 1
        values = torch.randn(num_patches, 3 * 2 * 14 * 14, generator=draw)
        grid_thw, kinds = torch.tensor([grid]), (row == config.image_token_id).int()
        place, _ = model.model.get_rope_index(row, mm_token_type_ids=kinds, image_grid_thw=grid_thw)
        given = {"pixel_values": values, "image_grid_thw": grid_thw, "mm_token_type_ids": kinds}
        labels = unshifted(row.roll(-1, 1), mask)
        expected = expected + model(input_ids=row, **given, labels=labels).loss * mask.sum()
        for found, x in zip((ids, masks, positions, grids, patches), (row, mask, place, grid_thw, values), strict=True):
            found.append(x)
    row = torch.cat(ids, 1)
    batch: Any = SimpleNamespace(
        input_ids=row,
        labels=row.roll(-1, 1),
        loss_mask=torch.cat(masks, 1),
        position_ids=torch.cat(positions, 2),
        media={PIXEL_VALUES: torch.cat(patches), PIXEL_SCALE: NO_SCALE, IMAGE_GRID: torch.cat(grids)},
        cu_seqlens=torch.tensor([0, ids[0].shape[1], row.shape[1]], dtype=torch.int32),
    )
    found = peer(hf_peer.to_hugging_face(config, batch, CPU))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    found.backward()
    assert all(p.grad is not None for p in peer.model.model.language_model.parameters())


@pytest.mark.parametrize("shape", ["tiny", "tiny-onevision", "tiny-qwen2.5-vl"])
def test_text_alone_gives_every_weight_a_gradient(folder: Path, shape: str) -> None:
    """Ranks whose micro-batch has no image take part in the sums over ranks; the loss is that of the text."""
    config = hf_peer.AutoConfig.from_pretrained(folder / shape)
    peer = build(config, Stack(train_vision=True), CPU)
    ids = torch.randint(8, 200, (1, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(ids.shape)
    mask[:, 10:30] = 1
    position_ids = torch.arange(40).expand((3, 1, 40) if config.model_type == "qwen2_5_vl" else (1, 40))
    batch: Any = SimpleNamespace(
        input_ids=ids,
        labels=ids.roll(-1, 1),
        loss_mask=mask,
        position_ids=position_ids,
        media={PIXEL_VALUES: torch.empty(0)},
        cu_seqlens=torch.tensor([0, 40], dtype=torch.int32),
    )
    loss = peer(hf_peer.to_hugging_face(config, batch, CPU))
    loss.backward()
    expected = reference(config, peer)(input_ids=ids, labels=unshifted(ids.roll(-1, 1), mask)).loss * mask.sum()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    tower = peer.model.model.get_submodule(CLASSES[config.model_type].tower)
    used = [name for name, p in tower.named_parameters() if p.grad is not None]
    assert len(used) > 10


def trained(folder: Path, stack: Stack) -> list[dict[str, Any]]:
    """Two steps of two micro-batches."""
    size = 1 if stack.packed else 2
    args = argparse.Namespace(hf=folder / "tiny", data=folder / "data", lr=1e-3, iters=2, seq_length=1024)
    args.micro_batch_size, args.global_batch_size = size, 2 * size
    return hf_peer.train(args, stack, CPU)


def test_every_stack_trains_alike(folder: Path) -> None:
    first, second = trained(folder, Stack())
    assert first["num_tokens"] > 0.7 * 2 * 1024 and second["loss"] < first["loss"]
    everything = trained(folder, Stack(reshard="step", recompute=True, compiled=True))
    assert [x["loss"] for x in everything] == pytest.approx([first["loss"], second["loss"]], rel=1e-4)
    padded = trained(folder, Stack(packed=False))
    assert padded[0]["num_conversations"] == 4 and padded[1]["loss"] < padded[0]["loss"]


def test_float8_trains_about_as_bf16(folder: Path) -> None:
    pytest.importorskip("torchao")
    losses = [x["loss"] for x in trained(folder, Stack(fp8=True))]
    assert losses == pytest.approx([x["loss"] for x in trained(folder, Stack())], rel=1e-2)
    assert losses != [x["loss"] for x in trained(folder, Stack())]


def test_pictures_of_the_shapes() -> None:
    """Qwen's are drawn between 300 and 1600 px, and always the same."""
    sides = [side for size in SHAPES["qwen2.5-vl-7b"].sizes for side in size]
    assert min(sides) >= 300 and max(sides) <= 1600 and len(set(sides)) > 100
    assert random_sizes(300, 1600) == SHAPES["qwen2.5-vl-7b"].sizes
