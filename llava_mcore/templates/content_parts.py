"""Adds a preamble to templates that only support plain text, so that they accept typed content (`{"type":
"image"}`, or `{"type": "audio"}` for a tokenizer with placeholders for audio)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llava_mcore.errors import ConversionError, with_article
from llava_mcore.templates.bounded import RENDER_ERRORS, check_bounds
from llava_mcore.templates.named import AUDIO_TOKENS, preamble

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACEHOLDERS = {"image": "<image>", "video": "<video>", "audio": "".join(AUDIO_TOKENS)}
"""Placeholder of each type of part besides text."""
OWN_TEMPLATE = "Omit --chat-template for the folder's own, or give a changed copy of its chat_template.jinja."
_NAMES = {"image": "image", "video": "video", "audio": "audio clip"}
_TEXT = "What does 7f3a show?"
_ANSWER = "A 9c1e."


def accept_parts(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    origin: str,
    *,
    videos: bool = False,
    image_token: str = PLACEHOLDERS["image"],
) -> str:
    """Return the template, preceded by the preamble if it does not support typed content.

    Args:
        origin: the template's source, for messages.
        videos: whether it must support videos as well as images.
        image_token: the class's placeholder of an image. Without the preamble, a template must write it by itself.

    Raises:
        ConversionError: the template cannot render a question and its answer, with or without an image.
    """
    check_bounds(template, origin)
    takes_audio = AUDIO_TOKENS[1] in tokenizer.get_vocab()
    kinds = ("audio",) if takes_audio else ("image", "video")[: 1 + videos]
    tokens = PLACEHOLDERS | {"image": image_token}
    if all(understands_parts(tokenizer, template, kind, tokens[kind]) for kind in kinds):
        return template
    if image_token != PLACEHOLDERS["image"] and not takes_audio:
        raise ConversionError(
            f"chat template ({origin}): it does not render a part of type image as one {image_token}, the model's "
            f"placeholder. {OWN_TEMPLATE}"
        )
    wrapped = preamble(tokenizer) + template
    _check_wrapped(tokenizer, template, wrapped, kinds[0], origin)
    return wrapped


def understands_parts(tokenizer: PreTrainedTokenizerBase, template: str, kind: str, placeholder: str) -> bool:
    """Return whether a template renders typed content, with one placeholder per image, video or audio clip."""
    try:
        rendered = _render(tokenizer, template, _conversation(kind, as_parts=True))
    except RENDER_ERRORS:
        return False
    return rendered.count(placeholder) == 1 and _is_said(rendered)


def _check_wrapped(tokenizer: PreTrainedTokenizerBase, template: str, wrapped: str, kind: str, origin: str) -> None:
    """Raise ConversionError unless the wrapped template renders parts as the original renders strings.

    kind: a type of parts; the preamble treats all others the same.
    """
    text = _conversation(kind, as_parts=False)
    try:
        expected = _render(tokenizer, template, text)
        rendered = [_render(tokenizer, wrapped, c) for c in (text, _conversation(kind, as_parts=True))]
    except RENDER_ERRORS as error:
        raise ConversionError(
            f"chat template ({origin}): cannot render a question about {with_article(_NAMES[kind])} and its answer: "
            f"{error}\n"
            "Give another one with --chat-template NAME|FILE."
        ) from error
    if rendered != [expected, expected] or not _is_said(expected) or expected.count(PLACEHOLDERS[kind]) != 1:
        raise ConversionError(
            f"chat template ({origin}): the question, its {_NAMES[kind]} or the answer is missing from what it "
            f"renders: {expected!r}\nGive another one with --chat-template NAME|FILE."
        )


def _is_said(rendered: str) -> bool:
    """Return whether question and answer appear as text, not as a printed list."""
    return _TEXT in rendered and _ANSWER in rendered and "'type'" not in rendered


def _conversation(kind: str, *, as_parts: bool) -> list[dict[str, Any]]:
    """Return a question about an image (video, audio clip) and its answer."""
    if not as_parts:
        question, answer = f"{PLACEHOLDERS[kind]}\n{_TEXT}", _ANSWER
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    parts = [{"type": kind}, {"type": "text", "text": _TEXT}]
    return [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": _ANSWER}]}]


def _render(tokenizer: PreTrainedTokenizerBase, template: str, conversation: list[dict[str, Any]]) -> str:
    return str(tokenizer.apply_chat_template(conversation, chat_template=template, tokenize=False))
