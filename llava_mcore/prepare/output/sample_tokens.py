"""Limits of a sample, and its tokens as training counts them."""

from __future__ import annotations

from collections.abc import Sequence

from llava_mcore.config.sections.data import Limits
from llava_mcore.data import samples
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.encode.encode import check_length
from llava_mcore.data.encode.tokens import TextTokens, audio_tokens, media_tokens, video_tokens
from llava_mcore.data.samples import Audio, Turn, Video
from llava_mcore.errors import DataError
from llava_mcore.prepare.row_types import AudioFile, BadSample, Draft, ImageFile, Reason, VideoFrames
from llava_mcore.prepare.sources.lines import too_large


def check_draft(turns: Sequence[Turn], limits: Limits) -> None:
    """Raise BadSample for a text longer than a sample may have."""
    try:
        check_length(turns, limits)
    except DataError as error:
        raise BadSample(Reason.TOO_LARGE, str(error)) from error


def check_amount(
    images: Sequence[ImageFile], videos: Sequence[VideoFrames], audios: Sequence[AudioFile], limits: Limits
) -> None:
    """Raise BadSample for more frames or bytes than a sample may have."""
    frames = [frame for video in videos for frame in video.frames]
    if len(frames) > limits.frames:
        raise BadSample(Reason.TOO_LARGE, f"{len(frames)} frames; the limit is {limits.frames} (--max-frames)")
    files = [*(image.data for image in (*images, *frames)), *(audio.data for audio in audios)]
    if sum(map(len, files)) > limits.sample_bytes:
        raise too_large("images and audio clips" if audios else "images", limits.sample_bytes)


def as_trained(
    draft: Draft, images: Sequence[ImageFile], videos: Sequence[VideoFrames], audios: Sequence[AudioFile]
) -> samples.Conversation:
    """Return the conversation as training reads it."""
    clips = [Video(tuple(frame.data for frame in video.frames), video.fps) for video in videos]
    return samples.Conversation(
        draft.turns,
        tuple(image.data for image in images),
        videos=tuple(clips),
        audios=tuple(Audio(audio.data) for audio in audios),
        tools=draft.tools,
    )


def tokens_of(assets: Assets | None, conversation: samples.Conversation) -> tuple[int | None, TextTokens | None]:
    """Return the number of tokens in training, and the tokens of the text."""
    if assets is None:
        return None, None
    try:
        tokens = assets.chat.tokens(conversation.turns, conversation.num_media, conversation.tools)
    except DataError as error:
        raise BadSample(Reason.TEMPLATE, str(error)) from error
    most_pixels = assets.limits.image_pixels
    try:
        media = media_tokens(conversation.images, assets.plan, most_pixels)
        media += video_tokens(conversation.videos, assets.plan, most_pixels)
    except DataError as error:
        raise BadSample(Reason.SHAPE, str(error)) from error
    try:
        media += audio_tokens(conversation.audios, assets.plan)
    except DataError as error:
        raise BadSample(Reason.AUDIO_LENGTH, str(error)) from error
    num_tokens = len(tokens.ids) + sum(len(item) - 1 for item in media)
    return num_tokens, tokens
