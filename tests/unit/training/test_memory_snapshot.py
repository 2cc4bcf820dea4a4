"""A GPU's memory by category, from a snapshot in torch's form: an allocator that keeps its own books made it.
tests/gpu/test_memory_snapshot.py records real ones."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torch.cuda import _memory_viz

from llava_mcore.training.logs.memory_image import draw
from llava_mcore.training.logs.memory_timeline import (
    BEFORE,
    CATEGORIES,
    UNKNOWN,
    Owned,
    category_of,
    summary,
    timeline_of,
)
from llava_mcore.training.memory_snapshot import MAX_BLOCKS, bounded

MIB = 1 << 20
CALLS = {
    "language model": [
        ("/x/megatron/core/transformer/mlp.py", "forward"),
        ("/x/megatron/core/distributed/data_parallel_base.py", "forward"),  # the wrapper around the whole model
    ],
    "vision tower": [("/x/torch/nn/functional.py", "gelu"), ("/x/llava_mcore/models/vision/transformer.py", "forward")],
    "loss": [
        ("/x/llava_mcore/models/loss/linear_cross_entropy.py", "forward"),
        ("/x/megatron/core/models/gpt.py", "f"),
    ],
    "optimizer step": [("/x/megatron/core/optimizer/optimizer.py", "step")],
    "backward pass": [],
    "elsewhere": [("/x/somewhere.py", "f")],
}


def frames(calls: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"filename": filename, "line": 7, "name": name} for filename, name in calls]


class Allocator:
    """One segment of memory, whose blocks are given out in order; it writes down what torch's allocator does."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.blocks: list[dict[str, Any]] = []
        self.next, self.time = 0x7000, 10**15
        self.books: list[dict[str, int]] = []
        self.live: dict[int, str] = {}
        self.sums = dict.fromkeys(CATEGORIES, 0)
        self.is_recording = False

    def allocate(self, size: int, category: str, calls: list[tuple[str, str]] | None = None) -> int:
        address = self.next
        self.next += size
        self.blocks.append(
            {"address": address, "size": size, "requested_size": size, "state": "active_allocated", "frames": []}
        )
        self.live[address] = category
        self.sums[category] += size
        self._note("alloc", address, size, frames(calls or []))
        return address

    def free(self, address: int) -> None:
        block = next(block for block in reversed(self.blocks) if block["address"] == address)
        block["state"] = "inactive"
        self.sums[self.live.pop(address)] -= block["size"]
        if self.is_recording:
            self._event("free_requested", address, block["size"], [])
        self._note("free_completed", address, block["size"], [])

    def _event(self, action: str, address: int, size: int, made_by: list[dict[str, Any]]) -> None:
        self.time += 1000
        event = {"action": action, "addr": address, "size": size, "frames": made_by, "stream": 0, "time_us": self.time}
        self.events.append(event)

    def _note(self, action: str, address: int, size: int, made_by: list[dict[str, Any]]) -> None:
        if self.is_recording:
            self._event(action, address, size, made_by)
            self.books.append(dict(self.sums))

    def record(self) -> None:
        self.is_recording = True
        self.books.append(dict(self.sums))

    def snapshot(self) -> dict[str, Any]:
        active = sum(block["size"] for block in self.blocks if block["state"] != "inactive")
        segment = {
            **{"device": 0, "address": 0x7000, "total_size": self.next - 0x7000, "allocated_size": active},
            **{"active_size": active, "stream": 0, "segment_type": "large", "blocks": self.blocks, "frames": []},
        }
        return {"segments": [segment], "device_traces": [self.events], "allocator_settings": {}}


def iteration(seed: int = 0) -> tuple[Allocator, list[Owned]]:
    """Return the memory of an iteration: of owned tensors, older ones, activations that grow and shrink."""
    allocator, draws = Allocator(), random.Random(seed)
    sizes = {"weights": 200 * MIB, "gradients": 100 * MIB, "optimizer state": 300 * MIB}
    owned = [Owned(allocator.allocate(size, name), size, name) for name, size in sizes.items()]
    old = [allocator.allocate(draws.randrange(1, 20) * MIB, BEFORE) for _ in range(5)]
    allocator.record()
    activations = []
    for category in [*["vision tower"] * 20, *["language model"] * 60, *["loss"] * 3]:
        activations.append(allocator.allocate(draws.randrange(1, 12) * MIB, category, CALLS[category]))
        if draws.random() < 0.3:
            allocator.free(activations.pop(draws.randrange(len(activations))))
    allocator.free(old.pop())
    while activations:
        allocator.allocate(draws.randrange(1, 5) * MIB, "backward pass", CALLS["backward pass"])
        allocator.free(activations.pop())
    allocator.allocate(50 * MIB, "optimizer step", CALLS["optimizer step"])
    return allocator, owned


