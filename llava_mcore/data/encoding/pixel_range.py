"""How many pixels a picture may have after it is resized, where a class resizes to a range of areas (Qwen-VL)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from transformers import BaseImageProcessor, PretrainedConfig
from transformers.image_utils import SizeDict

from llava_mcore.config.sections.data import PixelRange
from llava_mcore.errors import CheckpointError
from llava_mcore.files.json_files import read_object
from llava_mcore.models.architectures.registry import architecture_of

NESTED, OWN = "processor_config.json", "preprocessor_config.json"
"""Files with the image processor's settings: under "image_processor", and at the top level."""
OF_VIDEOS = "video_preprocessor_config.json"
"""The video processor's file. Without it, and without settings in `NESTED`, transformers reads `OWN` for videos too."""


def set_pixel_range(processor: BaseImageProcessor, pixels: PixelRange, config: PretrainedConfig) -> list[str]:
    """Change an image processor's range; return what is wrong, after which the processor is as it was."""
    if pixels == PixelRange():
        return []
    flags = " and ".join(
        f"{name} {value}"
        for name, value in (("--min-pixels", pixels.smallest), ("--max-pixels", pixels.largest))
        if value is not None
    )
    architecture = architecture_of(config)
    if not architecture.resizes_to_range:
        return [
            f"{flags} cannot be used: {architecture.model_class.__name__} does not resize pictures to a range of "
            "areas; omit it"
        ]
    own = pixel_range_of(processor, config)
    smallest, largest = pixels.smallest or own.smallest, pixels.largest or own.largest
    assert smallest is not None and largest is not None
    token = (processor.patch_size * processor.merge_size) ** 2
    if largest < max(smallest, token):
        return [
            f"{flags}: pictures would have between {smallest} and {largest} pixels (a limit that is not given is the "
            f"image processor's); the maximum must be at least the minimum and at least {token}, the pixels of a token"
        ]
    processor.size = SizeDict(shortest_edge=smallest, longest_edge=largest)
    return []


def pixel_range_of(processor: BaseImageProcessor | None, config: PretrainedConfig) -> PixelRange:
    """Return the range that an image processor resizes to; an empty one if its class does not resize to a range."""
    if processor is None or not architecture_of(config).resizes_to_range:
        return PixelRange()
    return PixelRange(int(processor.size["shortest_edge"]), int(processor.size["longest_edge"]))


def write_pixel_range(folder: Path, pixels: PixelRange) -> None:
    """Write a range to the image processor's settings in a Hugging Face folder, as the range of the exported model."""
    size = {"shortest_edge": pixels.smallest, "longest_edge": pixels.largest}
    nested = read_object(folder / NESTED, CheckpointError) if (folder / NESTED).is_file() else {}
    if (folder / OWN).is_file() and not (folder / OF_VIDEOS).is_file() and "video_processor" not in nested:
        shutil.copy(folder / OWN, folder / OF_VIDEOS)  # videos keep their limits
    for name in (NESTED, OWN):
        path = folder / name
        whole = read_object(path, CheckpointError) if path.is_file() else {}
        settings = whole.get("image_processor", {}) if name == NESTED else whole
        if not settings:
            continue
        for override in ("min_pixels", "max_pixels"):  # in older files; transformers prefers them to the size
            settings.pop(override, None)
        settings["size"] = size
        path.write_text(json.dumps(whole, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
