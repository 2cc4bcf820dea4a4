"""A GPU's memory over an iteration, by category, from torch's snapshot of its allocator; without torch.

The snapshot has the Python call stack of each allocation. Memory of the model and the optimizer is known by address.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OWNED = ("weights", "gradients", "optimizer state")
BEFORE = "other tensors, from before"
"""Memory that was allocated before recording began."""
UNKNOWN = "activations and other tensors"
"""All but the owned tensors, without a record."""
CATEGORIES = (
    *OWNED,
    BEFORE,
    UNKNOWN,
    "batch",
    "vision tower",
    "language model",
    "loss",
    "backward pass",
    "communication",
    "optimizer step",
    "elsewhere",
)
"""From bottom to top in the image."""
_PLACES = (
    ("optimizer step", ("/megatron/core/optimizer/", "/training/optimization/", "/torch/optim/")),
    ("batch", ("/llava_mcore/parallel/share", "/llava_mcore/parallel/batch", "/llava_mcore/training/fetch")),
    ("loss", ("/llava_mcore/models/loss/", "/llava_mcore/training/loss_terms", "cross_entropy")),
    ("communication", ("/param_and_grad_buffer.py", "/finalize_model_grads.py", "p2p_communication")),
    ("vision tower", ("/models/vision/", "/models/audio/", "/models/connectors/")),
    ("language model", ("/llava_mcore/models/", "/megatron/core/models/", "/megatron/core/transformer/")),
)
"""Categories by the files of the calls, from the outermost decision on: the first that matches any call."""
_MAX_POINTS = 3000
_NUM_LARGEST = 12
GIB = 1 << 30


@dataclass(frozen=True)
class Owned:
    """Memory of a persistent tensor: its address, its bytes and one of OWNED."""

    address: int
    size: int
    category: str


@dataclass(frozen=True)
class Allocation:
    """An allocation: its bytes, its category, and the call that made it ("" if not recorded)."""

    size: int
    category: str
    made_by: str


@dataclass
class Timeline:
    """Bytes by category at some times.

    Attributes:
        milliseconds: since the first event.
        amounts: category -> bytes at each time.
        reserved: bytes that torch holds of the GPU at the end.
        largest: the blocks at the time of the peak, equal ones together with their number: those of most bytes.
    """

    milliseconds: list[float] = field(default_factory=list)
    amounts: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in CATEGORIES})
    reserved: int = 0
    largest: list[tuple[Allocation, int]] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """Index of the time at which most is allocated."""
        totals = [sum(values) for values in zip(*self.amounts.values(), strict=True)]
        return totals.index(max(totals))

    def at(self, index: int) -> dict[str, int]:
        """Return the bytes of every category at a time, without empty ones."""
        return {name: values[index] for name, values in self.amounts.items() if values[index]}


def timeline_of(snapshot: Mapping[str, Any], owned: Sequence[Owned], device: int = 0) -> Timeline:
    """Return the memory over time that a snapshot of torch.cuda.memory has recorded; one time without a record."""
    blocks = _LiveMemory(owned)
    traces = snapshot["device_traces"]
    events = [event for event in (traces[device] if device < len(traces) else []) if event["action"] in _CHANGES]
    # Go backwards from the end to find the memory that was allocated at the beginning.
    live = dict(_live_blocks(snapshot, device))
    for event in reversed(events):
        if event["action"] == "alloc":
            live.pop(event["addr"], None)
        else:
            live[event["addr"]] = event["size"]
    blocks.begin(live, BEFORE if events else UNKNOWN)
    timeline = Timeline(reserved=sum(segment["total_size"] for segment in _segments(snapshot, device)))
    begin = events[0]["time_us"] if events else 0
    blocks.record(timeline, 0.0)
    for event in events:
        blocks.apply(event)
        blocks.record(timeline, (event["time_us"] - begin) / 1000)
    timeline.largest = blocks.largest_at_peak
    return _thinned(timeline)


_CHANGES = ("alloc", "free_completed")


class _LiveMemory:
    """Live blocks by address, and the sum of every category."""

    def __init__(self, owned: Sequence[Owned]) -> None:
        self._owned = sorted(owned, key=lambda part: part.address)
        self._live: dict[int, Allocation] = {}
        self._sums = dict.fromkeys(CATEGORIES, 0)
        self._peak = -1
        self.largest_at_peak: list[tuple[Allocation, int]] = []

    def begin(self, live: Mapping[int, int], category: str) -> None:
        """Take over the blocks that were there before anything was recorded: address -> bytes."""
        for address, size in live.items():
            self._add(address, size, category, "")

    def apply(self, event: Mapping[str, Any]) -> None:
        """Follow an allocation, or the end of one."""
        if event["action"] == "alloc":
            frames = event.get("frames", [])
            self._add(event["addr"], event["size"], category_of(frames), _innermost(frames))
        elif event["addr"] in self._live:
            block = self._live.pop(event["addr"])
            self._sums[block.category] -= block.size

    def _add(self, address: int, size: int, category: str, made_by: str) -> None:
        """Add a block; memory with a known owner belongs to its category, whichever call allocated it."""
        pieces = self._owners(address, size)
        if pieces:
            category = max(pieces, key=lambda name: pieces[name])
        self._live[address] = Allocation(size, category, made_by)
        self._sums[category] += size

    def _owners(self, address: int, size: int) -> dict[str, int]:
        """Return the owned bytes of a block by category."""
        pieces: dict[str, int] = {}
        index = bisect_left(self._owned, address, key=lambda part: part.address)
        while index < len(self._owned) and self._owned[index].address < address + size:
            part = self._owned[index]
            pieces[part.category] = pieces.get(part.category, 0) + part.size
            index += 1
        return pieces

    def record(self, timeline: Timeline, milliseconds: float) -> None:
        """Add the present sums to a timeline, and remember the blocks if these are the most so far."""
        timeline.milliseconds.append(milliseconds)
        for name, value in self._sums.items():
            timeline.amounts[name].append(value)
        total = sum(self._sums.values())
        # Sorting at every new maximum would be slow, so the blocks may be those of a time one percent below the peak.
        if total > self._peak * 1.01:
            self._peak = total
            equal = Counter(self._live.values()).items()
            self.largest_at_peak = sorted(equal, key=lambda part: -part[0].size * part[1])[:_NUM_LARGEST]


def category_of(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the category of an allocation by the calls that made it, innermost first.

    The backward pass runs in a thread of C++, without calls in Python but those of functions with their own backward.
    """
    if not frames or any(frame["name"] == "backward" for frame in frames):
        return "backward pass"
    for category, places in _PLACES:
        if any(place in frame["filename"] for frame in frames for place in places):
            return category
    return "elsewhere"


