"""The load of experts: how evenly routers spread tokens, and which experts get hardly any."""

from __future__ import annotations

from collections.abc import Sequence

ExpertTokens = Sequence[Sequence[float]]
"""Tokens of each expert of each layer; zeros in layers without experts."""

STARVED = 0.01
"""An expert with less than this part of an even load learns next to nothing."""
MIN_TOKENS = 1000
"""Tokens that an expert would have with an even load, from which on its share says something."""
MAX_LISTED = 8


def load_sums(loads: ExpertTokens) -> dict[str, tuple[float, float]]:
    """Return sums of tokens of the busiest and of the idlest expert, relative to an even load, over layers."""
    layers = [(max(x) * len(x) / sum(x), min(x) * len(x) / sum(x)) for x in loads if sum(x)]
    if not layers:
        return {}
    busiest, idlest = zip(*layers, strict=True)
    return {"max_expert_load": (sum(busiest), len(layers)), "min_expert_load": (sum(idlest), len(layers))}


class StarvedExperts:
    """Adds up the tokens of each expert until the numbers are significant, and names experts that got hardly any."""

    def __init__(self) -> None:
        self._totals: list[list[float]] = []
        self._first = 0
        self._known: set[tuple[int, int]] = set()

    def check(self, iteration: int, loads: ExpertTokens) -> str | None:
        """Return a warning if experts starve that did not before."""
        if not loads:
            return None
        if not self._totals:
            self._totals, self._first = [[0.0] * len(x) for x in loads], iteration
        self._totals = [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(self._totals, loads, strict=True)]
        even = [sum(x) / len(x) for x in self._totals]
        if min((x for x in even if x), default=0.0) < MIN_TOKENS:
            return None
        starved = {
            (layer, expert)
            for layer, tokens in enumerate(self._totals)
            for expert, count in enumerate(tokens)
            if count < STARVED * even[layer]
        }
        new, self._known, self._totals = sorted(starved - self._known), starved, []
        if not new:
            return None
        names = ", ".join(f"layer {layer} expert {expert}" for layer, expert in new[:MAX_LISTED])
        more = f" and {len(new) - MAX_LISTED} others" if len(new) > MAX_LISTED else ""
        return (
            f"{len(new)} experts got less than {STARVED:.0%} of an even share of the tokens in iterations "
            f"{self._first} to {iteration}: {names}{more}; they learn next to nothing: router.aux_loss_coef=0.001 "
            "spreads tokens more evenly"
        )