@pytest.mark.parametrize("seed", range(3))
def test_amounts_are_those_of_the_allocator(seed: int) -> None:
    allocator, owned = iteration(seed)
    timeline = timeline_of(allocator.snapshot(), owned)
    assert len(timeline.milliseconds) == len(allocator.books) > 150
    for index, expected in enumerate(allocator.books):
        assert timeline.at(index) == {name: size for name, size in expected.items() if size}
    totals = [sum(book.values()) for book in allocator.books]
    assert totals[timeline.peak] == max(totals)
    sizes = [block.size * count for block, count in timeline.largest]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 300 * MIB
    assert timeline.largest[0][0].category == "optimizer state"
    assert any(block.made_by == "mlp.py:7 forward" and count > 1 for block, count in timeline.largest)
    # The books are in torch's form: its own programs read them.
    assert "total_reserved" in _memory_viz.segsum(allocator.snapshot())
    assert f"{len(allocator.events)} entries" in _memory_viz.trace(allocator.snapshot())


def test_without_a_record_there_is_one_time() -> None:
    allocator, owned = iteration()
    timeline = timeline_of(allocator.snapshot() | {"device_traces": [[]]}, owned)
    assert timeline.milliseconds == [0.0]
    at_end, allocated = allocator.books[-1], sum(allocator.books[-1].values())
    parts = timeline.at(0)
    assert parts["weights"] == at_end["weights"] and sum(parts.values()) == allocated
    assert parts.keys() == {"weights", "gradients", "optimizer state", UNKNOWN}
    assert summary(timeline).startswith(f"optimizer state {300 / 1024:.2f} GiB, ")


def test_other_devices_and_long_traces() -> None:
    allocator, owned = iteration()
    snapshot = allocator.snapshot()
    snapshot["segments"].append(snapshot["segments"][0] | {"device": 1})
    assert timeline_of(snapshot, owned).reserved == allocator.next - 0x7000
    assert timeline_of(snapshot | {"device_traces": []}, owned, device=1).milliseconds == [0.0]
    peak = max(sum(book.values()) for book in allocator.books)
    for _ in range(2500):
        allocator.free(allocator.allocate(MIB, "elsewhere", CALLS["elsewhere"]))
    timeline = timeline_of(allocator.snapshot(), owned)
    assert len(timeline.milliseconds) == 3000
    assert sum(timeline.at(timeline.peak).values()) == peak, "thinning keeps the peak"


@pytest.mark.parametrize("category", CALLS)
def test_category_of_calls(category: str) -> None:
    assert category_of(frames(CALLS[category])) == category


def test_a_custom_backward_is_the_backward_pass() -> None:
    calls = [
        ("/x/megatron/core/transformer/mlp.py", "forward"),
        ("/x/megatron/core/tensor_parallel/random.py", "backward"),
    ]
    assert category_of(frames(calls)) == "backward pass"


def test_image(tmp_path: Path) -> None:
    allocator, owned = iteration()
    snapshot = allocator.snapshot()
    draw(timeline_of(snapshot, owned), tmp_path / "over_time.png", "my-run: rank 0, iteration 5")
    draw(timeline_of(snapshot | {"device_traces": [[]]}, owned), tmp_path / "once.png", "my-run: rank 0, out of memory")
    for name in ("over_time", "once"):
        with Image.open(tmp_path / f"{name}.png") as image:
            assert image.size == (1320, 880)
            colors = {color for count, color in image.convert("RGB").getcolors(10**6) or [] if count > 500}
        assert {(0x30, 0x50, 0x7A), (0x9D, 0xB8, 0xD6)} < colors, "weights and optimizer state"
        assert ((0xE0, 0xA0, 0x30) in colors) is (name == "over_time"), "the language model's activations"
        assert (tmp_path / f"{name}.png").stat().st_size < 300_000


def test_what_a_run_writes_by_itself_is_bounded() -> None:
    small = {"state": "inactive", "size": 1, "address": 0}
    segments = [{"allocated_size": size, "blocks": [small] * (MAX_BLOCKS // 2)} for size in (1, 3, 2)]
    kept = bounded({"segments": segments, "device_traces": [list(range(300_000))], "x": 1})
    assert [segment["allocated_size"] for segment in kept["segments"]] == [3, 2]
    assert len(kept["device_traces"][0]) == 200_000 and kept["device_traces"][0][-1] == 299_999 and kept["x"] == 1
