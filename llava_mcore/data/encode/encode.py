"""A conversation -> tokens that fit into a sequence. Its media stay encoded, because packing only needs lengths."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, takewhile
from typing import Any

import numpy as np

from llava_mcore.config.sections.data import Limits
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.encode.marks import NAMES
from llava_mcore.data.encode.tokens import (
    TOKENS_KEY,
    TextTokens,
    audio_tokens,
    expand,
    from_json,
    in_order,
    is_by,
    is_of,
    media_tokens,
    video_tokens,
)
from llava_mcore.data.samples import (
    IMAGE_MARK,
    Audio,
    Conversation,
    MediaSpan,
    TokenConversation,
    Turn,
    Video,
)
from llava_mcore.data.storage.stored_tokens import StoredTokens
from llava_mcore.errors import DataError, with_article
from llava_mcore.media.media import MediaPlan, MediaTokens


class TooLongError(DataError):
    """A conversation that does not fit into a sequence, or has more patches than a pack may have."""


def check_length(turns: Sequence[Turn], limits: Limits) -> None:
    """Raise DataError for a conversation with too many characters, because tokenizing takes time and memory."""
    num_chars = sum(len(turn.text) for turn in turns)
    if num_chars > limits.text_chars:
        raise DataError(
            f"the conversation has {num_chars} characters; the limit is {limits.text_chars} (max_text_chars)"
        )


def tokenize(conversation: Conversation, assets: Assets, key: str) -> TokenConversation:
    """Return all tokens of a conversation: the stored ones if tokenizer, template and text are still the same.

    Raises DataError if the template cannot render it, or stored tokens do not belong to it.
    """
    check_length(conversation.turns, assets.limits)
    check_media(conversation, assets)
    text = stored_tokens(conversation, assets)
    if text is None:
        text = assets.chat.tokens(conversation.turns, conversation.num_media, conversation.tools)
    return expanded(text, conversation, assets, key)


def check_media(conversation: Conversation, assets: Assets) -> None:
    """Raise DataError for media that cannot be used, and for too many images, frames or audio clips."""
    limits, frames = assets.limits, conversation.frames
    for mark, count in conversation.num_media.items():
        if count and mark in assets.refused:
            raise DataError(f"it has {with_article(NAMES[mark])}, but {assets.refused[mark]}")
    if len(frames) > limits.frames:
        raise DataError(f"its videos have {len(frames)} frames; the limit is {limits.frames} (max_frames)")
    num_bytes = sum(map(len, (*conversation.images, *frames, *(audio.data for audio in conversation.audios))))
    if num_bytes > limits.sample_bytes:
        raise DataError(
            f"its images, frames and audio clips have {num_bytes} bytes; the limit is {limits.sample_bytes} "
            "(max_sample_bytes)"
        )


def expanded(text: TextTokens, conversation: Conversation, assets: Assets, key: str) -> TokenConversation:
    """Return a conversation's tokens with those of its media. DataError for media that cannot be read."""
    plan, most_pixels = assets.plan, assets.limits.image_pixels
    images = zip(conversation.images, media_tokens(conversation.images, plan, most_pixels), strict=True)
    videos = zip(conversation.videos, video_tokens(conversation.videos, plan, most_pixels), strict=True)
    audios = zip(conversation.audios, audio_tokens(conversation.audios, plan), strict=True)
    ordered: list[tuple[bytes | Video | Audio, MediaTokens]] = in_order(text.ids, [*images], [*videos], [*audios], plan)
    tokens = expand(text, plan.placeholders, [item for _, item in ordered])
    placed = (MediaSpan(data, int(start), item) for (data, item), start in zip(ordered, tokens.starts, strict=True))
    return TokenConversation(key, tokens.input_ids, tokens.trained, tuple(placed), truncated=False, typed=tokens.typed)


