"""The pixels of a resized image or frame, where a class resizes to a range of areas (Qwen-VL)."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from transformers import BaseImageProcessor, BaseVideoProcessor, PretrainedConfig, Qwen3VLVideoProcessor
from transformers.image_utils import SizeDict

from llava_mcore.config.sections.data import PixelRange
from llava_mcore.errors import CheckpointError
from llava_mcore.files.regular import read_object
from llava_mcore.models.architectures.registry import architecture_of

NESTED, IMAGE_SETTINGS = "processor_config.json", "preprocessor_config.json"
"""Files with the image processor's settings: under "image_processor", and at the top level."""
OF_VIDEOS, VIDEO_SECTION = "video_preprocessor_config.json", "video_processor"
"""The video processor's file, and its section of `NESTED`. Without them, transformers reads `IMAGE_SETTINGS` for
videos too."""


@dataclass(frozen=True, slots=True)
class Ranged:
    """Images or frames, resized to a range: their flags, their processor, and where a folder has its settings."""

    name: str
    flags: tuple[str, str]
    processor: str
    section: str
    """Section of `NESTED`."""
    file: str

    def typed_flags(self, pixels: PixelRange) -> str:
        """Return the flags that were given, with their values."""
        values = zip(self.flags, (pixels.smallest, pixels.largest), strict=True)
        return " and ".join(f"{flag} {value}" for flag, value in values if value is not None)


IMAGES = Ranged("images", ("--min-pixels", "--max-pixels"), "image processor", "image_processor", IMAGE_SETTINGS)
FRAMES = Ranged("frames", ("--video-min-pixels", "--video-max-pixels"), "video processor", VIDEO_SECTION, OF_VIDEOS)


def set_pixel_range(
    processor: BaseImageProcessor | BaseVideoProcessor,
    pixels: PixelRange,
    config: PretrainedConfig,
    of: Ranged = IMAGES,
) -> list[str]:
    """Change a processor's range; return what is wrong, after which the processor is as it was."""
    if pixels == PixelRange():
        return []
    flags, architecture = of.typed_flags(pixels), architecture_of(config)
    if not architecture.resizes_to_range:
        return [
            f"{flags} cannot be used: {architecture.model_class.__name__} does not resize {of.name} to a range of "
            "areas; omit it"
        ]
    current = pixel_range_of(processor, config)
    smallest, largest = pixels.smallest or current.smallest, pixels.largest or current.largest
    if smallest is None or largest is None:
        return [f"{flags} cannot be used: the size of the {of.processor} is {processor.size}, not a range; correct it"]
    name, token = of.name, (processor.patch_size * processor.merge_size) ** 2
    if isinstance(processor, Qwen3VLVideoProcessor):  # its range is that of all frames together
        name, token = "all frames of a video together", token * processor.temporal_patch_size
    if largest < max(smallest, token):
        return [
            f"{flags}: {name} would have between {smallest} and {largest} pixels (a limit that is not given is the "
            f"{of.processor}'s); the maximum must be at least the minimum and at least {token}, the pixels of a token"
        ]
    processor.size = SizeDict(shortest_edge=smallest, longest_edge=largest)
    return []


def range_problems(
    processor: BaseImageProcessor | BaseVideoProcessor, config: PretrainedConfig, of: Ranged = IMAGES
) -> list[str]:
    """Return what is wrong with a processor's own range."""
    if not architecture_of(config).resizes_to_range:
        return []
    current = pixel_range_of(processor, config)
    for value in (current.smallest, current.largest):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return [
                f"the {of.processor}'s size is {processor.size}, expected shortest_edge and longest_edge, whole "
                f"numbers of pixels above 0: the minimum and maximum area of {of.name}"
            ]
    return []


def pixel_range_of(processor: BaseImageProcessor | BaseVideoProcessor | None, config: PretrainedConfig) -> PixelRange:
    """Return the range that a processor resizes to; an empty one if its class does not resize to a range."""
    if processor is None or not architecture_of(config).resizes_to_range:
        return PixelRange()
    return PixelRange(processor.size.shortest_edge, processor.size.longest_edge)


def write_pixel_range(folder: Path, pixels: PixelRange, of: Ranged = IMAGES) -> None:
    """Write a range to a processor's settings in a Hugging Face folder, as the range of the exported model."""
    nested = read_object(folder / NESTED, CheckpointError) if (folder / NESTED).is_file() else {}
    if (folder / IMAGE_SETTINGS).is_file() and not (folder / OF_VIDEOS).is_file() and VIDEO_SECTION not in nested:
        shutil.copy(
            folder / IMAGE_SETTINGS, folder / OF_VIDEOS
        )  # images and videos had the same limits, and no longer do
    for name in (NESTED, of.file):
        path = folder / name
        content = read_object(path, CheckpointError) if path.is_file() else {}
        settings = content.get(of.section, {}) if name == NESTED else content
        if not settings:
            continue
        for override in ("min_pixels", "max_pixels"):  # in older files; transformers prefers them to the size
            settings.pop(override, None)
        settings["size"] = {"shortest_edge": pixels.smallest, "longest_edge": pixels.largest}
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
