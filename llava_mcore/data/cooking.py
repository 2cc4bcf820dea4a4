"""Raw parts of a shard's sample -> a conversation. Pictures stay undecoded here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron.energon import FileStoreDecoder, TextSample, VQASample, basic_sample_keys, stateless

from llava_mcore.data.samples import IMAGE_MARK, ChatSample, Turn
from llava_mcore.errors import DataError

IMAGE_PARTS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm")


class TextDecoder(FileStoreDecoder):
    """Decodes the json and txt parts of a sample and leaves everything else as bytes.

    Energon's own decoder would decode pictures before the shuffle buffer, which makes the buffer several times larger
    and the first batch wait for all of it; it would also unpickle parts such as `.pkl`.
    """

    def decode(self, fname: str, data: bytes) -> Any:
        """Decode one part by the end of its name. DataError if it is not what its name says."""
        kind = fname.rsplit(".", 1)[-1].lower()
        try:
            if kind in ("json", "jsn"):
                return json.loads(data)
            return data.decode("utf-8") if kind in ("txt", "text") else data
        except ValueError as error:  # both JSONDecodeError and UnicodeDecodeError
            raise DataError(f"part {fname!r} cannot be decoded: {error}") from error

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        return {k: self.decode(k, v) if isinstance(v, bytes) else v for k, v in sample.items()}

    def config(self) -> dict[str, Any]:
        """What energon records of a decoder."""
        return {"type": type(self).__qualname__}


@stateless
def cook_vqa(sample: dict[str, Any]) -> ChatSample:
    """Cook a sample of a CrudeWebdataset: `json` with "question", the answer in `txt`, and at most one picture.

    A sample without a picture is text only, so both kinds mix in one dataset. DataError if a part is missing.
    """
    pictures = [key for key in sample if not key.startswith("__") and key.rsplit(".", 1)[-1].lower() in IMAGE_PARTS]
    if len(pictures) > 1:
        raise DataError(f"one picture at most is allowed, found the parts {pictures}")
    if not isinstance(sample.get("json"), dict) or "question" not in sample["json"]:
        raise DataError('a part .json with {"question": …} is needed')
    if "txt" not in sample:
        raise DataError("a part .txt with the answer is needed")
    return ChatSample(
        **basic_sample_keys(sample),
        turns=vqa_turns(sample["json"]["question"], sample["txt"], has_image=bool(pictures)),
        images=tuple(sample[key] for key in pictures),
    )


def chat_from_standard(sample: Any) -> ChatSample:
    """Turn a sample of a type that energon itself makes into a conversation. DataError for other types."""
    if isinstance(sample, ChatSample):
        return sample
    if not isinstance(sample, VQASample):
        hint = "; prepare text-only samples as CrudeWebdataset" if isinstance(sample, TextSample) else ""
        raise DataError(f"a {type(sample).__name__} cannot be trained on, only VQASample and crude samples{hint}")
    if not isinstance(sample.image, bytes):
        raise DataError(f"the field image is {type(sample.image).__name__}, not a picture such as jpg; see field_map")
    answers = [sample.answers] if isinstance(sample.answers, str) else sample.answers
    if not answers:
        raise DataError("the sample has no answer; map the field answers, for example to txt")
    return ChatSample.derive_from(
        sample, turns=vqa_turns(sample.context, answers[0], has_image=True), images=(sample.image,)
    )


def vqa_turns(question: Any, answer: Any, *, has_image: bool) -> tuple[Turn, ...]:
    """Return question and answer without white space around; the picture goes first unless the question places it."""
    for name, text in (("question", question), ("answer", answer)):
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"the {name} must be text that is not empty, found {text!r}")
    question = question.strip()
    if has_image and IMAGE_MARK not in question:
        question = f"{IMAGE_MARK}\n{question}"
    return (Turn("user", question), Turn("assistant", answer.strip()))
