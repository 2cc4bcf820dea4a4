"""What the data benchmarks read: real photographs as JPEGs in shards, with texts as long as those of LLaVA's mix."""

from __future__ import annotations

import io
import json
import random
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn import datasets
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoImageProcessor, LlavaConfig

from benchmarks.material import Sample
from benchmarks.shapes import SPECIAL, chat_tokenizer, make_hf_folder
from llava_mcore.prepare.prepare_source import prepare
from llava_mcore.prepare.shard_plan import Counting, Options, SourcePaths

TEXTS = (datasets.load_iris, datasets.load_wine, datasets.load_breast_cancer, datasets.load_diabetes)
TOKENS_PER_WORD = 1.75
"""Of these texts, by the tokenizer trained on them."""


def english_words() -> list[str]:
    """The words of scikit-learn's descriptions of its data, in order."""
    return " ".join(load().DESCR for load in TEXTS).split()


def make_hf_assets(folder: Path, *, image_size: int, seq_length: int) -> Path:
    """Write a Hugging Face folder (no weights): LLaVA 1.5's processor at an image size, and a real BPE tokenizer."""
    make_hf_folder(folder, "llava-1.5-7b", seq_length=seq_length)
    config = LlavaConfig.from_pretrained(folder)
    config.vision_config.image_size = image_size
    config.image_seq_length = (image_size // config.vision_config.patch_size) ** 2
    config.save_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder)
    processor.size, processor.crop_size = {"shortest_edge": image_size}, {"height": image_size, "width": image_size}
    processor.save_pretrained(folder)
    (folder / "processor_config.json").unlink(missing_ok=True)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(english_words())], trainer)
    chat_tokenizer(tokenizer).save_pretrained(folder)
    return folder


def make_pictures(sizes: Sequence[tuple[int, int]], number: int) -> list[bytes]:
    """Return JPEGs (quality 90) cut out of scikit-learn's two photographs at random places, sizes (w, h) in turn."""
    photos = [Image.fromarray(photo) for photo in datasets.load_sample_images().images]
    draw = random.Random(1)
    pictures = []
    for index in range(number):
        photo, (width, height) = photos[index % len(photos)], sizes[index % len(sizes)]
        zoom = draw.uniform(1.0, 1.6) * max(width / photo.width, height / photo.height)
        large = photo.resize((round(photo.width * zoom) + 1, round(photo.height * zoom) + 1), Image.Resampling.LANCZOS)
        left, top = draw.randrange(large.width - width), draw.randrange(large.height - height)
        buffer = io.BytesIO()
        large.crop((left, top, left + width, top + height)).save(buffer, "JPEG", quality=90)
        pictures.append(buffer.getvalue())
    return pictures


def make_samples(number: int, pictures: Sequence[bytes], *, text_only: float, median_tokens: int) -> list[Sample]:
    """Return samples whose texts have log-normal lengths; `text_only` is the part without an image."""
    draw, words, samples = np.random.default_rng(0), english_words(), []
    for index in range(number):
        length = min(1500, 4 + int(draw.lognormal(np.log(median_tokens / TOKENS_PER_WORD), 0.8)))
        start = int(draw.integers(len(words)))
        text = [words[(start + i) % len(words)] for i in range(length)]
        cut = max(1, length // 4)
        has_picture = draw.random() >= text_only
        picture = pictures[index % len(pictures)] if has_picture else None
        question = ("<image>\n" if has_picture else "") + " ".join(text[:cut])
        samples.append(Sample(question, " ".join(text[cut:]), picture))
    return samples


def multiply(source: Path, folder: Path, num_shards: int) -> Path:
    """Create a dataset of many shards from a prepared one: links to its tars and indexes, and an index of all of them.

    The SQLite index is that of the source: training does not read it.
    """
    meta = folder / ".nv-meta"
    meta.mkdir(parents=True)
    tars = sorted(source.glob("*.tar"))
    counts = {}
    for number in range(num_shards):
        tar, name = tars[number % len(tars)], f"{number:06d}.tar"
        (folder / name).hardlink_to(tar)
        (folder / f"{name}.idx").hardlink_to(tar.with_suffix(".tar.idx"))
        counts[name] = tar.with_suffix(".tar.idx").stat().st_size // struct.calcsize("Q") - 1
    (meta / ".info.json").write_text(json.dumps({"energon_version": "7.4.1", "shard_counts": counts}))
    split = {"split_parts": {"train": [f"{{000000..{num_shards - 1:06d}}}.tar"], "val": [], "test": []}, "exclude": []}
    (meta / "split.yaml").write_text(json.dumps(split), encoding="utf-8")
    for name in ("index.sqlite", "index.uuid", "dataset.yaml"):
        (meta / name).write_bytes((source / ".nv-meta" / name).read_bytes())
    return folder


class Silent:
    """Shows no progress."""

    def begin(self, what: str, total: int | None) -> None:
        """Do nothing."""

    def advance(self, number: int) -> None:
        """Do nothing."""


def prepare_shards(source: Path, folder: Path, hf_dir: Path) -> Path:
    """Prepare shards as a user does: with the tokenizer of training."""
    prepare(SourcePaths((source,)), folder, Options(rows_per_shard=500, counting=Counting(hf_dir)), Silent())
    return folder
