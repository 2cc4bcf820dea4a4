"""Raw parts of a shard's sample -> its conversations. Images, frames and audio clips stay undecoded here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron.energon import FileStore, FileStoreDecoder, TextSample, VQASample, basic_sample_keys, stateless

from llava_mcore.data.encode.marks import NAMES, check_marks, count_marks, without_marks
from llava_mcore.data.encode.messages import (
    ROLES,
    check_order,
    complete,
    is_call_role,
    role_of,
    turn_of,
)
from llava_mcore.data.encode.prompts import POOL_KEY
from llava_mcore.data.encode.record_keys import CHOSEN, REJECTED, ROW, TURN, is_full, majority
from llava_mcore.data.encode.sample_media import SampleMedia, media_of
from llava_mcore.data.encode.tokens import TOKENS_KEY
from llava_mcore.data.encode.tools import tools_of
from llava_mcore.data.samples import AUDIO_MARK, IMAGE_MARK, VIDEO_MARK, ChatSample, Conversation, Turn
from llava_mcore.data.storage.tar_files import NoContents
from llava_mcore.errors import DataError


class TextDecoder(FileStoreDecoder):
    """Decodes the json and txt parts of a sample and leaves everything else as bytes.

    Energon's own decoder would decode images before the shuffle buffer, which makes the buffer several times larger
    and the first batch wait for all of it; it would also unpickle parts such as `.pkl`.
    """

    def decode(self, fname: str, data: bytes) -> Any:
        """Decode one part by the end of its name. DataError if its content does not match its name."""
        kind = fname.rsplit(".", 1)[-1].lower()
        try:
            if kind in ("json", "jsn"):
                return json.loads(data)
            return data.decode("utf-8") if kind in ("txt", "text") else data
        except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError too
            raise DataError(f"part {fname!r} cannot be decoded: {error}") from error

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Decode the parts of a sample. DataError if one is invalid or has no contents."""
        empty = [f"part {k!r}: {v.reason}" for k, v in sample.items() if isinstance(v, NoContents)]
        if empty:
            raise DataError("; ".join(empty))
        return {k: self.decode(k, v) if isinstance(v, bytes) else v for k, v in sample.items()}

    def config(self) -> dict[str, Any]:
        """Return what energon records about a decoder."""
        return {"type": type(self).__qualname__}


@stateless
def cook_chat(sample: dict[str, Any], *, images: FileStore[bytes] | None = None) -> ChatSample:
    """Cook a sample of a CrudeWebdataset or of a jsonl file.

    Its json part holds "messages", or "pack" (several conversations), each with `<image>`, `<video>` and
    `<audio>` in the positions of images, videos and audio clips; or "question", with the answer in a txt part and at
    most one of each.
    If the dataset has a prompt pool, the question may be missing, which counts as an empty one. `media_of` says where
    all of these are; names in a store are read only here.

    Raises:
        DataError: something is missing or has a wrong type; the sample is skipped.
        RuntimeError: the store of images cannot be reached; the run ends.
    """
    has_pool = POOL_KEY in (sample.get("__subflavors__") or {})
    about = sample.get("json")
    if not isinstance(about, dict):
        raise DataError(f"a part .json with an object is needed, found {_kind(about)}")
    if CHOSEN in about and REJECTED in about:
        raise DataError("the sample is a preference pair, which training does not support yet")
    forms = [form for form in ("messages", "pack", "question") if form in about]
    if len(forms) != 1:
        raise DataError(f'the json must have one of "messages", "pack" and "question", found {forms or sorted(about)}')
    # Its media are shared out over the conversations in their order.
    media = media_of(sample, about, images)
    conversations: tuple[Conversation, ...]
    if forms == ["question"]:
        conversations = (_question(about["question"], sample, media, has_pool=has_pool),)
    else:
        members = [about] if forms == ["messages"] else about["pack"]
        conversations = _share_media(members, media, has_pool=has_pool)
    return ChatSample(**basic_sample_keys(sample), conversations=conversations)


