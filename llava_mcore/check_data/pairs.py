"""Preference pairs: each answer is checked as a conversation of its own, about the same images, videos and sounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llava_mcore.check_data.finding import Finding
from llava_mcore.data.encode.record_keys import CHOSEN, PAIR, REJECTED

WORST_FIRST = ("stop", "left out", "excluded", "used")


def sides_of(raw: Any) -> dict[str, Any]:
    """Return the sample for each of its answers, by its name; a sample that is no pair by the name ""."""
    about = raw.get("json") if isinstance(raw, dict) else None
    if not isinstance(about, dict) or not all(isinstance(about.get(key), dict) for key in PAIR):
        return {"": raw}
    shared = {key: value for key, value in about.items() if key not in PAIR}
    return {key: {**raw, "json": {**shared, **about[key]}} for key in PAIR}


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
