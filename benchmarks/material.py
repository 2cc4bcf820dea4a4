"""What the training benchmarks run on: real shards of conversations, and weights for the folders of `shapes`."""

from __future__ import annotations

import gc
import io
import json
import random
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from megatron.energon.flavors import BaseWebdatasetFactory
from PIL import Image, ImageFilter

from benchmarks.shapes import AUDIO_SECONDS, Size
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.architectures.registry import architecture_of

TOKENS_PER_SECOND = 3.6
"""Of English as it is read aloud; the tokens of the benchmarks' tokenizer are bytes."""
NUM_VIDEOS = 16
"""Different ones, which conversations share."""
VIDEO_SHARE = 1 / 3
"""Of the conversations of a blend with videos."""
VIDEO_SIZES: tuple[Size, ...] = ((640, 360), (480, 270), (360, 640))
VIDEO_FPS = 2.0
PAN = 12
"""Pixels by which a video's picture moves from a frame to the next one."""
TOKENS_AROUND = 64
"""At least as many as a question about a video and the chat template take."""
DATASET_YAML = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"


def make_weights(folder: Path) -> None:
    """Add random weights in bf16 to a folder of `make_hf_folder`, drawn on a GPU where there is one."""
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        hf = load_hf_config(folder)
        model = architecture_of(hf).model_class._from_config(hf, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    gc.collect()  # its parts refer to each other; the runs that follow need the GPU's memory
    torch.cuda.empty_cache()


def make_jpeg(seed: int, width: int = 640, height: int = 480) -> bytes:
    """Return smooth colored noise as a JPEG of about the size of a photograph's."""
    return as_jpeg(make_picture(seed, width, height))


def make_picture(seed: int, width: int, height: int) -> Image.Image:
    """Return smooth colored noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).filter(ImageFilter.GaussianBlur(1))


def as_jpeg(image: Image.Image) -> bytes:
    """Return an image encoded."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


@dataclass(frozen=True)
class Sample:
    """One conversation with an image or audio clip, or none, and perhaps more images; or with a video.

    `video`: its frames, JPEGs of one size.
    """

    question: str
    answer: str
    picture: bytes | None
    sound: bytes | None = None
    more_pictures: tuple[bytes, ...] = ()
    video: tuple[bytes, ...] = ()


def make_shards(
    folder: Path,
    *,
    num_samples: int,
    num_shards: int = 8,
    num_pictures: int = 64,
    sizes: Sequence[tuple[int, int]] = ((640, 480),),
    num_images: int = 1,
) -> Path:
    """Write and index shards of `conversations`."""
    return write_shards(folder, conversations(num_samples, sizes, num_pictures, num_images), num_shards)


def conversations(
    num_samples: int, sizes: Sequence[tuple[int, int]], num_pictures: int = 64, num_images: int = 1
) -> list[Sample]:
    """Return conversations with lengths like LLaVA's mix: nine of ten with one image.

    With more, each has `num_images` of them and an answer as long as those to as many. Answers are cut from Python's
    language reference, which every Python brings: English that a model can learn.
    """
    draw = random.Random(0)
    book = " ".join(" ".join(text.split()) for _, text in sorted(topics.items()))
    pictures = [make_jpeg(number, *sizes[number % len(sizes)]) for number in range(num_pictures)]
    samples = []
    for number in range(num_samples):
        has_picture = draw.random() < 0.9 or num_images > 1
        length = sum(min(3000, int(draw.lognormvariate(5, 0.8)) + 8) for _ in range(num_images))
        place = draw.randrange(len(book) - length)
        answer = book[place : place + length]
        question = "<image>\n" * (num_images if has_picture else 0) + "What is this?"
        first, *more = (pictures[(number * num_images + i) % num_pictures] for i in range(num_images))
        samples.append(Sample(question, answer, first if has_picture else None, more_pictures=tuple(more)))
    return samples


def with_videos(samples: Sequence[Sample], num_frames: int, seq_length: int) -> list[Sample]:
    """Return conversations of which one of three, drawn at random, has a video instead of its images.

    Its answer is cut to what remains of `seq_length` tokens beside the longest video; the others stay as they are.

    Args:
        num_frames, seq_length: as for `make_videos`.
    """
    draw, videos = random.Random(1), make_videos(num_frames, seq_length)
    longest = seq_length // 2 - TOKENS_AROUND
    return [
        replace(
            sample,
            question="<video>\nWhat happens?",
            answer=sample.answer[:longest],
            picture=None,
            more_pictures=(),
            video=draw.choice(videos),
        )
        if draw.random() < VIDEO_SHARE
        else sample
        for sample in samples
    ]


def make_videos(num_frames: int, seq_length: int) -> list[tuple[bytes, ...]]:
    """Return the frames of NUM_VIDEOS videos: pictures that pan, in VIDEO_SIZES by turns.

    A video has between half and twice `num_frames` frames, an even number, `num_frames` in the geometric mean. One
    that would take more than half of `seq_length` tokens (`pair_tokens`) has only as many frames as fit there.
    """
    draw, videos = random.Random(0), []
    for number in range(NUM_VIDEOS):
        width, height = VIDEO_SIZES[number % len(VIDEO_SIZES)]
        pairs = round(num_frames / 2 * 2 ** draw.uniform(-1, 1))
        pairs = max(1, min(pairs, seq_length // 2 // pair_tokens(width, height)))
        videos.append(make_frames(number, width, height, 2 * pairs))
    return videos


def pair_tokens(width: int, height: int) -> int:
    """Return how many tokens two frames are in Qwen2.5-VL. In Qwen3-VL they are fewer, with the text of their times."""
    return round(width / 28) * round(height / 28)


def make_frames(seed: int, width: int, height: int, num_frames: int) -> tuple[bytes, ...]:
    """Return the JPEGs of what a frame sees that moves to the right over a wide picture."""
    whole = make_picture(seed, width + PAN * (num_frames - 1), height)
    return tuple(as_jpeg(whole.crop((x, 0, x + width, height))) for x in range(0, PAN * num_frames, PAN))


def make_audio_shards(folder: Path, *, num_samples: int, num_shards: int = 8, num_clips: int = 64) -> Path:
    """Write and index shards of clips with transcripts as long as speech has them: about 3.6 tokens per second."""
    draw = random.Random(0)
    book = " ".join(" ".join(text.split()) for _, text in sorted(topics.items()))
    lengths = [draw.uniform(*AUDIO_SECONDS) for _ in range(num_clips)]
    sounds = [make_flac(number, seconds) for number, seconds in enumerate(lengths)]
    samples = []
    for number in range(num_samples):
        length = round(TOKENS_PER_SECOND * lengths[number % num_clips])
        place = draw.randrange(len(book) - length)
        answer, sound = book[place : place + length], sounds[number % num_clips]
        samples.append(Sample("<audio>\nTranscribe.", answer, None, sound))
    return write_shards(folder, samples, num_shards)


def make_flac(seed: int, seconds: float, rate: int = 16_000) -> bytes:
    """Return noise whose loudness changes as a FLAC of one channel."""
    import soundfile  # which benchmarks with images do without

    noise = np.random.default_rng(seed).standard_normal(round(seconds * rate))
    loudness = 0.1 * (1 + np.sin(np.arange(len(noise)) / rate * 20))
    buffer = io.BytesIO()
    soundfile.write(buffer, (noise * loudness).clip(-1, 1), rate, format="FLAC")
    return buffer.getvalue()


def write_shards(folder: Path, samples: Sequence[Sample], num_shards: int = 8) -> Path:
    """Write and index shards of conversations; sample i goes into shard i mod num_shards."""
    folder.mkdir(parents=True)
    for shard in range(num_shards):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for number in range(shard, len(samples), num_shards):
                sample = samples[number]
                _add(tar, f"{number:08d}.json", json.dumps(_record(sample)).encode())
                if sample.picture is not None:
                    _add(tar, f"{number:08d}.0.jpg", sample.picture)
                for place, picture in enumerate(sample.more_pictures, start=1):
                    _add(tar, f"{number:08d}.{place}.jpg", picture)
                for place, frame in enumerate(sample.video):
                    _add(tar, f"{number:08d}.{place}.jpg", frame)
                if sample.sound is not None:
                    _add(tar, f"{number:08d}.0.flac", sample.sound)
    BaseWebdatasetFactory.prepare_dataset(
        str(folder),
        [f"{shard:05d}.tar" for shard in range(num_shards)],
        split_parts_ratio=[("train", 1.0), ("val", 0.0), ("test", 0.0)],
        workers=1,
    )
    (folder / ".nv-meta" / "dataset.yaml").write_text(DATASET_YAML, encoding="utf-8")
    return folder


def _record(sample: Sample) -> dict[str, Any]:
    """Return a conversation's json."""
    messages = [{"role": "user", "content": sample.question}, {"role": "assistant", "content": sample.answer}]
    if not sample.video:
        return {"messages": messages}
    frames = [f"{place}.jpg" for place in range(len(sample.video))]
    return {"messages": messages, "videos": [{"frames": frames, "fps": VIDEO_FPS}]}


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
