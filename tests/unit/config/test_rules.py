"""Each rule between the values of a run, its model and its machine has a case that breaks it alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from llava_mcore.config.load import load_run_config
from llava_mcore.config.rules.all_rules import check_devices, check_layout, check_run
from llava_mcore.errors import ConfigError, DataError
from llava_mcore.inference.generation.settings import Settings
from llava_mcore.models.language.decoder import require_within
from tests.helpers.run_settings import DIMS, smallest_run


@pytest.fixture
def good(tmp_path: Path) -> list[str]:
    """Overrides of a run without problems, for 8 processes."""
    return smallest_run(tmp_path, "parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2")


def test_a_good_run_has_no_problem(good: list[str]) -> None:
    assert check_run(load_run_config(None, good), DIMS, world_size=8, device_available=False) == []
    assert check_run(load_run_config(None, good), DIMS, world_size=8, device_available=True) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["checkpoint.save_dir=null"], ["checkpoint.save_dir is missing", "--save-dir"]),
        (["checkpoint.save_dir=/dev/null"], ["--save-dir /dev/null is not a folder"]),
        (["checkpoint.hf_dir=/nowhere/hf"], ["--tokenizer-load-dir /nowhere/hf: no such folder"]),
        (["checkpoint.init=true"], ["--init", "--megatron-load-dir", "one of the two"]),
        (["checkpoint.save_optim=true"], ["--save-optim has no effect without --save or --save-interval"]),
        (
            ["model.freeze_language_model=true", "model.freeze_vision_projection=true"],
            ["all three parts are frozen"],
        ),
        (["checkpoint.async_save=true"], ["--async-save has no effect without --save-interval"]),
        (["checkpoint.keep_every=2"], ["--keep-every has no effect without --keep-last"]),
        (["checkpoint.non_persistent_dir=/d"], ["has no effect without --non-persistent-save-interval"]),
        (["checkpoint.non_persistent_local_dir=/d"], ["--non-persistent-local-ckpt-dir has no effect without"]),
        (["checkpoint.non_persistent_save_interval=2"], ["--non-persistent-save-interval", "add --save-optim"]),
        (["logging.profile=9:11"], ["--profile 9:11 reaches beyond the last iteration, 10"]),
        (["logging.memory_snapshot=3"], ["--memory-snapshot records a GPU's memory and none was found"]),
        (["logging.profile_ranks=0"], ["logging.profile_ranks has no effect without --profile"]),
        (["logging.profile=9:10", "logging.profile_ranks=2,8"], ["names rank 8: this run has 0 to 7"]),
        (["optimizer.min_lr=1"], ["optimizer.min_lr 1 is above --lr 2e-05"]),
        (["parallel.backend=nccl"], ["--backend nccl needs GPUs"]),
        (["training.global_batch_size=3"], ["--global-batch-size 3 is not a multiple of 2", "2 data-parallel ranks"]),
        (
            ["training.micro_batch_size=3"],
            ["--global-batch-size 128 is not a multiple of 6", "6, or --micro-batch-size 1"],
        ),
        (["parallel.tensor_model_parallel_size=4", "parallel.pipeline_model_parallel_size=4"], ["8 processes", "= 16"]),
        (["parallel.pipeline_model_parallel_size=1", "data.seq_length=5000"], ["--seq-length 5000 exceeds the 4096"]),
    ],
    ids=lambda value: value[0] if value and "=" in value[0] else "",
)
def test_one_broken_rule_gives_one_message(good: list[str], changes: list[str], expected: list[str]) -> None:
    found = check_run(load_run_config(None, [*good, *changes]), DIMS, world_size=8, device_available=False)
    assert len(found) == 1, found
    assert all(words in found[0] for words in expected), found[0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["logging.memory_snapshot=10", "logging.memory_snapshot_ranks=7"], None),
        (["logging.memory_snapshot=11"], "--memory-snapshot 11 is after the last iteration, 10"),
        (["logging.memory_snapshot=3", "logging.profile=2:3"], "--profile 2:3 records the memory of that iteration"),
        (["logging.memory_snapshot=3", "logging.memory_snapshot_ranks=9"], "memory_snapshot_ranks names rank 9: this"),
    ],
)
def test_a_snapshot_of_memory(good: list[str], changes: list[str], expected: str | None) -> None:
    messages = check_run(load_run_config(None, [*good, *changes]), DIMS, world_size=8, device_available=True)
    assert messages == [] if expected is None else len(messages) == 1 and expected in messages[0]


@pytest.mark.parametrize(
    ("dims", "tp", "pp", "expected"),
    [
        (
            {"num_attention_heads": 6},
            4,
            1,
            ["--tp 4", "attention heads of the language model, which is 6 in M", "1 or 2"],
        ),
        ({"num_query_groups": 2}, 4, 1, ["key/value heads of the language model, which is 2 in M", "can use 1 or 2"]),
        ({"ffn_hidden_size": 130}, 4, 1, ["MLP width of the language model, which is 130"]),
        ({"hidden_size": 66}, 4, 1, ["width of the projection, which is 66"]),
        ({"vision_num_attention_heads": 3}, 2, 1, ["attention heads of the vision tower, which is 3", "can use 1"]),
        ({"vision_ffn_hidden_size": 66}, 4, 1, ["MLP width of the vision tower, which is 66"]),
        ({"num_layers": 6}, 1, 4, ["--pp 4", "number of layers of the language model, which is 6", "1, 2, 3 or 6"]),
    ],
)
def test_layout_that_does_not_divide(dims: dict[str, int], tp: int, pp: int, expected: list[str]) -> None:
    found = check_layout(dataclasses.replace(DIMS, **dims), tp, pp, "M")
    assert len(found) == 1, found
    assert all(words in found[0] for words in expected), found[0]


def test_a_tower_that_does_not_divide_needs_the_option_that_the_message_names(good: list[str]) -> None:
    dims = dataclasses.replace(DIMS, vision_ffn_hidden_size=51)
    run = load_run_config(None, [*good, "parallel.vision_data_parallel=off"])
    (found,) = check_run(run, dims, world_size=8, device_available=False)
    assert "MLP width of the vision tower, which is 51" in found and "can use 1; in training" in found
    assert "--vision-data-parallel also allows 1, 2 or 4" in found
    for value in ("on", "auto"):  # the launcher puts `on` in place of the latter
        whole = load_run_config(None, [*good, f"parallel.vision_data_parallel={value}"])
        assert check_run(whole, dims, world_size=8, device_available=False) == []
    found = check_layout(dims, 8, 1, "M", vision_data_parallel=True)
    assert all("of the vision tower" not in x and "can use 1, 2 or 4" in x for x in found) and found
    narrow = dataclasses.replace(dims, projection_ffn_hidden_size=102)
    assert "width inside the projection, which is 102" in check_layout(narrow, 4, 1, "M", vision_data_parallel=True)[0]


def test_widths_of_a_tower_in_fp8(good: list[str]) -> None:
    """Widths of a divided tower that FP8 cannot multiply are refused; a whole tower's need not be divided."""
    dims = dataclasses.replace(DIMS, vision_hidden_size=64, vision_ffn_hidden_size=96)
    flags = ["training.fp8=true", "training.fp8_vision=true", "parallel.tensor_model_parallel_size=4"]
    off = "parallel.vision_data_parallel=off"
    found = check_run(load_run_config(None, [*good, *flags, off]), dims, world_size=8, device_available=True)
    (told,) = [x for x in found if "multiple of 64" in x]
    assert "MLP width of the vision tower, which is 96" in told and "--vision-data-parallel" in told
    whole = load_run_config(None, [*good, *flags, "parallel.vision_data_parallel=true"])
    assert not any("multiple of" in x for x in check_run(whole, dims, world_size=8, device_available=True))
    narrow = dataclasses.replace(dims, vision_hidden_size=72)
    found = check_run(whole, narrow, world_size=8, device_available=True)
    assert any("which is 72" in x and "multiple of 16: omit --fp8-vision" in x for x in found)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