def _innermost(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the innermost call outside torch, as file:line name."""
    for frame in frames:
        if "/torch/" not in frame["filename"]:
            return f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"
    return ""


def _segments(snapshot: Mapping[str, Any], device: int) -> list[Mapping[str, Any]]:
    """Return a device's segments: the memory that torch has reserved from CUDA."""
    return [segment for segment in snapshot["segments"] if segment["device"] == device]


def _live_blocks(snapshot: Mapping[str, Any], device: int) -> list[tuple[int, int]]:
    """Return address and size of what is allocated when a snapshot is taken."""
    blocks = []
    for segment in _segments(snapshot, device):
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                blocks.append((address, block["size"]))
            address += block["size"]
    return blocks


def _thinned(timeline: Timeline) -> Timeline:
    """Return at most some thousand points, of each stretch the one with the most memory."""
    count = len(timeline.milliseconds)
    if count <= _MAX_POINTS:
        return timeline
    totals = [sum(values) for values in zip(*timeline.amounts.values(), strict=True)]
    bounds = [count * index // _MAX_POINTS for index in range(_MAX_POINTS + 1)]
    indices = [max(range(start, stop), key=totals.__getitem__) for start, stop in itertools.pairwise(bounds)]
    amounts = {name: [values[index] for index in indices] for name, values in timeline.amounts.items()}
    return Timeline([timeline.milliseconds[index] for index in indices], amounts, timeline.reserved, timeline.largest)


def summary(timeline: Timeline) -> str:
    """Return the peak by category as one line, such as "weights 12.1 GiB, gradients 6.0 GiB"."""
    parts = sorted(timeline.at(timeline.peak).items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in parts)
