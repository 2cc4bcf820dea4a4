"""Asterisk's English prompts: recordings of one speaker with what she says, from two Debian packages.

The recordings (asterisk-core-sounds-en-wav, 8 kHz) and the list of their texts (asterisk-core-sounds-en) are licensed
under CC-BY-SA-3.0.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile

QUESTION = "Transcribe the speech."
LONGEST = 30.0
"""Seconds that the model hears."""
MOST_JOINED, LONGEST_JOINED = 4, 15.0
"""Prompts in a recording of several, and its seconds before its speed is changed."""
SPEEDS = (0.9, 1.25)
NOT_SPEECH = re.compile(r"[\[\]<>()]")
"""Descriptions of tones and of silence are in brackets or parentheses."""


@dataclass(frozen=True)
class Prompt:
    """One recording."""

    name: str
    file: Path
    text: str
    seconds: float


def read_prompts(sounds: Path, texts: Path) -> list[Prompt]:
    """Return the recordings of speech that have a text.

    Raises:
        FileNotFoundError: says which packages to install.
    """
    if not sounds.is_dir() or not texts.is_file():
        raise FileNotFoundError(
            f"there is no {sounds} or no {texts}: apt-get install asterisk-core-sounds-en-wav asterisk-core-sounds-en, "
            "or give --recordings and --texts"
        )
    lines = gzip.decompress(texts.read_bytes()).decode("utf-8").splitlines()
    named = dict(line.split(": ", 1) for line in lines if not line.startswith(";") and ": " in line)
    found = []
    for name, text in sorted(named.items()):
        file = sounds / f"{name}.wav"
        if not file.is_file() or NOT_SPEECH.search(text):
            continue
        seconds = soundfile.info(file).duration
        if 0 < seconds <= LONGEST:
            found.append(Prompt(name, file, " ".join(text.split()), seconds))
    return found


def words(text: str) -> str:
    """Return a text as it is compared: lower case, without punctuation."""
    return " ".join(re.sub(r"[^\w\s']", " ", text.lower()).split())


def split(prompts: list[Prompt], held_out_share: float) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts to train on and those held out. Equal texts are on the same side."""
    sides: tuple[list[Prompt], list[Prompt]] = ([], [])
    for prompt in prompts:
        number = int.from_bytes(hashlib.blake2b(words(prompt.text).encode(), digest_size=8).digest())
        sides[number < held_out_share * 2**64].append(prompt)
    return sides


def made_of(train: Sequence[Prompt], prompts: Sequence[Prompt]) -> list[bool]:
    """Return which prompts have only words that prompts to train on have too."""
    known = {word for prompt in train for word in words(prompt.text).split()}
    return [known.issuperset(words(prompt.text).split()) for prompt in prompts]


def join(prompts: Sequence[Prompt], folder: Path, number: int, on_file: Callable[[], None]) -> list[Prompt]:
    """Write recordings that are several prompts one after the other, at other speeds, and return them.

    A few hundred sentences are soon known by heart; what follows what here can only be heard.
    """
    folder.mkdir()
    rng, found = random.Random(0), []
    short = [x for x in prompts if x.seconds <= LONGEST_JOINED]
    for i in range(number):
        chosen = rng.sample(short, rng.randint(1, MOST_JOINED))
        while len(chosen) > 1 and sum(x.seconds for x in chosen) > LONGEST_JOINED:
            chosen.pop()
        waves, rates = zip(*(soundfile.read(x.file, dtype="int16") for x in chosen), strict=True)
        rate = round(rates[0] * rng.uniform(*SPEEDS))
        file, samples = folder / f"{i:05d}.flac", np.concatenate(waves)
        soundfile.write(file, samples, rate)
        found.append(Prompt(file.stem, file, " ".join(x.text for x in chosen), len(samples) / rate))
        on_file()
    return found


def write_rows(prompts: Sequence[Prompt], path: Path) -> None:
    """Write what `prepare` reads: a conversation about each recording."""
    rows = [
        {
            "id": prompt.name,
            "audio": str(prompt.file.absolute()),
            "messages": [
                {"role": "user", "content": f"<audio>\n{QUESTION}"},
                {"role": "assistant", "content": prompt.text},
            ],
        }
        for prompt in prompts
    ]
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
