"""Hashes of a sample: equal for equal contents, and close for similar text and images."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from datasketch import MinHash
from numpy.typing import NDArray
from PIL import Image

from llava_mcore.data.processors.images import decode_image
from llava_mcore.data.samples import ChatSample, Conversation
from llava_mcore.errors import DataError

HASH_SIDE = 16
"""A perceptual hash has HASH_SIDE ** 2 bits."""
SAMPLED = 4 * HASH_SIDE
"""Pixels of an edge of the image that is hashed."""
MARGIN = 600.0
"""Largest change of a frequency by compressing or resizing an image; a photograph's are ten times as large."""
NUM_PERMUTATIONS = 128
"""Hashes in a MinHash: its estimate of a Jaccard similarity has a standard error of about 0.04."""
_COSINES = 2 * np.cos(np.pi / SAMPLED * np.outer(np.arange(HASH_SIDE), np.arange(SAMPLED) + 0.5))
"""The low frequencies of a discrete cosine transform (DCT-II), [HASH_SIDE, SAMPLED]."""
EMPTY = MinHash(num_perm=NUM_PERMUTATIONS, scheme="affine32")
SHINGLE = 5
"""Characters of the pieces that texts are compared by."""
FRAMES_OF_VIDEO = 3
"""Frames of a video that are compared: the first, the middle and the last one."""


@dataclass(frozen=True)
class SamplePlace:
    """Where a sample is."""

    dataset: int
    """Index of the dataset, over all data paths in their order."""
    index: int
    """Number of the sample in its dataset."""
    shard: str
    key: str


@dataclass(frozen=True)
class Signature:
    """Hashes by which two samples are first compared."""

    place: SamplePlace
    exact: bytes
    """Digest of all text and media."""
    text: NDArray[np.uint32]
    """[NUM_PERMUTATIONS]: MinHash of its text."""
    images: tuple[bytes, ...]
    """The perceptual hash of each image and of some frames of each video."""
    other_media: bytes
    """Digest of its audio clips; empty without any."""


def signature_of(place: SamplePlace, chat: ChatSample) -> Signature:
    """Return the signature of a sample. DataError if an image cannot be decoded."""
    digest = hashlib.blake2b(digest_size=16)
    for conversation in chat.conversations:
        for turn in conversation.turns:
            digest.update(f"{turn.role}\0{turn.text}\0{turn.reasoning}\1".encode("utf-8", "surrogatepass"))
        for data in media_of(conversation):
            digest.update(hashlib.blake2b(data, digest_size=16).digest())
    audio = [clip.data for conversation in chat.conversations for clip in conversation.audios]
    return Signature(
        place,
        digest.digest(),
        minhash(text_of(chat)),
        tuple(perceptual_hash(image) for image in images_of(chat)),
        hashlib.blake2b(b"".join(audio), digest_size=16).digest() if audio else b"",
    )


def media_of(conversation: Conversation) -> Sequence[bytes]:
    """Return the encoded media of a conversation."""
    return [*conversation.images, *conversation.frames, *(clip.data for clip in conversation.audios)]


def text_of(chat: ChatSample) -> str:
    """Return all turns of a sample as one text without marks, case and repeated white space."""
    turns = [turn.text for conversation in chat.conversations for turn in conversation.turns if turn.role != "system"]
    return re.sub(r"\s+", " ", re.sub(r"<(image|video|audio)>", " ", "\n".join(turns))).strip().casefold()


def shingles(text: str) -> set[str]:
    """Return all pieces of SHINGLE characters; the whole text if it is shorter."""
    return {text[i : i + SHINGLE] for i in range(max(1, len(text) - SHINGLE + 1))}


def jaccard(one: str, other: str) -> float:
    """Return the similarity of two texts by their pieces, from 0 to 1."""
    a, b = shingles(one), shingles(other)
    return len(a & b) / len(a | b)


def minhash(text: str) -> NDArray[np.uint32]:
    """Return the MinHash of a text, [NUM_PERMUTATIONS]."""
    result = as_minhash(EMPTY.hashvalues.copy())
    result.update_batch([piece.encode("utf-8", "surrogatepass") for piece in shingles(text)])
    return np.asarray(result.hashvalues)


def as_minhash(values: NDArray[np.uint32]) -> MinHash:
    """Return datasketch's object for the values of a MinHash."""
    return MinHash(hashvalues=values, permutations=EMPTY.permutations, scheme=EMPTY.scheme)


def images_of(chat: ChatSample) -> list[Image.Image]:
    """Return the decoded images of a sample, and some frames of its videos. DataError if one cannot be decoded."""
    encoded: list[bytes] = []
    for conversation in chat.conversations:
        encoded += conversation.images
        for video in conversation.videos:
            last = len(video.frames) - 1
            chosen = sorted({round(i * last / (FRAMES_OF_VIDEO - 1)) for i in range(FRAMES_OF_VIDEO)})
            encoded += [video.frames[i] for i in chosen]
    return [decode_image(data) for data in encoded]


def perceptual_hash(image: Image.Image) -> bytes:
    """Return the hash of an image's low frequencies, HASH_SIDE ** 2 bits: 1 where one is above their median.

    This is pHash (Zauner, "Implementation and benchmarking of perceptual image hash functions", 2010), except for a
    margin: where a drawing is symmetric or nearly empty, many frequencies are about 0, and compressing it would change
    the bits of half of them.
    """
    try:
        gray = image.convert("L").resize((SAMPLED, SAMPLED), Image.Resampling.LANCZOS)
    except (OSError, ValueError) as error:
        raise DataError(f"an image cannot be hashed: {error}") from error
    low = _COSINES @ np.asarray(gray, dtype=np.float64) @ _COSINES.T
    return np.packbits((low > np.median(low) + MARGIN).reshape(-1)).tobytes()


def differing_bits(one: bytes, other: bytes) -> int:
    """Return the Hamming distance of two hashes."""
    return (int.from_bytes(one) ^ int.from_bytes(other)).bit_count()