def stored_tokens(conversation: Conversation, assets: Assets) -> TextTokens | None:
    """Return the tokens that were stored with a conversation, with one placeholder per image, video and audio clip.

    None if there are none, or if they differ from what would be computed now.

    Raises DataError if they are damaged.
    """
    stored = conversation.tokens
    if not is_by(stored, assets.chat.fingerprint) or not is_of(stored, conversation.turns, conversation.tools):
        return None
    tokens = from_json(conversation.tokens)
    for mark, token_id in assets.chat.media_ids.items():
        count = conversation.num_media[mark]
        if np.count_nonzero(tokens.ids == token_id) != count:
            raise DataError(f"its {TOKENS_KEY} are not those of {count} {NAMES[mark]}s; prepare the data again")
    return tokens


def stored_text(
    parts: Mapping[str, Any], stored: StoredTokens, assets: Assets
) -> tuple[TextTokens, Conversation] | None:
    """Return the tokens that are stored beside a shard, and the images that they belong to.

    None if they were stored for a different sample, or if the sample cannot be used as it is: then its json is decoded,
    which reports the problem.

    Args:
        parts: of the sample, as they are in the shard.
    """
    # The parts are those that the tokens were stored for, and images alone.
    content = parts.get("json")
    names = [name for name in parts if name != "json" and not name.startswith("__")]
    images = tuple(parts[name] for name in names)
    if not isinstance(content, bytes) or zlib.crc32(content) != stored.of_json or len(images) != stored.num_images:
        return None
    if [name.partition(".")[0] for name in names] != [str(n) for n in range(len(names))]:
        return None
    if not all(isinstance(image, bytes) for image in images) or (images and IMAGE_MARK in assets.refused):
        return None
    # The limits of this run, and one placeholder for each image.
    limits = assets.limits
    if stored.num_chars > limits.text_chars or sum(map(len, images)) > limits.sample_bytes:
        return None
    ids = stored.ids.astype(np.int64)
    if np.count_nonzero(ids == assets.plan.image_token_id) != len(images):
        return None
    trained = np.zeros(len(ids), dtype=np.bool_)
    for start, end in stored.spans.reshape(-1, 2).tolist():
        trained[start:end] = True
    return TextTokens(ids, trained), Conversation((), images)


def fit(
    tokens: TokenConversation,
    seq_length: int,
    truncate: bool,
    *,
    most_patches: int | None = None,
    unit: str = MediaPlan.unit,
) -> TokenConversation:
    """Return the conversation if it keeps to both budgets, else its beginning if it may be truncated.

    Args:
        most_patches: data.max_media_tokens.
        unit: what that counts (`MediaPlan.unit`).

    Raises:
        TooLongError: it may not be truncated, or nothing to train on would be left.
    """
    # Collect every budget that is exceeded, so that one message names all settings to raise.
    over, raised = [], []
    if len(tokens) > seq_length:
        over.append(f"{len(tokens)} tokens (media included), but data.seq_length is {seq_length}")
        raised.append("data.seq_length (--seq-length)")
    if most_patches is not None and tokens.num_patches > most_patches:
        over.append(f"{tokens.num_patches} {unit}, but data.max_media_tokens is {most_patches}")
        raised.append("data.max_media_tokens")
    if not over:
        return tokens
    excess = f"the sample has {'; and '.join(over)}"
    if not truncate:
        raise TooLongError(f"{excess}; raise {' and '.join(raised)}, or choose --on-too-long truncate")
    # An answer that is cut off completely leaves nothing to learn.
    shorter = cut(tokens, seq_length, most_patches)
    if not shorter.trained.any():
        raise TooLongError(f"{excess}; if it is truncated, nothing to train on is left")
    return shorter


def cut(tokens: TokenConversation, seq_length: int, most_patches: int | None = None) -> TokenConversation:
    """Return the beginning that keeps to both budgets, without an image, video or audio clip that would be cut in two.

    The remaining images keep the tokens that they had among all images.
    """
    patches = accumulate(item.tokens.num_patches for item in tokens.media)
    fitting = takewhile(
        lambda pair: pair[0].end <= seq_length and (most_patches is None or pair[1] <= most_patches),
        zip(tokens.media, patches, strict=True),
    )
    complete = tuple(item for item, _ in fitting)
    left_out = tokens.media[len(complete) :]
    end = min(seq_length, left_out[0].start) if left_out else seq_length
    return replace(
        tokens, input_ids=tokens.input_ids[:end], trained=tokens.trained[:end], media=complete, truncated=True
    )
