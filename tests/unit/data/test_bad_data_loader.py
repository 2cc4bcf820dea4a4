"""Every kind of bad input through the loader that trains: left out with its reason, or one message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.loader.train_loader import TrainLoader
from llava_mcore.data.samples import Batch
from llava_mcore.errors import DataError
from tests.helpers.bad_data import BAD_DATA, SEQ_LENGTH, BadData

pytest_plugins = ("tests.helpers.llava_fixtures",)


def read(path: Path, assets: Assets, bad: BadData) -> list[Batch]:
    data = DataConfig(
        path=path,
        seq_length=SEQ_LENGTH,
        num_workers=0,
        shuffle_buffer_size=0,
        packing=bad.packing,
        packing_buffer_size=2,
        num_streams=None if bad.ranks > 1 else 1,
    )
    loader = TrainLoader(data, assets, micro_batch_size=1, dp_rank=bad.ranks - 1, dp_size=bad.ranks, seed=1)
    return [next(loader) for _ in range(12)]


@pytest.mark.parametrize("bad", BAD_DATA, ids=lambda bad: bad.name)
def test_loader_says_what_is_promised(bad: BadData, assets: Assets, tmp_path: Path) -> None:
    path = bad.make(tmp_path)
    if bad.kind == "stop":
        with pytest.raises(DataError) as caught:
            read(path, assets, bad)
        assert re.search(bad.text, str(caught.value)), str(caught.value)
        return
    reasons = [skip.reason for batch in read(path, assets, bad) for skip in batch.skipped]
    assert bool(reasons) == (bad.kind == "skip")
    assert all(re.search(bad.text, reason) for reason in reasons), reasons


def test_table_is_as_long_as_promised() -> None:
    assert len({bad.name for bad in BAD_DATA if bad.kind != "fine"}) >= 60
