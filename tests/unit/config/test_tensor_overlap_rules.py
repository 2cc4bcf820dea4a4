"""What --tp-comm-overlap cannot do together with is refused before anything starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from llava_mcore.config.load import load_run_config
from llava_mcore.config.rules.all_rules import check_run, loader_multiple
from tests.helpers.run_settings import DIMS, smallest_run


@pytest.fixture
def good(tmp_path: Path) -> list[str]:
    """Overrides of a run without problems, for 8 processes."""
    return [
        *smallest_run(tmp_path),
        "parallel.tensor_model_parallel_size=2",
        "parallel.sequence_parallel=true",
        "parallel.tp_comm_overlap=true",
        "data.packing=true",
    ]


def test_packs_are_filled_up(good: list[str]) -> None:
    run = load_run_config(None, good)
    assert check_run(run, DIMS, world_size=8, device_available=True) == []
    assert loader_multiple(run) == run.data.seq_length
    plain = load_run_config(None, [*good, "parallel.tp_comm_overlap=false"])
    assert loader_multiple(plain) < plain.data.seq_length


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["data.packing=false"], "add --packing"),
        (["launch.num_gpus=3"], "which has 3: lower --tp 2 to a divisor"),
        (["model.transformer_impl=local"], "is for Transformer Engine's layers"),
        (["parallel.context_parallel_size=2"], "does not work with --cp yet"),
        (["parallel.fsdp=optim"], "does not work with --fsdp yet"),
        (["adapter.r=4"], "does not work with adapters"),
        (["training.fp8=true", "training.fp8_recipe=blockwise"], "use delayed or tensorwise"),
        (["parallel.sequence_parallel=false"], "--tp-comm-overlap has no effect without --sequence-parallel"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_it_cannot_do(good: list[str], changes: list[str], expected: str) -> None:
    found = check_run(load_run_config(None, [*good, *changes]), DIMS, world_size=8, device_available=True)
    assert len(found) == 1, found
    assert expected in found[0]


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        ({"num_experts": 8, "expert_ffn_hidden_size": 64}, "mixtures of experts"),
        ({"delta_key_heads": 4, "delta_value_heads": 4}, "gated delta nets"),
        ({"num_cross_layers": 1}, "layers that attend to images"),
    ],
)
def test_layers_without_it(good: list[str], sizes: dict[str, int], kind: str) -> None:
    dims = dataclasses.replace(DIMS, **sizes)
    found = check_run(load_run_config(None, good), dims, world_size=8, device_available=True)
    assert [text for text in found if "--tp-comm-overlap" in text and kind in text]


def test_there_must_be_gpus(good: list[str]) -> None:
    found = check_run(load_run_config(None, good), DIMS, world_size=8, device_available=False)
    assert any(text.startswith("--tp-comm-overlap sends messages between GPUs") for text in found)
