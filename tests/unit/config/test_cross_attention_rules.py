"""Options that a model whose decoder attends to images does not have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llava_mcore.config.load import load_run_config
from llava_mcore.config.rules.all_rules import check_layout, check_parts, check_run
from llava_mcore.config.rules.dims import ModelDims

DIMS = ModelDims(
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=8,
    num_query_groups=4,
    vocab_size=366,
    vision_num_layers=5,
    vision_hidden_size=64,
    vision_ffn_hidden_size=128,
    vision_num_attention_heads=4,
    max_position_embeddings=4096,
    sliding_window=None,
    num_cross_layers=2,
)
COMPUTED: list[dict[str, Any]] = [
    {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True},
    {"data.packing": True},
    {"parallel.use_distributed_optimizer": True, "model.recompute": "full"},
    {"adapter.r": 4},
    {"parallel.tensor_model_parallel_size": 2, "parallel.vision_data_parallel": True},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"parallel.pipeline_model_parallel_size": 2}, "--pp 2: 2 layers of hf attend to the features of images"),
    ({"parallel.context_parallel_size": 2, "data.packing": True}, "--cp 2"),
    ({"parallel.fsdp": "optim_grads"}, "--fsdp optim_grads"),
    ({"model.cuda_graphs": True, "data.packing": True}, "--cuda-graphs"),
    ({"training.fp8": True}, "--fp8"),
    ({"model.train_expanded": True}, "--train-expanded"),
    ({"optimizer.name": "muon"}, "optimizer.name=muon"),
]


def problems(flags: dict[str, Any], dims: ModelDims) -> list[str]:
    run = load_run_config(None, [], {"checkpoint.save_dir": "runs", "data.seq_length": 1024} | flags)
    return [x for x in check_run(run, dims, 2, device_available=False, source="hf") if "attend to" in x]


@pytest.mark.parametrize("flags", COMPUTED, ids=str)
def test_what_is_computed(flags: dict[str, Any]) -> None:
    assert problems(flags, DIMS) == []


@pytest.mark.parametrize(("flags", "said"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_refused(flags: dict[str, Any], said: str) -> None:
    """In one sentence, and of such models alone."""
    (problem,) = problems(flags, DIMS)
    assert problem.startswith(said)
    assert problems(flags, replace(DIMS, num_cross_layers=0)) == []


def test_every_command_refuses_stages() -> None:
    """Imports and exports ask the first, answers and comparisons the second."""
    for check in (check_layout, check_parts):
        assert check(DIMS, 2, 1, "hf") == []
        assert len(check(DIMS, 2, 2, "hf")) == 1 and "use --pp 1" in check(DIMS, 2, 2, "hf")[0]
