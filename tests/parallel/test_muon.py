"""Muon: the numbers of a plain loop over Hugging Face's matrices, at every layout, also of a run that another layout
saved."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlavaForConditionalGeneration

from tests.helpers.batches import FakeLoader
from tests.helpers.tiny_checkpoints import make_checkpoints
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import run_world
from tests.parallel import muon_checks
from tests.parallel.muon_checks import FIRST_STEPS, Layout, kinds_of
from tests.parallel.training_checks import MIXED

ONE: Layout = (1, 1, 1, 1, 1)
LAYOUTS: list[Layout] = [ONE, (2, 1, 1, 1, 2), (1, 1, 2, 1, 1), (1, 2, 2, 2, 1), (2, 1, 2, 2, 1), (1, 1, 2, 1, 1, 2)]
"""Each resumes what the one before it has saved, too."""
COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Of the quintic iteration (leloykun.github.io/ponder/muon-opt-coeffs)."""
Found = dict[Layout, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models are."""
    return tmp_path_factory.mktemp("muon")


@pytest.fixture(scope="module")
def results(folder: Path) -> Found:
    """What every rank has found at every layout."""
    checkpoints = make_checkpoints(
        folder, {"dense": partial(make_hf_llava, text="llama"), "experts": partial(make_hf_llava, text="qwen3_moe")}
    )
    found: Found = {}
    sources: dict[str, str] = {}
    for layout in LAYOUTS:
        tp, pp, dp, *_ = layout
        given: dict[str, Any] = {"checkpoints": checkpoints, "save_dir": str(folder / "save")}
        found[layout] = run_world(tp * pp * dp, muon_checks.one_layout, layout=layout, sources=sources, **given)
        sources |= dict.fromkeys(kinds_of(layout), "-".join(map(str, layout)))
    return found


class PlainMuon:
    """Muon as its papers have it, for the matrices of linear layers; the caller has AdamW for the rest."""

    def __init__(self, matrices: dict[str, torch.nn.Parameter], weight_decay: float) -> None:
        self.matrices, self.weight_decay = matrices, weight_decay
        self.momenta = {name: torch.zeros_like(p) for name, p in matrices.items()}

    @torch.no_grad()
    def step(self, rates: dict[str, float]) -> None:
        for name, p in self.matrices.items():
            if p.grad is None:  # the tower's last layer, of which no feature is used
                continue
            momentum = self.momenta[name]
            momentum.mul_(0.95).add_(p.grad, alpha=0.05)
            x = 0.05 * p.grad + 0.95 * momentum
            x = x / x.norm()
            for a, b, c in COEFFICIENTS:
                square = x @ x.T
                x = a * x + (b * square + c * square @ square) @ x
            p.mul_(1 - rates[name] * self.weight_decay)
            p.sub_(x * 0.2 * max(p.shape) ** 0.5, alpha=rates[name])


def is_matrix(name: str, parameter: torch.nn.Parameter) -> bool:
    linear = ("_proj.weight", ".fc1.weight", ".fc2.weight", "linear_1.weight", "linear_2.weight")
    return parameter.ndim == 2 and name.endswith(linear)


def test_one_process_trains_as_plain_torch(results: Found, folder: Path) -> None:
    """Twenty steps of Hugging Face's model with torch alone: the same losses and gradient norms."""
    ours = results[ONE][0]["plain"]
    assert len(ours["loss"]) == 20
    model = LlavaForConditionalGeneration.from_pretrained(folder / "dense" / "hf").train()
    named = dict(model.named_parameters())
    matrices = {name: p for name, p in named.items() if is_matrix(name, p)}
    # Two towers of four layers with six or seven matrices, and the projection's two.
    assert len(matrices) == 4 * 6 + 4 * 7 + 2
    rest = {name: p for name, p in named.items() if name not in matrices}
    groups = [
        {"params": [p], "weight_decay": 0.1 if p.ndim > 1 or "class_embedding" in name else 0.0, "name": name}
        for name, p in rest.items()
    ]
    adam, muon = torch.optim.AdamW(groups, lr=1e-3), PlainMuon(matrices, 0.1)
    loader = FakeLoader(model.config, micro_batch_size=8, dp_rank=0, dp_size=1, text_only=set(MIXED))
    losses, norms = [], []
    for lr in ours["lr"]:
        batch = next(loader)
        logits = model(input_ids=batch.input_ids, pixel_values=batch.media["pixel_values"]).logits
        token_loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        loss = (token_loss * batch.loss_mask.flatten()).sum() / batch.loss_mask.sum()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        rates = {name: lr * (0.5 if "vision_tower" in name else 1.0) for name in named}
        for group in adam.param_groups:
            group["lr"] = rates[group["name"]]
        adam.step()
        muon.step(rates)
        model.zero_grad()
        losses.append(loss.item())
    assert ours["loss"] == pytest.approx(losses, rel=1e-5)
    assert ours["grad_norm"] == pytest.approx(norms, rel=1e-3)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_alike(results: Found, layout: Layout) -> None:
    """Dense layers and experts, each with a whole and a sharded optimizer; and towers that no rank divides."""
    one = results[ONE][0]
    for rank in results[layout]:
        for kind in kinds_of(layout):
            if kind in rank:
                found = rank[kind]["loss"]
                assert found[:FIRST_STEPS] == pytest.approx(one["plain"]["loss"][:FIRST_STEPS], rel=1e-5), kind
            of_experts = rank[f"experts, {kind}"]["loss"]
            assert of_experts == pytest.approx(one["experts, plain"]["loss"], rel=1e-5), kind
        if "whole towers" in rank:
            assert rank["whole towers"]["loss"] == pytest.approx(one["experts, plain"]["loss"], rel=1e-5)
        for losses in rank["half precision"]:
            assert losses == pytest.approx(one["experts, plain"]["loss"][:3], rel=1e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_goes_on(results: Found, layout: Layout) -> None:
    """Bit for bit at the layout that has saved it, and with the same losses at another."""
    for kind in kinds_of(layout):
        uninterrupted, resumed = results[layout][0][f"resumed, {kind}"]
        assert resumed == uninterrupted, kind
        if layout != ONE:
            elsewhere = results[layout][0][f"from another layout, {kind}"]
            expected, _ = results[ONE][0][f"resumed, {kind}"]
            assert elsewhere == pytest.approx(expected, rel=1e-5), kind
