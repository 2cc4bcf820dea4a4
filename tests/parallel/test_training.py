"""Training gives the same numbers at every layout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlavaForConditionalGeneration

from tests.helpers.batches import FakeLoader
from tests.helpers.tiny_checkpoints import hf_dir, make_checkpoints
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import LAYOUTS, run_world
from tests.parallel import validation_checks
from tests.parallel.validation_checks import NUM_VALIDATION, make_material

Layout = tuple[int, int, int]
Results = Callable[[Layout], dict[str, Any]]
ONE: Layout = (1, 1, 1)
COMBINED: list[Layout] = [(2, 1, 2), (2, 2, 2)]
"""Tensor and data parallelism together: half of all processes, so only what one axis might do to the other runs."""
OF_COMBINED = ("plain", "distributed", "tied", "text only", "packed")
WHOLE = [layout for layout in LAYOUTS if layout not in COMBINED]
"""Layouts that run everything."""
FIRST_STEPS = dict.fromkeys(COMBINED, 6) | dict.fromkeys(WHOLE[1:], 8)
"""How many of a run's steps a layout trains at most: one process trains all 20. Finding a loss scale takes 8."""
COMPARED = ("plain", "distributed", "tied", "text only", "images only", "stage 1", "rates", "last layer")
CELLS: list[Any] = [(x, run) for x in WHOLE[1:] for run in COMPARED]
CELLS += [pytest.param(x, run, marks=pytest.mark.long) for x in COMBINED for run in OF_COMBINED if run in COMPARED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models are."""
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    """Returns the curves of a layout, from rank 0 of its world, and what its validation found."""
    untied = functools.partial(make_hf_llava, text="llama", tie=False)
    tied = functools.partial(make_hf_llava, text="qwen2", tie=True)
    checkpoints = make_checkpoints(folder, {"untied": untied, "tied": tied})
    given: dict[str, Any] = {"checkpoints": checkpoints, "save_dir": str(folder / "save")}
    material = make_material(folder)

    @functools.cache
    def of(layout: Layout) -> dict[str, Any]:
        tp, pp, dp = layout
        what: dict[str, Any] = {"most_steps": FIRST_STEPS.get(layout)}
        what |= {"material": material} if layout in WHOLE else {"material": None, "runs": OF_COMBINED}
        ranks = run_world(tp * pp * dp, validation_checks.curves_and_validation, tp=tp, pp=pp, **what, **given)
        assert all(rank == ranks[0] for rank in ranks), "ranks disagree about the loss"
        return ranks[0]

    return of


@pytest.mark.parametrize(("layout", "run"), CELLS)
def test_loss_curve_equals_one_process(results: Results, layout: Layout, run: str) -> None:
    reference, here = results(ONE)["plain" if run == "distributed" else run], results(layout)[run]
    expected = reference["loss"][: FIRST_STEPS[layout]]
    assert here["loss"] == pytest.approx(expected, rel=1e-5)
    assert here["grad_norm"][0] == pytest.approx(reference["grad_norm"][0], rel=1e-5)


@pytest.mark.parametrize("layout", WHOLE)
def test_recomputation_needs_nothing_trained_below(results: Results, layout: Layout) -> None:
    reference, here = results(ONE)["last layer"], results(layout)["last layer + recompute"]
    assert here["loss"] == pytest.approx(reference["loss"], rel=1e-5)
    assert here["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4) and reference["grad_norm"][0] > 0


@pytest.mark.parametrize("layout", [*WHOLE, *(pytest.param(x, marks=pytest.mark.long) for x in COMBINED)])
def test_packed_samples_train_as_padded_ones(results: Results, layout: Layout) -> None:
    """Packed samples of unequal length, at every layout, against the padded ones in one process."""
    reference, here = results(ONE)["short"], results(layout)["packed"]
    assert here["loss"] == pytest.approx(reference["loss"], rel=1e-5)
    assert here["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)
    assert here["grad_norm"][0] == pytest.approx(reference["grad_norm"][0], rel=1e-5)


@pytest.mark.parametrize("layout", WHOLE)
def test_validation_finds_the_same_at_every_layout(results: Results, layout: Layout) -> None:
    """Every sample once, padded or packed; a broken one is skipped."""
    reference, here = results(ONE)["validation"], results(layout)["validation"]
    for name in here.keys() - {"without"}:
        expected, *counts = reference["some" if name == "some" else "padded"]["validations"][0]
        loss, *found = here[name]["validations"][0]
        assert loss == pytest.approx(expected, rel=1e-6), name
        assert found == counts, name
    assert reference["padded"]["validations"][0][2:] == (NUM_VALIDATION - 1, 1)
    assert reference["some"]["validations"][0][2:] == (15, 1), "two global batches"
    first, *_, last = [loss for loss, *_ in reference["padded"]["validations"]]
    assert first != last, "it measures the weights of its iteration"


@pytest.mark.parametrize("layout", WHOLE)
def test_training_does_not_notice_validation(results: Results, layout: Layout) -> None:
    """Bit for bit, with dropout."""
    here = results(layout)["validation"]
    assert here["padded"]["losses"] == here["without"]["losses"] and len(here["without"]["losses"]) == 2


def test_loss_falls_and_half_precision_is_close(results: Results) -> None:
    plain = results(ONE)["plain"]["loss"]
    assert plain[-1] < 0.9 * plain[0]
    full_precision = results(ONE)["short"]["loss"]
    for layout in WHOLE:
        assert results(layout)["bf16"]["loss"] == pytest.approx(full_precision, rel=5e-3)
        assert results(layout)["fp16"]["loss"] == pytest.approx(full_precision, rel=5e-3)


@pytest.mark.parametrize("layout", WHOLE)
def test_fp16_finds_its_loss_scale(results: Results, layout: Layout) -> None:
    """Updates whose gradients overflow are skipped on all ranks until the scale fits; then the loss falls."""
    losses, norms = (results(layout)["fp16, adapting"][name] for name in ("loss", "grad_norm"))
    first = norms.index(next(norm for norm in norms if norm))  # update
    assert 2 < first < len(norms) - 2 and 0 not in norms[first:]
    assert losses[2 : first + 1] == losses[: first - 1], "two batches take turns, and the weights stay as they were"
    assert losses[-1] < 0.99 * losses[first - 1]


def plain_groups(model: LlavaForConditionalGeneration) -> list[dict[str, Any]]:
    """Return AdamW's groups of the run "plain": norms and biases do not decay."""
    decayed = [p for n, p in model.named_parameters() if p.ndim > 1 or "class_embedding" in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim > 1 or "class_embedding" in n)]
    return [
        {"params": decayed, "weight_decay": 0.01, "ratio": 1.0},
        {"params": others, "weight_decay": 0.0, "ratio": 1.0},
    ]


