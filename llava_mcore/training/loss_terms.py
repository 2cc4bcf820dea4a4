"""The table of terms that a run may add to the cross-entropy of its output layer, or only report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llava_mcore.config.schema import RunConfig
from llava_mcore.models.loss.terms import LossTerm, TokenTerm


@dataclass(frozen=True)
class KnownTerm:
    """A term that a run may have. coefficient: its weight in a run, None if the run does not have it; without the
    function, every run reports the term and none is trained with it."""

    values: TokenTerm
    coefficient: Callable[[RunConfig], float | None] | None = None


LOSS_TERMS: dict[str, KnownTerm] = {}
"""By the name in metrics.jsonl. See docs/extend/loss.md and docs/extend/metric.md."""


def loss_terms(run: RunConfig) -> dict[str, LossTerm]:
    """Return the terms of a run by name."""
    terms = {}
    for name, term in LOSS_TERMS.items():
        coefficient = None if term.coefficient is None else term.coefficient(run)
        if term.coefficient is None or coefficient is not None:
            terms[name] = LossTerm(term.values, coefficient)
    return terms
