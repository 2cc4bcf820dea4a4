"""Prepared and unprepared data paths. Also makes the shards that the tests of the loader read."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from megatron.energon.cli.main import main as energon
from PIL import Image
from sklearn.datasets import load_digits

from llava_mcore.data.storage.dataset_path import FIELD_MAP, check_dataset, fingerprint, nested_fingerprint
from llava_mcore.errors import DataError

DIGITS = load_digits()


def picture(index: int, kind: str = "JPEG", mode: str = "RGB", size: tuple[int, int] = (80, 60)) -> bytes:
    """One of scikit-learn's scans of handwritten digits."""
    image = Image.fromarray((DIGITS.images[index] * 15).astype(np.uint8)).resize(size).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def vqa_sample(index: int, **parts: Any) -> dict[str, Any]:
    """A sample as in the documentation; parts replace its parts, None leaves one out."""
    sample = {
        "__key__": f"{index:06d}",
        "jpg": picture(index),
        "json": {"question": f"Which digit is in image {index}?"},
        "txt": f"It is {DIGITS.target[index]}.",
    }
    return {k: v for k, v in (sample | parts).items() if v is not None}


def write_shard(path: Path, samples: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path), encoder=False) as tar:
        for sample in samples:
            parts = {k: json.dumps(v) if isinstance(v, dict) else v for k, v in sample.items()}
            tar.write({k: v.encode() if isinstance(v, str) and k != "__key__" else v for k, v in parts.items()})


def prepare(folder: Path, sample_type: str = "VQASample") -> Path:
    """Run the documented `energon prepare`, in this process because importing it takes seconds."""
    fields = ["--field-map", FIELD_MAP] if sample_type == "VQASample" else []
    arguments = ["prepare", str(folder), "--non-interactive", "--split-ratio", "1,0,0", "--sample-type", sample_type]
    energon([*arguments, *fields, "--num-workers", "1", "--no-progress"], standalone_mode=False)
    return folder


def select_shards(folder: Path, *names: str) -> None:
    """Let the train part of a prepared dataset be these shards."""
    split = {"split_parts": {"train": list(names), "val": [], "test": []}, "exclude": []}
    (folder / ".nv-meta" / "split.yaml").write_text(json.dumps(split), encoding="utf-8")


def make_vqa(folder: Path, *, shards: int = 3, samples: int = 12) -> Path:
    for shard in range(shards):
        write_shard(folder / f"{shard:06d}.tar", (vqa_sample(shard * samples + i) for i in range(samples)))
    return prepare(folder)


def test_path_is_needed_and_must_exist(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--data-path"):
        check_dataset(None)
    with pytest.raises(DataError, match="does not exist"):
        check_dataset(tmp_path / "nothing")
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match=r"a prepared folder or the \.yaml file"):
        check_dataset(tmp_path / "a.txt")


def test_unprepared_folder_is_told_how_to_prepare(tmp_path: Path) -> None:
    write_shard(tmp_path / "my data" / "000000.tar", [vqa_sample(0)])
    with pytest.raises(DataError) as caught:
        check_dataset(tmp_path / "my data")
    message = str(caught.value)
    assert ".nv-meta" in message
    assert f"energon prepare '{tmp_path}/my data' --non-interactive" in message
    assert """--field-map '{"image":"jpg","context":"json[question]","answers":"txt"}'""" in message


def test_half_prepared_and_empty(tmp_path: Path) -> None:
    """A dataset without shards or without its files of `prepare` is refused with what to do."""
    make_vqa(tmp_path, shards=1, samples=1)
    assert check_dataset(tmp_path) == [tmp_path]
    select_shards(tmp_path)
    with pytest.raises(DataError, match="no shards in its 'train' part"):
        check_dataset(tmp_path)
    (tmp_path / ".nv-meta" / "dataset.yaml").unlink()
    with pytest.raises(DataError, match=r"dataset\.yaml missing.*\n.*energon prepare .* --force-overwrite"):
        check_dataset(tmp_path)


def test_blend_names_every_bad_part(tmp_path: Path) -> None:
    good = make_vqa(tmp_path / "good", shards=1, samples=1)
    write_shard(tmp_path / "raw" / "000000.tar", [vqa_sample(1)])
    blend = tmp_path / "blend.yaml"
    blend.write_text(_blend("good", "raw", "gone"), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        check_dataset(blend)
    assert "2 problems" in str(caught.value)
    assert "raw has no .nv-meta" in str(caught.value) and "gone does not exist" in str(caught.value)
    blend.write_text(_blend("good"), encoding="utf-8")
    assert check_dataset(blend) == [good]
    blend.write_text("splits: 3", encoding="utf-8")
    with pytest.raises(DataError, match="not a blend of datasets"):
        check_dataset(blend)


def test_every_entry_of_a_blend_is_checked(tmp_path: Path) -> None:
    """A dataset may be listed twice, with other parts or split files."""
    make_vqa(tmp_path / "data", shards=1, samples=1)
    (tmp_path / "blend.yaml").write_text(_blend("data, split_part: val", "data"))
    with pytest.raises(DataError, match="no shards in its 'val' part"):
        check_dataset(tmp_path / "blend.yaml")
    (tmp_path / "blend.yaml").write_text(_blend("data", "data, split_config: other.yaml"))
    with pytest.raises(DataError, match=r"\(other\.yaml missing\)"):
        check_dataset(tmp_path / "blend.yaml")
    split = tmp_path / "data" / ".nv-meta" / "split.yaml"
    split.rename(split.with_name("other.yaml"))
    (tmp_path / "blend.yaml").write_text(_blend("data, split_config: other.yaml"))
    assert check_dataset(tmp_path / "blend.yaml") == [tmp_path / "data"]


def test_fingerprint_of_blends_within_a_blend(tmp_path: Path) -> None:
    """It changes with every entry of the inner blend."""
    for name in ("a", "b"):
        make_vqa(tmp_path / name, shards=1, samples=1)
    outer, inner, known = tmp_path / "outer.yaml", tmp_path / "inner.yaml", []
    outer.write_text(_blend("inner.yaml, subflavors: {path: nowhere}"))
    for entries in ("a b", "a, weight: 50 b", "a, subset: {range: ['0%','50%']} b", "a, split_config: other.yaml b"):
        inner.write_text(_blend(*entries.rsplit(" ", 1)))
        shutil.copy(tmp_path / "a" / ".nv-meta" / "split.yaml", tmp_path / "a" / ".nv-meta" / "other.yaml")
        known.append(nested_fingerprint(outer))
    (tmp_path / "a" / ".nv-meta" / "other.yaml").write_text('{"split_parts": {"train": []}, "exclude": []}')
    known.append(nested_fingerprint(outer))
    assert len(set(map(tuple, known))) == len(known) and all(known)
    assert nested_fingerprint(tmp_path / "a") == []


def _blend(*names: str) -> str:
    """The YAML of a blend; a name may be followed by other keys."""
    entries = "".join(f"      - {{path: ./{name}}}\n" for name in names)
    return f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n{entries}"


def test_fingerprint_follows_the_data_not_its_place(tmp_path: Path) -> None:
    first = make_vqa(tmp_path / "a", shards=1, samples=1)
    known = fingerprint(first)
    moved = first.rename(tmp_path / "b")
    assert fingerprint(moved) == known
    assert fingerprint(make_vqa(tmp_path / "c", shards=1, samples=1)) != known
    select_shards(moved, "000000.tar", "000000.tar")
    assert fingerprint(moved) != known
