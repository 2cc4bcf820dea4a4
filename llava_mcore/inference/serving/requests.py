"""Checks of a chat request before transformers sees it.

transformers' server opens any path and address that a request names as an image; here an image is in the request.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.data.processors.images import ToRgb, decode_image, is_plain_jpeg, on_white
from llava_mcore.errors import DataError

ROLES = ("system", "user", "assistant")
REFUSED = ("generation_config", "chat_template_kwargs", "tools")
"""Fields of transformers' server that would change generation and templates."""
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "n": (1,),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": ("none",),
    "web_search_options": (),
}
"""Fields of OpenAI's interface that this server does not have, and their values that change nothing."""
MOST_STOPS, MOST_STOP_CHARS = 4, 1000
"""As many stops as OpenAI's interface takes, and the characters of each."""
PICTURE_URL = "data:image/"
HOW_TO_SEND = '"url" must be "data:image/TYPE;base64,DATA"'


class RequestError(Exception):
    """A request that is refused. `status`: the HTTP status of the answer."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ServedModel:
    """The model that requests are checked against.

    `name`: of the model. `most_tokens`: of a prompt and its answer together, the model's number of positions.
    `special_in`: returns the special tokens in a text; transformers would read them as control tokens and placeholders
    of images. `to_rgb`: makes images RGB as in training.
    """

    name: str
    most_tokens: int
    special_in: Callable[[str], Collection[str]]
    to_rgb: ToRgb = on_white


def check_chat(body: Any, model: ServedModel) -> dict[str, Any]:
    """Return a request for chat completions as transformers' server takes it. A field that is null is one not given.

    Raises:
        RequestError: with everything that is wrong.
    """
    if not isinstance(body, dict):
        raise RequestError(f"the request must be a JSON object, found {_kind(body)}")
    options = {name: value for name, value in body.items() if value is not None}
    if options.get("model") not in (None, model.name):
        raise RequestError(f'the model {options["model"]!r} is not served here; this server has "{model.name}"', 404)
    errors = [f'"{name}" is not allowed' for name in REFUSED if name in options]
    errors += _unsupported(options)
    errors += _number_problems(options, model)
    errors += _stops(options.get("stop"))
    errors += _messages(options.get("messages"), model)
    if errors:
        raise RequestError("; ".join(errors))
    return _as_taken(options, model)


def _as_taken(options: dict[str, Any], model: ServedModel) -> dict[str, Any]:
    """Return a valid request in one of the forms that OpenAI's interface allows, with the fields that count."""
    taken = {name: value for name, value in options.items() if name not in UNSUPPORTED}
    taken["messages"] = [
        {"role": message["role"], "content": _as_decoded(message["content"], model)} for message in options["messages"]
    ]
    if "max_completion_tokens" in taken:  # OpenAI's newer name; transformers 5.17 ignores it
        taken["max_tokens"] = taken.pop("max_completion_tokens")
    if "stop" in taken:
        taken["stop"] = [taken["stop"]] if isinstance(taken["stop"], str) else taken["stop"]
    return taken


def _as_decoded(content: str | list[dict[str, Any]], model: ServedModel) -> str | list[dict[str, Any]]:
    """Return a message with its images as the model was trained on them.

    transformers' server decodes them by torchvision, which does not rotate images by their EXIF, drops transparency
    and reads fewer formats. PNG loses nothing.
    """
    if isinstance(content, str):
        return content
    return [part if part["type"] == "text" else _as_png(part, model) for part in content]


def _as_png(part: dict[str, Any], model: ServedModel) -> dict[str, Any]:
    data = _bytes_of(part["image_url"])
    if is_plain_jpeg(data):
        return part
    file = io.BytesIO()
    decode_image(data, to_rgb=model.to_rgb).save(file, "PNG", compress_level=1)
    url = f"{PICTURE_URL}png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _bytes_of(value: str | dict[str, Any]) -> bytes:
    """Return the bytes of an image whose address has been checked."""
    url: str = value["url"] if isinstance(value, dict) else value
    return base64.b64decode(url.partition(",")[2], validate=True)


def _unsupported(options: dict[str, Any]) -> list[str]:
    return [
        f'"{name}" is not supported by this server: remove it, found {options[name]!r:.60}'
        for name, without_effect in UNSUPPORTED.items()
        if name in options and options[name] not in without_effect
    ]


