"""Rows shuffled by a seed: every kind of source, killed and run again, with several processes, and in little memory."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llava_mcore.data.storage.dataset_path import SCRATCH
from llava_mcore.errors import DataError
from llava_mcore.prepare import prepare_source
from llava_mcore.prepare.journal import Journal
from llava_mcore.prepare.output.tar_file import ShardWriter
from llava_mcore.prepare.shard_plan import Options
from llava_mcore.prepare.shuffle import Permutation
from tests.helpers import prepare_cases as cases
from tests.helpers.prepare_cases import Case, contents, make, read_back, shard_bytes, vqa_cases

SHUFFLED = Options(rows_per_shard=4, shuffle_seed=3)
WRITERS: list[Callable[[Path, Sequence[Case]], Path]] = [
    cases.write_llava,
    cases.write_llava_lines,
    cases.write_parquet,
    cases.write_hub,
    cases.write_saved,
    cases.write_triples,
    cases.write_tars,
]


def order(size: int, seed: int = 3) -> list[int]:
    return Permutation(size, seed)(np.arange(size, dtype=np.uint64)).tolist()


def test_a_permutation_has_each_number_once_at_any_place() -> None:
    for size in (1, 2, 3, 7, 64, 1000, 4097):
        assert sorted(order(size)) == list(range(size))
        parts = [Permutation(size, 3)(np.arange(i, min(i + 5, size), dtype=np.uint64)) for i in range(0, size, 5)]
        assert np.concatenate(parts).tolist() == order(size)
    # Where each number comes is uniform over seeds: chi-square with 15 * 15 degrees of freedom.
    counts = np.zeros((16, 16))
    for seed in range(320):
        counts[np.arange(16), order(16, seed)] += 1
    chi_square = ((counts - 20) ** 2 / 20).sum()
    assert abs(chi_square - 15 * 15) < 5 * (2 * 15 * 15) ** 0.5


@pytest.mark.parametrize("writer", WRITERS)
def test_every_kind_of_source(writer: Callable[[Path, Sequence[Case]], Path], tmp_path: Path) -> None:
    source = writer(tmp_path / "src", vqa_cases(11))
    make(source, tmp_path / "plain")
    result = make(source, tmp_path / "out", SHUFFLED)
    plain, found = read_back(tmp_path / "plain"), read_back(tmp_path / "out")
    expected = [plain[row] for row in order(11)]
    assert [sample["messages"] for sample in found] == [sample["messages"] for sample in expected]
    assert [sample["pictures"] for sample in found] == [sample["pictures"] for sample in expected]
    assert [sample["source"] for sample in found] == [sample["source"] for sample in expected]
    assert [sample["key"] for sample in found] == [f"{position:09d}" for position in range(11)]
    assert result.finished and not [*(tmp_path / "out" / SCRATCH).glob("*.arrow")]


def test_several_sources_killed_and_continued_by_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files with and without offsets in one source; the second start has processes, the first one none."""
    folder = tmp_path / "src"
    lines = cases.write_llava_lines(folder / "a", vqa_cases(9))
    table = cases.write_parquet(folder / "b", vqa_cases(6))
    tar = cases.write_llava(folder / "c", vqa_cases(5))
    paths = (lines, table, tar)

    def prepare(out: Path, options: Options = SHUFFLED, num_workers: int = 0) -> prepare_source.Result:
        source = prepare_source.SourcePaths(paths)
        return prepare_source.prepare(source, out, options, cases.Quiet(), num_workers=num_workers)

    prepare(tmp_path / "whole")
    whole = shard_bytes(tmp_path / "whole")
    assert len(whole) == 5 and len({json.dumps(sample["source"]) for sample in read_back(tmp_path / "whole")}) == 20
    for owner, name in ((Journal, "add"), (ShardWriter, "finish")):
        out, original, calls = tmp_path / name, getattr(owner, name), iter([None, None])

        def fails(*args: object, original: Callable[..., object] = original, calls: object = calls) -> object:
            next(calls)  # type: ignore[call-overload]
            return original(*args)

        with monkeypatch.context() as patch, pytest.raises((StopIteration, RuntimeError)):
            patch.setattr(owner, name, fails)
            prepare(out)
        assert 0 < len(shard_bytes(out)) < 5
        assert prepare(out, num_workers=2 if name == "add" else 0).num_made < 5
        assert shard_bytes(out) == whole
        for file in ("manifest.json", ".nv-meta/index.uuid", ".nv-meta/split.yaml"):
            assert (out / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    with pytest.raises(DataError, match="--shuffle-seed: started with 3, now 4"):
        prepare(tmp_path / "whole", Options(rows_per_shard=4, shuffle_seed=4))
    prepare(tmp_path / "other", Options(rows_per_shard=4, shuffle_seed=4))
    assert shard_bytes(tmp_path / "other") != whole


def test_a_row_group_larger_than_what_is_held(tmp_path: Path) -> None:
    """13 MB in one row group: its rows are copied and read in other order within a few MB, without pyarrow's pool."""
    noise = np.random.default_rng(0)
    rows = [{"question": f"q {i}", "answer": noise.bytes(8000).hex()} for i in range(800)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=800, compression="none")
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        make(tmp_path / "a.parquet", tmp_path / "out", Options(rows_per_shard=100, shuffle_seed=0))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5e6 and pa.total_allocated_bytes() - before < 5e6
    assert len(contents(tmp_path / "out")) == 800


def test_no_room_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = cases.write_parquet(tmp_path / "src", vqa_cases(5))
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(prepare_source.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DataError, match=re.escape("--keep-order, which needs no copy")):
        make(source, tmp_path / "out", SHUFFLED)
    assert make(source, tmp_path / "out", Options(rows_per_shard=4), overwrite=True).finished


def test_few_rows_get_smaller_shards_for_validation(tmp_path: Path) -> None:
    source = cases.write_llava_lines(tmp_path / "src", vqa_cases(30))
    for seed in (None, 0):
        options = Options(val_ratio=0.1, shuffle_seed=seed)
        result = make(source, tmp_path / f"out {seed}", options)
        assert {part: (p.shards, p.samples) for part, p in result.parts.items()} == {"train": (9, 27), "val": (1, 3)}
        assert make(source, tmp_path / f"out {seed}", options).num_made == 0
    one = cases.write_llava_lines(tmp_path / "one", vqa_cases(1))
    with pytest.raises(DataError, match="needs at least two rows, but there is one"):
        make(one, tmp_path / "a", Options(val_ratio=0.1))
    with pytest.raises(DataError, match=r"the 30 rows make one of 50; omit --samples-per-shard, or lower it to 1"):
        make(source, tmp_path / "b", Options(rows_per_shard=50, val_ratio=0.1))
