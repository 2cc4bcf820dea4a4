"""Images are divided over ranks whole, by their sizes, and come back in their order."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.media.batch_fields import MEDIA_SEQLENS, PIXEL_VALUES, WINDOW_ORDER, WINDOW_SEQLENS, MediaWork
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.flops import TrainedParts, Workload, model_flops
from llava_mcore.models.vision.patches import PatchTransformer, windows_of
from llava_mcore.parallel.groups import single_process, tensor_parallel_group
from llava_mcore.parallel.items import Items, divide, gather_items, host_lengths
from tests.helpers.class_checks import batch_of, load_model
from tests.helpers.tiny_qwen import make_hf_qwen
from tests.unit.models.test_qwen import CONVERSATIONS


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 8))
def test_every_item_has_one_rank_and_no_rank_has_much_more(costs: list[int], num_ranks: int) -> None:
    parts = divide(costs, num_ranks)
    assert len(parts) == num_ranks and sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in parts)
    loads = [sum(costs[i] for i in part) for part in parts]
    least = max(sum(costs) / num_ranks, max(costs, default=0))
    assert max(loads) <= 2 * least and max(loads) - min(loads) <= max(costs, default=0)


def test_equal_items_are_divided_evenly() -> None:
    assert sorted(map(len, divide([1] * 10, 4))) == [2, 2, 3, 3]
    assert divide([5], 3) == [[0], [], []]
    assert sorted(divide([1, 1, 4, 1, 1], 2)) == [[0, 1, 3, 4], [2]], "the most expensive ones first"


def test_windows_of_pictures() -> None:
    """Windows are counted for each image."""
    assert windows_of([16, 4, 12], [8, 8, 4, 4, 4, 4]) == [2, 1, 3]
    assert windows_of([], []) == []


def test_fields_of_some_items() -> None:
    """Chosen items keep their rows, and fields that number places are numbered again."""
    rows = {"a": [2, 1, 3], "b": [1, 2, 2]}
    items = Items([2, 1, 3], [2, 1, 3], rows, numbering=frozenset({"b"}), lengths=[4, 9, 7])
    assert items.longest([0, 2]) == 7 and items.longest([]) == Items([2], [2], {}).longest([0]) == 0
    media = {"a": torch.arange(6), "b": torch.tensor([0, 2, 1, 4, 3]), "c": torch.zeros(2)}
    found = items.of(media, [0, 2])
    assert found["a"].tolist() == [0, 1, 3, 4, 5] and found["b"].tolist() == [0, 2, 1] and found["c"] is media["c"]


def test_rows_come_back_in_their_order() -> None:
    """In a group of one; tests/parallel/test_vision_parallel.py has several."""
    with single_process():
        own = torch.arange(12.0).view(6, 2).requires_grad_()
        found = gather_items(own, [2, 1, 3], [[0, 1, 2]], tensor_parallel_group())
        assert torch.equal(found, own)
        (found * torch.arange(6.0)[:, None]).sum().backward()
        assert torch.equal(own.grad, torch.arange(6.0)[:, None].expand(6, 2))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_costs_are_the_products_of_a_towers_layers(tmp_path: Path, name: str) -> None:
    """Those that training counts; in windows they grow less than with the square of an image's patches."""
    make_hf_qwen(tmp_path / "hf", name)
    hf = load_hf_config(tmp_path / "hf")
    with single_process() as groups:
        tower = load_model(groups, import_hf(tmp_path / "hf", tmp_path / "m")).vision_model
        assert isinstance(tower, PatchTransformer)
        window = tower.shape.window_patches
        for num_patches in (16, 64, 256):
            in_windows = num_patches * min(window, num_patches)
            work = MediaWork(0, num_patches, num_patches**2, in_windows, 1)
            counted = model_flops(hf, Workload(0, 0, work), TrainedParts())
            layers = counted.vision_layers.forward + counted.vision_attention.forward
            assert 2 * tower.products(num_patches) == layers, num_patches


def test_what_a_tower_computes_for_a_part_are_the_rows_of_the_whole(tmp_path: Path) -> None:
    """Windows, positions and lengths of each image and frame go with it."""
    make_hf_qwen(tmp_path / "hf", "qwen2_5_vl")
    checkpoint = import_hf(tmp_path / "hf", tmp_path / "m")
    media = batch_of(load_assets(tmp_path / "hf"), CONVERSATIONS, packed=True).media
    with single_process() as groups, torch.no_grad():
        tower = load_model(groups, checkpoint).vision_model
        assert isinstance(tower, PatchTransformer)
        items = tower.items(media, host_lengths(media))
        longest = items.longest(range(len(items.costs)))
        assert longest == media[MEDIA_SEQLENS].max()
        whole = tower(media[PIXEL_VALUES].float(), media, longest).split(list(items.num_features))
        for chosen in ([0, 2], [1], list(range(len(items.costs)))):
            part = items.of(media, chosen)
            assert len(part[MEDIA_SEQLENS]) == len(chosen)
            assert part[WINDOW_ORDER].sort().values.tolist() == list(range(len(part[WINDOW_ORDER])))
            assert part[WINDOW_SEQLENS].sum() == part[MEDIA_SEQLENS].sum()
            found = tower(part[PIXEL_VALUES].float(), part, items.longest(chosen))
            assert torch.allclose(found, torch.cat([whole[i] for i in chosen]), rtol=1e-5, atol=1e-5)