def _number_problems(options: dict[str, Any], model: ServedModel) -> list[str]:
    ranges: dict[str, tuple[type | tuple[type, ...], float, float]] = {
        "max_tokens": (int, 1, model.most_tokens),
        "max_completion_tokens": (int, 1, model.most_tokens),
        "temperature": ((int, float), 0, 100),
        "top_p": ((int, float), 0, 1),
        "seed": (int, -(2**63), 2**63 - 1),
    }
    return [
        f'"{name}" must be {"an integer" if kinds is int else "a number"} from {least} to {largest}, '
        f"found {options[name]!r:.60}"
        for name, (kinds, least, largest) in ranges.items()
        if name in options
        and (
            not isinstance(options[name], kinds)
            or isinstance(options[name], bool)
            or not least <= options[name] <= largest  # NaN neither
        )
    ]


def _stops(stop: Any) -> list[str]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if (
        isinstance(stops, list)
        and len(stops) <= MOST_STOPS
        and all(isinstance(each, str) and 0 < len(each) <= MOST_STOP_CHARS and _is_unicode(each) for each in stops)
    ):
        return []
    return [
        f'"stop" must be a text or a list of up to {MOST_STOPS} texts of 1 to {MOST_STOP_CHARS} characters, '
        f"found {_kind(stop)}"
    ]


def _messages(messages: Any, model: ServedModel) -> list[str]:
    if not isinstance(messages, list) or not messages or not all(isinstance(x, dict) for x in messages):
        return ['"messages" must be a non-empty list of objects']
    errors = []
    for index, message in enumerate(messages):
        if message.get("role") not in ROLES:
            errors.append(f"message {index}: the role is {message.get('role')!r}; allowed: {', '.join(ROLES)}")
        if message.get("tool_calls"):
            errors.append(f'message {index}: "tool_calls" are not supported: this server calls no tools; remove them')
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            errors.append(f'message {index}: "content" must be a text or a list of parts, found {_kind(content)}')
            continue
        errors += [f"message {index}: {problem}" for part in parts for problem in _part(part, model)]
        if message.get("role") != "user" and any(part.get("type") == "image_url" for part in parts):
            errors.append(f"message {index}: only the user's messages can have images")
        if index == len(messages) - 1 and not errors:
            errors += _question(message["role"], parts)
    return errors


def _question(role: str, parts: list[dict[str, Any]]) -> list[str]:
    if role != "user":
        return [f"the last message must be the user's, found {role}"]
    if not any(part["type"] == "text" and part["text"].strip() for part in parts):
        return ["the question is empty"]
    return []


def _part(part: dict[str, Any], model: ServedModel) -> list[str]:
    kind = part.get("type")
    if kind == "image_url":
        return _image_problems(part.get(kind))
    return _text(part.get("text"), model) if kind == "text" else [f"a part of type {kind!r}; allowed: text, image_url"]


def _text(text: Any, model: ServedModel) -> list[str]:
    if not isinstance(text, str):
        return [f'"text" must be a text, found {_kind(text)}']
    if len(text) > LIMITS.text_chars:
        return [f"a text has {len(text)} characters; the limit is {LIMITS.text_chars}"]
    if not _is_unicode(text):
        return ["a text has half of a surrogate pair (\\ud800 to \\udfff without the other half): send valid Unicode"]
    special = sorted(model.special_in(text))
    return [f"a text has special tokens of the model, {', '.join(special)}: remove them"] if special else []


def _is_unicode(text: str) -> bool:
    """Return whether a tokenizer can read a text: JSON allows half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _image_problems(value: Any) -> list[str]:
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str):
        return [f'"image_url" must be {{"url": …}}, found {_kind(value)}']
    head, comma, _ = url.partition(",")
    if not head.startswith(PICTURE_URL) or not head.endswith(";base64") or not comma:
        return [f"an image must be in the request: {HOW_TO_SEND}, found {url[:60]!r}"]
    try:
        decode_image(_bytes_of(url))
    except binascii.Error as error:
        return [f"an image is not valid base64: {error}"]
    except DataError as error:
        return [str(error)]
    return []


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {value!r:.60}"
