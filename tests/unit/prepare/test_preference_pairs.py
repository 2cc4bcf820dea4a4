"""Rows with a chosen and a rejected answer, as TRL, LLaMA-Factory and RLHF-V write them, are not trained on yet."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llava_mcore.__main__ import main
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.encode.conversation import cook_chat
from llava_mcore.data.samples import Turn
from llava_mcore.data.storage.dataset_path import check_dataset
from llava_mcore.errors import DataError
from llava_mcore.prepare.record_layouts import Keys
from llava_mcore.prepare.record_pairs import parse_pair
from llava_mcore.prepare.record_parts import place_marks
from llava_mcore.prepare.row_types import BadSample, Reason
from llava_mcore.prepare.shard_plan import Counting, Options
from llava_mcore.prepare.sources.detect import Opening
from tests.helpers.prepare_cases import make, picture

pytest_plugins = ("tests.helpers.llava_fixtures",)

KEYS = Keys(pairs=True)
PICTURE = picture(3)
USER, GOOD, BAD = {"role": "user", "content": "Which?"}, "A three.", "An eight."
TYPED = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


LAYOUTS: dict[str, dict[str, Any]] = {
    "TRL, text": {"prompt": "Which?", "chosen": GOOD, "rejected": BAD},
    "TRL, messages": {"prompt": [USER], "chosen": [answer(GOOD)], "rejected": [answer(BAD)]},
    "TRL, typed": {
        "prompt": [TYPED],
        "chosen": [{"role": "assistant", "content": [{"type": "text", "text": GOOD}]}],
        "rejected": [{"role": "assistant", "content": [{"type": "text", "text": BAD}]}],
    },
    "TRL, no prompt": {"chosen": [USER, answer(GOOD)], "rejected": [USER, answer(BAD)]},
    "TRL, JSON text": {"chosen": json.dumps([USER, answer(GOOD)]), "rejected": json.dumps([USER, answer(BAD)])},
    "UltraFeedback": {
        "prompt": "Which?",
        "messages": [USER, answer(GOOD)],
        "chosen": [USER, answer(GOOD)],
        "rejected": [USER, answer(BAD)],
    },
    "LLaMA-Factory, sharegpt": {
        "conversations": [{"from": "human", "value": "<image>Which?"}],
        "chosen": {"from": "gpt", "value": GOOD},
        "rejected": {"from": "gpt", "value": BAD},
    },
    "LLaMA-Factory, alpaca": {"instruction": "Which?", "input": "", "chosen": GOOD, "rejected": BAD},
    "Megatron-SWIFT": {"messages": [USER, answer(GOOD)], "rejected_response": BAD},
    "Megatron-SWIFT, messages": {"messages": [USER, answer(GOOD)], "rejected_messages": [USER, answer(BAD)]},
    "Megatron-SWIFT, turn": {"messages": [USER, answer(GOOD)], "rejected_response": [answer(BAD)]},
    "Megatron-SWIFT, query": {"query": "Which?", "response": GOOD, "rejected_response": BAD},
    "RLHF-V": {"text": json.dumps({"question": "Which?", "chosen": GOOD, "rejected": BAD}), "ds_name": "x"},
    "RLAIF-V": {"question": "Which?", "chosen": GOOD, "rejected": BAD},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str) -> None:
    drafts = parse_pair({"images": [PICTURE], **LAYOUTS[name]}, KEYS)
    mark = "<image>" if "sharegpt" in name else "<image>\n"
    for draft, text in zip(map(place_marks, drafts), (GOOD, BAD), strict=True):
        assert draft.turns == (Turn("user", f"{mark}Which?"), Turn("assistant", text))
        assert draft.images == (PICTURE,)
        assert draft.unused == ({"`ds_name`"} if name == "RLHF-V" else set())


def test_answers_before_those_of_the_pair_are_not_trained() -> None:
    talk = [USER, answer("Hm."), {"role": "user", "content": "Well?"}]
    for row in (
        {"prompt": talk, "chosen": [answer(GOOD)], "rejected": [answer(BAD)]},
        {"conversations": talk, "chosen": answer(GOOD), "rejected": answer(BAD), "system": "S"},
        {"chosen": [*talk, answer(GOOD)], "rejected": [*talk, answer(BAD)]},
    ):
        for draft, text in zip(parse_pair(row, KEYS), (GOOD, BAD), strict=True):
            answers = [turn for turn in draft.turns if turn.role == "assistant"]
            assert [(turn.text, turn.trained) for turn in answers] == [("Hm.", False), (text, True)]


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        (
            {"messages": [USER, answer("A")], "rejected_response": "B", "rejected_images": ["other.jpg"]},
            Reason.DIFFERENT,
            "`rejected_images`",
        ),
        ({"prompt": "Q", "chosen": "A"}, Reason.NO_ANSWER, "no `rejected`"),
        ({"prompt": "Q", "completion": "A"}, Reason.NO_ANSWER, "no `chosen` and no `rejected`"),
        ({"prompt": "Q", "chosen": "A", "rejected": "A"}, Reason.SAME_ANSWERS, "nothing to prefer"),
        (
            {"chosen": [USER, answer("A")], "rejected": [{"role": "user", "content": "Other?"}, answer("B")]},
            Reason.DIFFERENT,
            "turn 0, where `chosen` has a turn of the user",
        ),
        (
            {"chosen": [USER, answer("A")], "rejected": [USER, answer("A"), USER, answer("B")]},
            Reason.DIFFERENT,
            "turn 2, where `chosen` has nothing",
        ),
        (
            {"prompt": "Something else?", "chosen": [USER, answer("A")], "rejected": [USER, answer("B")]},
            Reason.DIFFERENT,
            "`prompt` is not in the conversations",
        ),
        ({"prompt": "Q", "chosen": 3, "rejected": "B"}, Reason.WRONG_TYPE, "int 3"),
    ],
)
def test_rows_that_are_no_pair(row: dict[str, Any], reason: Reason, detail: str) -> None:
    with pytest.raises(BadSample) as caught:
        parse_pair(row, KEYS)
    assert caught.value.reason is reason and detail in caught.value.detail


def test_prepared_checked_and_not_trained(
    hf: Path, assets: Assets, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table and lines with the same pairs; tokens of both answers are those of training; a broken one is told."""
    rows = [
        {"question": f"Which {i}?", "chosen": GOOD, "rejected": BAD, "image": {"bytes": picture(i)}} for i in range(4)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    result = make(tmp_path / "a.parquet", tmp_path / "plain")
    assert result.counts.reasons == {Reason.PAIR.value: 4} and "--preference-pairs" in result.first_skipped[0].detail
    options = Options(rows_per_shard=3, counting=Counting(hf), shuffle_seed=0)
    out = tmp_path / "out"
    result = make(tmp_path / "a.parquet", out, options, Opening(keys=KEYS))
    assert result.finished and result.counts.conversations == 4 and result.counts.tokens.count == 8
    samples = []
    for shard in sorted(out.glob("*.tar")):
        with tarfile.open(shard) as tar:
            samples += [json.load(tar.extractfile(m)) for m in tar.getmembers() if m.name.endswith("json")]  # type: ignore[arg-type]
    for sample in samples:
        for side, text in (("chosen", GOOD), ("rejected", BAD)):
            question = f"<image>\nWhich {sample['source']['index']}?"
            assert [turn["content"] for turn in sample[side]["messages"]] == [question, text]
            ids = assets.chat.tokens((Turn("user", question), Turn("assistant", text)), {"<image>": 1}, ()).ids
            assert sample[side]["num_tokens"] == len(ids) - 1 + assets.plan.tokens_per_tile
    # Training refuses the folder, and a sample wherever it was put.
    with pytest.raises(DataError, match=r"holds preference pairs .* training on preference pairs is not supported yet"):
        check_dataset(out)
    with pytest.raises(DataError, match="is a preference pair"):
        cook_chat({"__key__": "a", "__restore_key__": (), "json": samples[0]})
    # `check` reads both answers.
    flags = ["check", "--data-path", str(out), "--tokenizer-load-dir", str(hf), "--json", str(tmp_path / "r.json")]
    assert main([*flags, "--seq-length", "128"]) == 0
    told = capsys.readouterr().out
    assert told.rstrip().endswith(
        "preference pairs: no sample would be left out; training on preference pairs is not supported yet"
    )
    assert told.count("ASSISTANT") == 2, told
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["preference_pairs"] and not report["train"] and report["conversations"] == 4
    longest = max(sample[side]["num_tokens"] for sample in samples for side in ("chosen", "rejected"))
    assert report["tokens_per_sample"]["max"] == longest
    assert main([*flags, "--seq-length", str(longest - 1)]) == 2
    assert "rejected: " in capsys.readouterr().out
    train = ["train", "--data-path", str(out), "--tokenizer-load-dir", str(hf), "--save-dir", str(tmp_path / "save")]
    assert main(train) == 2
    assert "holds preference pairs" in capsys.readouterr().err
