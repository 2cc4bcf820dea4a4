"""Chat templates of every kind: ids as Hugging Face's processor makes them, and exactly the answer and EOS trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tokenizers import processors
from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

from llava_mcore.data.encode.chat_format import ChatFormat
from llava_mcore.data.encode.tokens import ChatTokens
from llava_mcore.data.samples import AUDIO_MARK, IMAGE_MARK, VIDEO_MARK, Turn
from llava_mcore.errors import DataError
from tests.helpers.chat_cases import sentencepiece_like, trimmed_byte_level
from tests.helpers.encoding import N, encoded, image_positions
from tests.helpers.tiny_hf import CHAT_TEMPLATE, make_tokenizer

LIST, STRING, MIXED = ("list", "list"), ("string", "string"), ("list", "string")


@dataclass(frozen=True)
class Case:
    template: str
    formats: tuple[str, str]
    trained: str
    """What is trained of the answer ANSWER, EOS shown as </s>."""
    eos: str = "</s>"


CASES = {
    "marks with EOS": Case(CHAT_TEMPLATE, LIST, " ANSWER</s>"),
    "marks without EOS": Case(
        "{% for m in messages %}{{ m.role.upper() + ': ' }}"
        "{% for p in m.content if p.type == 'image' %}<image>\n{% endfor %}{% for p in m.content if p.type == 'text' %}"
        "{% if m.role == 'assistant' %}{% generation %}{{ p.text + ' ' }}{% endgeneration %}"
        "{% else %}{{ p.text + ' ' }}{% endif %}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
        LIST,
        " ANSWER</s>",  # the space is before the mark, but in one token with the answer's first letters
    ),
    "marks before EOS": Case(
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{{ eos_token }}\n{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
        STRING,
        "ANSWER</s>",
    ),
    "marks that end after EOS": Case(
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}"
        "{{ ' ' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
        STRING,
        "ANSWER</s> ",
    ),
    "chatml of plain text": Case(
        "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        STRING,
        "ANSWER<|im_end|>",
        eos="<|im_end|>",
    ),
    "chatml with another EOS": Case(
        "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        STRING,
        "ANSWER<|im_end|></s>",
    ),
    "instructions with BOS": Case(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
        "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}",
        STRING,
        " ANSWER</s>",
    ),
    "typed question, plain answer": Case(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{% for p in m.content %}"
        "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}[/INST]{% else %}{{ m.content + eos_token }}"
        "{% endif %}{% endfor %}",
        MIXED,
        "ANSWER</s>",
    ),
    "headings, nothing after": Case(
        "{% for m in messages %}### {{ m.role | capitalize }}:\n{{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}### Assistant:\n{% endif %}",
        STRING,
        "ANSWER</s>",
    ),
}


TOKENIZERS = {
    "byte level": make_tokenizer,
    "trimmed": trimmed_byte_level,
    "prepend": lambda: sentencepiece_like("prepend"),
    "metaspace": lambda: sentencepiece_like("first"),
}


@cache
def processor_and_format(tokenizer_name: str, case_name: str) -> tuple[LlavaProcessor, ChatFormat]:
    case = CASES[case_name]
    tokenizer = TOKENIZERS[tokenizer_name]()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    if "<|im_end|>" in case.template:
        tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
        tokenizer.eos_token = case.eos
    processor = LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=case.template,
    )
    return processor, ChatFormat(tokenizer, case.template, image_token="<image>")


def vqa(question: str, answer: str, *, image: bool) -> list[Turn]:
    return [Turn("user", f"{IMAGE_MARK}\n{question}" if image else question), Turn("assistant", answer)]


def served(processor: LlavaProcessor, formats: tuple[str, str], turns: list[Turn], **options: Any) -> list[int]:
    """The ids that Hugging Face's processor makes of the same conversation."""
    messages: list[dict[str, Any]] = []
    images = [Image.new("RGB", (60, 60))] * sum(IMAGE_MARK in turn.text for turn in turns)
    for turn in turns:
        text = turn.text.removeprefix(f"{IMAGE_MARK}\n")
        typed: list[dict[str, Any]] = [{"type": "image"}] if text != turn.text else []
        as_list = formats[turn.role == "assistant"] == "list"
        messages.append(
            {"role": turn.role, "content": [*typed, {"type": "text", "text": text}] if as_list else turn.text}
        )
    text = processor.apply_chat_template(messages, **options)
    bos = processor.tokenizer.bos_token
    keep = {} if not text.startswith(bos) else {"add_special_tokens": False}
    return processor(images=images or None, text=text, **keep)["input_ids"][0]


