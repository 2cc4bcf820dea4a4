"""The result of examining one sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from llava_mcore.data.encode.record_keys import CHOSEN, REJECTED

Status = Literal["used", "left out", "stop", "excluded"]
WORST_FIRST = ("stop", "left out", "excluded", "used")


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
    """Patches of its images, frames and audio clips (`MediaPlan.unit`)."""
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
        """Whether it has one or several conversations, and no, one or several images, videos and audio clips."""
        counts = (self.num_images, len(self.num_frames), self.num_audios)
        return (min(self.num_conversations, 2), *(min(count, 2) for count in counts))


def as_one(findings: Mapping[str, Finding]) -> Finding:
    """Return the finding of a pair: the sizes of its longer conversation, and the problems of both."""
    if len(findings) == 1:
        return next(iter(findings.values()))
    longer = max(findings.values(), key=lambda finding: finding.num_tokens)
    status = min((finding.status for finding in findings.values()), key=WORST_FIRST.index)
    reasons = [f"{name}: {reason}" for name, finding in findings.items() for reason in finding.reasons]
    remarks = [remark for finding in findings.values() for remark in finding.remarks]
    return replace(
        longer,
        status=status,
        reasons=("; ".join(reasons),) if reasons else (),
        remarks=tuple(dict.fromkeys(remarks)),
        num_trained=findings[CHOSEN].num_trained + findings[REJECTED].num_trained,
    )
