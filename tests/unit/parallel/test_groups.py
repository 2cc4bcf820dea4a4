"""Process groups that the world's size does not allow."""

from __future__ import annotations

import datetime
import re

import pytest
import torch.distributed as dist

from llava_mcore.errors import ConfigError
from llava_mcore.parallel.replica_groups import replica_groups


@pytest.mark.parametrize("tp", [2, 4])
def test_a_world_that_replicas_do_not_divide(monkeypatch: pytest.MonkeyPatch, tp: int) -> None:
    """The rules of a run see to that, so this is for worlds that others have started."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    message = f"3 processes cannot be divided into groups of --tp {tp} x --pp 1 = {tp}: start a multiple of {tp}"
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        replica_groups(tp, 1, 1, datetime.timedelta(seconds=1))
    assert error.value.on_all_ranks
