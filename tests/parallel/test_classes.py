"""Classes other than LLaVA train the same at every layout, packed or padded, with any part frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from llava_mcore.convert.import_hf import import_hf
from llava_mcore.media.batch_fields import PIXEL_VALUES
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.architectures.registry import architecture_of
from tests.helpers.batches import FakeLoader
from tests.helpers.cases import hf_pixels
from tests.helpers.tiny_classes import MAKERS
from tests.helpers.world import run_world
from tests.parallel import training_checks
from tests.parallel.training_checks import GLOBAL_BATCH

LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)]
"""tp, pp, dp."""
WHOLE = [(1, 1, 1), (2, 2, 1)]
"""Layouts that run every variant; tests/parallel/test_training.py runs LLaVA's at every layout."""
PARTS = ("vision_model", "vision_projection", "language_model")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """The curves of every layout, from rank 0 of each world."""
    root: Path = tmp_path_factory.mktemp("classes")
    for name, make in MAKERS.items():
        make(root / f"hf-{name}")
        import_hf(root / f"hf-{name}", root / name)
    arguments = {"checkpoints": {name: str(root / name) for name in MAKERS}, "save_dir": str(root / "save")}
    found: dict[Any, Any] = {"root": root}
    for tp, pp, dp in LAYOUTS:
        ranks = run_world(
            tp * pp * dp, training_checks.curves_of_classes, tp=tp, pp=pp, variants=(tp, pp, dp) in WHOLE, **arguments
        )
        assert all(rank == ranks[0] for rank in ranks), "ranks disagree about the loss"
        found[tp, pp, dp] = ranks[0]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MAKERS)
def test_loss_curves_equal_those_of_one_process(results: dict[Any, Any], layout: Any, name: str) -> None:
    reference, here = results[1, 1, 1], results[layout]
    pairs = {run: run for run in here if run[0] == name and run[1] != "bf16"} | {(name, "packed"): (name, "plain")}
    for run, expected in pairs.items():
        assert here[run]["loss"] == pytest.approx(reference[expected]["loss"], rel=1e-5), run
        assert here[run]["grad_norm"] == pytest.approx(reference[expected]["grad_norm"], rel=1e-4), run
        assert here[run]["grad_norm"][0] == pytest.approx(reference[expected]["grad_norm"][0], rel=1e-5), run


@pytest.mark.parametrize("layout", WHOLE)
@pytest.mark.parametrize("name", MAKERS)
def test_half_precision_is_close_and_parts_add_up(results: dict[Any, Any], layout: Any, name: str) -> None:
    reference, here = results[1, 1, 1], results[layout]
    assert here[name, "bf16"]["loss"] == pytest.approx(reference[name, "plain"]["loss"], rel=5e-3)
    norms = [here[name, f"only {part}"]["grad_norm"][0] for part in PARTS]
    whole = here[name, "plain"]["grad_norm"][0]
    assert sum(x**2 for x in norms) == pytest.approx(whole**2, rel=1e-4), "the gradient is that of its parts"


@pytest.mark.parametrize("name", MAKERS)
def test_the_first_step_is_plain_hugging_faces(results: dict[Any, Any], name: str) -> None:
    """The same loss and gradient norm by transformers and torch alone."""
    folder = results["root"] / f"hf-{name}"
    hf = load_hf_config(folder)
    model = architecture_of(hf).model_class.from_pretrained(folder).train()
    loader = FakeLoader(hf, micro_batch_size=GLOBAL_BATCH, dp_rank=0, dp_size=1, text_only={1, 4, 5, 6, 7})
    batch = next(loader)
    logits = model(input_ids=batch.input_ids, pixel_values=hf_pixels(hf, batch.media[PIXEL_VALUES])).logits
    losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    loss = (losses * batch.loss_mask.flatten()).sum() / batch.loss_mask.sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    ours = results[1, 1, 1][name, "plain"]
    assert (ours["loss"][0], ours["grad_norm"][0]) == pytest.approx((loss.item(), norm), rel=1e-5)
