"""A saved position in the data: the settings that it belongs to, and where the streams were.

It is plain containers of numbers and strings, so checkpoints need no pickles, and has no sample data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llava_mcore.config.load import RENAMED_KEYS
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.storage.dataset_path import fingerprint, nested_fingerprint
from llava_mcore.errors import DataError

FORMAT = 5
EARLIER_FORMATS = (1, 2, 3, 4)
"""Positions in an order of samples that no longer exists."""

MICRO_BATCH = "training.micro_batch_size"
NUM_STREAMS = "data.num_streams"
PROCESSORS = "processors"


def settings_to_resume_with(
    data: DataConfig, assets: Assets, path: Path | str, seed: int, micro_batch_size: int
) -> dict[str, Any]:
    """Return the settings that determine samples, their order and which of them are dropped, by their names in
    messages.

    Settings without effect are left out. So is the sequence length of samples that are not packed: it may change, as
    docs/data.md says.
    """
    # These settings decide something only where samples are packed.
    packing = {"data.packing_buffer_size": data.packing_buffer_size, "data.seq_length": data.seq_length}
    return {
        PROCESSORS: assets.images.settings(),
        NUM_STREAMS: data.num_streams,
        "data.shuffle_buffer_size": data.shuffle_buffer_size,
        "data.blend_weights": data.blend_weights,
        "data.packing": data.packing,
        **(packing if data.packing else {}),
        "data.max_media_tokens": data.max_media_tokens,
        "data.on_too_long": data.on_too_long,
        "data.max_sample_bytes": data.max_sample_bytes,
        "data.max_text_chars": data.max_text_chars,
        "data.max_image_pixels": data.max_image_pixels,
        "data.max_frames": data.max_frames,
        MICRO_BATCH: micro_batch_size,
        "training.seed": seed,
        "data.lang": assets.lang,
        "data.special_tokens_in_text": data.special_tokens_in_text,
        "data.min_pixels": assets.pixels.smallest,
        "data.max_pixels": assets.pixels.largest,
        "data.video_min_pixels": assets.video_pixels.smallest,
        "data.video_max_pixels": assets.video_pixels.largest,
        "megatron-energon": version("megatron-energon"),
        "data (made by energon prepare)": fingerprint(path),
        "data (blends in the blend; split_config and dataset_config)": nested_fingerprint(path),
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the differences in settings that prevent a saved position from being used.

    Only settings in both are compared: one that is missing has no effect there, or an older version did not record it.
    A position is counted in micro-batches; it can be converted to smaller ones that divide them.
    """
    names = [name for name in before if name in now and name not in (MICRO_BATCH, PROCESSORS)]
    mismatches = [
        f"{name}: saved with {_said(before[name])}, now {_said(now[name])}"
        for name in names
        if before[name] != now[name]
    ]
    if PROCESSORS in before:
        saved, current = before[PROCESSORS], now[PROCESSORS]
        mismatches += [
            f"{name}: saved with {saved.get(name, 'none')}, now {current.get(name, 'none')}"
            for name in sorted(saved.keys() | current.keys())
            if saved.get(name) != current.get(name)
        ]
    size = before.get(MICRO_BATCH, now[MICRO_BATCH])
    if size % now[MICRO_BATCH]:
        fitting = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        mismatches.append(f"{MICRO_BATCH}: saved with {size}, now {now[MICRO_BATCH]}; it may become {fitting}")
    return mismatches


def _said(value: Any) -> Any:
    return "none" if value is None else value


@dataclass(frozen=True)
class SavedStreams:
    """Where the streams of a saved run are."""

    positions: dict[int, dict[str, Any]]
    num_batches: dict[int, int]
    """Batches that each stream has returned to all ranks."""

    @classmethod
    def of(cls, states: Sequence[dict[str, Any]]) -> SavedStreams:
        """Return what the states of several ranks say together. Of a shared stream, the latest position counts."""
        positions: dict[int, dict[str, Any]] = {}
        num_batches: dict[int, int] = {}
        for state in states:
            for index, count in state["num_batches"].items():
                num_batches[index] = max(count, num_batches.get(index, 0))
            for index, position in state["streams"].items():
                before = positions.get(index)
                if position is not None and (before is None or position["num_batches"] > before["num_batches"]):
                    positions[index] = position
        return cls(positions, num_batches)

    def scaled(self, times: int) -> SavedStreams:
        """Return the same for micro-batches that are smaller by a factor of `times`."""
        positions = {n: x | {"num_batches": x["num_batches"] * times} for n, x in self.positions.items()}
        return SavedStreams(positions, {n: count * times for n, count in self.num_batches.items()})


def settings_of(saved: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings of a saved position. DataError if this version cannot read it."""
    version = saved[0].get("format") if saved and isinstance(saved[0], dict) else None
    if version in EARLIER_FORMATS:
        raise DataError(
            f"the position in the data was saved by an earlier version (format {version}), which read the samples in "
            "another order, so this run cannot continue in it. Start a run with another --name from its weights "
            "(--megatron-load-dir), or continue with the version that it was started with"
        )
    if version != FORMAT:
        raise DataError(f"this is not a position in the data that this version can read (expected format {FORMAT})")
    return {RENAMED_KEYS.get(name, name): value for name, value in saved[0]["settings"].items()}
