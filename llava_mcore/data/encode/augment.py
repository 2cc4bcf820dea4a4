"""Augmentation: the transforms of `data.augment`, applied to decoded images with reproducible draws."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import inspect
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import torch
import torchvision
from torch import Tensor
from torchvision.transforms import AutoAugmentPolicy, InterpolationMode, v2

from llava_mcore.config.sections.augment import TransformConfig
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.samples import IMAGE_MARK, VIDEO_MARK
from llava_mcore.errors import ConfigError, DataError, problems


class OwnTransform(v2.Transform):
    """A transform of one image, uint8 [3, height, width], with its arguments in `__init__`.

    It keeps type and size, has no state, and draws from torch's global generator alone, which is seeded for each
    image.
    """

    moves: ClassVar[bool] = False
    """Whether things in the image are elsewhere afterwards, so that coordinates in the text are wrong."""


OWN_TRANSFORMS: dict[str, type[OwnTransform]] = {}
"""By the name in `data.augment`."""


TRANSFORM_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that transforms raise for arguments, and for images, that they cannot use."""

_SIZE = "it changes the size of an image, but tokens are counted and packed before images are decoded"
_TYPE = "it changes the type of the pixels, which the checkpoint's image processor needs as they are"
_BATCH = "it mixes the images and labels of a batch of a classifier"
_INNER = "it takes other transforms or code; list transforms of images in data.augment itself"
_BOXES = "it is for boxes and key points, which samples do not have"
REFUSED = {
    **dict.fromkeys(("CenterCrop", "FiveCrop", "Pad", "RandomCrop", "RandomIoUCrop", "RandomResize"), _SIZE),
    **dict.fromkeys(("RandomResizedCrop", "RandomShortestSize", "RandomZoomOut", "Resize"), _SIZE),
    **dict.fromkeys(("ScaleJitter", "TenCrop"), _SIZE),
    **dict.fromkeys(("ConvertImageDtype", "LinearTransformation", "Normalize", "PILToTensor", "ToDtype"), _TYPE),
    **dict.fromkeys(("ToImage", "ToPILImage", "ToPureTensor", "ToTensor"), _TYPE),
    **dict.fromkeys(("CutMix", "MixUp"), _BATCH),
    **dict.fromkeys(("Compose", "Lambda", "RandomApply", "RandomChoice", "RandomOrder"), _INNER),
    **dict.fromkeys(("ClampBoundingBoxes", "ClampKeyPoints", "ConvertBoundingBoxFormat", "SetClampingMode"), _BOXES),
    **dict.fromkeys(("SanitizeBoundingBoxes", "SanitizeKeyPoints"), _BOXES),
    "UniformTemporalSubsample": "it changes the number of frames of a video",
}
"""Classes in torchvision.transforms.v2 that cannot be used, with the reason. The others are tried before they are
used."""
_MOVING = ("torchvision.transforms.v2._geometry", "torchvision.transforms.v2._auto_augment")
"""Modules of classes that move what is in an image."""
_CHOICES: dict[str, type[Enum]] = {"interpolation": InterpolationMode, "policy": AutoAugmentPolicy}
"""Arguments that torchvision takes as members of an enumeration, and users write as text."""
_PROBES = ((96, 128), (128, 96), (112, 112))
_PROBE_SEEDS = range(4)


class ImageKey(NamedTuple):
    """Everything that the random draws of an image depend on."""

    seed: int
    """training.seed."""
    dataset: int
    """Index of the dataset in a blend."""
    sample: str
    """Key of the conversation."""
    pass_index: int
    """How often the dataset has been read completely before."""
    position: int
    """Index of the image or video in the conversation."""


class Augmentation:
    """The transforms of a run, in their order."""

    def __init__(self, transforms: Sequence[TransformConfig]) -> None:
        """Construct the transforms, and try each of them. ConfigError lists all that cannot be used."""
        errors: list[str] = []
        built = [_build(f"data.augment.{index}", item, errors) for index, item in enumerate(transforms)]
        if errors:
            allowed = ", ".join(sorted(offered()))
            raise ConfigError(problems(f"data.augment cannot be used; transforms that can be: {allowed}", errors))
        self._transforms = [transform for transform in built if transform is not None]

    def __call__(self, pixels: Tensor, key: ImageKey) -> Tensor:
        """Return an image or frame, uint8 [3, height, width], after all transforms; equal keys have equal draws.

        torch's global generator is as before afterwards.

        Raises:
            ConfigError: a transform has changed type or size.
            DataError: a transform cannot be applied to this image.
        """
        with _draws(key):
            for transform in self._transforms:
                pixels = _apply(transform, pixels)
        return pixels

    @property
    def warnings(self) -> list[str]:
        """Warnings that the start of a run prints."""
        moving = [type(transform).__name__ for transform in self._transforms if _moves(transform)]
        if not moving:
            return []
        return [
            f"data.augment: {', '.join(moving)} moves what is in an image, but the text stays: coordinates, and words "
            "such as 'left', are then wrong"
        ]


