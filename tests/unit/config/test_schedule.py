"""The length of a run, its batch sizes and its learning rates, all counted in samples."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llava_mcore import parallel  # noqa: F401  before megatron.core
from llava_mcore.config.load import load_run_config
from llava_mcore.config.rules.all_rules import check_batch, check_values
from llava_mcore.config.rules.batch_size import BatchSizes, Ramp
from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import ConfigError
from llava_mcore.training.optimization.optimizer import build_scheduler, learning_rates, rate_change

RAMPS = st.builds(Ramp, start=st.integers(1, 6), increment=st.integers(1, 4), samples=st.integers(0, 90))


def megatron_size(ramp: Ramp, full: int, consumed: int) -> int:
    """Megatron-LM's rule: the ramp's samples are divided evenly over its increments."""
    if consumed > ramp.samples or not ramp.samples:
        return full
    per_increment = ramp.samples / ((full - ramp.start) / ramp.increment)
    return min(full, ramp.start + int(consumed / per_increment) * ramp.increment)


@given(RAMPS, st.integers(1, 5), st.integers(0, 40))
def test_ramp_is_megatron_lms_and_all_counts_agree(ramp: Ramp, increments: int, iterations: int) -> None:
    full = ramp.start + increments * ramp.increment
    sizes = BatchSizes.of(full, ramp)
    consumed = 0
    for _ in range(iterations):
        size = sizes.at(consumed)
        # where its division of floats comes out at a whole number, it may fall on either side
        assert size in {megatron_size(ramp, full, consumed), megatron_size(ramp, full, consumed + 1)}
        consumed += size
    assert sizes.samples_after(iterations) == consumed
    for samples in (consumed, consumed + sizes.at(consumed) - 1):
        assert sizes.iterations_within(samples) == iterations


def run_of(*keys: str) -> RunConfig:
    return load_run_config(None, ["training.global_batch_size=8", "optimizer.lr=1", *keys])


def rates(run: RunConfig, iterations: int) -> list[float]:
    """Return the learning rate of every iteration."""
    optimizer: Any = SimpleNamespace(param_groups=[{"max_lr": 1.0, "min_lr": run.optimizer.min_lr}])
    scheduler = build_scheduler(run, optimizer)
    found, consumed = [], 0
    for _ in range(iterations):
        found.append(learning_rates(run, scheduler)["language_model"])
        size = run.training.batch_sizes.at(consumed)
        scheduler.step(increment=size)
        consumed += size
    return found


WARM = ("training.train_iters=10", "optimizer.lr_warmup_fraction=0.2", "optimizer.min_lr=0.1")


def test_shapes_of_the_schedule() -> None:
    """Warm-up and each kind of decay give the learning rates of their formula."""
    linear = rates(run_of(*WARM, "optimizer.lr_decay_style=linear"), 11)
    assert linear == pytest.approx([0, 0.5, 1, *(1 - 0.9 * i / 8 for i in range(1, 9))])
    cosine = rates(run_of(*WARM), 11)
    assert cosine[2:] == pytest.approx([0.1 + 0.45 * (1 + math.cos(math.pi * i / 8)) for i in range(9)])
    wsd = ("optimizer.lr_decay_style=WSD", "optimizer.lr_wsd_decay_iters=4")
    shapes = {
        "linear": lambda x: 1 - x,
        "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
        "exponential": lambda x: 2 * 0.5**x - 1,
        "minus_sqrt": lambda x: 1 - math.sqrt(x),
    }
    for name, shape in shapes.items():
        found = rates(run_of(*WARM, *wsd, f"optimizer.lr_wsd_decay_style={name}"), 11)
        assert found[:7] == [0, 0.5, 1, 1, 1, 1, 1]
        assert found[7:] == pytest.approx([0.1 + 0.9 * shape(i / 4) for i in range(1, 5)]), name
    in_samples = rates(run_of(*WARM, wsd[0], "optimizer.lr_wsd_decay_samples=32"), 11)
    assert in_samples == rates(run_of(*WARM, *wsd), 11)


def test_each_part_has_its_own_rate() -> None:
    """Half way down from its own peak to the same fraction of it."""
    run = run_of(*WARM, "optimizer.lr_decay_style=linear", "optimizer.vision_lr=0.5", "optimizer.projection_lr=2")
    optimizer: Any = SimpleNamespace(param_groups=[{"max_lr": 1.0, "min_lr": 0.1}])
    scheduler = build_scheduler(run, optimizer)
    scheduler.step(increment=48)
    expected = {"language_model": 0.55, "vision_model": 0.275, "vision_projection": 1.1}
    assert learning_rates(run, scheduler) == pytest.approx(expected)


def test_a_resume_says_how_it_changes_the_rate_and_what_keeps_it() -> None:
    """After 10 iterations of a linear decay from 1 to 0.1: the run of 20 is half way down."""
    keys = ("optimizer.lr_decay_style=linear", "optimizer.min_lr=0.1", "optimizer.lr_warmup_fraction=0")
    before = run_of("training.train_iters=10", *keys)

    def said(*changes: str) -> str | None:
        run = run_of("training.train_iters=10", *keys, *changes)
        optimizer: Any = SimpleNamespace(param_groups=[{"max_lr": run.optimizer.lr, "min_lr": run.optimizer.min_lr}])
        scheduler = build_scheduler(run, optimizer)
        scheduler.step(increment=80)
        found, unchanged = rate_change(before, run, scheduler), learning_rates(run, scheduler)
        assert scheduler.lr_decay_steps == 8 * run.training.num_iterations and unchanged["language_model"] > 0
        return found

    assert said() is None and said("optimizer.adam_beta2=0.9") is None
    assert said("training.train_iters=20") == (
        "the next learning rate is 0.55 instead of 0.1: the schedule has 160 samples instead of 80; "
        "to keep it, --lr-decay-style constant --lr 0.1 without optimizer.min_lr"
    )
    kept = ("training.train_iters=20", "optimizer.lr_decay_style=constant", "optimizer.lr=0.1", "optimizer.min_lr=0")
    assert said(*kept) is None
    other = said("optimizer.lr=2", "optimizer.min_lr=0.5", "optimizer.vision_lr=4")
    assert other is not None and "is 0.5 instead of 0.1: optimizer.lr is 2.0 instead of 1.0, optimizer.vision" in other
    assert other.endswith("--lr 0.1 optimizer.vision_lr=0.1 without optimizer.min_lr")


def test_a_resume_takes_the_samples_of_a_saved_schedule_and_its_own_settings() -> None:
    optimizer: Any = SimpleNamespace(param_groups=[{"max_lr": 1.0, "min_lr": 0.1}])
    saved, longer = (build_scheduler(run_of(*WARM[1:], f"training.train_iters={n}"), optimizer) for n in (10, 20))
    saved.step(increment=24)
    longer.load_state_dict(saved.state_dict())
    assert (longer.num_steps, longer.lr_warmup_steps, longer.lr_decay_steps) == (24, 32, 160)
    assert longer.get_lr({"max_lr": 1.0, "min_lr": 0.1}) == 24 / 32


def test_the_schedule_counts_samples_under_a_ramp() -> None:
    """8 iterations of 4 samples and 4 of 8: in samples, the second half begins with the ninth."""
    run = run_of("training.train_samples=69", "training.rampup_batch_size=4 4 32", "optimizer.lr_decay_style=linear")
    assert run.training.num_iterations == 12 and not [*check_values(run)][1:]
    found = rates(run, 13)
    assert found[8] == pytest.approx(0.5) and found[12] == 0
    assert found[1] - found[2] == pytest.approx(4 / 64) and found[9] - found[10] == pytest.approx(8 / 64)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["training.train_samples=80", "training.train_iters=3"], "--train-iters and --train-samples both set"),
        (["training.train_samples=7"], "--train-samples 7 is less than the first batch, 8"),
        (["training.train_iters=9", "training.rampup_batch_size=3,2,9"], "steps of 2 from 3 on do not reach"),
        (["training.train_iters=9", "training.rampup_batch_size=8,2,9"], "steps of 2 from 8 on do not reach"),
        (["training.train_iters=9", "optimizer.lr_decay_style=WSD"], "WSD needs the length of its decay"),
        (["training.train_iters=9", "optimizer.lr_wsd_decay_iters=2"], "--lr-wsd-decay-iters has no effect without"),
        (["training.train_iters=9", "optimizer.lr_wsd_decay_style=cosine"], "--lr-wsd-decay-style has no effect"),
        (
            ["training.train_iters=9", "optimizer.lr_decay_style=WSD", "optimizer.lr_wsd_decay_iters=10"],
            "--lr-wsd-decay-iters 10: the decay is longer than the 72 samples after the warm-up (9 iterations in all)",
        ),
        (
            ["training.train_iters=9", "optimizer.lr_decay_style=WSD", "optimizer.lr_wsd_decay_iters=9", WARM[1]],
            "--lr-wsd-decay-iters 9: the decay is longer than the 56 samples after the warm-up (9 iterations in all)",
        ),
    ],
)
def test_what_cannot_be(keys: list[str], expected: str) -> None:
    found = [text for text in check_values(run_of("checkpoint.save_dir=/tmp/x", *keys))]
    assert len(found) == 1 and expected in found[0], found


def test_a_ramp_must_divide_and_be_three_numbers() -> None:
    found = check_batch(run_of("training.rampup_batch_size=2,3,9", "training.micro_batch_size=2"), 1)
    assert found == [
        "INCREMENT of --rampup-batch-size is not a multiple of 2 = --micro-batch-size 2 x 1 data-parallel ranks: use a "
        "multiple of 2, or --micro-batch-size 1"
    ]
    for text in ("16,16", "0,1,2", "1,0,2", "a,b,c"):
        with pytest.raises(ConfigError, match="expected START,INCREMENT,SAMPLES"):
            run_of(f"training.rampup_batch_size={text}")