def _question(question: Any, sample: dict[str, Any], media: SampleMedia, *, has_pool: bool) -> Conversation:
    conversation = _conversation((), media)
    for mark, count in conversation.num_media.items():
        if count > 1:
            raise DataError(f'with "question", at most one {NAMES[mark]} is allowed, found {count}')
    if "txt" not in sample:
        raise DataError("a part .txt with the answer is needed")
    turns = vqa_turns(question, sample["txt"], _marks_of(conversation), has_pool=has_pool)
    ROW.check(sample["json"])
    turns = complete(turns, sample["json"])
    check_order(turns)
    return replace(conversation, turns=turns, tools=tools_of(sample["json"]))


def _conversation(
    turns: tuple[Turn, ...], media: SampleMedia, tokens: Any = None, tools: tuple[Mapping[str, Any], ...] = ()
) -> Conversation:
    return Conversation(turns, media.images, tokens, media.videos, media.audios, tools)


def _marks_of(conversation: Conversation) -> tuple[str, ...]:
    """Return a mark for each of its images, videos and audio clips."""
    return tuple(mark for mark, count in conversation.num_media.items() for _ in range(count))


def _share_media(members: Any, media: SampleMedia, *, has_pool: bool) -> tuple[Conversation, ...]:
    """Return the conversations of a sample, each with the images, videos and audio clips of its marks."""
    if not isinstance(members, list) or not members or not all(isinstance(member, dict) for member in members):
        raise DataError('"pack" must be a list of objects with "messages"')
    conversations, done = [], dict.fromkeys(NAMES, 0)
    for member in members:
        turns = chat_turns(member.get("messages"), has_pool=has_pool, row=member)
        if has_pool and len(members) == 1:
            turns = _place_media(turns, _marks_of(_conversation(turns, media)))
        first, done = done, {mark: count + count_marks(turns, mark) for mark, count in done.items()}
        images, videos, audios = (slice(first[mark], done[mark]) for mark in (IMAGE_MARK, VIDEO_MARK, AUDIO_MARK))
        own_media = SampleMedia(media.images[images], media.videos[videos], media.audios[audios])
        # With a pool the text of a question is not known before training.
        tokens = None if has_pool else member.get(TOKENS_KEY)
        conversations.append(_conversation(turns, own_media, tokens, tools_of(member)))
    said = [turn for conversation in conversations for turn in conversation.turns]
    num_media = _conversation((), media).num_media
    # Where there are none, it depends on the model whether a mark is text: the tokenizer checks that.
    check_marks(said, num_media, literal=NAMES)
    return tuple(conversations)


def _place_media(turns: tuple[Turn, ...], marks: Sequence[str]) -> tuple[Turn, ...]:
    """Put all images, videos and audio clips into an empty question, unless the conversation has marks."""
    if any(mark in turn.text for turn in turns for mark in NAMES):
        return turns
    first = next(index for index, turn in enumerate(turns) if turn.role == "user")
    if turns[first].text.strip():
        return turns
    return (*turns[:first], Turn("user", "\n".join(marks)), *turns[first + 1 :])


def with_prompt(turns: Sequence[Turn], prompt: str) -> tuple[Turn, ...]:
    """Return the turns with the prompt as question if the first one only has images, videos and audio clips."""
    first = next(index for index, turn in enumerate(turns) if turn.role == "user")
    marks = turns[first].text.strip()
    if without_marks(marks).strip():
        return tuple(turns)
    return (*turns[:first], Turn("user", f"{marks}\n{prompt}".strip()), *turns[first + 1 :])


