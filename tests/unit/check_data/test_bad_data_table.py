"""Every kind of bad input: what `check` says about it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llava_mcore.check_data import check as check_data
from llava_mcore.check_data.report import DataReport
from llava_mcore.cli import check
from llava_mcore.data.encode.assets import Assets
from tests.helpers.bad_data import BAD_DATA, FAULTY, SEQ_LENGTH, BadData

pytest_plugins = ("tests.helpers.llava_fixtures",)


def examine(path: Path, assets: Assets, *flags: str) -> DataReport:
    """The report that the command would print, at a rate of skips that one sample in four keeps to."""
    rate = ["--max-skip-rate", "0.3", "--seq-length", str(SEQ_LENGTH)]
    args = check.parser().parse_args(["--data-path", str(path), "--tokenizer-load-dir", "unused", *rate, *flags])
    return check_data.examine(check.data_check(args), assets)[0]


def said(report: DataReport) -> str:
    """Everything that the report says about the data."""
    return "\n".join([*report.stop, *report.remarks, *(group.reason for group in report.tally.groups.values())])


def test_table_has_sixty_kinds_with_names_of_their_own() -> None:
    names = [bad.name for bad in BAD_DATA]
    assert len(set(names)) == len(names)
    assert sum(bad.kind != "fine" for bad in BAD_DATA) >= 60


@pytest.mark.parametrize("bad", [bad for bad in BAD_DATA if bad.ranks == 1], ids=lambda bad: bad.name)
def test_check_says_what_is_promised(bad: BadData, assets: Assets, tmp_path: Path) -> None:
    report = examine(bad.make(tmp_path), assets)
    text = said(report)
    assert re.search(bad.text, text), text
    left_out = report.tally.problems("left out")
    if bad.kind == "fine":
        assert not report.reasons_not_to_train and not left_out
        assert bool(text) == bool(bad.text), text
    elif bad.kind == "stop":
        assert report.reasons_not_to_train
    else:
        assert not report.reasons_not_to_train and not report.stop
        assert [group.count for group in left_out] == [1] and report.tally.num_left_out == 1
        ((_, shard, key),) = left_out[0].examples
        assert (shard, key) in {("000000.tar", f"{FAULTY:06d}"), ("lines.jsonl", "1")}
