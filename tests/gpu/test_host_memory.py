"""Host memory that is allocated ahead is what a save uses."""

from __future__ import annotations

import pytest
import torch

from llava_mcore.training.saving.pending import allocate_in_background

pytestmark = pytest.mark.gpu


def test_copies_use_what_was_allocated() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    with torch.cuda.device(device):
        tensors = [torch.randn(size, device=device) for size in (3_000_000, 3_000_000, 70_000)]
        allocate_in_background([x.nbytes for x in tensors], device).join()
        before = torch.cuda.host_memory_stats()["num_host_alloc"]
        copies = [x.to("cpu", non_blocking=True) for x in tensors]
        torch.cuda.synchronize()
        assert all(copy.is_pinned() and torch.equal(copy, x.cpu()) for copy, x in zip(copies, tensors, strict=True))
        assert torch.cuda.host_memory_stats()["num_host_alloc"] == before
