"""Configuration of the run's length, batch sizes and number formats."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from llava_mcore.config.rules.batch_size import BatchSizes, Ramp, parse_ramp
from llava_mcore.config.sections.base import Iterations, Samples, Section, Size


def _ramp_text(text: str) -> str:
    parse_ramp(text)
    return text


class TrainingConfig(Section):
    """Length, batch sizes and number formats of the run."""

    train_iters: Iterations | None = None
    """Iterations (optimizer steps) of the whole run, including those before a resume; required unless train_samples is
    given."""
    train_samples: Samples | None = None
    """Samples of the whole run instead of iterations: as many whole iterations as fit into them."""
    micro_batch_size: Size = 1
    """Samples of one forward pass on one data-parallel rank."""
    global_batch_size: Size
    """Samples of one iteration over all data-parallel ranks and micro-batches."""
    rampup_batch_size: Annotated[str, AfterValidator(_ramp_text)] | None = None
    """START,INCREMENT,SAMPLES: start with global batches of START samples and increase them by INCREMENT, evenly over
    SAMPLES samples, up to the global batch size. Not given: all have that size."""
    precision: Literal["bf16", "fp16", "fp32"] | None = None
    """Number format of weights and activations; not given: bf16 with GPUs, fp32 without."""
    loss_scale: float | None = Field(None, gt=0)
    """Loss scale for fp16; not given: dynamic, starting at 65536."""
    fp8: bool = False
    """Use FP8 matrix products in the language model's layers (Transformer Engine on Hopper or newer), together with
    bf16."""
    fp8_vision: bool = False
    """Also use FP8 matrix products in the layers of a trained tower. Needs --cuda-graphs-vision."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise"] = "delayed"
    """How FP8 values are scaled: by the maximum of earlier steps, of this tensor, or of its blocks."""
    fp8_format: Literal["hybrid", "e4m3"] = "hybrid"
    """FP8 format: e4m3 forward and e5m2 for gradients (hybrid), or e4m3 for both."""
    fp8_maximum_over: Literal["all", "tensor_parallel"] = "all"
    """Ranks that share the maximum of the delayed recipe: those of a pipeline stage in all replicas, or in one."""
    fp8_first_layers_bf16: int = Field(0, ge=0, le=10**5)
    """First layers of the language model that stay in bf16 (not with the delayed recipe)."""
    fp8_last_layers_bf16: int = Field(0, ge=0, le=10**5)
    """Last layers of the language model that stay in bf16 (not with the delayed recipe)."""
    seed: int = Field(1234, ge=0, le=2**53)
    """Seed of initialization, dropout and shuffling."""
    deterministic: bool = False
    """Use deterministic kernels only: equal runs give equal bits, but are slower."""

    @property
    def ramp(self) -> Ramp | None:
        """The batch-size ramp-up, if there is one."""
        return None if self.rampup_batch_size is None else parse_ramp(self.rampup_batch_size)

    @property
    def batch_sizes(self) -> BatchSizes:
        """Global batch sizes over the run. Only for runs that passed `check_run`."""
        return BatchSizes.of(self.global_batch_size, self.ramp)

    @property
    def num_iterations(self) -> int:
        """Iterations of the whole run; 0 if not given."""
        if self.train_samples is None:
            return self.train_iters or 0
        return self.batch_sizes.iterations_within(self.train_samples)
