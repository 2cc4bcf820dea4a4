"""Configuration of validation while training."""

from __future__ import annotations

from llava_mcore.config.sections.base import Iterations, Section


class ValidationConfig(Section):
    """When the loss of the data's validation part is measured, and of how much of it."""

    eval_interval: Iterations | None = None
    """Iterations between two validations, beside the one after the last iteration; not given: none. Training goes on
    with the very bits that it would have without."""
    eval_iters: Iterations | None = None
    """Samples of a validation, counted in global batches, always the same ones; not given: every sample once."""
