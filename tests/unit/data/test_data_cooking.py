"""Raw parts of a sample -> conversations."""

from __future__ import annotations

from typing import Any

import pytest

from llava_mcore.data.encode.conversation import chat_turns, cook_chat, with_prompt
from llava_mcore.data.encode.prompts import POOLS
from llava_mcore.data.samples import Turn, Video
from llava_mcore.errors import DataError


def raw(json: Any, *, pool: str | None = None, **parts: Any) -> dict[str, Any]:
    subflavors = {} if pool is None else {"prompt_pool": pool}
    keys = {"__key__": "k", "__restore_key__": (), "__sources__": (), "__subflavors__": subflavors}
    return {**keys, "json": json, **{name.replace("_", "."): part for name, part in parts.items()}}


def message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def test_conversation_with_pictures_anywhere() -> None:
    """Images are taken in the order of their numbers, wherever the text has them."""
    messages = [
        message("system", "Be brief."),
        message("user", "Compare <image> and <image>."),
        message("assistant", "Both are red."),
        message("user", "And this?\n<image>"),
        message("assistant", "Blue."),
    ]
    parts: dict[str, Any] = {"10.jpg": b"c", "2.png": b"b", "0.jpg": b"a"}
    (found,) = cook_chat(raw({"messages": messages, "num_tokens": 3}) | parts).conversations
    assert [(t.role, t.text) for t in found.turns] == [(m["role"], m["content"]) for m in messages]
    assert found.images == (b"a", b"b", b"c"), "in the order of their numbers"


def test_pack_shares_its_pictures() -> None:
    first = {"messages": [message("user", "<image> a"), message("assistant", "1")]}
    second = {"messages": [message("user", "b"), message("assistant", "2")]}
    third = {"messages": [message("user", "<image><image> c"), message("assistant", "3")]}
    parts: dict[str, Any] = {"0.jpg": b"x", "1.jpg": b"y", "2.jpg": b"z"}
    found = cook_chat(raw({"pack": [first, second, third]}) | parts).conversations
    assert [c.images for c in found] == [(b"x",), (), (b"y", b"z")]


USER, ASSISTANT = message("user", "q"), message("assistant", "a")
BROKEN: list[tuple[Any, str]] = [
    (None, "a part .json with an object is needed, found nothing"),
    ([1], r"found list \[1\]"),
    ({"id": 3}, r"one of .*found \['id'\]"),
    ({"messages": [USER], "question": "q"}, r"found \['messages', 'question'\]"),
    ({"messages": []}, "must be a non-empty list"),
    ({"messages": "q"}, "found str 'q'"),
    ({"messages": [USER, {"role": "assistant"}]}, "message 1 must have"),
    ({"messages": [USER, message("assistant", " ")]}, "message 1: the answer is empty"),
    ({"messages": [USER, message("narrator", "a")]}, "the role is 'narrator'; allowed: system, developer, user"),
    ({"messages": [USER, message("tool", "a"), ASSISTANT]}, "results of tools come between .*; found user, tool"),
    ({"messages": [USER, ASSISTANT | {"weight": 0.5}]}, "`weight` is 0.5; .* only 0 and 1 are possible"),
    ({"messages": [USER, ASSISTANT | {"loss": False}]}, "the loss of every answer is 0"),
    ({"messages": [USER, ASSISTANT], "loss_mask": [1, 1, 1]}, "3 entries for 2 turns with 1 answers"),
    ({"messages": [USER, ASSISTANT], "documents": [{"text": "a"}]}, "documents for the chat template"),
    ({"messages": [USER]}, "an answer is needed"),
    ({"messages": [ASSISTANT]}, "must take turns, the user first; .* found assistant"),
    ({"messages": [USER, USER, ASSISTANT]}, "must take turns"),
    ({"messages": [USER, message("system", "s"), ASSISTANT]}, "a system message only at the beginning"),
    ({"pack": []}, '"pack" must be a list of objects'),
    ({"pack": [3]}, '"pack" must be a list of objects'),
    ({"question": "q"}, "a part .txt with the answer is needed"),
]


@pytest.mark.parametrize(("json", "reason"), BROKEN)
def test_broken_samples(json: Any, reason: str) -> None:
    """A sample that cannot be used is refused with its reason."""
    with pytest.raises(DataError, match=reason):
        cook_chat(raw(json))


def test_picture_parts_that_have_no_order() -> None:
    messages = {"messages": [message("user", "<image><image>"), ASSISTANT]}
    with pytest.raises(DataError, match=r"several images must be numbered .* found the parts \['jpg', 'png'\]"):
        cook_chat(raw(messages, jpg=b"x", png=b"y"))


