"""The loss on the validation split during training, without any effect on training."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from llava_mcore.checkpoint.fp8_scales import scaled_modules
from llava_mcore.data.loader.datasets import short_names
from llava_mcore.data.loader.validation_data import ValidationData, ValidationPass
from llava_mcore.errors import DataError, LlavaMcoreError
from llava_mcore.parallel.batch import HostBatch, MicroBatch, fill_rows, without_loss
from llava_mcore.parallel.context import uncuttable
from llava_mcore.parallel.groups import gather_to_all, sum_over_ranks
from llava_mcore.parallel.random import kept_random_state
from llava_mcore.parallel.share import share_step
from llava_mcore.parallel.together import raise_listed
from llava_mcore.processes.watchdog import Watchdog
from llava_mcore.training.fetch import SkipBudget
from llava_mcore.training.optimization.data_parallel import gathers_ahead
from llava_mcore.training.setup import Trainer
from llava_mcore.training.step import LOSS, forward_backward


@dataclass(frozen=True)
class ValidationResult:
    """One validation: `loss` is the mean over all its trained tokens, None if it is not finite; perplexity: exp(loss).

    num_skipped: samples that were skipped because they are broken or too long.
    losses: of each dataset of a blend, by its path; empty without a blend.
    """

    iteration: int
    loss: float | None
    perplexity: float | None
    num_trained_tokens: int
    num_conversations: int
    num_skipped: int
    seconds: float
    losses: Mapping[str, float] = field(default_factory=dict)

    def line(self) -> str:
        """Return the console line."""
        loss = "-" if self.loss is None else f"{self.loss:.4f}"
        perplexity = "-" if self.perplexity is None else f"{self.perplexity:.3f}"
        skipped = f" | {self.num_skipped} samples skipped" if self.num_skipped else ""
        names = short_names(list(self.losses))
        parts = ", ".join(f"{name} {value:.4f}" for name, value in zip(names, self.losses.values(), strict=True))
        return (
            f"validation after step {self.iteration} | loss {loss}{f' ({parts})' if parts else ''} | perplexity "
            f"{perplexity} | {self.num_conversations} samples, {self.num_trained_tokens} tokens | {self.seconds:.1f} s"
            f"{skipped}"
        )

    def values(self) -> dict[str, float]:
        """Return the numbers under their names in sinks."""
        values = {"loss": self.loss, "perplexity": self.perplexity, "seconds": self.seconds}
        names = short_names(list(self.losses))
        values |= {f"loss/{name}": loss for name, loss in zip(names, self.losses.values(), strict=True)}
        return {f"validation/{name}": value for name, value in values.items() if value is not None}

    def record(self) -> dict[str, Any]:
        """Return the object to write as a JSON line."""
        return asdict(self)


class Validator:
    """Measures the loss on the validation split; all methods except `due` are collective calls."""

    def __init__(self, trainer: Trainer, data: ValidationData | None, watchdog: Watchdog) -> None:
        """data: on ranks that load data."""
        run, groups = trainer.run, trainer.groups
        self.trainer, self.data, self.watchdog = trainer, data, watchdog
        self.micro_batch_size = 1 if run.data.packing else run.training.micro_batch_size
        self.most_batches = run.training.global_batch_size // (run.training.micro_batch_size * groups.dp_size)
        self._has_told = False

    def due(self, iteration: int, *, is_last: bool) -> bool:
        """Return whether a validation follows this iteration."""
        interval = self.trainer.run.validation.eval_interval
        return interval is not None and (iteration % interval == 0 or is_last)

    def run(self, iteration: int) -> ValidationResult:
        """Run one validation. DataError on all ranks if any cannot read the data, or too much of it is broken."""
        start = time.perf_counter()
        groups = self.trainer.groups
        # Ranks that read no data do not know how many datasets there are.
        (num_parts,) = sum_over_ranks(groups, [0 if self.data is None or groups.rank else len(self.data.parts)])
        budget = SkipBudget(self.trainer.run.data.max_skip_rate)
        sums = torch.zeros(num_parts, 2, dtype=torch.float64)  # loss, trained tokens; of this rank's replica
        used = skipped = 0
        with without_side_effects(self.trainer):
            for part in range(num_parts):
                sums[part], *counts = self._measure_part(iteration, part, budget)
                used, skipped = used + counts[0], skipped + counts[1]
        self._has_told = True
        # The mean over the trained tokens of all replicas.
        budget.check(groups, used, skipped)
        dist.all_reduce(sums, group=groups.control)
        loss, *losses = (_mean(pair) for pair in (sums.sum(0), *sums))
        named = {} if self.data is None or num_parts == 1 else zip(self.data.parts, losses, strict=True)
        return ValidationResult(
            iteration=iteration,
            loss=loss,
            perplexity=math.exp(loss) if loss is not None and loss < 700 else None,
            num_trained_tokens=int(sums[:, 1].sum()),
            num_conversations=used,
            num_skipped=skipped,
            seconds=time.perf_counter() - start,
            losses={name: value for name, value in dict(named).items() if value is not None},
        )

    def _measure_part(self, iteration: int, part: int, budget: SkipBudget) -> tuple[torch.Tensor, int, int]:
        """Return (summed loss, trained tokens) of this replica on one dataset; conversations that all ranks have used
        and skipped."""
        groups = self.trainer.groups
        # Every pass reads the same samples, so that validations can be compared.
        passing = None if self.data is None else self.data.open(groups.dp_rank, groups.dp_size, part)
        filler: MicroBatch | None = None
        sums = torch.zeros(2, dtype=torch.float64)
        used = skipped = rounds = 0
        # Run as many micro-batches at a time as a training step has, until no replica has any left.
        try:
            while True:
                self.watchdog.begin(f"validation after iteration {iteration}, dataset {part + 1}, part {rounds + 1}")
                batches, counts = self._fetch(passing, budget)
                if not any(counts.per_replica):
                    return sums, used, skipped
                if rounds == 0:
                    filler = self._filler(batches, counts.per_replica)
                used, skipped, rounds = used + counts.used, skipped + counts.skipped, rounds + 1
                total = self._num_passes(counts.per_replica)
                if total:
                    sums += self._measure(batches, filler, total)
        finally:
            if passing is not None:
                passing.close()

    def _fetch(self, passing: ValidationPass | None, budget: SkipBudget) -> tuple[list[Any], _ValidationCounts]:
        """Read as many micro-batches as a training step has, or those that are left; [] on ranks that do not read."""
        groups = self.trainer.groups
        batches: list[Any] = []
        problem: str | None = None
        if passing is not None:
            try:
                batches = [batch for _, batch in zip(range(self.most_batches), passing, strict=False)]
                problem = next(filter(None, (uncuttable(batch, groups.cp_size) for batch in batches)), None)
            except LlavaMcoreError as error:
                problem = str(error)
        raise_listed(groups, problem, DataError, "validation data cannot be used")
        if not self._has_told:
            budget.report(batches)
        counts = [0] * groups.dp_size
        counts[groups.dp_rank] = len(batches)
        used = sum(len(batch.sample_keys) for batch in batches)
        skipped = sum(len(batch.skipped) for batch in batches)
        used, skipped, *per_replica = sum_over_ranks(groups, [used, skipped, *counts])
        return batches, _ValidationCounts(used, skipped, tuple(per_replica))

    def _num_passes(self, per_replica: Sequence[int]) -> int:
        """Return how many micro-batches this replica runs, some of them fillers."""
        groups = self.trainer.groups
        count = max(per_replica) if self.trainer.replicas_run_together else per_replica[groups.dp_rank]
        # An interleaved schedule needs a multiple of the number of stages.
        return self.most_batches if count and self._is_interleaved else count

    def _filler(self, batches: Sequence[HostBatch], per_replica: Sequence[int]) -> MicroBatch | None:
        """Return a micro-batch without loss to fill up a replica's passes, on ranks that load data; a collective call
        if a replica has none at all and gets that of another."""
        groups, fields = self.trainer.groups, self.trainer.fields
        filler = without_loss(fill_rows(batches[0], self.micro_batch_size), fields) if batches else None
        if min(per_replica) or not self.trainer.replicas_run_together:
            return filler
        source = next(index for index, count in enumerate(per_replica) if count)
        sent = replace(filler, media={k: x.clone() for k, x in filler.media.items()}) if filler is not None else None
        received = gather_to_all(groups, sent if groups.dp_rank == source else None)
        return next(x for x in received if x is not None) if groups.loads_data else None

    def _measure(self, read: Sequence[HostBatch], filler: MicroBatch | None, total: int) -> torch.Tensor:
        """Return (summed loss, trained tokens) of this replica's micro-batches; zeros on ranks that do not report the
        loss.

        Args:
            filler: fills up to `total` micro-batches.
        """
        groups, fields, batches = self.trainer.groups, self.trainer.fields, None
        if self.data is not None:
            batches = [fill_rows(batch, self.micro_batch_size) for batch in read]
            if len(batches) < total:
                assert filler is not None
                batches += [filler] * (total - len(batches))
        reports = forward_backward(self.trainer.chunks, share_step(groups, batches, total, fields), forward_only=True)
        if not groups.reports_loss:
            return torch.zeros(2, dtype=torch.float64)
        return torch.stack([report[LOSS] for report in reports if LOSS in report]).double().sum(0).cpu()

    @property
    def _is_interleaved(self) -> bool:
        return len(self.trainer.chunks) > 1


def _mean(pair: torch.Tensor) -> float | None:
    """Return the loss per trained token of (summed loss, trained tokens); None if it is not finite."""
    loss = pair[0].item() / pair[1].item() if pair[1] else math.nan
    return loss if math.isfinite(loss) else None


@dataclass(frozen=True)
class _ValidationCounts:
    """Conversations used and skipped on all ranks, and micro-batches of each replica."""

    used: int
    skipped: int
    per_replica: tuple[int, ...]


@contextlib.contextmanager
def without_side_effects(trainer: Trainer) -> Iterator[None]:
    """Run the model without dropout and gradients, and restore its state.

    The state is the modules' modes, the random generators (Transformer Engine's attention advances them even without
    dropout) and, with FP8, the history of largest values from which the next scales are computed.
    """
    modules = [module for chunk in trainer.chunks for module in chunk.modules()]
    modes = [module.training for module in modules]
    scaled = [module for model in trainer.models for module in scaled_modules(model).values()]
    saved_scales = [module.get_fp8_meta_tensors() for module in scaled]
    for chunk in trainer.chunks:
        if gathers_ahead(chunk):
            chunk.start_param_sync(force_sync=True)
        chunk.set_is_first_microbatch()  # with FP8: convert the weights again, which the last step has changed
        chunk.eval()
    try:
        with torch.no_grad(), kept_random_state():
            yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for module, scales in zip(scaled, saved_scales, strict=True):
            module.reset_fp8_meta_tensors(scales)  # None: to their initial values
