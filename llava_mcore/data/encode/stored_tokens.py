"""Tokens that `prepare` writes into a sample's json, so that training does not tokenize again."""

from __future__ import annotations

import json
import logging
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from megatron.energon.epathlib import EPath

from llava_mcore.config.sections.data import PixelRange
from llava_mcore.data.encode.text.tokens import TextTokens
from llava_mcore.data.samples import Turn
from llava_mcore.errors import DataError

TOKENS_KEY = "prepared_tokens"
"""Key in a conversation's json."""
DIGEST_KEY = "of"
"""Key in that entry: the digest of the turns. Entries of earlier versions have none, so that nobody knows whether the
text was changed afterwards; they are not used."""
ORIGIN_FILE = "tokens.json"
"""File in .nv-meta: the fingerprint of the tokens in the latest shards, and the pixel ranges that they were counted
with."""
RANGES = {
    "pixels": ("pictures", "--min-pixels", "--max-pixels"),
    "video_pixels": ("frames", "--video-min-pixels", "--video-max-pixels"),
}
"""Keys in that file, and in `Assets`."""

logger = logging.getLogger(__name__)


def to_json(tokens: TextTokens, fingerprint: str, digest: str) -> dict[str, Any]:
    """Return the entry for the json.

    "by" is the fingerprint of the tokenizer and template, "of" the digest of the turns, "ids" are little-endian uint32
    in base64, "trained" lists the bounds of the trained spans: [start, end, start, end, …].
    """
    ends = np.flatnonzero(np.diff(tokens.trained, prepend=False, append=False))
    ids = b64encode(tokens.ids.astype("<u4").tobytes()).decode("ascii")
    return {"by": fingerprint, DIGEST_KEY: digest, "ids": ids, "trained": ends.tolist()}


def digest_of(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return a hash of everything in a conversation that its tokens depend on."""
    content = [[turn.role, turn.text, turn.trained, turn.reasoning, dict(turn.fields)] for turn in turns]
    text = json.dumps([content, list(tools)], default=str)
    return blake2b(text.encode("ascii"), digest_size=12).hexdigest()


def is_by(stored: Any, fingerprint: str) -> bool:
    """Return whether these are tokens of the tokenizer and template with that fingerprint."""
    return isinstance(stored, dict) and stored.get("by") == fingerprint


def is_of(stored: dict[str, Any], turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> bool:
    """Return whether these are tokens of exactly these turns. False for tokens that were stored without a digest."""
    return DIGEST_KEY in stored and stored[DIGEST_KEY] == digest_of(turns, tools)


def from_json(stored: dict[str, Any]) -> TextTokens:
    """The inverse of `to_json`. DataError if they are damaged."""
    try:
        ids = np.frombuffer(b64decode(stored["ids"]), "<u4").astype(np.int64)
        trained = np.zeros(len(ids), dtype=np.bool_)
        ends = iter(stored["trained"])
        for start, end in zip(ends, ends, strict=True):
            trained[start:end] = True
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"its {TOKENS_KEY} cannot be read ({error!r}); prepare the data again") from error
    return TextTokens(ids, trained)


def log_origin(datasets: Iterable[Path | EPath], fingerprint: str) -> None:
    """Log for every dataset with stored tokens whether they are used."""
    for dataset in datasets:
        file = dataset / ".nv-meta" / ORIGIN_FILE
        if not file.is_file():
            continue
        origin = json.loads(file.read_text())
        if is_by(origin, fingerprint) and DIGEST_KEY in origin:
            logger.info("%s: stored tokens are used", dataset)
        elif is_by(origin, fingerprint):
            logger.info(
                "%s: its tokens were prepared by an earlier version, which did not record the text that they belong "
                "to, so they are computed again during training, which takes CPU time; prepare the data again to save "
                "it",
                dataset,
            )
        else:
            logger.info(
                "%s: tokens were prepared with another tokenizer or chat template, so they are computed again during "
                "training, which takes CPU time; prepare the data again to save it",
                dataset,
            )


def origin_of(fingerprint: str, ranges: Mapping[str, PixelRange]) -> dict[str, Any]:
    """Return the content of ORIGIN_FILE. `ranges`: by the keys of RANGES; empty ones are left out."""
    listed = {key: [pixels.smallest, pixels.largest] for key, pixels in ranges.items() if pixels != PixelRange()}
    return {"by": fingerprint, DIGEST_KEY: "turns", **listed}


def warn_of_other_pixels(datasets: Iterable[Path | EPath], ranges: Mapping[str, PixelRange]) -> None:
    """Warn about every dataset whose tokens were counted with another range of pixels than training resizes to."""
    for dataset in datasets:
        file = dataset / ".nv-meta" / ORIGIN_FILE
        origin = json.loads(file.read_text()) if file.is_file() else {}
        for key, (name, *flags) in RANGES.items():
            pixels = ranges[key]
            current = [pixels.smallest, pixels.largest]
            if key not in origin or pixels == PixelRange() or origin[key] == current:
                continue
            smallest, largest = origin[key]
            logger.warning(
                "%s: its tokens were counted with %s of %s to %s pixels, but this run resizes them to %s to %s: lengths"
                " and packs differ from those that prepare reported; give %s %s %s %s, or prepare the data again",
                *(dataset, name, smallest, largest, *current, flags[0], smallest, flags[1], largest),
            )