@pytest.mark.parametrize(
    "sample",
    [
        raw({"messages": [ASSISTANT]}, pool="caption", jpg=b"x"),
        raw({"messages": [message("user", ""), ASSISTANT]}, pool="caption", jpg=b"x"),
        raw({"messages": [message("user", "<image>"), ASSISTANT]}, pool="caption", jpg=b"x"),
        raw({"question": ""}, pool="caption", jpg=b"x", txt="a"),
        raw({"question": None}, pool="caption", jpg=b"x", txt="a"),
    ],
)
def test_question_from_a_pool(sample: dict[str, Any]) -> None:
    """A sample without a question gets one from the pool, after its image."""
    (found,) = cook_chat(sample).conversations
    prompt = POOLS["caption"]["en"][0]
    assert with_prompt(found.turns, prompt) == (Turn("user", f"<image>\n{prompt}"), Turn("assistant", "a"))
    assert found.images == (b"x",)


def test_pool_leaves_questions_alone() -> None:
    turns = chat_turns([message("user", "<image>\nWhy?"), ASSISTANT], has_pool=True)
    assert with_prompt(turns, "Describe it.") == turns


# -- videos --------------------------------------------------------------------------------------------------------


def clip(*names: str, fps: Any = None) -> Any:
    return list(names) if fps is None else {"frames": list(names), "fps": fps}


def test_frames_are_parts_that_are_no_pictures() -> None:
    """Frames go by their names, in the order listed, and may come twice; the other parts are the images."""
    messages = [message("user", "<video> <image>"), ASSISTANT, message("user", "<image><video>"), ASSISTANT]
    about = {"messages": messages, "videos": [clip("v.b.jpg", "v.a.jpg", "v.b.jpg"), clip("7.png", fps=2)]}
    parts: dict[str, Any] = {"v.a.jpg": b"a", "v.b.jpg": b"b", "7.png": b"c", "3.jpg": b"y", "1.jpg": b"x"}
    (found,) = cook_chat(raw(about) | parts).conversations
    assert found.images == (b"x", b"y")
    assert found.videos == (Video((b"b", b"a", b"b")), Video((b"c",), 2.0))


def test_a_pack_shares_its_videos() -> None:
    members = [{"messages": [message("user", f"{marks}q"), ASSISTANT]} for marks in ("<video>", "<image>", "<video>")]
    about = {"pack": members, "videos": [clip("0.jpg"), clip("1.jpg", "2.jpg")]}
    found = cook_chat(raw(about) | {f"{i}.jpg": b"%d" % i for i in range(4)}).conversations
    assert [c.videos for c in found] == [(Video((b"0",)),), (), (Video((b"1", b"2")),)]
    assert [c.images for c in found] == [(), (b"3",), ()]


def test_a_question_about_a_video() -> None:
    """A video stands before the question unless the question says where."""
    about = {"question": "Why?", "videos": [clip("0.jpg")]}
    (found,) = cook_chat(raw(about, txt="a") | {"0.jpg": b"x", "1.jpg": b"y"}).conversations
    assert [turn.text for turn in found.turns] == ["<image>\n<video>\nWhy?", "a"]
    (found,) = cook_chat(raw({**about, "question": "So <video>?"}, txt="a") | {"0.jpg": b"x"}).conversations
    assert [turn.text for turn in found.turns] == ["So <video>?", "a"] and not found.images


def test_a_video_gets_its_question_from_a_pool() -> None:
    about = {"messages": [ASSISTANT], "videos": [clip("0.jpg")]}
    (found,) = cook_chat(raw(about, pool="caption") | {"0.jpg": b"x"}).conversations
    assert with_prompt(found.turns, "Describe it.")[0] == Turn("user", "<video>\nDescribe it.")


BROKEN_VIDEOS: list[tuple[Any, str]] = [
    ("clip.mp4", '"videos" must be a list with an entry per video'),
    (["clip.mp4"], "video 0 is 'clip.mp4': a shard holds the frames of a video, not the video itself; `prepare`"),
    ([clip("0.jpg"), 3], "video 1 must be a list of the names of its frames"),
    ([[0]], "video 0 must be a list of the names"),
    ([[""]], "video 0 must be a list of the names"),
    ([{"fps": 2.0}], "video 0 must be a list of the names"),
    ([[]], "video 0 has no frames"),
    ([clip("0.jpg", "9.jpg")], r"video 0: there is no part '9.jpg', found \['0.jpg'\], and the dataset has no store"),
    ([clip("0.jpg", fps=0)], "video 0: fps must be a number above 0, found 0"),
    ([clip("0.jpg", fps=float("nan"))], "found nan"),
    ([clip("0.jpg", fps=True)], "found True"),
    ([clip("0.jpg", fps="2")], "found '2'"),
    ([clip("0.jpg"), clip("0.jpg")], "1 <video> in the conversation, but 2 videos"),
]


@pytest.mark.parametrize(("videos", "reason"), BROKEN_VIDEOS)
def test_broken_videos(videos: Any, reason: str) -> None:
    """A list of videos that cannot be used is refused with its reason."""
    about = {"messages": [message("user", "<video>"), ASSISTANT], "videos": videos}
    parts: dict[str, Any] = {} if videos in ([], None) else {"0.jpg": b"x"}
    with pytest.raises(DataError, match=reason):
        cook_chat(raw(about) | parts)
