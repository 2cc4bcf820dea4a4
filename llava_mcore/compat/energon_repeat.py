"""Energon 7.4.1 gives another number of samples than `repetitions` say where that is no whole number.

It leaves the last, partial repetition in the middle of the dataset and counts what was left as the next whole one, so
that 1.5 gives 1 from the second round on, and a stream of few samples none of 0.5. Here a round goes on where the one
before stopped: behind r rounds a stream of n samples has given floor(r * repetitions * n).
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
    wanted = math.floor((self._repetition + 1) * share) - math.floor(self._repetition * share)
    while self._index < wanted:
        for sample in self.dataset:
            self._index += 1
            yield sample
            if self._index >= wanted:
                break
    self._repetition += 1
    self._index = 0


def repeat_parts_exactly() -> None:
    """Let energon keep to repetitions such as 0.5. Calling it again changes nothing.

    Raises:
        AttributeError: energon repeats in another way.
    """
    replace_name(RepeatDataset, "__iter__", _repeat)
