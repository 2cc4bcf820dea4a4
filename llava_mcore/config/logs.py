"""Configuration of what is reported, and where."""

from __future__ import annotations

from pydantic import Field

from llava_mcore.config.section import Section


class LoggingConfig(Section):
    """What is reported."""

    log_interval: int = Field(1, ge=1)
    """Iterations between two lines on the console; metrics.jsonl gets every iteration."""
    tensorboard: bool = False
    """Also write TensorBoard's event files, in SAVE_DIR/NAME/tensorboard."""
    wandb: bool = False
    """Also log to Weights & Biases; a resumed run goes on in the same one. WANDB_MODE=offline needs no network."""
    wandb_project: str = "llava_mcore"
    """Project of Weights & Biases that the run belongs to."""
    debug: bool = False
    """Print the first batch in words, trained parts marked, and the shapes that enter and leave each part of the model
    on every pipeline stage."""