def offered() -> dict[str, type[v2.Transform]]:
    """Return the classes that may be used by name, if they keep type and size with their arguments."""
    classes = {name: value for name, value in vars(v2).items() if inspect.isclass(value)}
    from_torchvision = {
        name: cls
        for name, cls in classes.items()
        if issubclass(cls, v2.Transform) and cls is not v2.Transform and name not in REFUSED
    }
    return {**from_torchvision, **OWN_TRANSFORMS}


def augmentation_of(data: DataConfig, assets: Assets) -> Augmentation | None:
    """Return the transforms of a run; None if there are none.

    Raises:
        ConfigError: some cannot be used, or the model takes neither images nor videos.
    """
    if not data.augment:
        return None
    if {IMAGE_MARK, VIDEO_MARK} <= assets.refused.keys():
        raise ConfigError(f"data.augment has no effect: {assets.refused[IMAGE_MARK]}; omit it")
    return Augmentation(data.augment)


def _build(where: str, config: TransformConfig, errors: list[str]) -> v2.Transform | None:
    """Return a transform that has been tried; None after a problem, which is added to `errors`."""
    name, classes = config.name, offered()
    if name in REFUSED:
        errors.append(f"{where}: {name} is refused: {REFUSED[name]}")
        return None
    if name not in classes:
        close = difflib.get_close_matches(name, classes, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        errors.append(f"{where}: torchvision {torchvision.__version__} has no transform {name!r:.80}{hint}")
        return None
    try:
        transform = classes[name](**_with_members(config.arguments))
    except TRANSFORM_ERRORS as error:
        arguments = ", ".join(inspect.signature(classes[name]).parameters) or "none"
        errors.append(f"{where} ({name}): {error}; its arguments: {arguments}")
        return None
    problem = _try(transform)
    if problem is not None:
        errors.append(f"{where} ({name}): {problem}")
    return transform


def _with_members(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with members of enumerations in place of their texts. ValueError for another text."""
    converted = dict(arguments)
    for name, kind in _CHOICES.items():
        if isinstance(arguments.get(name), str):
            values = {member.value: member for member in kind}
            if arguments[name] not in values:
                raise ValueError(f"{name} is {arguments[name]!r:.80}, expected one of {', '.join(values)}")
            converted[name] = values[arguments[name]]
    return converted


def _try(transform: v2.Transform) -> str | None:
    """Return why a transform cannot be used for images of several proportions."""
    for height, width in _PROBES:
        for seed in _PROBE_SEEDS:
            with _draws(ImageKey(seed, 0, "probe", 0, 0)):
                probe = torch.randint(0, 256, (3, height, width), dtype=torch.uint8)
                try:
                    _apply(transform, probe)
                except (ConfigError, DataError) as error:
                    return str(error)
    return None


def _apply(transform: v2.Transform, pixels: Tensor) -> Tensor:
    """Apply one transform. Errors like Augmentation's."""
    size = f"an image of {pixels.shape[2]} x {pixels.shape[1]} pixels"
    try:
        result = transform(pixels)
    except TRANSFORM_ERRORS as error:
        raise DataError(f"{type(transform).__name__} cannot be applied to {size}: {error}") from error
    if type(result) is not Tensor or result.dtype != pixels.dtype or result.shape != pixels.shape:
        kind = f"{result.dtype} {[*result.shape]}" if isinstance(result, Tensor) else type(result).__name__
        raise ConfigError(
            f"{type(transform).__name__} makes {kind} of {size} ({pixels.dtype} {[*pixels.shape]}): transforms of "
            "data.augment may not change type or size"
        )
    return result


def _moves(transform: v2.Transform) -> bool:
    if isinstance(transform, OwnTransform):
        return transform.moves
    return type(transform).__module__ in _MOVING


@contextlib.contextmanager
def _draws(key: ImageKey) -> Iterator[None]:
    """Seed torch's global generator in a block, and compute there with one thread, as loader processes do: sums over a
    image have other roundings with more."""
    state, num_threads = torch.get_rng_state(), torch.get_num_threads()
    digest = hashlib.blake2b("\0".join(map(str, key)).encode("utf-8", "surrogateescape"), digest_size=8).digest()
    if num_threads != 1:
        torch.set_num_threads(1)
    # Not torch.manual_seed, which also seeds the GPUs.
    torch.default_generator.manual_seed(int.from_bytes(digest, "big") >> 1)
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if num_threads != 1:
            torch.set_num_threads(num_threads)
