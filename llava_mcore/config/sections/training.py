"""Configuration of the run's length, batch sizes and number formats."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from llava_mcore.config.rules.batch_size import BatchSizes, Ramp, parse_ramp
from llava_mcore.config.sections.base import Flag, Iterations, Needs, Samples, Section, Size


def _ramp_text(text: str) -> str:
    parse_ramp(text)
    return text


RampText = Annotated[str, AfterValidator(_ramp_text)]
_FP8 = Needs("training.fp8")


class TrainingConfig(Section):
    """Length, batch sizes and number formats of the run."""

    flag_group = "training"

    train_iters: Annotated[Iterations | None, Flag("--train-iters")] = None
    """Iterations (optimizer steps) of the whole run, including those before a resume. Default: one pass through the
    data, unless train_samples or train_epochs is given."""
    train_samples: Annotated[Samples | None, Flag("--train-samples")] = None
    """Length of the whole run in samples: as many whole iterations as fit into them."""
    train_epochs: Annotated[float | None, Flag("--train-epochs")] = Field(None, gt=0, le=10**6)
    """Length of the whole run in passes through the data, such as 3 or 0.5: it ends with the iteration that reads the
    last sample of the last pass. Skipped samples count, and so does every sample in a pack."""
    epoch_samples: Annotated[Samples | None, Needs("training.train_epochs")] = None
    """Samples of one pass through the data. Default: counted at the start. Required for weighted blends."""
    micro_batch_size: Annotated[Size, Flag("--micro-batch-size")] = 1
    """Samples per forward pass on one data-parallel rank."""
    global_batch_size: Annotated[Size, Flag("--global-batch-size")]
    """Samples per iteration, over all data-parallel ranks and micro-batches."""
    rampup_batch_size: Annotated[RampText | None, Flag("--rampup-batch-size")] = None
    """START,INCREMENT,SAMPLES: start with global batches of START samples and increase them by INCREMENT, evenly over
    SAMPLES samples, up to the global batch size. Default: no ramp-up."""
    precision: Annotated[Literal["bf16", "fp16", "fp32"] | None, Flag("--precision", after="--adam-beta2")] = None
    """Number format of weights and activations. Default: bf16 with GPUs, fp32 without."""
    loss_scale: Annotated[float | None, Flag("--loss-scale"), Needs("training.precision", value="fp16")] = Field(
        None, gt=0
    )
    """Fixed loss scale for fp16. Default: dynamic, starting at 65536."""
    fp8: Annotated[bool, Flag("--fp8", after="--flash-attn")] = False
    """Use FP8 matrix products in the language model's layers (Transformer Engine on Hopper or newer), together with
    bf16."""
    fp8_vision: Annotated[bool, Flag("--fp8-vision"), _FP8] = False
    """Also use FP8 matrix products in the layers of a trained tower. Needs --cuda-graphs-vision."""
    fp8_recipe: Annotated[Literal["delayed", "tensorwise", "blockwise"], Flag("--fp8-recipe"), _FP8] = "delayed"
    """How FP8 values are scaled: by the maximum of earlier steps (delayed), of the tensor, or of its blocks."""
    fp8_format: Annotated[Literal["hybrid", "e4m3"], Flag("--fp8-format"), _FP8] = "hybrid"
    """FP8 format: e4m3 forward and e5m2 for gradients (hybrid), or e4m3 for both."""
    fp8_first_layers_bf16: Annotated[int, _FP8] = Field(0, ge=0, le=10**5)
    """First layers of the language model that stay in bf16 (not with the delayed recipe)."""
    fp8_last_layers_bf16: Annotated[int, _FP8] = Field(0, ge=0, le=10**5)
    """Last layers of the language model that stay in bf16 (not with the delayed recipe)."""
    seed: int = Field(1234, ge=0, le=2**53)
    """Seed of initialization, dropout and shuffling."""
    deterministic: Annotated[bool, Flag("--deterministic", after="--cuda-graphs-vision")] = False
    """Use only deterministic kernels: equal runs give equal bits, but are slower."""

    @property
    def ramp(self) -> Ramp | None:
        """The batch-size ramp-up, if there is one."""
        return None if self.rampup_batch_size is None else parse_ramp(self.rampup_batch_size)

    @property
    def batch_sizes(self) -> BatchSizes:
        """Global batch sizes over the run. Only for runs that passed `check_run`."""
        return BatchSizes.of(self.global_batch_size, self.ramp)

    @property
    def samples_to_read(self) -> int | None:
        """Samples that a run by epochs reads, with skipped ones and every sample of a pack; None for other runs, and
        before the data has been counted."""
        if self.train_epochs is None or self.epoch_samples is None:
            return None
        return math.ceil(self.train_epochs * self.epoch_samples)

    @property
    def num_iterations(self) -> int:
        """Iterations of the whole run, at most: a run by epochs ends sooner if samples are packed or skipped. 0 if not
        given."""
        if self.samples_to_read is not None:
            within = self.batch_sizes.iterations_within(self.samples_to_read)
            return within + (self.batch_sizes.samples_after(within) < self.samples_to_read)
        if self.train_samples is None:
            return self.train_iters or 0
        return self.batch_sizes.iterations_within(self.train_samples)

    def fraction_done(self, iteration: int, num_read: int) -> float:
        """Return how much of the run is done, from 0 to 1.

        Args:
            num_read: samples that were read, as `samples_to_read` counts them.
        """
        total, num_iterations = self.samples_to_read, self.num_iterations
        by_iterations = iteration / num_iterations if num_iterations else 1.0
        return min(1.0, by_iterations if total is None else max(by_iterations, num_read / total))
