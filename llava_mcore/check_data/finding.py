"""The result of examining one sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["used", "left out", "stop", "excluded"]


@dataclass(frozen=True)
class Finding:
    """The result for one sample."""

    dataset: int
    index: int
    shard: str
    key: str
    status: Status = "used"
    """stop: training would end; excluded: split.yaml excludes the sample."""
    reasons: tuple[str, ...] = ()
    """Why the sample, or conversations of a pack, are skipped, or why training would end."""
    remarks: tuple[str, ...] = ()
    num_conversations: int = 1
    num_tokens: int = 0
    """Media included; 0 if it could not be tokenized."""
    num_patches: int = 0
    """Patches of its images, frames and sounds (`MediaPlan.unit`)."""
    num_trained: int = 0
    num_images: int = 0
    num_frames: tuple[int, ...] = ()
    """Frames of each video."""
    num_audios: int = 0
    num_without_fps: int = 0
    """Videos whose fps is assumed; 0 if the model's tokens and positions do not depend on it."""
    unused: tuple[str, ...] = ()
    """Keys of the json that nothing reads."""

    @property
    def kind(self) -> tuple[int, ...]:
        """Whether it has one or several conversations, and no, one or several images, videos and sounds."""
        counts = (self.num_images, len(self.num_frames), self.num_audios)
        return (min(self.num_conversations, 2), *(min(count, 2) for count in counts))
