"""A YAML file that lists several sources, and the blend of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llava_mcore.errors import DataError, problems
from llava_mcore.files.regular import RefusedFileError, plain_name, read_regular_file
from llava_mcore.prepare.journal import write_whole
from llava_mcore.prepare.record_layouts import Keys
from llava_mcore.prepare.sources.detect import Format, Opening
from llava_mcore.prepare.sources.fetch import is_url

BLEND = "blend.yaml"
SUFFIXES = (".yaml", ".yml")
MOST_BYTES = 1 << 24
MOST_VALUES = 1_000_000
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ListedSource(BaseModel):
    """One entry of the list. Paths are relative to the YAML file; a path may be a URL."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str = Field(min_length=1)
    name: str | None = None
    weight: Positive | None = None
    """Share in the blend, relative to the others'."""
    epochs: Positive | None = None
    """Repetitions of each sample per epoch of the blend; instead of weights."""
    format: Format = "auto"
    image_dir: Path | None = None
    source_split: str = "train"
    image_key: str | None = None
    question_key: str | None = None
    answer_key: str | None = None
    captions: bool = False
    preference_pairs: bool = False
    video_key: str | None = None
    audio_key: str | None = None
    frames_fps: Positive | None = None
    subflavors: dict[str, Any] = {}
    """Passed on to energon's blend."""

    def place(self, root: Path) -> str:
        """Return the path or URL of the source."""
        return self.path if is_url(self.path) else str(root / self.path)

    def opening(self, root: Path) -> Opening:
        """Return how to read it."""
        texts = (self.image_key, self.question_key, self.answer_key, self.captions)
        keys = Keys(*texts, self.video_key, self.audio_key, self.preference_pairs)
        image_dir = None if self.image_dir is None else root / self.image_dir
        return Opening(self.format, image_dir, self.source_split, keys, frames_fps=self.frames_fps)


class Listing(BaseModel):
    """The whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sources: list[ListedSource] = Field(min_length=1)

    def by_name(self) -> dict[str, ListedSource]:
        """Return the sources by the names of their folders."""
        return {_name(source): source for source in self.sources}


def is_listing(path: Path) -> bool:
    """Whether a path is a list of sources."""
    return path.suffix.lower() in SUFFIXES


def read_listing(path: Path) -> Listing:
    """Read and check a list. DataError lists everything that is wrong with it."""
    try:
        content = yaml.safe_load(read_regular_file(path, MOST_BYTES).decode("utf-8"))
        if _size(content, {}) > MOST_VALUES:
            raise DataError(f"{path} has more than {MOST_VALUES} values after expanding aliases (*name)")
        listing = Listing.model_validate(content)
    except RefusedFileError as error:
        raise DataError(str(error)) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        errors = [f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors()]
        raise DataError(problems(f"{path} is not a list of sources (see docs/prepare.md)", errors)) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} is not valid YAML: {error}") from error
    errors = _disagreements(listing)
    if errors:
        raise DataError(problems(f"{path} cannot be prepared", errors))
    return listing


def _size(value: Any, known: dict[int, int]) -> int:
    """Return the number of values within a value. RecursionError for one that contains itself."""
    if not isinstance(value, (dict, list)):
        return 1
    if id(value) not in known:
        inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_size(item, known) for item in inner)
    return known[id(value)]


def _disagreements(listing: Listing) -> list[str]:
    names = [_name(source) for source in listing.sources]
    errors = [f"two sources have the name {n!r}; give one a `name`" for n in sorted(set(names)) if names.count(n) > 1]
    unusable = [n for n in names if not plain_name(n) or n.startswith(".") or n == BLEND]
    errors += [f"{n!r} cannot be the name of a folder; give the source another `name`" for n in unusable]
    weighted = [_name(source) for source in listing.sources if source.weight is not None]
    repeated = [_name(source) for source in listing.sources if source.epochs is not None]
    if weighted and repeated:
        errors.append(
            f"{', '.join(weighted)} with `weight` and {', '.join(repeated)} with `epochs`: choose one of them"
        )
    return errors


def _name(source: ListedSource) -> str:
    return PurePath(source.path).name.lstrip(".").partition(".")[0] if source.name is None else source.name


def write_blend(folder: Path, listing: Listing, *, has_val: bool) -> Path:
    """Write energon's metadataset of the prepared sources and return its path. The validation split has each once."""
    entries = []
    for name, source in listing.by_name().items():
        entry: dict[str, Any] = {"path": f"./{name}"}
        if source.subflavors:
            entry["subflavors"] = source.subflavors
        entries.append((entry, source))
    if any(source.epochs is not None for source in listing.sources):
        train = _epochs([(entry, source.epochs or 1) for entry, source in entries])
    else:
        train = {"blend": [{"weight": source.weight or 1, **entry} for entry, source in entries]}
    splits = {"train": train} | ({"val": _epochs([(entry, 1) for entry, _ in entries])} if has_val else {})
    blend = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": splits}
    write_whole(folder / BLEND, yaml.dump(blend, Dumper=_Plain, sort_keys=False, allow_unicode=True))
    return folder / BLEND


class _Plain(yaml.SafeDumper):
    """Writes repeated values in full: energon does not read aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _epochs(entries: Sequence[tuple[Mapping[str, Any], float]]) -> dict[str, Any]:
    return {"blend_epochized": [{"repetitions": times, **entry} for entry, times in entries]}
