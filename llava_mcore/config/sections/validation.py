"""Configuration of validation during training."""

from __future__ import annotations

from llava_mcore.config.sections.base import Iterations, Section


class ValidationConfig(Section):
    """When the loss on the validation split is measured, and on how much of it."""

    eval_interval: Iterations | None = None
    """Iterations between two validations, besides the one after the last iteration; not given: none. Training continues
    bitwise as without it."""
    eval_iters: Iterations | None = None
    """Number of global batches in a validation, always the same samples; not given: every sample once."""
