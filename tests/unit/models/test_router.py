"""Which tokens count in the terms of routers."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.loader.collate import collate
from llava_mcore.data.samples import EncodedSample, TokenConversation
from llava_mcore.models.language.router import token_weights
from llava_mcore.parallel.groups import join_alone
from llava_mcore.training.fetch import SkipBudget, fetch_step
from llava_mcore.training.step import train_step
from tests.helpers.tiny_hf import make_hf_llava
from tests.parallel.resume_checks import open_fake_loader
from tests.parallel.training_checks import GLOBAL_BATCH, make_trainer, run_config

CONFIG: Any = SimpleNamespace(num_moe_experts=8, sequence_parallel=False, context_parallel_size=1)
LENGTHS = (5, 9, 3)
"""Of conversations, whose last two tokens are trained."""


def samples() -> list[EncodedSample]:
    conversations = [
        TokenConversation(f"c{n}", np.arange(n, dtype=np.int64) + 4, np.arange(n) >= n - 2, (), False) for n in LENGTHS
    ]
    pixels = torch.zeros(0, 3, 2, 2)
    return [
        EncodedSample(__key__=x.key, __restore_key__=(), conversations=[x], pixel_values=pixels) for x in conversations
    ]


@pytest.mark.parametrize("multiple", [1, 8, 32])
def test_padding_counts_nothing(multiple: int) -> None:
    """Neither that of rows nor that of packs, however long; the others count as much as the trained ones together."""
    options: dict[str, Any] = {"seq_length": 32, "pad_token_id": 3, "multiple": multiple}
    for packed in (False, True):
        batch = collate(samples(), packed=packed, **options)
        weights = token_weights(CONFIG, batch.loss_mask)
        assert weights is not None and weights.shape == batch.input_ids.shape
        # The last token of a row predicts nothing.
        counted = [sum(LENGTHS) - 1] if packed else [n - 1 for n in LENGTHS]
        for row, number in zip(weights, counted, strict=True):
            assert (row[:number] == row[0]).all() and not row[number:].any()
        assert weights.sum() == pytest.approx(2 * len(LENGTHS))


def test_without_trained_tokens() -> None:
    weights = token_weights(CONFIG, torch.zeros(2, 8))
    assert weights is not None and not weights.any()
    assert token_weights(CONFIG, None) is None
    assert token_weights(SimpleNamespace(num_moe_experts=None), torch.ones(2, 8)) is None


def test_frozen_routers(tmp_path: Path) -> None:
    """They stay as they are while experts are trained, and still report their terms."""
    make_hf_llava(tmp_path / "hf", text="qwen3_moe")
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    flags = {"model.freeze": "*.mlp.gate.weight", "router.aux_loss_coef": 0.1}
    run = run_config(1, 1, str(tmp_path / "megatron"), str(tmp_path), **flags)
    groups = join_alone()
    trainer = make_trainer(groups, run)
    before = {name: x.detach().clone() for name, x in trainer.models[0].named_parameters()}
    loader = open_fake_loader(groups, trainer, run, 0)
    parts = groups, trainer.chunks, trainer.optimizer, trainer.scheduler
    for _ in range(2):
        batches, *_ = fetch_step(groups, loader, 2, SkipBudget(0.0), trainer.fields)
        result = train_step(*parts, batches, GLOBAL_BATCH, loads=trainer.loads).result()
    same = {name for name, x in trainer.models[0].named_parameters() if torch.equal(x, before[name])}
    routers = {name for name in before if name.endswith("mlp.router.weight")}
    assert len(routers) == 3 and routers <= same
    assert not [name for name in same if ".experts." in name]
    assert "load_balancing" in result.sums and sum(result.loads[0]) > 0
