"""A tokenized conversation: ids, and the mask of trained tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TextTokens:
    """A tokenized conversation of m tokens in which every picture and video is one placeholder."""

    ids: NDArray[np.int64]
    """[m]"""
    trained: NDArray[np.bool_]
    """[m]; True if the model is trained to predict this token (not the one after it)."""
    typed: tuple[str, ...] = ()
    """Special tokens in the text of its turns."""
    num_filled: int = 0
    """Trained answers before which the template has written its own text (`ChatText.own_text`)."""


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """A tokenized conversation of n tokens with k pictures and videos, each as its own tokens."""

    input_ids: NDArray[np.int64]
    """[n]"""
    trained: NDArray[np.bool_]
    """[n]"""
    starts: NDArray[np.int64]
    """[k]; start of each picture or video."""
    typed: tuple[str, ...] = ()
    """Special tokens in the text of its turns; empty if its tokens were stored."""