def test_layout_is_accepted_exactly_when_everything_divides(
    heads: int, groups: int, layers: int, tp: int, pp: int
) -> None:
    dims = dataclasses.replace(DIMS, num_attention_heads=heads, num_query_groups=groups, num_layers=layers)
    sizes = (heads, groups, 128, 64, 4)
    divides = all(size % tp == 0 for size in sizes) and layers % pp == 0
    assert (check_layout(dims, tp, pp, "M") == []) == divides


def test_a_model_refuses_what_its_window_would_hide() -> None:
    require_within(None, 5000), require_within(1024, None), require_within(1024, 1024)
    with pytest.raises(ConfigError, match="1025 tokens exceeds the sliding attention window of 1024"):
        require_within(1024, 1025)
    settings = Settings(GenerationConfig(), 100, frozenset(), most_positions=4096)
    assert settings.within(None).longest_answer(4000) == 96
    assert settings.within(1024).longest_answer(1000) == 24
    with pytest.raises(DataError, match="the model has 1024 positions"):
        settings.within(1024).longest_answer(1024)


def test_sliding_window_shorter_than_the_sequence(good: list[str]) -> None:
    """It is refused with the size of the window."""
    dims = dataclasses.replace(DIMS, sliding_window=1024)
    found = check_run(load_run_config(None, good), dims, world_size=8, device_available=False)
    assert len(found) == 1
    assert "sliding attention window of 1024" in found[0]


def test_a_class_token_that_must_not_stay(good: list[str]) -> None:
    run = load_run_config(None, [*good, "model.drop_class_token=true"])
    assert check_run(run, DIMS, world_size=8, device_available=False) == []
    keeps = dataclasses.replace(DIMS, keeps_class_token=True)
    found = check_run(run, keeps, world_size=8, device_available=False)
    assert len(found) == 1 and "--no-add-class-token, but the model keeps the class token" in found[0]
    assert check_run(load_run_config(None, good), keeps, world_size=8, device_available=False) == []


def test_all_problems_come_together() -> None:
    run = load_run_config(None, ["parallel.tensor_model_parallel_size=3", "parallel.backend=nccl"])
    found = check_run(run, DIMS, world_size=4, device_available=False)
    assert len(found) >= 7


def test_without_dims_the_other_rules_still_hold(good: list[str]) -> None:
    run = load_run_config(None, [*good, "checkpoint.init=true"])
    assert len(check_run(run, None, world_size=8, device_available=False)) == 1


def test_more_gpus_than_there_are() -> None:
    assert "this machine has 2: use 1 to 2" in check_devices(4, 2)[0]
    assert check_devices(2, 2) == []
    assert check_devices(4, 0) == []
