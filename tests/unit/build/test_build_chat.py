"""The built chat template takes strings and lists of parts, whatever template the text model brought."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoProcessor, AutoTokenizer

from llava_mcore.data.encode.assets import load_assets
from llava_mcore.templates.named import family_format
from tests.helpers.build_parts import CHATML, make_text_tokenizer, save_text

pytest_plugins = ("tests.helpers.build_fixtures",)

PLAIN = family_format("plain")
STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m['role'] == 'user' %}{{ '[INST] '"
    " + m['content'] | trim + ' [/INST]' }}{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
BLIND = (  # lists silently become nothing, as in several chat templates
    "\n  {% for message in messages[::-1] %}{% set last = loop.last %}{% endfor %}\n"
    "{% macro head(role) %}<|im_start|>{{ role }}\n{% endmacro %}"
    "{% for message in messages %}{% if message.content is string %}{% set content = message.content %}{% else %}"
    "{% set content = '' %}{% endif %}{{ head(message.role) }}{{ content }}</s>\n{% endfor %}"
)
NATIVE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}{{ eos_token }}{% endfor %}"
)
QUESTION = [{"type": "image"}, {"type": "text", "text": "Which digit? "}]
PICTURE_CHAT = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": [{"type": "text", "text": "Seven."}]},
]
STRING_CHAT = [{"role": "user", "content": "<image>\nWhich digit? "}, {"role": "assistant", "content": "Seven."}]


@pytest.mark.parametrize(
    "template", [CHATML, STRICT, BLIND, NATIVE, None], ids=["chatml", "strict", "blind", "native", "none"]
)
def test_template_takes_strings_and_parts(build_tiny: Any, tmp_path: Path, template: str | None) -> None:
    source = save_text(tmp_path / "text", tokenizer=make_text_tokenizer(template=template))
    out = build_tiny(source)
    tokenizer, processor = AutoTokenizer.from_pretrained(out), AutoProcessor.from_pretrained(out)
    original = AutoTokenizer.from_pretrained(source)
    given = original.apply_chat_template(STRING_CHAT, chat_template=template or PLAIN, tokenize=False)
    for renderer in (tokenizer, processor):
        assert renderer.apply_chat_template(STRING_CHAT, tokenize=False) == given
        if template != NATIVE:
            assert renderer.apply_chat_template(PICTURE_CHAT, tokenize=False) == given
        assert renderer.apply_chat_template(PICTURE_CHAT, tokenize=False).count("<image>") == 1
    saved = (out / "chat_template.jinja").read_text()
    assert saved == tokenizer.chat_template == processor.chat_template
    assert saved == template if template == NATIVE else saved.endswith(template or PLAIN)
    load_assets(out)


def test_template_with_several_pictures_and_turns(build_tiny: Any) -> None:
    """A list of parts renders as the same text with its placeholders written out."""
    tokenizer = AutoTokenizer.from_pretrained(build_tiny())
    text, image = (lambda t: {"type": "text", "text": t}), {"type": "image"}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [image, image, text("Same"), text("?")]},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": [text("And this?"), image]},
    ]
    flat = ["Be brief.", "<image>\n<image>\nSame?", "No.", "And this?\n<image>"]
    strings = [m | {"content": content} for m, content in zip(chat, flat, strict=True)]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == tokenizer.apply_chat_template(
        strings, chat_template=CHATML, tokenize=False, add_generation_prompt=True
    )
    clip = [{"role": "user", "content": [{"type": "video"}, text("Which?")]}]
    assert "<video>\nWhich?" in tokenizer.apply_chat_template(clip, tokenize=False)
    with pytest.raises(Exception, match="text, image or video, not audio"):
        tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "audio"}]}], tokenize=False)


def test_plain_template_marks_what_is_trained(build_tiny: Any, tmp_path: Path) -> None:
    out = build_tiny(save_text(tmp_path / "text", tokenizer=make_text_tokenizer(template=None)))
    tokenizer = AutoTokenizer.from_pretrained(out)
    chat = [*PICTURE_CHAT, {"role": "user", "content": "Even?"}, {"role": "assistant", "content": "No."}]
    made = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    trained = [i for i, mask in zip(made["input_ids"], made["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(trained) == " Seven.</s> No.</s>"
    prompt = tokenizer.apply_chat_template(chat[:3], tokenize=False, add_generation_prompt=True)
    assert prompt == "USER: <image>\nWhich digit?  ASSISTANT: Seven.</s>USER: Even? ASSISTANT:"
    assert tokenizer.apply_chat_template(chat, tokenize=False).startswith(prompt)


def test_template_from_a_file(build_tiny: Any, tmp_path: Path) -> None:
    """A template that is given as a file is copied as it is."""
    file = tmp_path / "my.jinja"
    file.write_text(NATIVE)
    assert (build_tiny(chat_template=file) / "chat_template.jinja").read_text() == NATIVE
