"""torch's files across its versions."""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any

from torch.distributed.checkpoint.metadata import TensorProperties

NUM_STATE = 5
"""Values of a pickled TensorProperties up to torch 2.14; 2.15 adds `strides`, which only ever describes a tensor."""


@functools.cache
def accept_newer_metadata() -> None:
    """Let this torch read the metadata of checkpoints that torch 2.15 wrote."""
    if any(field.name == "strides" for field in fields(TensorProperties)):
        return
    properties: Any = TensorProperties
    set_state = properties.__setstate__

    def set_known_state(self: TensorProperties, state: tuple[Any, ...]) -> None:
        set_state(self, state[:NUM_STATE])

    properties.__setstate__ = set_known_state