def trained(format_: ChatFormat, tokens: ChatTokens, tokenizer: PreTrainedTokenizerFast) -> str:
    return tokenizer.decode(tokens.input_ids[tokens.trained].tolist(), clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("case_name", CASES)
def test_an_answer_that_is_not_trained_changes_the_mask_alone(case_name: str) -> None:
    processor, format_ = processor_and_format("byte level", case_name)
    first, second = vqa("one?", "FIRST", image=False), vqa("two?", "ANSWER", image=False)
    both, one = (
        encoded(format_, [first[0], replace(first[1], trained=x), *second], num_images=0) for x in (True, False)
    )
    assert one.input_ids.tolist() == both.input_ids.tolist()
    # Which token a space belongs to depends on the words around it.
    answer = CASES[case_name].trained.replace(" ", "")
    assert trained(format_, one, processor.tokenizer).replace(" ", "") == answer
    assert trained(format_, both, processor.tokenizer).replace(" ", "") == answer.replace("ANSWER", "FIRST") + answer


@pytest.mark.parametrize("case_name", CASES)
def test_the_prompt_of_a_second_question_is_the_beginning_of_what_is_trained(case_name: str) -> None:
    """With the EOS that training adds to the first answer where the template writes none."""
    _, format_ = processor_and_format("byte level", case_name)
    talk = [*vqa("one?", "FIRST", image=False), *vqa("two?", "ANSWER", image=False)]
    text, _ = format_.segments(talk)
    assert text.startswith(format_.prompt_text(talk[:3]))


@pytest.mark.parametrize("image", [True, False], ids=["picture", "text only"])
@pytest.mark.parametrize("tokenizer_name", TOKENIZERS)
@pytest.mark.parametrize("case_name", CASES)
def test_ids_and_mask_of_every_template(case_name: str, tokenizer_name: str, image: bool) -> None:
    """Ids are those of the rendered text, and exactly the answer is trained."""
    case = CASES[case_name]
    processor, format_ = processor_and_format(tokenizer_name, case_name)
    assert (format_.content_format["user"], format_.content_format["assistant"]) == case.formats
    answer = "It is the 漢 house"
    turns = vqa("What is this?", answer, image=image)
    tokens = encoded(format_, turns, num_images=int(image))

    text = trained(format_, tokens, processor.tokenizer)
    expected = case.trained.replace("ANSWER", answer)
    # A tokenizer that puts ▁ before each piece of text makes one more space; it belongs to the answer's first token.
    spaced = tokenizer_name in ("prepend", "metaspace")
    assert text == expected or (spaced and text.lstrip().replace("</s> ", "</s>") == expected.lstrip())

    assert (tokens.input_ids == format_.media_ids["<image>"]).sum() == len(image_positions(tokens)) == N * image
    prompt = served(processor, case.formats, turns[:1], add_generation_prompt=True)
    assert tokens.input_ids[: len(prompt)].tolist() == prompt
    if format_._closing.has_eos:
        assert tokens.input_ids.tolist() == served(processor, case.formats, turns)
    else:
        after = np.flatnonzero(tokens.trained)[-1] + 1
        assert tokens.input_ids[after - 1] == processor.tokenizer.eos_token_id
        assert not processor.tokenizer.decode(tokens.input_ids[after:]).strip()


@pytest.mark.parametrize("tokenizer_name", ["byte level", "prepend"])
def test_mask_is_hugging_faces(tokenizer_name: str) -> None:
    processor, format_ = processor_and_format(tokenizer_name, "marks with EOS")
    turns = vqa("Which digit is shown?", "It is seven 漢字。", image=True)
    found = encoded(format_, turns, num_images=1)
    expected = processor.tokenizer.apply_chat_template(
        [{"role": t.role, "content": t.text} for t in turns],
        chat_template=CHAT_TEMPLATE,
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    single = np.delete(np.arange(len(found.input_ids)), image_positions(found)[1:])
    skipped = int(tokenizer_name == "prepend")  # a tokenizer's own method leaves BOS out, its processor does not
    assert found.input_ids[single].tolist()[skipped:] == expected["input_ids"]
    assert found.trained[single].tolist()[skipped:] == [bool(m) for m in expected["assistant_masks"]]


def has_no_mark(text: str) -> bool:
    """Hypothesis also draws the strings that it finds in the code."""
    return not any(mark in text for mark in (IMAGE_MARK, VIDEO_MARK, AUDIO_MARK))


@pytest.mark.parametrize("case_name", [c for c in CASES if c != "instructions with BOS"])
@settings(max_examples=40)
@given(question=st.text(min_size=1).filter(has_no_mark), answer=st.text(min_size=1).filter(has_no_mark))
def test_any_text(case_name: str, question: str, answer: str) -> None:
    """Whatever is asked and answered, the trained tokens are the answer and EOS, byte for byte."""
    question, answer = f"q{question}", f"a{answer.rstrip()}z"
    processor, format_ = processor_and_format("byte level", case_name)
    tokens = encoded(format_, vqa(question, answer, image=True), num_images=1)
    assert trained(format_, tokens, processor.tokenizer) == CASES[case_name].trained.replace("ANSWER", answer)


def test_answer_with_the_eos_text_in_it_is_learnt_whole() -> None:
    for case_name in ("chatml of plain text", "instructions with BOS", "headings, nothing after"):
        processor, format_ = processor_and_format("byte level", case_name)
        answer = f"one{format_.eos_token}two"
        text = trained(format_, encoded(format_, vqa("q", answer, image=False), num_images=0), processor.tokenizer)
        assert text == CASES[case_name].trained.replace("ANSWER", answer)


def test_every_turn_and_every_picture() -> None:
    """Every answer is trained, and every image has its tokens at its place."""
    processor, format_ = processor_and_format("byte level", "marks with EOS")
    turns = [
        Turn("user", f"{IMAGE_MARK}\n{IMAGE_MARK}\nCompare."),
        Turn("assistant", "first"),
        Turn("user", f"And {IMAGE_MARK} here?"),
        Turn("assistant", "second"),
    ]
    tokens = encoded(format_, turns, num_images=3)
    assert trained(format_, tokens, processor.tokenizer) == " first</s> second</s>"
    assert len(image_positions(tokens)) == 3 * N
    for case_name in ("chatml of plain text", "headings, nothing after"):
        processor, format_ = processor_and_format("byte level", case_name)
        text = trained(format_, encoded(format_, turns, num_images=3), processor.tokenizer)
        assert text == "".join(CASES[case_name].trained.replace("ANSWER", t) for t in ("first", "second"))


@pytest.mark.parametrize(("text", "num_images"), [("none", 1), (f"{IMAGE_MARK} {IMAGE_MARK}", 1), (IMAGE_MARK, 0)])
def test_marks_must_match_pictures(text: str, num_images: int) -> None:
    _, format_ = processor_and_format("byte level", "marks with EOS")
    with pytest.raises(DataError, match=f"{text.count(IMAGE_MARK)} <image> .* {num_images} images"):
        encoded(format_, [Turn("user", text), Turn("assistant", "yes")], num_images=num_images)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "neither from typed parts nor from text"),
        ("{{ raise_exception('no roles') }}", "no roles"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{% if add_generation_prompt %}>>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}", "its prompt"),
        ("{% generation %}{% endgeneration %}{% for m in messages %}{{ m.content }}{% endfor %}", "does not contain"),
    ],
)
def test_templates_that_cannot_be_trained_with(template: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ChatFormat(make_tokenizer(), template, image_token="<image>")


SYSTEM_OF_TEXT = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'system' %}{{ m.content SEP }}{% else %}"
    "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}"
    "{{ eos_token if m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Typed parts from all but the system prompt, as Llama 3.2 Vision's."""


