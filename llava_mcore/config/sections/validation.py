"""Configuration of validation while training."""

from __future__ import annotations

from llava_mcore.config.sections.base import Iterations, Section


class ValidationConfig(Section):
    """When the loss of the data's validation part is measured, and of how much of it."""

    eval_interval: Iterations | None = None
    """Iterations between two validations, besides the one after the last iteration; not given: none. Training continues
    with the same bits as without."""
    eval_iters: Iterations | None = None
    """Number of global batches in a validation, always the same samples; not given: every sample once."""
