"""Finds the images, video frames and audio clips of a sample: its parts, and names in a store."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from megatron.energon import FileStore
from megatron.energon.epathlib import EPath

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.data.samples import AUDIO_PARTS, IMAGE_PARTS, Audio, Video
from llava_mcore.data.storage.remote import STORAGE_ERRORS
from llava_mcore.errors import DataError
from llava_mcore.files.regular import RefusedFileError, open_regular_file

VIDEOS_KEY, FRAMES_KEY, FPS_KEY, AUDIOS_KEY = "videos", "frames", "fps", "audios"


@dataclass(frozen=True, slots=True)
class ListedVideo:
    """An entry of "videos" in a json: the names of its frames, and frames per second."""

    frames: tuple[Any, ...]
    fps: float | None


@dataclass(frozen=True, slots=True)
class SampleMedia:
    """The media of a sample, each kind in the order of its marks."""

    images: tuple[bytes, ...] = ()
    videos: tuple[Video, ...] = ()
    audios: tuple[Audio, ...] = ()


def media_of(sample: Mapping[str, Any], about: Mapping[str, Any], store: FileStore[bytes] | None) -> SampleMedia:
    """Return the images, videos and audio clips of a sample.

    Frames are the parts, or names in the store, that "videos" of the json lists. The other image parts are its
    images, numbered in the order of their marks (`0.jpg`, `1.png`, …); without any, those that "images" names in the
    store. Audio clips are the parts, or names in the store, that "audios" lists; without it, all audio parts by number.

    Args:
        about: the sample's json.
        store: the dataset's store of images (`aux: {images: …}` in a blend).

    Raises:
        DataError: something is missing or has a wrong type.
        RuntimeError: the store cannot be reached.
    """
    listed = listed_videos(about.get(VIDEOS_KEY))
    frames = {name for video in listed for name in video.frames}
    parts = {key: part for key, part in sample.items() if is_image_part(key)}
    images = [parts[name] for name in _numbered([name for name in parts if name not in frames])]
    if not images and about.get("images"):
        images = stored_images(about["images"], store, dict(sample))
    videos = [
        Video(tuple(_frames(index, video, parts, store, sample)), video.fps) for index, video in enumerate(listed)
    ]
    audios = [Audio(data) for data in _audios(sample, about.get(AUDIOS_KEY), store)]
    return SampleMedia(tuple(images), tuple(videos), tuple(audios))


def _audios(sample: Mapping[str, Any], listed: Any, store: FileStore[bytes] | None) -> list[bytes]:
    """Return the audio clips of a sample. `listed`: "audios" of its json."""
    parts = {key: part for key, part in sample.items() if is_audio_part(key)}
    if listed is None:
        return [parts[name] for name in _numbered(list(parts), "audio clips")]
    if not isinstance(listed, list) or not all(isinstance(name, str) and name for name in listed):
        raise DataError(f'"{AUDIOS_KEY}" must be a list of names, found {listed!r:.80}')
    unused = sorted(parts.keys() - set(listed))
    if unused:
        raise DataError(f'"{AUDIOS_KEY}" does not list the part {unused[0]!r}')
    named = [name for name in listed if name not in parts]
    if named and store is None:
        raise DataError(
            f"there is no part {named[0]!r}, found {sorted(parts) or 'no audio clips'}, and the dataset has no store "
            "(aux: {images: …})"
        )
    stored = dict(zip(named, stored_images(named, store, dict(sample), key=AUDIOS_KEY), strict=True)) if named else {}
    return [parts[name] if name in parts else stored[name] for name in listed]


def is_image_part(name: str) -> bool:
    """Return whether a part of a sample is an image or frame, by its suffix."""
    return _has_suffix(name, IMAGE_PARTS)


def is_audio_part(name: str) -> bool:
    """Return whether a part of a sample is an audio clip, by its suffix."""
    return _has_suffix(name, AUDIO_PARTS)


def _has_suffix(name: str, suffixes: Collection[str]) -> bool:
    return not name.startswith("__") and name.rsplit(".", 1)[-1].lower() in suffixes


def listed_videos(videos: Any) -> list[ListedVideo]:
    """Parse "videos" of a json: for each video a list of its frames, or {"frames": […], "fps": 2.0}.

    DataError for anything else.
    """
    if videos is None:
        return []
    if not isinstance(videos, list):
        raise DataError(f'"{VIDEOS_KEY}" must be a list with an entry per video, found {videos!r:.80}')
    return [_listed(index, video) for index, video in enumerate(videos)]


def _listed(index: int, video: Any) -> ListedVideo:
    frames, fps = (video.get(FRAMES_KEY), video.get(FPS_KEY)) if isinstance(video, dict) else (video, None)
    if isinstance(video, str):
        raise DataError(
            f"video {index} is {video!r:.80}: a shard holds the frames of a video, not the video itself; `prepare` "
            "writes such shards"
        )
    if not isinstance(frames, list) or not all(isinstance(name, str) and name for name in frames):
        raise DataError(
            f'video {index} must be a list of the names of its frames, or {{"frames": [names], "fps": number}}; found '
            f"{video!r:.80}"
        )
    if not frames:
        raise DataError(f"video {index} has no frames")
    return ListedVideo(tuple(frames), check_fps(fps, f"video {index}"))


def check_fps(fps: Any, where: str) -> float | None:
    """Return frames per second as a number, None if they are not given. DataError if it is not a positive number."""
    if fps is None:
        return None
    is_number = isinstance(fps, int | float) and not isinstance(fps, bool)
    if not is_number or not math.isfinite(fps) or fps <= 0:
        raise DataError(f"{where}: fps must be a number above 0, found {fps!r:.80}")
    return float(fps)


def _frames(
    index: int,
    video: ListedVideo,
    parts: Mapping[str, bytes],
    store: FileStore[bytes] | None,
    sample: Mapping[str, Any],
) -> list[bytes]:
    """Return the frames of a video: parts of the sample, or else of the store."""
    named = [name for name in video.frames if name not in parts]
    if named and store is None:
        raise DataError(
            f"video {index}: there is no part {named[0]!r}, found {sorted(parts) or 'no images'}, and the dataset "
            "has no store of images (aux: {images: …})"
        )
    stored = dict(zip(named, stored_images(named, store, dict(sample), key=VIDEOS_KEY), strict=True)) if named else {}
    return [parts[name] if name in parts else stored[name] for name in video.frames]


def _numbered(names: list[str], media_name: str = "images") -> list[str]:
    """Return the names of parts in the order of their numbers."""
    if len(names) < 2:
        return names
    stems = [name.partition(".")[0] for name in names]
    if not all(stem.isdecimal() for stem in stems) or len(set(stems)) != len(stems):
        example = "0.jpg, 1.png" if media_name == "images" else "0.wav, 1.mp3"
        raise DataError(f"several {media_name} must be numbered ({example}, …), found the parts {names}")
    return sorted(names, key=lambda name: int(name.partition(".")[0]))


def stored_images(
    names: Any, store: FileStore[bytes] | None, sample: dict[str, Any], *, key: str = "images"
) -> list[bytes]:
    """Return the bytes of the images that a sample names, in that order.

    Args:
        names: the value of `key` in the sample's json.
        store: the store that the blend gives as `aux: {images: …}` with the dataset.
        sample: the images' locations are added to its sources, for messages.

    Raises:
        DataError: there is no store, the names are not a list, a name is outside of the store, or an image is missing.
        RuntimeError: the store does not answer, or refuses the request.
    """
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise DataError(f'"{key}" must be a list of names, found {names!r:.80}')
    if store is None:
        raise DataError(f'"{key}" names {names[0]!r}, but the dataset has no store of images (aux: {{images: …}})')
    return [_image(name, store, sample) for name in names]


def _check_file(name: str, store: FileStore[bytes]) -> None:
    """Raise DataError for a file whose reading would block or never end."""
    folder = EPath(store.get_path())
    if not folder.is_local():
        return
    try:
        open_regular_file(folder.local_path() / name, LIMITS.sample_bytes).close()
    except RefusedFileError as error:
        raise DataError(f"the image {name!r}: {error}") from error
    except (OSError, ValueError):
        pass  # missing: it is in a tar of the store, or reading it reports the error


def _image(name: str, store: FileStore[bytes], sample: dict[str, Any]) -> bytes:
    if PurePosixPath(name).is_absolute() or "://" in name or ".." in PurePosixPath(name).parts:
        raise DataError(f"the image {name!r} is outside of its store; names must be relative to it")
    _check_file(name, store)
    try:
        return store.get(name, sample)
    except (FileNotFoundError, KeyError) as error:
        raise DataError(f"the image {name!r} is not in {store.get_path()}") from error
    except STORAGE_ERRORS as error:
        # Local files fail one by one. An object store that refuses or does not answer would fail for all of them,
        # so its OSErrors become errors that do not count as a broken sample.
        if not isinstance(error, PermissionError) and isinstance(error, OSError) and error.__cause__ is None:
            raise DataError(f"the image {name!r} in {store.get_path()} cannot be read: {error}") from error
        raise RuntimeError(f"{store.get_path()} cannot be read: {error.__cause__ or error}") from None