@pytest.mark.parametrize("ending", ["| trim", "+ '.'"])
def test_system_prompts_of_plain_text(ending: str) -> None:
    """A system prompt keeps what the template puts after it."""
    format_ = ChatFormat(make_tokenizer(), SYSTEM_OF_TEXT.replace("SEP", ending), image_token="<image>")
    text = format_.render([Turn("system", "Be kind"), *vqa("q", "a", image=True)])
    assert text.startswith(f"[system]Be kind{'.' if '.' in ending else ''}[user]<image>q")


LAST_ONLY = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% else %}{{ eos_token }}{% endif %}"
)
"""The EOS after the last answer only, as Phi-3's."""


def test_templates_that_know_one_question_only_say_so() -> None:
    def format_of(template: str) -> ChatFormat:
        return ChatFormat(make_tokenizer(), template, image_token="<image>")

    assert format_of(CHAT_TEMPLATE).several_turns is None
    assert "does not start a conversation with its prompt" in (format_of(LAST_ONLY).several_turns or "")
    assert (
        trained(
            format_of(LAST_ONLY),
            encoded(format_of(LAST_ONLY), vqa("q", "a", image=False), num_images=0),
            make_tokenizer(),
        )
        == "a</s>"
    )


def test_the_date_in_a_template_stands_still() -> None:
    """The same samples are the same tokens tomorrow, and after a resume."""
    template = "{{ strftime_now('%d %b %Y') }}" + CHAT_TEMPLATE
    format_ = ChatFormat(make_tokenizer(), template, image_token="<image>")
    assert format_.render(vqa("q", "a", image=False)).startswith("26 Jul 2024")


