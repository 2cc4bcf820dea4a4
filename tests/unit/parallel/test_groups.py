"""Process groups that the world's size does not allow."""

from __future__ import annotations

import datetime
import re

import pytest
import torch.distributed as dist

from llava_mcore.errors import ConfigError
from llava_mcore.parallel import random
from llava_mcore.parallel.replica_groups import replica_groups


@pytest.mark.parametrize("tp", [2, 4])
def test_a_world_that_replicas_do_not_divide(monkeypatch: pytest.MonkeyPatch, tp: int) -> None:
    """The rules of a run see to that, so this is for worlds that others have started."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    message = f"3 processes cannot be divided into groups of --tp {tp} x --pp 1 = {tp}: start a multiple of {tp}"
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        replica_groups(tp, 1, 1, datetime.timedelta(seconds=1))
    assert error.value.on_all_ranks


def test_replicas_and_stages_draw_other_dropout_and_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    of_weights, of_dropout = list[int](), list[int]()
    for stage in range(8):
        for replica in range(64):
            monkeypatch.setattr(random.parallel_state, "get_pipeline_model_parallel_rank", lambda stage=stage: stage)
            monkeypatch.setattr(random.parallel_state, "get_data_parallel_rank", lambda replica=replica, **_: replica)
            monkeypatch.setattr(random, "_seed", of_weights.append)
            random.seed_everything(1234)
            monkeypatch.setattr(random, "_seed", of_dropout.append)
            random.seed_replicas(1234)
    assert len(set(of_weights)) == 8 and len(set(of_dropout)) == 8 * 64
