"""Energon 7.4.1 yields a wrong number of samples if `repetitions` is not an integer.

It stops the last, partial repetition in the middle of the dataset and counts the rest as the next whole one: 1.5 yields
1 from the second round on, and 0.5 yields nothing from a stream of few samples. With this patch a round continues where
the previous one stopped: after r rounds a stream of n samples has yielded floor(r * repetitions * n).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from megatron.energon.wrappers.repeat_dataset import RepeatDataset

from llava_mcore.compat.required import replace_name, required

_repeat_whole = required(RepeatDataset, "__iter__")


def _repeat(self: RepeatDataset[Any]) -> Iterator[Any]:
    if self.repeats is None or float(self.repeats).is_integer():
        yield from _repeat_whole(self)
        return
    share = self.repeats * self.dataset.len_worker()
    target = math.floor((self._repetition + 1) * share) - math.floor(self._repetition * share)
    while self._index < target:
        for sample in self.dataset:
            self._index += 1
            yield sample
            if self._index >= target:
                break
    self._repetition += 1
    self._index = 0


def repeat_parts_exactly() -> None:
    """Make energon respect repetitions such as 0.5. A second call changes nothing.

    Raises:
        AttributeError: this version of energon repeats differently.
    """
    replace_name(RepeatDataset, "__iter__", _repeat)