def test_templates_ask_for_the_date_in_every_way() -> None:
    """Llama 3.2's spelling, inside a macro, in a test for it, and a template that begins with what is stripped."""
    conversation = vqa("q", "a", image=False)
    plain = ChatFormat(make_tokenizer(), CHAT_TEMPLATE, image_token="<image>").render(conversation)
    for asked, expected in {
        "{%- set date_string = strftime_now('%d %b %Y') %}{{ date_string }}|": "26 Jul 2024|",
        "{% macro day() %}{{ strftime_now('%A %-d. %B') }}{% endmacro %}\n{{ day() }}": "Friday 26. July",
        "{% if strftime_now is defined %}{{ strftime_now('%Y')|int + 1 }}{% endif %}": "2025",
        "\n  {% set x = 1 %}\n{{ strftime_now('100%% of %F %q') }}": "\n100% of 2024-07-26 %q",
    }.items():
        format_ = ChatFormat(make_tokenizer(), asked + CHAT_TEMPLATE, image_token="<image>")
        assert format_.render(conversation) == expected + plain


def test_tokenizer_that_ends_every_prompt_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    with pytest.raises(DataError, match="ends every text, so every prompt too, with </s>"):
        ChatFormat(tokenizer, CHAT_TEMPLATE, image_token="<image>")


def test_eos_that_is_no_token_is_refused() -> None:
    tokenizer = make_tokenizer()
    template = CHAT_TEMPLATE.replace("eos_token", "'<end>'")
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    format_ = ChatFormat(tokenizer, template, image_token="<image>")
    tokens = encoded(format_, vqa("q", "a", image=False), num_images=0)
    assert trained(format_, tokens, tokenizer) == " a<end></s>"
