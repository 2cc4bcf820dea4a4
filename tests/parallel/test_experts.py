"""Mixtures of experts: the same numbers as Hugging Face's at every layout, also of a run that another layout saved."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from llava_mcore.adapters.linear_layers import model_layers
from llava_mcore.adapters.peft_config import plan_of_folder
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.errors import ConversionError
from llava_mcore.media.batch_fields import PIXEL_VALUES
from llava_mcore.models.architectures.hf_config import load_hf_config
from tests.helpers.batches import LENGTH, micro_batch
from tests.helpers.peft_models import make_peft_folder
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.world import run_world
from tests.parallel import expert_checks
from tests.parallel.expert_checks import (
    BRIEF,
    COEFFICIENTS,
    MICRO_BATCH,
    TEXT_ONLY,
    WITH_ADAPTERS,
    WITH_ANSWERS,
    Layout,
)
from tests.parallel.test_adapters import check_export
from tests.parallel.training_checks import GLOBAL_BATCH

LAYOUTS: dict[Layout, int] = {
    (1, 1, 1, 1): 1,
    (1, 1, 2, 1): 2,
    (2, 1, 1, 2): 2,
    (2, 1, 2, 1): 2,
    (1, 2, 2, 1): 4,
    (2, 2, 2, 1): 4,
    (2, 1, 2, 2): 4,
    (1, 1, 2, 1, 2): 2,
    (2, 1, 2, 1, 2): 4,
}
"""tp, pp, ep, etp, perhaps cp, and the number of processes. Each resumes what the one before it has saved."""
ONE: Layout = (1, 1, 1, 1)
NUM_VALIDATION = (1, 11)
"""Numbers of validation samples: two replicas have different numbers of micro-batches, or one has none."""
BOTH_TENSORS = ["experts.gate_up_proj", "experts.down_proj"]
Found = dict[Layout, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def expected_logits() -> dict[str, torch.Tensor]:
    """Filled by `results`: Hugging Face's logits."""
    return {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def results(folder: Path, expected_logits: dict[str, torch.Tensor]) -> Found:
    """What every rank has found at every layout."""
    root = folder
    model = make_hf_llava(root / "hf", text="qwen3_moe", text_overrides={"moe_intermediate_size": 32})
    import_hf(root / "hf", root / "megatron")
    batch = micro_batch(model.config, list(range(GLOBAL_BATCH)), set(TEXT_ONLY))
    with recorded_router_logits(model.train()) as of_layers:
        logits = model(input_ids=batch.input_ids, pixel_values=batch.media[PIXEL_VALUES]).logits
    expected_logits["all"] = logits.detach().clone()
    losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    total = (losses * batch.loss_mask.flatten()).sum()
    for rows in torch.arange(GLOBAL_BATCH).split(MICRO_BATCH):
        mask = batch.loss_mask[rows]
        total = total + mask.sum() * sum(router_terms(x[rows], mask) for x in of_layers)
    (total / batch.loss_mask.sum()).backward()
    save_gradients(model, root / "hf", root / "hf-gradients")
    import_hf(root / "hf-gradients", root / "gradients")
    given: dict[str, Any] = {"checkpoint": str(root / "megatron"), "gradients": str(root / "gradients")}
    given |= {"inputs": {"input_ids": batch.input_ids, **batch.media}, "save_dir": str(root / "save")}
    given["data"] = [str(few_samples(root / f"data-{count}", count)) for count in NUM_VALIDATION]
    found: Found = {}
    source = None
    for layout, size in LAYOUTS.items():
        found[layout] = run_world(size, expert_checks.one_layout, layout=layout, source=source, **given)
        source = "-".join(map(str, layout))
    return found


@contextmanager
def recorded_router_logits(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collect the logits [b, s, experts] of all routers of a Hugging Face model in this block."""
    found: list[torch.Tensor] = []

    def record(gate: torch.nn.Module, args: Any) -> None:
        hidden = args[0].reshape(GLOBAL_BATCH, LENGTH, -1)
        found.append(F.linear(hidden, gate.get_parameter("weight")))

    gates = [x for name, x in model.named_modules() if name.endswith(".mlp.gate")]
    hooks = [gate.register_forward_pre_hook(record) for gate in gates]
    yield found
    for hook in hooks:
        hook.remove()


def router_terms(logits: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Return the terms of one router in one micro-batch as papers have them; tokens after a row's last trained one are
    padding."""
    rows = [x[: int(mask.nonzero().max()) + 1] for x, mask in zip(logits, loss_mask, strict=True)]
    real = torch.cat(rows)
    probs, k = real.softmax(-1), 3
    share = F.one_hot(probs.topk(k).indices, probs.shape[-1]).sum(1).float().mean(0)
    balance = probs.shape[-1] / k * (share * probs.mean(0)).sum()
    return COEFFICIENTS["aux_loss_coef"] * balance + COEFFICIENTS["z_loss_coef"] * real.logsumexp(-1).square().mean()


def few_samples(folder: Path, count: int) -> Path:
    """Write a dataset with as many validation samples as samples for training."""
    make_dataset(folder, num_samples=2 * count)
    split = "split_parts: {train: [000001.tar], val: [000000.tar], test: []}\nexclude: []\n"
    (folder / ".nv-meta" / "split.yaml").write_text(split)
    return folder


def save_gradients(model: torch.nn.Module, hf: Path, target: Path) -> None:
    """Write a copy of a folder that has gradients in place of weights: an import divides them as it divides weights."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    shutil.copytree(hf, target)
    cast(Any, model).save_pretrained(target)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_logits_and_gradients_are_those_of_hugging_face(
    results: Found, expected_logits: dict[str, torch.Tensor], layout: Layout
) -> None:
    computed = [rank["logits"] for rank in results[layout] if rank["logits"] is not None]
    assert computed
    for logits in computed:
        assert (logits - expected_logits["all"]).abs().max() <= 1e-5
    assert max(rank["gradients"] for rank in results[layout]) <= 1e-5


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_gives_the_same_numbers(results: Found, layout: Layout) -> None:
    """Also with packed samples, and if experts are computed again in the backward pass."""
    reference, here = results[ONE][0], results[layout][0]
    assert here["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    assert here["packed"]["loss"] == pytest.approx(reference["losses"][:2], rel=1e-5)
    assert here["packed"]["grad_norm"] == pytest.approx(reference["packed"]["grad_norm"], rel=1e-5)
    for rank in results[layout]:
        kept = rank["products"]
        assert sum(kept) == len(kept) / 2 > 0, "each product is computed once more, and kept only then"
    if "interleaved" in here:  # every stage has two chunks of layers
        assert here["interleaved"]["loss"] == pytest.approx(reference["losses"][:2], rel=1e-5)
    if "fp16" in here:  # with a fixed loss scale, as two optimizers would find two
        assert here["fp16"]["loss"] == pytest.approx(reference["losses"][:3], rel=5e-3)
        assert here["fp16"]["grad_norm"] == pytest.approx(reference["fp16"]["grad_norm"], rel=2e-2)
    if "fp8" in here:
        in_fp8 = here["fp8"]
        assert in_fp8["fp8"] == pytest.approx(in_fp8["bf16"], rel=1e-3) and in_fp8["fp8"] != in_fp8["bf16"]
        assert in_fp8["recomputed"] == in_fp8["fp8"]
        assert in_fp8["bf16"][3] < in_fp8["bf16"][0]
    assert reference["losses"][2] < reference["losses"][0]
    assert here["parameters"] == reference["parameters"], "each expert is counted once"


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x not in BRIEF], ids=str)
def test_routers_report_the_same_numbers(results: Found, layout: Layout) -> None:
    reference, terms = results[ONE][0], results[layout][0]["with terms"]
    assert terms["loss"] == pytest.approx(reference["with terms"]["loss"], rel=1e-5)
    assert terms["tokens"] == reference["with terms"]["tokens"]
    assert all(x[0] == x[2] == x[3] > x[1] == 0 for x in terms["tokens"]), "the second layer has no experts"
    for name in ("load_balancing", "router_z", "max_expert_load", "min_expert_load"):
        assert terms[name] == pytest.approx(reference["with terms"][name], rel=1e-5)


@pytest.mark.parametrize("layout", WITH_ADAPTERS, ids=str)
def test_adapters(results: Found, layout: Layout) -> None:
    """Adapters of attention and of MLPs among experts are the same at every layout, and resumed bit for bit."""
    for rank in results[layout]:
        for kind, (losses, resumed) in rank["adapters"].items():
            reference, _ = results[ONE][0]["adapters"][kind]
            assert losses == pytest.approx(reference, rel=1e-5), kind
            assert resumed == losses[2:], kind
            assert losses[2] < losses[0], kind


@pytest.mark.parametrize("layout", ["2-1-2-1-1", "2-1-2-2-1"])
def test_adapters_of_experts_are_those_of_peft(results: Found, folder: Path, tmp_path: Path, layout: str) -> None:
    """Trained where two processes divide the experts, or each of them too: PEFT's logits, and its merge to the bit."""
    assert results
    check_export(folder / "hf", folder / "save" / f"experts-{layout}", tmp_path)


def test_an_adapter_of_another_number_of_experts(results: Found, folder: Path) -> None:
    assert results
    given: dict[str, Any] = {"r": 2, "target_modules": [], "target_parameters": ["experts.gate_up_proj"]}
    make_hf_llava(folder / "other", text="qwen3_moe", text_overrides={"num_experts": 4})
    make_peft_folder(folder / "other", folder / "of-four", **given | {"target_parameters": BOTH_TENSORS})
    layers = model_layers(load_hf_config(folder / "hf"))
    with pytest.raises(
        ConversionError, match=r"gate_up_proj: its 8 rows at rank 2 are those of 4 experts, and .* has 8"
    ):
        plan_of_folder(folder / "of-four", "default", layers, is_trained=True)
    make_peft_folder(folder / "hf", folder / "one-tensor", **given)
    with pytest.raises(ConversionError, match=r"down_proj\.lora_A\.weight is .*, expected"):
        plan_of_folder(folder / "one-tensor", "default", layers, is_trained=True)


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x not in BRIEF], ids=str)
def test_validation_of_fewer_samples_than_fit(results: Found, layout: Layout) -> None:
    """Replicas that share experts run the same number of micro-batches, and find the same as one process."""
    for here, reference in zip(results[layout][0]["validations"], results[ONE][0]["validations"], strict=True):
        ((loss, *counts),) = here
        ((expected, *expected_counts),) = reference
        assert loss == pytest.approx(expected, rel=1e-5)
        assert counts == expected_counts


@pytest.mark.parametrize("layout", WITH_ANSWERS, ids=str)
def test_answers_while_replicas_share_experts(results: Found, layout: Layout) -> None:
    """Replicas with fewer or shorter answers keep step with the others, and all end if one cannot read a question."""
    (reference,), _ = results[ONE][0]["answers"]
    assert len(reference[1]) == NUM_VALIDATION[-1]
    for rank in results[layout]:
        (answers,), said = rank["answers"]
        assert answers == reference or rank is not results[layout][0]
        assert "questions of the validation split cannot be asked" in said or layout == ONE
        assert said.count("the shard is gone") == math.prod((*layout[:2], *layout[4:])), "the ranks of one replica"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_resumed(results: Found, layout: Layout) -> None:
    """At the same layout bit for bit, at another one with other sums."""
    here = results[layout][0]
    assert here["resumed"] == here["losses"][2:]
    for rank in results[layout]:
        uninterrupted, resumed = rank.get("own disk", ((), ()))
        assert resumed == uninterrupted
    if layout != ONE:
        assert here["resumed elsewhere"] == pytest.approx(results[ONE][0]["losses"][2:], rel=1e-5)