def groups_with_rates(model: LlavaForConditionalGeneration) -> list[dict[str, Any]]:
    """Return those of the run "rates": parts with learning rates of their own, everything decays, much is frozen."""
    groups: dict[float, list[torch.nn.Parameter]] = {3.0: [], 0.3: [], 1.0: []}
    for name, parameter in model.named_parameters():
        if "vision_tower" in name:
            trained, ratio = not name.endswith("class_embedding"), 3.0
        elif "multi_modal_projector" in name:
            trained, ratio = True, 0.3
        else:
            trained, ratio = "layers.2." in name or "layers.3.mlp." in name or name == "lm_head.weight", 1.0
        parameter.requires_grad_(trained)
        groups[ratio] += [parameter] if trained else []
    return [{"params": found, "weight_decay": 0.1, "ratio": ratio} for ratio, found in groups.items()]


@pytest.mark.parametrize(
    ("run", "make_groups", "clip"), [("plain", plain_groups, 1), ("rates", groups_with_rates, 1e9)]
)
def test_one_process_trains_as_plain_hugging_face(
    results: Results, folder: Path, run: str, make_groups: Callable[[Any], list[dict[str, Any]]], clip: float
) -> None:
    """Same model, same batches, torch's AdamW and clipping, no megatron: the same losses and gradient norms."""
    ours = results(ONE)[run]
    model = LlavaForConditionalGeneration.from_pretrained(hf_dir(folder, "untied")).train()
    optimizer = torch.optim.AdamW(make_groups(model), lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    loader = FakeLoader(model.config, micro_batch_size=8, dp_rank=0, dp_size=1, text_only={1, 4, 5, 6, 7})
    losses, norms = [], []
    for lr in ours["lr"]:
        batch = next(loader)
        logits = model(input_ids=batch.input_ids, pixel_values=batch.media["pixel_values"]).logits
        token_loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        loss = (token_loss * batch.loss_mask.flatten()).sum() / batch.loss_mask.sum()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        for group in optimizer.param_groups:
            group["lr"] = lr * group["ratio"]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert ours["loss"] == pytest.approx(losses, rel=1e-5)
    assert ours["grad_norm"] == pytest.approx(norms, rel=1e-3)
    assert ours["grad_norm"][0] == pytest.approx(norms[0], rel=1e-5)
