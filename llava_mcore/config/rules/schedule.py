"""Rules for the length of a run, its batch sizes and its learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterator

from llava_mcore.config.sections.optimizer import OptimizerConfig
from llava_mcore.config.sections.training import TrainingConfig


def check_schedule(training: TrainingConfig, optimizer: OptimizerConfig) -> Iterator[str]:
    """Yield problems of the run's length, its ramp-up or its schedule."""
    # At most one flag sets the length of the run; `resolve` sets it otherwise.
    lengths = {
        "--train-iters": training.train_iters,
        "--train-samples": training.train_samples,
        "--train-epochs": training.train_epochs,
    }
    flags = [flag for flag, value in lengths.items() if value is not None]
    if len(flags) > 1:
        both = "both" if len(flags) == 2 else "all"
        yield f"{' and '.join(flags)} {both} set the length of the run: give only one of them"
    # A run by epochs has no number of iterations before it ends.
    if training.train_epochs is not None and optimizer.lr_wsd_decay_iters is not None:
        yield (
            "--lr-wsd-decay-iters: with --train-epochs the schedule follows the samples that are read: give "
            "--lr-wsd-decay-samples"
        )
        return
    # The ramp reaches the full batch, and the run has a first batch.
    ramp, full = training.ramp, training.global_batch_size
    if ramp is not None and (ramp.start >= full or (full - ramp.start) % ramp.increment):
        yield (
            f"--rampup-batch-size {training.rampup_batch_size}: steps of {ramp.increment} from {ramp.start} on do not "
            f"reach --global-batch-size {full}: change one of them"
        )
        return
    num_iterations = training.num_iterations
    if training.train_samples is not None and not num_iterations:
        first = training.batch_sizes.at(0)
        yield f"--train-samples {training.train_samples} is less than the first batch, {first}: raise it"
    elif num_iterations:
        yield from _check_wsd(training, optimizer, num_iterations)


def _check_wsd(training: TrainingConfig, optimizer: OptimizerConfig, num_iterations: int) -> Iterator[str]:
    decay_options = {
        "--lr-wsd-decay-iters": optimizer.lr_wsd_decay_iters,
        "--lr-wsd-decay-samples": optimizer.lr_wsd_decay_samples,
    }
    names = [name for name, value in decay_options.items() if value is not None]
    if optimizer.lr_decay_style != "WSD":
        return
    if len(names) != 1:
        yield "--lr-decay-style WSD needs the length of its decay: one of --lr-wsd-decay-iters and …-samples"
        return
    warmup, total, decay = schedule_samples(training, optimizer)
    if decay > total - warmup:
        yield (
            f"{names[0]} {decay_options[names[0]]}: the decay is longer than the {total - warmup} samples after the "
            f"warm-up ({num_iterations} iterations in all): lower it"
        )


def schedule_samples(training: TrainingConfig, optimizer: OptimizerConfig) -> tuple[int, int, int]:
    """Return the samples of the warm-up, of the whole run, and of WSD's decay (0 without one)."""
    sizes, num_iterations = training.batch_sizes, training.num_iterations
    if training.samples_to_read is not None:  # packs have different numbers of samples
        total = training.samples_to_read
        return round(total * optimizer.lr_warmup_fraction), total, optimizer.lr_wsd_decay_samples or 0
    warmup = sizes.samples_after(round(num_iterations * optimizer.lr_warmup_fraction))
    total = sizes.samples_after(num_iterations)
    decay = optimizer.lr_wsd_decay_samples or 0
    if optimizer.lr_wsd_decay_iters is not None:
        decay = total - sizes.samples_after(max(0, num_iterations - optimizer.lr_wsd_decay_iters))
        decay += training.global_batch_size * max(0, optimizer.lr_wsd_decay_iters - num_iterations)
    return warmup, total, decay
