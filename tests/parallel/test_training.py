"""Training gives the same numbers at every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlavaForConditionalGeneration

from llava_mcore.apps.import_hf import import_hf
from tests.helpers.batches import FakeLoader
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import run_world

LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int, int], dict[str, Any]]:
    """The curves of every layout, from rank 0 of each world."""
    root: Path = tmp_path_factory.mktemp("training")
    checkpoints = {}
    for name, tie in (("untied", False), ("tied", True)):
        make_hf_llava(root / f"hf-{name}", text="qwen2" if tie else "llama", tie=tie)
        import_hf(root / f"hf-{name}", root / name)
        checkpoints[name] = str(root / name)
    found: dict[Any, Any] = {"hf": root / "hf-untied"}
    for tp, pp, dp in LAYOUTS:
        arguments = {"tp": tp, "pp": pp, "checkpoints": checkpoints, "save_dir": str(root / "save")}
        ranks = run_world(tp * pp * dp, "tests.parallel.training_checks:curves", **arguments)
        assert all(rank == ranks[0] for rank in ranks), "ranks disagree about the loss"
        found[tp, pp, dp] = ranks[0]
    return found


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("run", ["plain", "distributed", "tied", "text only", "pictures only", "stage 1"])
def test_loss_curve_equals_one_process(results: dict[Any, Any], layout: tuple[int, int, int], run: str) -> None:
    reference = results[1, 1, 1]["plain" if run == "distributed" else run]
    here = results[layout][run]
    assert here["loss"] == pytest.approx(reference["loss"], rel=1e-5)
    assert here["grad_norm"][0] == pytest.approx(reference["grad_norm"][0], rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_samples_train_as_padded_ones(results: dict[Any, Any], layout: tuple[int, int, int]) -> None:
    """Packed samples of unequal length, at every layout, against the padded ones in one process."""
    reference, here = results[1, 1, 1]["short"], results[layout]["packed"]
    assert here["loss"] == pytest.approx(reference["loss"], rel=1e-5)
    assert here["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)
    assert here["grad_norm"][0] == pytest.approx(reference["grad_norm"][0], rel=1e-5)


def test_loss_falls_and_bf16_is_close(results: dict[Any, Any]) -> None:
    plain = results[1, 1, 1]["plain"]["loss"]
    assert plain[-1] < 0.9 * plain[0]
    full_precision = results[1, 1, 1]["short"]["loss"]
    for layout in LAYOUTS:
        assert results[layout]["bf16"]["loss"] == pytest.approx(full_precision, rel=5e-3)


def test_one_process_trains_as_plain_hugging_face(results: dict[Any, Any]) -> None:
    """Same model, same batches, torch's AdamW and clipping, no megatron: the same losses and gradient norms."""
    ours = results[1, 1, 1]["plain"]
    model = LlavaForConditionalGeneration.from_pretrained(results["hf"]).train()
    decayed = [p for n, p in model.named_parameters() if p.ndim > 1 or "class_embedding" in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim > 1 or "class_embedding" in n)]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    loader = FakeLoader(model.config, micro_batch_size=8, dp_rank=0, dp_size=1, text_only={1, 3, 4, 5})
    losses, norms = [], []
    for lr in ours["lr"]:
        batch = next(loader)
        logits = model(input_ids=batch.input_ids, pixel_values=batch.pixel_values).logits
        token_loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        loss = (token_loss * batch.loss_mask.flatten()).sum() / batch.loss_mask.sum()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert ours["loss"] == pytest.approx(losses, rel=1e-5)
    assert ours["grad_norm"] == pytest.approx(norms, rel=1e-3)
    assert ours["grad_norm"][0] == pytest.approx(norms[0], rel=1e-5)
