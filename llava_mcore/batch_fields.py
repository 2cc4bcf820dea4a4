"""The named tensors by which pictures travel, from the loader's processes to the model.

An architecture says which ones its batches have; collation, padding and broadcasts only read what a `Field` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Field:
    """One named tensor of a micro-batch; those of its samples are put together along the first dim.

    `dtypes`: those it may have. `item_shape`: the dims behind the first, None where any size may stand, which is one
    for all of a run's batches. `index_of`: what the values point at, if they do: "tokens" [b * s], so that they move
    with what stands before them, or "features", the rows that the connector returns, of all pictures of the
    micro-batch. `shared`: every sample has the same values, of which a micro-batch keeps one copy.
    """

    dtypes: tuple[torch.dtype, ...]
    item_shape: tuple[int | None, ...] = ()
    index_of: Literal["tokens", "features"] | None = None
    shared: bool = False

    def joined(self, values: Sequence[NDArray[Any]], before: Sequence[int]) -> Tensor:
        """Return the values of all pictures of a micro-batch as one tensor.

        Args:
            values: of each picture.
            before: what stands before each picture of what the values point at, if they do.
        """
        if not values:
            return torch.empty([0, *(n or 0 for n in self.item_shape)], dtype=self.dtypes[0])
        if self.index_of is not None:
            values = [value + number for value, number in zip(values, before, strict=True)]
        return torch.from_numpy(np.concatenate(values)).to(self.dtypes[0])


Fields = Mapping[str, Field]
"""By name, in the order in which they are sent."""

PIXEL_VALUES, PIXEL_SCALE, FEATURE_POSITIONS = "pixel_values", "pixel_scale", "feature_positions"
FEATURE_ROWS = "feature_rows"
"""Which of the connector's features they are, in the order of FEATURE_POSITIONS; without this field all, in order."""
NEWLINE_POSITIONS = "newline_positions"
"""The tokens that the learnt newline takes the place of."""
RESIZED_POSITIONS, RESIZED_ROWS, RESIZED_WEIGHTS = "resized_positions", "resized_rows", "resized_weights"
"""The tokens that features of a resized grid take the place of; each is a weighted sum of four of the connector's."""

PICTURE_FIELDS: Fields = {
    PIXEL_VALUES: Field((torch.uint8, torch.float32), (3, None, None)),
    PIXEL_SCALE: Field((torch.float32,), (3,), shared=True),
    FEATURE_POSITIONS: Field((torch.int64,), index_of="tokens"),
}
"""Tiles of one size (a picture is one or several), what normalises them (see `pixels.normalise`; no rows where they
are float32), and the token that each feature takes the place of."""
