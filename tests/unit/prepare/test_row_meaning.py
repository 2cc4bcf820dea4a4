"""What rows say besides text: losses, system prompts, tools, reasoning, several answers; and what nothing reads."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from llava_mcore.__main__ import main
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.encode.chat_format import ChatFormat
from llava_mcore.data.encode.conversation import cook_chat
from llava_mcore.data.encode.encode import tokenize
from llava_mcore.data.encode.marks import escape, unescape
from llava_mcore.data.encode.record_keys import PART, ROW, TURN
from llava_mcore.data.samples import Turn
from llava_mcore.errors import DataError
from llava_mcore.prepare.record_layouts import Keys, check_turns, parse
from llava_mcore.prepare.record_parts import place_marks
from llava_mcore.prepare.row_types import BadSample, Draft, Reason
from tests.helpers.bad_data_makers import index, write_tar
from tests.helpers.prepare_cases import make, read_back
from tests.helpers.tiny_hf import CHAT_TEMPLATE, make_tokenizer

pytest_plugins = ("tests.helpers.llava_fixtures",)

Q, A = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
TEXT = {"type": "text", "text": "A"}
CALL = {"function": {"name": "add", "arguments": '{"a": 1}'}}
FULL_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


def draft(row: dict[str, Any]) -> Draft:
    result = place_marks(parse(row, Keys()))
    check_turns(result.turns)
    return result


def said(row: dict[str, Any]) -> list[str]:
    """Role, text and reasoning of each turn; ! marks an answer that is not trained."""
    marked = {"system": "s", "user": "u", "assistant": "a", "tool": "t"}
    return [f"{marked[t.role]}{'' if t.trained else '!'}:{t.text}{t.reasoning and ' ?' + t.reasoning}"
            for t in draft(row).turns]  # fmt: skip


TWO = [Q, A, Q, {"role": "assistant", "content": "B"}]
READ: dict[str, tuple[dict[str, Any], list[str]]] = {
    "loss of a turn": (chat(Q, A | {"loss": False}, *TWO[2:]), ["u:Q", "a!:A", "u:Q", "a:B"]),
    "weights": (chat(Q, A | {"weight": 0}, Q, TWO[3] | {"weight": 1.0}), ["u:Q", "a!:A", "u:Q", "a:B"]),
    "text": (chat(Q, A | {"train": "false"}, *TWO[2:]), ["u:Q", "a!:A", "u:Q", "a:B"]),
    "negated": (chat(Q, A | {"masked": True}, *TWO[2:]), ["u:Q", "a!:A", "u:Q", "a:B"]),
    "mask by turn": (chat(*TWO, loss_mask=[0, 0, 1, 1]), ["u:Q", "a!:A", "u:Q", "a:B"]),
    "mask by answer": (chat(*TWO, loss_mask="[1, 0]"), ["u:Q", "a:A", "u:Q", "a!:B"]),
    "pair": ({"texts": [{"user": "Q", "assistant": "A", "train": 0}, {"user": "Q", "assistant": "B"}]},
             ["u:Q", "a!:A", "u:Q", "a:B"]),
    "system": (chat(Q, A, system="S"), ["s:S", "u:Q", "a:A"]),
    "same system": (chat({"role": "system", "content": "S"}, Q, A, system="S "), ["s:S", "u:Q", "a:A"]),
    "system of a pair": ({"texts": [{"user": "Q", "assistant": "A", "system": "S"}]}, ["s:S", "u:Q", "a:A"]),
    "alpaca": ({"instruction": "Sum", "input": "1 2", "output": "3", "system": "S", "history": [["Q", "A"]]},
               ["s:S", "u:Q", "a:A", "u:Sum\n1 2", "a:3"]),
    "query": ({"query": "Q", "response": "A", "history": [[]]}, ["u:Q", "a:A"]),
    "prompt and completion": ({"prompt": [Q, A, Q], "completion": [A]}, ["u:Q", "a!:A", "u:Q", "a:A"]),
    "input": ({"question": "Q", "input": "7", "answer": "A"}, ["u:Q\n7", "a:A"]),
    "VQAv2": ({"question": "Q", "answers": [{"answer": "nets"}, {"answer": "net"}, {"answer": "Net "}]},
              ["u:Q", "a:net"]),
    "TextVQA": ({"question": "Q", "answers": ["dakota", "nokia", "x", "nokia"]}, ["u:Q", "a:nokia"]),
    "first of equals": ({"question": "Q", "answers": ["b", "a"]}, ["u:Q", "a:b"]),
    "chosen": ({"question": "Q", "answer": "a", "answers": ["b", "b", "a"]}, ["u:Q", "a:a"]),
    "SQuAD": ({"question": "Q", "answers": {"text": ["b"], "answer_start": [3]}}, ["u:Q", "a:b"]),
    "empty list first": ({"conversations": [], **chat(Q, A)}, ["u:Q", "a:A"]),
    "same lists": ({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}], **chat(Q, A)},
                   ["u:Q", "a:A"]),
    "empty content": (chat({"from": "human", "content": "", "value": "Q"}, A), ["u:Q", "a:A"]),
    "JSON messages": ({"messages": json.dumps([Q, A]), "images": "[]"}, ["u:Q", "a:A"]),
    "JSON parts": (chat(Q | {"content": '[{"type": "image"}, {"type": "text", "text": "Q"}]'},
                        A | {"content": '{"type": "text", "text": "A"}'}, images=["p"]), ["u:<image>\nQ", "a:A"]),
    "JSON answer": (chat(Q, A | {"content": '[{"a": 1}]'}), ["u:Q", 'a:[{"a": 1}]']),
    "reasoning": (chat(Q, A | {"reasoning": "why"}), ["u:Q", "a:A ?why"]),
    "reasoning part": (chat(Q, A | {"content": [{"type": "thinking", "thinking": "why"}, TEXT]}),
                       ["u:Q", "a:A ?why"]),
    "roles": (chat({"from": "Human ", "value": "Q"}, {"from": "GPT", "value": "A"}), ["u:Q", "a:A"]),
    "speakers": (chat({"speaker": "user", "text": "Q"}, {"speaker": "bot", "text": "A"}), ["u:Q", "a:A"]),
    "tools": (chat(Q, A | {"content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "2"}, A),
              ["u:Q", "a:", "t:2", "a:A"]),
    "typed text is literal": (chat(Q | {"content": [{"type": "image", "image": "p"}, TEXT | {"text": "<image>"}]},
                                   A | {"content": "a <video>"}), ["u:<image>\n<\\image>", "a:a <\\video>"]),
    "escaped": (chat(Q | {"content": "<image><\\image>"}, A, images=["p"]), ["u:<image><\\image>", "a:A"]),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_rows_are_read_as_they_are_meant(name: str) -> None:
    row, expected = READ[name]
    assert said(row) == expected
    assert draft(row).unused == frozenset()


MARKED = A | {"content": "a <image>"}
REFUSED: dict[str, tuple[dict[str, Any], Reason, str]] = {
    "mark in an answer": (chat(Q, MARKED, images=["p"]), Reason.MARKS, r"messages\[1\], of the assistant, has <image>"),
    "mark in a system prompt": (chat(Q, A, images=["p"], system="<image>"), Reason.MARKS, "of the system"),
    "mark in the answer to a question": ({"question": "Q", "answer": "<image>", "image": "p"}, Reason.MARKS, "write <"),
    "answer of KTO": (chat(Q, A, label=False), Reason.KEY, "`label`: False .an answer that must not be learned"),
    "image tag": (chat(Q | {"content": "<img>a/b.jpg</img> Q"}, A), Reason.MARKS, "write <image> there, and list it"),
    "part without image": (chat(Q | {"content": [{"type": "image", "source": {"data": "x"}}]}, A), Reason.MARKS,
                           "its part has none of image_url, image, url, path, base64, and the row lists no more"),
    "half": (chat(Q, A | {"weight": 0.5}), Reason.KEY, "`weight` is 0.5; .* only 0 and 1 are possible"),
    "contradiction": (chat(Q, A | {"weight": 0, "train": True}), Reason.KEY, "`weight` and `train` contradict"),
    "nothing": (chat(Q, A, weight=0), Reason.NOTHING_TRAINED, "every answer is 0"),
    "mask of another length": (chat(Q, A, loss_mask=[1, 0, 1]), Reason.KEY, "3 entries for 2 turns with 1 answers"),
    "ambiguous mask": (chat(Q, A | {"mask": True}), Reason.KEY, "`mask`: True"),
    "two system prompts": (chat({"role": "system", "content": "S"}, Q, A, system="T"), Reason.DIFFERENT, "'T' and 'S'"),
    "two images": (chat(Q, A, image="p", images=["q"]), Reason.DIFFERENT, "`image` and `images` differ"),
    "two conversations": ({"conversations": [Q, A | {"content": "B"}], **chat(Q, A)}, Reason.DIFFERENT, "differ"),
    "boxes": (chat(Q, A | {"content": "<bbox>"}, objects={"bbox": [[1, 2, 3, 4]]}), Reason.KEY, "<bbox> would have to"),
    "frames of an image": (chat(Q | {"content": [{"type": "image", "image": "p", "nframes": 9}]}, A), Reason.KEY,
                            "`nframes` beside an image, which has no such option"),
    "size of the next image": (chat(Q | {"content": [{"type": "image", "max_pixels": 9}]}, A, images=["p"]),
                                 Reason.KEY, "`max_pixels` must be beside the reference"),
    "size of a row": (chat(Q, A, image="p", max_pixels=9), Reason.KEY, "`max_pixels`: 9 .write it beside the"),
    "images of a turn": (chat(Q | {"images": ["p"]}, A), Reason.KEY, "list it beside the turns"),
    "arguments of the template": (chat(Q, A, chat_template_kwargs={"x": 1}), Reason.KEY, "not supported"),
    "narrator": (chat({"role": "narrator", "content": "Q"}, A), Reason.UNKNOWN_ROLE, "'narrator'; allowed: ai, assist"),
    "result without a call": (chat(Q, {"role": "tool", "content": "2"}, A), Reason.ROLE_ORDER, "results of tools"),
    "broken call": (chat(Q, {"role": "function_call", "content": "add(1)"}), Reason.KEY, 'a call must be {"name"'),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_cannot_be_honored_are_skipped_with_a_reason(name: str) -> None:
    row, reason, message = REFUSED[name]
    with pytest.raises(BadSample, match=message) as caught:
        draft(row)
    assert caught.value.reason is reason


def test_calls_and_tools_get_the_form_that_templates_expect() -> None:
    calls = [{"from": "function_call", "value": json.dumps({"name": "add", "arguments": {"a": 1}})}] * 2
    rows = {"conversations": [{"from": "human", "value": "Q"}, *calls, {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "A"}], "tools": '[{"name": "add"}]'}  # fmt: skip
    result = draft(rows)
    assert [turn.role for turn in result.turns] == ["user", "assistant", "tool", "assistant"]
    assert result.turns[1].fields == {"tool_calls": [FULL_CALL, FULL_CALL]}
    assert result.tools == ({"type": "function", "function": {"name": "add"}},)
    assert draft(chat(Q, A | {"tool_calls": [CALL]})).turns[1].fields == {"tool_calls": [FULL_CALL]}


def test_a_key_belongs_to_one_column_of_the_tables() -> None:
    for table in (ROW, TURN, PART):
        assert not table.honored & table.refused.keys() and not table.honored & table.ignored
        assert not table.refused.keys() & table.ignored


@pytest.mark.parametrize("text", ["<image>", r"<\image>", r"<\\video> <audio> <\a>", r"\<image>"])
def test_escaped_marks_come_back(text: str) -> None:
    assert unescape(escape(text)) == text and "<image>" not in escape(text)


# -- chat templates --------------------------------------------------------------------------------------------------

HEAD = "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
TAIL = (
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '<call>' + (c.function | tojson) }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
)
TOOLS = "{% for t in tools or [] %}{{ '<tool>' + (t | tojson) + '\n' }}{% endfor %}"
HYBRID = TOOLS + HEAD + "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}" + TAIL + "{% endif %}"
THINKING = HYBRID.replace("{% endif %}", "", 0)[: -len("{% endif %}")] + "{{ '<think>\n' }}{% endif %}"
OPTIONAL = (
    TOOLS + HEAD + "{% if m.thinking %}{{ '<think>' + m.thinking + '</think>' }}{% endif %}" + TAIL + "{% endif %}"
)


def format_of(template: str) -> tuple[ChatFormat, PreTrainedTokenizerFast]:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.eos_token = "<|im_end|>"
    return ChatFormat(tokenizer, template, image_token="<image>"), tokenizer


def trained(template: str, row: dict[str, Any]) -> str:
    """The trained text of a row, spans separated by |."""
    format_, tokenizer = format_of(template)
    result = draft(row)
    tokens = format_.tokens(result.turns, {"<image>": len(result.images)}, result.tools)
    starts = np.flatnonzero(np.diff(tokens.trained, prepend=False, append=False)).reshape(-1, 2)
    return "|".join(tokenizer.decode(tokens.ids[a:b], clean_up_tokenization_spaces=False) for a, b in starts)


END = "<|im_end|>"
TRAINED: dict[str, tuple[str, dict[str, Any], str]] = {
    "reasoning": (HYBRID, chat(Q, A | {"reasoning": "why"}), f"<think>\nwhy\n</think>\n\nA{END}"),
    "plain": (HYBRID, chat(Q, A), f"<think>\n\n</think>\n\nA{END}"),
    "after an open thought": (THINKING, chat(Q, A | {"reasoning": "why"}), f"why\n</think>\n\nA{END}"),
    "by another key": (OPTIONAL, chat(Q, A | {"reasoning_content": "why"}), f"<think>why</think>A{END}"),
    "one of two": (OPTIONAL, chat(Q, A | {"loss": False}, *TWO[2:]), f"B{END}"),
    "call": (OPTIONAL, chat(Q, A | {"tool_calls": [CALL]}, {"role": "tool", "content": "2"}, TWO[3]),
             f'A<call>{{"name": "add", "arguments": {{"a": 1}}}}{END}|B{END}'),
    "literal mark": (OPTIONAL, chat(Q | {"content": "<image>"}, A | {"content": "the <\\image> tag"}, image="p"),
                     f"the <image> tag{END}"),
    "mark in a call": (OPTIONAL, chat(Q, A | {"tool_calls": [{"name": "add", "arguments": {"a": "<image>"}}]}),
                       f'A<call>{{"name": "add", "arguments": {{"a": "<image>"}}}}{END}'),
    "marked template": (CHAT_TEMPLATE, chat(Q, A | {"weight": 0}, *TWO[2:]), f" B{END}"),
    "EOS added": (OPTIONAL.replace("<|im_end|>", ""), chat(Q, A | {"weight": 0}, *TWO[2:]), f"B{END}"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINED)
def test_exactly_the_trained_answers_are_trained(name: str) -> None:
    template, row, expected = TRAINED[name]
    assert trained(template, row) == expected


def test_answers_that_are_not_trained_end_as_the_others_do() -> None:
    format_, _ = format_of(OPTIONAL.replace("<|im_end|>", ""))
    turns = [Turn("user", "Q"), Turn("assistant", "A", trained=False), Turn("user", "Q"), Turn("assistant", "B")]
    assert format_.adds_eos and format_.segments(turns)[0].count(END) == 2


def test_a_literal_mark_is_not_a_placeholder() -> None:
    format_, tokenizer = format_of(OPTIONAL)
    ids = format_.tokens([Turn("user", r"<image><\image>"), Turn("assistant", "A")], {"<image>": 1}).ids
    assert (ids == tokenizer.convert_tokens_to_ids("<image>")).sum() == 1
    assert tokenizer.decode(ids).count("<image>") == 2


def test_tools_that_a_template_drops_are_refused() -> None:
    row = draft(chat(Q, A, tools=[{"name": "add"}]))
    format_, _ = format_of(OPTIONAL.removeprefix(TOOLS))
    with pytest.raises(DataError, match="the chat template does not render tools; choose another --chat-template"):
        format_.tokens(row.turns, {}, row.tools)
    assert '<tool>{"type": "function", "function": {"name": "add"}}' in format_of(OPTIONAL)[0].render(
        row.turns, row.tools
    )
    calls = draft(chat(Q, A | {"tool_calls": [CALL]}))
    plain = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    plain += "{% if add_generation_prompt %}[assistant]{% endif %}"
    with pytest.raises(DataError, match="does not render tool_calls"):
        format_of(plain)[0].tokens(calls.turns, {})
    assert format_of(plain)[0].features.loses_reasoning([Turn("assistant", "A", reasoning="why")])


def test_what_a_template_writes_into_answers_is_told() -> None:
    for template, text in ((HYBRID, "<think>\n\n</think>"), (THINKING, "</think>")):
        format_, _ = format_of(template)
        assert format_.own_text == text and repr(text) in (format_.own_text_warning or "")
        plain, thought = (Turn("assistant", "A", reasoning=reasoning) for reasoning in ("", "why"))
        assert format_.tokens([Turn("user", "Q"), plain], {}).num_filled == 1
        assert format_.tokens([Turn("user", "Q"), thought], {}).num_filled == 0
    assert format_of(OPTIONAL)[0].own_text_warning is None and format_of(CHAT_TEMPLATE)[0].own_text_warning is None


# -- commands --------------------------------------------------------------------------------------------------------


def test_what_nothing_reads_is_counted(tmp_path: Path, hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By `prepare`, also for columns of a table, and by `check`, which reads the written samples and users' own."""
    rows = [chat(Q, A | {"mood": "good"}, score=1, source="x", note=None), chat(Q, A, score=2)]
    (tmp_path / "rows.json").write_text(json.dumps([*rows, chat({"role": "narrator", "content": "Q"}, A)]))
    command = ["prepare", str(tmp_path / "rows.json"), "--out", str(tmp_path / "out"), "--num-workers", "0"]
    assert main([*command, "--max-skip-rate", "0.5", "--tokenizer-load-dir", str(hf)]) == 0
    told = capsys.readouterr().out
    assert "out: not used: `score` in 2 rows, `mood` of turns in 1 row" in told
    assert "out: unknown roles: 'narrator' in 1 row" in told
    pq.write_table(
        pa.table({"question": ["Q"], "answer": ["A"], "mood": ["m"], "system": ["S"]}), tmp_path / "a.parquet"
    )
    assert make(tmp_path / "a.parquet", tmp_path / "table").counts.unused == {"`mood`": 1}
    assert read_back(tmp_path / "table")[0]["messages"][0] == {"role": "system", "content": "S"}
    write_tar(tmp_path / "own" / "000000.tar", {"a": {"json": chat(Q, A | {"mood": "good"}, score=1)}})
    flags = ["--tokenizer-load-dir", str(hf), "--seq-length", "128", "--data-path"]
    assert main(["check", *flags, str(index(tmp_path / "own"))]) == 0
    assert "note: not used: `score` in 1 sample, `mood` of turns in 1 sample" in capsys.readouterr().out
    assert main(["check", *flags, str(tmp_path / "out")]) == 0
    assert "not used" not in capsys.readouterr().out


def test_shards_keep_what_rows_say(tmp_path: Path, assets: Assets) -> None:
    """Rows and the shards that are made of them are the same conversations; so are users' own shards."""
    row = chat(Q, A | {"reasoning": "why", "weight": 0}, *TWO[2:], tools=[{"name": "add"}], system="S")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    make(tmp_path / "rows.jsonl", tmp_path / "out")
    with tarfile.open(tmp_path / "out" / "000000.tar") as tar:
        file = tar.extractfile("000000000.json")
        assert file is not None
        sample = json.load(file)
    own: dict[str, Any] = {"__key__": "k", "__restore_key__": (), "__subflavors__": {}}
    for about in (sample, row):
        (conversation,) = cook_chat(own | {"json": about}).conversations
        assert conversation.turns == draft(row).turns and conversation.tools == draft(row).tools
    (plain,) = cook_chat(own | {"json": chat(Q, A | {"loss": False}, *TWO[2:])}).conversations
    tokens = tokenize(plain, assets, "k")
    assert assets.tokenizer.decode(tokens.input_ids[tokens.trained]) == " B</s>"
