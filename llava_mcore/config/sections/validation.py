"""Configuration of validation during training."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from llava_mcore.config.sections.base import Flag, Iterations, Needs, Section, Size

_GENERATE = Needs("validation.eval_generate")


class ValidationConfig(Section):
    """Validation: the loss, and answers to questions."""

    flag_group = "validation"

    eval_interval: Annotated[Iterations | None, Flag("--eval-interval")] = None
    """Iterations between validations, besides the one after the last iteration. Default: no validation. Training
    continues bit for bit as without."""
    eval_iters: Annotated[Iterations | None, Flag("--eval-iters"), Needs("validation.eval_interval")] = None
    """Number of global batches per validation, always the same samples. Default: every sample once."""
    eval_generate: Annotated[Iterations | None, Flag("--eval-generate")] = None
    """Iterations between rounds in which the model answers questions from the validation split, besides the one after
    the last iteration. Default: no such rounds. Training continues bit for bit as without."""
    eval_generate_samples: Annotated[Size, Flag("--eval-generate-samples"), _GENERATE] = 64
    """Samples of the validation split to ask in each round, evenly distributed and always the same."""
    eval_generate_max_new_tokens: Annotated[Size, Flag("--eval-generate-max-new-tokens"), _GENERATE] = 64
    """Maximum number of tokens of an answer."""
    eval_generate_batch_size: Annotated[Size, _GENERATE] = 8
    """Questions that a model replica answers at the same time."""
    eval_generate_examples: Annotated[int, _GENERATE] = Field(8, ge=0, le=64)
    """Answers of a round that are shown with their images in answers/ITERATION.png, TensorBoard and Weights & Biases.
    """
