"""The report of a data check: what was checked, what was found, and whether to train."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from llava_mcore.check_data.tally import Tally, bins, expected_fill, fitting, quantile
from llava_mcore.errors import counted

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
OF_PATCHES = ("p50", "p99", "max")
NUM_BINS = 10


@dataclass(frozen=True)
class DataReport:
    """The results of checking a data path."""

    data_path: str
    tokenizer_dir: str
    seq_length: int
    max_media_tokens: int | None
    unit: str
    """The unit of `max_media_tokens` (`MediaPlan.unit`)."""
    packing_buffer_size: int
    sample_multiple: int
    """Multiple that the lengths of packed samples are rounded up to."""
    max_skip_rate: float
    full: bool
    """Whether every sample was checked."""
    seconds: float
    """Seconds for checking the samples."""
    stop: tuple[str, ...]
    """Problems other than samples that would end training."""
    remarks: tuple[str, ...]
    tally: Tally
    own_text_warning: str | None = None
    """`ChatText.own_text_warning`"""
    has_pairs: bool = False
    """Samples are preference pairs: nothing trains on them, however good they are."""

    @property
    def skip_rate(self) -> float:
        """Fraction of the checked conversations that training would skip."""
        return self.tally.num_left_out / max(1, self.tally.num_seen)

    @property
    def reasons_not_to_train(self) -> list[str]:
        """Return short reasons; empty if there are none."""
        tally, reasons = self.tally, []
        if self.stop:
            reasons.append("the dataset is not as it was prepared, or cannot be opened")
        fatal = sum(group.count for group in tally.problems("stop"))
        if fatal:
            reasons.append(f"{counted(fatal, 'sample')} that would end training")
        if tally.num_looked_at and tally.num_left_out >= tally.num_seen:
            reasons.append("no sample can be used")
        elif self.skip_rate > self.max_skip_rate:
            reasons.append(
                f"{tally.num_left_out} of {counted(tally.num_seen, 'sample')} would be left out, more than "
                f"--max-skip-rate {self.max_skip_rate:g}"
            )
        return reasons

    @property
    def num_samples(self) -> int:
        """Samples of all datasets together."""
        return sum(data.num_samples for data in self.tally.datasets)

    @cached_property
    def fill(self) -> float | None:
        """How full packs of seq_length tokens will be; None if no sample fits."""
        return expected_fill(self.tally.sizes, self.seq_length, self.packing_buffer_size, multiple=self.sample_multiple)

    @property
    def samples_per_pack(self) -> float | None:
        """None if no sample fits."""
        usable, fill = fitting(self.tally.sizes, self.seq_length), self.fill
        if fill is None:
            return None
        mean = sum(length * count for (length, _), count in usable.items()) / usable.total()
        return self.seq_length * fill / mean

    def epoch(self) -> dict[str, int] | None:
        """Return the counts of an epoch by kind, estimated from the checked samples; None without epochs."""
        data = self.tally.datasets
        if not data or any(one.repeats is None for one in data):
            return None
        weighted = [(one, one.repeats or 0.0) for one in data]
        return {
            "samples": round(sum(r * one.per_sample(one.num_used) for one, r in weighted)),
            "tokens": round(sum(r * one.per_sample(one.num_tokens) for one, r in weighted)),
            "images": round(sum(r * one.per_sample(one.num_images) for one, r in weighted)),
            "videos": round(sum(r * one.per_sample(one.num_videos) for one, r in weighted)),
            "frames": round(sum(r * one.per_sample(one.num_frames) for one, r in weighted)),
            "audios": round(sum(r * one.per_sample(one.num_audios) for one, r in weighted)),
        }

    def quantiles(self) -> dict[str, int]:
        """Return quantiles of the tokens per sample."""
        return {name: quantile(self.tally.lengths, part) for name, part in QUANTILES.items()}

    def quantiles_of_patches(self) -> dict[str, int]:
        """Return quantiles of the patches per sample."""
        return {name: quantile(self.tally.patches, QUANTILES[name]) for name in OF_PATCHES}

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain containers."""
        tally = self.tally
        return {
            # The verdict first; the rest explains it.
            "data_path": self.data_path,
            "tokenizer_dir": self.tokenizer_dir,
            "train": not self.reasons_not_to_train and not self.has_pairs,
            "preference_pairs": self.has_pairs,
            "reasons_not_to_train": self.reasons_not_to_train,
            "full": self.full,
            "looked_at": tally.num_looked_at,
            "conversations": tally.num_seen,
            "left_out": tally.num_left_out,
            "max_skip_rate": self.max_skip_rate,
            "seconds": round(self.seconds, 3),
            "seq_length": self.seq_length,
            # Sizes, for the sequence length and the packing.
            "tokens_per_sample": {
                **self.quantiles(),
                "histogram": [list(one) for one in bins(tally.lengths, NUM_BINS)],
            },
            "max_media_tokens": self.max_media_tokens,
            "media_tokens_per_sample": {**self.quantiles_of_patches(), "unit": self.unit},
            "packing": {
                "buffer_size": self.packing_buffer_size,
                "sample_multiple": self.sample_multiple,
                "fill": self.fill,
            },
            "images_per_sample": _by_number(tally.images),
            "videos_per_sample": _by_number(tally.videos),
            "frames_per_video": _by_number(tally.frames),
            "videos_without_fps": tally.num_without_fps,
            "unused_keys": dict(tally.unused.most_common()),
            "audios_per_sample": _by_number(tally.audios),
            "epoch": self.epoch(),
            # Each dataset, and each problem with examples.
            "datasets": [asdict(one) for one in tally.datasets],
            "stop": list(self.stop),
            "remarks": list(self.remarks),
            "groups": [asdict(g) for level in ("stop", "left out", "remark") for g in tally.problems(level)],
        }


def _by_number(counts: Counter[int]) -> dict[str, int]:
    """Return counts with keys that JSON has, in their order."""
    return {str(key): count for key, count in sorted(counts.items())}
