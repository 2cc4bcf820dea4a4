"""Options that save memory or time change no number: losses and gradients are those of the plain run of the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlavaForConditionalGeneration

from llava_mcore.checkpoint.layout import hf_folder, iteration_folder
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from tests.helpers.batches import FakeLoader
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import run_world
from tests.parallel import option_checks
from tests.parallel.option_checks import option_runs, other_layouts
from tests.parallel.test_layouts import assert_same_folder
from tests.parallel.training_checks import GLOBAL_BATCH, MIXED

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"vision": "siglip"},
    "qwen2": {"tie": True},
    "gemma3": {"vision": "dinov2_with_registers", "tie": True},
    "gemma2": {"vision": "internvit"},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root: Path = tmp_path_factory.mktemp("options")
    for text, more in FAMILIES.items():
        make_hf_llava(root / f"hf-{text}", text=text, **more)
        import_hf(root / f"hf-{text}", root / text)
    return {text: str(root / text) for text in FAMILIES}


@pytest.mark.long
def test_options_change_no_number(checkpoints: dict[str, str], tmp_path: Path) -> None:
    arguments = {"tp": 2, "pp": 2, "checkpoints": checkpoints, "save_dir": str(tmp_path)}
    ranks = run_world(4, option_checks.curves, **arguments)
    assert all(rank == ranks[0] for rank in ranks), "ranks disagree about the loss"
    runs = ranks[0]
    assert runs.keys() == option_runs().keys()
    for name, option in option_runs().items():
        run, plain = runs[name], runs[option.baseline or name]
        if option.bitwise:
            assert run == plain, name
        assert run["loss"] == pytest.approx(plain["loss"], rel=1e-5), name
        assert run["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4), name
        assert run["grad_norm"][0] == pytest.approx(plain["grad_norm"][0], rel=1e-5), name
    for name, (text, _) in other_layouts().items():
        export_hf(tmp_path / name, tmp_path / f"{name}-hf", tensor_parallel=2, pipeline_parallel=2, verify=True)
        assert_same_folder(Path(checkpoints[text]).parent / f"hf-{text}", tmp_path / f"{name}-hf")
    for name, text in (("gemma3 tied", "gemma3"), ("packed gemma2", "gemma2")):
        loss, norm = first_step_of_hugging_face(Path(checkpoints[text]).parent / f"hf-{text}")
        assert (runs[name]["loss"][0], runs[name]["grad_norm"][0]) == pytest.approx((loss, norm), rel=1e-5), name


def first_step_of_hugging_face(folder: Path) -> tuple[float, float]:
    """Return loss and gradient norm of the first global batch, from transformers alone."""
    model = LlavaForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").train()
    loader = FakeLoader(model.config, micro_batch_size=GLOBAL_BATCH, dp_rank=0, dp_size=1, text_only=MIXED)
    batch = next(loader)
    logits = model(input_ids=batch.input_ids, pixel_values=batch.media["pixel_values"]).logits
    losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    loss = (losses * batch.loss_mask.flatten()).sum() / batch.loss_mask.sum()
    loss.backward()
    return loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()


def test_a_checkpoint_does_not_know_how_the_layers_were_divided(checkpoints: dict[str, str], tmp_path: Path) -> None:
    """Saved from an interleaved pipeline, continued with uneven stages."""
    hf = str(hf_folder(iteration_folder(Path(checkpoints["llama"]), 0)))
    arguments = {"checkpoint": checkpoints["llama"], "save_dir": str(tmp_path), "hf": hf}
    ranks = run_world(2, option_checks.resume_elsewhere, **arguments)
    assert ranks[0] == ranks[1] and ranks[0].keys() == {"plain", "distributed"}
    for broken, uninterrupted in ranks[0].values():
        assert broken == pytest.approx(uninterrupted, rel=1e-5)
