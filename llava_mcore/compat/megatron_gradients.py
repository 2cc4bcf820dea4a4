"""The gradient buffers of megatron-core 0.19.2's data-parallel wrapper, which have no public interface.

Import `llava_mcore.parallel` first, as for megatron.core itself.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from itertools import groupby

from megatron.core.distributed import DistributedDataParallel
from torch import Tensor
from torch.nn import Parameter

from llava_mcore.compat.required import required


def gradient_ranges(wrapped: DistributedDataParallel, parameters: Container[Parameter]) -> Iterator[Tensor]:
    """Yield the gradients of some trained parameters as few flat views, with the padding between them.

    Each view is of parameters that no other one is between in a buffer.
    """
    for buffer in required(wrapped, "buffers"):
        places = required(buffer, "param_index_map")  # start, end and bucket of each parameter
        spans = sorted((start, end, param in parameters) for param, (start, end, _) in places.items())
        for is_wanted, found in groupby(spans, key=lambda span: span[2]):
            if is_wanted:
                together = list(found)
                yield required(buffer, "grad_data")[together[0][0] : together[-1][1]]