def chat_turns(messages: Any, *, has_pool: bool = False, row: Mapping[str, Any] | None = None) -> tuple[Turn, ...]:
    """Return the turns of a list of `{"role": …, "content": text}`; with a pool, an answer may come first.

    Args:
        row: the object that has the messages, with whatever `record_keys.ROW` honors beside them.

    Raises:
        DataError: there is no answer, none is trained, users and assistants do not take turns after at most one system
            message, or there is a key that cannot be honored.
    """
    if not isinstance(messages, list) or not messages:
        raise DataError(f'"messages" must be a non-empty list, found {_kind(messages)}')
    ROW.check(row or {})
    turns = list(complete([_chat_turn(index, message) for index, message in enumerate(messages)], row or {}))
    start = 1 if turns and turns[0].role == "system" else 0
    if has_pool and turns[start:] and turns[start].role == "assistant":
        turns.insert(start, Turn("user", ""))
    check_order(turns)
    if all(turn.role != "assistant" for turn in turns):
        raise DataError(f"an answer is needed; found {', '.join(turn.role for turn in turns)}")
    return tuple(turns)


def _chat_turn(index: int, message: Any) -> Turn:
    where = f"message {index}"
    if not isinstance(message, dict):
        raise DataError(f'{where} must have a "role" and a text as "content", found {message!r:.200}')
    role = role_of(message.get("role"))
    if role is None:
        raise DataError(f"{where}: the role is {message.get('role')!r}; allowed: {', '.join(ROLES)}")
    has_more = is_full(message.get("tool_calls")) or is_full(message.get("function_call"))
    text = "" if has_more and message.get("content") is None else message.get("content")
    if not isinstance(text, str):
        raise DataError(f'{where} must have a "role" and a text as "content", found {message!r:.200}')
    if role == "assistant" and not text.strip() and not has_more:
        raise DataError(f"{where}: the answer is empty")
    TURN.check(message, where)
    return turn_of(message, role, text, where, is_call=is_call_role(message["role"]))


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {value!r:.80}"


def chat_from_standard(sample: Any) -> ChatSample:
    """Turn a sample of one of energon's own types into a conversation. DataError for other types."""
    if isinstance(sample, ChatSample):
        return sample
    if not isinstance(sample, VQASample):
        kind = type(sample).__name__
        if isinstance(sample, TextSample):
            advice = "prepare text-only samples as CrudeWebdataset"
        else:
            advice = (
                "prepare the shards again. In energon's list choose the class VQAWebdataset or VQASample, whose number "
                "depends on energon's version, or run: energon prepare FOLDER --force-overwrite --non-interactive "
                "--split-ratio 1,0,0 --sample-type VQASample --field-map "
                """'{"image": "jpg", "context": "json[question]", "answers": "txt"}'"""
            )
        raise DataError(f"a {kind} cannot be trained on, only VQASample and crude samples: {advice}")
    if not isinstance(sample.image, bytes):
        raise DataError(f"the field image is {type(sample.image).__name__}, not an image such as jpg; see field_map")
    answers = [sample.answers] if isinstance(sample.answers, str) else sample.answers
    if not answers:
        raise DataError("the sample has no answer; map the field answers, for example to txt")
    answer = majority(answers)
    has_pool = POOL_KEY in (sample.__subflavors__ or {})
    turns = vqa_turns(sample.context, answer, (IMAGE_MARK,), has_pool=has_pool)
    return ChatSample.derive_from(sample, conversations=(Conversation(turns, (sample.image,)),))


def vqa_turns(question: Any, answer: Any, marks: Sequence[str] = (), *, has_pool: bool = False) -> tuple[Turn, ...]:
    """Return question and answer without surrounding white space, after the marks that the question lacks.

    With a pool the question may be empty or None.
    """
    if has_pool and question is None:
        question = ""
    for name, text, may_be_empty in (("question", question, has_pool), ("answer", answer, False)):
        if not isinstance(text, str) or not (text.strip() or may_be_empty):
            raise DataError(f"the {name} must be non-empty text, found {text!r}")
    question = question.strip()
    question = "\n".join([*(mark for mark in marks if mark not in question), question]).strip()
    return (Turn("user", question), Turn("assistant", answer.strip()))
