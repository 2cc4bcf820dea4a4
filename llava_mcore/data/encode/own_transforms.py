"""Transforms for `data.augment` that torchvision does not have. docs/extend/augmentation.md adds one."""

from __future__ import annotations

from typing import ClassVar

from torchvision.transforms import v2


class OwnTransform(v2.Transform):
    """A transform of one picture, uint8 [3, height, width], with its arguments in `__init__`.

    It keeps type and size, has no state, and draws from torch's global generator alone, which is seeded for each
    picture.
    """

    moves: ClassVar[bool] = False
    """Whether things in the picture are elsewhere afterwards, so that coordinates in the text are wrong."""


OWN_TRANSFORMS: dict[str, type[OwnTransform]] = {}
"""By the name in `data.augment`."""
