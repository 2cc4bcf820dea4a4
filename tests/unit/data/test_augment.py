"""Augmentation: draws that depend on sample and pass alone, nothing without it, and what is refused."""

from __future__ import annotations

import io
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from llava_mcore.config.load import load_run_config, save_run_config
from llava_mcore.config.sections.augment import TransformConfig
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import Assets, load_assets
from llava_mcore.data.encode.augment import REFUSED, Augmentation, ImageKey, offered
from llava_mcore.data.encode.tokens import media_tokens
from llava_mcore.data.loader.train_loader import TrainLoader
from llava_mcore.data.loader.validation_data import ValidationData
from llava_mcore.data.processors.image_processor import ImagePreprocessor
from llava_mcore.data.processors.images import decode_pixels, noise
from llava_mcore.data.samples import Batch, MediaSpan, Video
from llava_mcore.errors import ConfigError, DataError
from llava_mcore.launch.preflight import preflight
from tests.helpers.tiny_hf import make_hf_llava
from tests.unit.data.test_data_loader import assert_equal, open_loader, take
from tests.unit.data.test_data_shards import make_vqa, prepare, select_shards, vqa_sample, write_shard

JITTER = [{"name": "ColorJitter", "brightness": 0.5, "hue": 0.1}, {"name": "RandomHorizontalFlip"}]
NEEDED: dict[str, dict[str, Any]] = {
    "GaussianBlur": {"kernel_size": 5},
    "Grayscale": {"num_output_channels": 3},
    "JPEG": {"quality": [30, 90]},
    "RandomAdjustSharpness": {"sharpness_factor": 2},
    "RandomAffine": {"degrees": 10},
    "RandomPosterize": {"bits": 3},
    "RandomRotation": {"degrees": 10, "interpolation": "bilinear"},
    "RandomSolarize": {"threshold": 128},
}
"""Arguments of the transforms that need some."""


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    path = tmp_path_factory.mktemp("hf")
    make_hf_llava(path)
    return load_assets(path)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vqa(tmp_path_factory.mktemp("data"), shards=3, samples=16)


def transforms(*entries: dict[str, Any]) -> tuple[TransformConfig, ...]:
    return DataConfig.model_validate({"augment": entries}).augment


def pictures(batches: list[Batch]) -> dict[str, list[Tensor]]:
    """Return the pixels of each sample's only image, in the order in which it was read."""
    by_key = defaultdict(list)
    for batch in batches:
        for key, pixels in zip(batch.sample_keys, batch.media["pixel_values"], strict=True):
            by_key[key].append(pixels)
    return by_key


def test_off_by_default(dataset: Path, assets: Assets) -> None:
    """Without transforms, images are those of the processor."""
    assert DataConfig().augment == ()
    plain = take(open_loader(dataset, assets), 30)
    assert_equal(take(open_loader(dataset, assets, augment=()), 30), plain)
    for key, pixels in pictures(plain).items():
        expected = assets.images.tiles([span(assets, vqa_sample(int(key))["jpg"])])
        assert all(torch.equal(one, expected[0]) for one in pixels)


def span(assets: Assets, data: bytes, **options: Any) -> MediaSpan:
    return MediaSpan(data, 0, media_tokens([data], assets.plan, assets.limits.image_pixels)[0], **options)


@pytest.mark.parametrize("packing", [False, True])
def test_ranks_and_workers_change_nothing(dataset: Path, assets: Assets, packing: bool) -> None:
    """Through more than one pass: the samples are those without augmentation, and other pixels."""
    options: dict[str, Any] = {"num_streams": 8, "packing": packing, "packing_buffer_size": 5, "augment": JITTER}
    expected = take(open_loader(dataset, assets, **options), 28)
    for dp, workers in ((2, 0), (2, 2)):
        ranks = [open_loader(dataset, assets, workers=workers, dp_rank=r, dp_size=dp, **options) for r in range(dp)]
        assert_equal([next(ranks[turn % dp]) for turn in range(28)], expected)
        for rank in ranks:
            rank.close()
    plain = take(open_loader(dataset, assets, **(options | {"augment": []})), 28)
    for one, other in zip(expected, plain, strict=True):
        assert one.sample_keys == other.sample_keys and torch.equal(one.input_ids, other.input_ids)
        pixels = one.media["pixel_values"], other.media["pixel_values"]
        assert pixels[0].dtype == pixels[1].dtype and pixels[0].shape == pixels[1].shape
        assert not torch.equal(*pixels)


@pytest.mark.parametrize("packing", [False, True])
def test_resumed_runs_read_the_same_pixels(dataset: Path, assets: Assets, packing: bool) -> None:
    """Stops in both passes, also with samples of the first one in the buffers; each time other ranks and processes."""
    options: dict[str, Any] = {"num_streams": 4, "packing": packing, "packing_buffer_size": 5, "augment": JITTER}
    expected = take(open_loader(dataset, assets, **options), 48)
    batches: list[Batch] = []
    saved: list[dict[str, Any]] | None = None
    for dp, workers, count in ((1, 0, 12), (2, 1, 10), (1, 2, 4), (2, 0, 22)):
        ranks = [
            open_loader(dataset, assets, workers=workers, dp_rank=r, dp_size=dp, saved=saved, **options)
            for r in range(dp)
        ]
        batches += [next(ranks[turn % dp]) for turn in range(count)]
        saved = [rank.state() for rank in ranks]
        for rank in ranks:
            rank.close()
    assert_equal(batches, expected)


def test_draws_depend_on_sample_and_pass(dataset: Path, assets: Assets) -> None:
    """Other streams, another shuffle buffer: other batches, but the same pixels of each sample in each pass."""
    in_order = pictures(take(open_loader(dataset, assets, augment=JITTER, num_streams=1, shuffle=0), 96))
    passes = {key: [pixels.numpy().tobytes() for pixels in same] for key, same in in_order.items()}
    assert all(len(same) == len(set(same)) == 4 for same in passes.values())
    for options in ({"num_streams": 1}, {"num_streams": 2}, {"num_streams": 1, "seed": 6}):
        batches = take(open_loader(dataset, assets, augment=JITTER, **options), 60)
        for key, same in pictures(batches).items():
            shared = {pixels.numpy().tobytes() for pixels in same} & set(passes[key])
            assert len(shared) == (0 if "seed" in options else len(same))


def test_parts_of_repetitions_and_datasets_with_equal_keys(assets: Assets, tmp_path: Path) -> None:
    """Every sample has other draws in each of its passes, and other ones than its namesake in another dataset."""
    for name in ("one", "two"):
        write_shard(tmp_path / name / "000000.tar", [vqa_sample(i) for i in range(8)])
        prepare(tmp_path / name)
    entries = "[{repetitions: 1, path: ./one}, {repetitions: 1.5, path: ./two}]"
    blend = f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: {{train: {{blend_epochized: {entries}}}}}"
    (tmp_path / "blend.yaml").write_text(blend)
    options: dict[str, Any] = {"num_streams": 1, "micro_batch_size": 1, "augment": JITTER, "shuffle": 4}
    loader = open_loader(tmp_path / "blend.yaml", assets, **options)
    batches = take(loader, 30)
    batches += take(open_loader(tmp_path / "blend.yaml", assets, saved=[loader.state()], **options), 30)
    for pixels in pictures(batches).values():  # 3 passes of one dataset, at least 4 of the other
        assert len(pixels) >= 7
        assert len({one.numpy().tobytes() for one in pixels}) == len(pixels)


def test_validation_is_never_augmented(assets: Assets, tmp_path: Path) -> None:
    make_vqa(tmp_path, shards=2, samples=8)
    select_shards(tmp_path, "000000.tar")
    split = tmp_path / ".nv-meta" / "split.yaml"
    split.write_text(split.read_text().replace('"val": []', '"val": ["000001.tar"]'))

    def read(*entries: dict[str, Any]) -> list[Batch]:
        data = DataConfig.model_validate({"path": tmp_path, "seq_length": 64, "num_workers": 0, "augment": entries})
        return list(ValidationData(data, assets, micro_batch_size=2, seed=5).open(0, 1, 0))

    assert_equal(read(*JITTER), read())


def test_global_random_numbers_are_left_alone(dataset: Path, assets: Assets) -> None:
    before = torch.get_rng_state()
    take(open_loader(dataset, assets, augment=JITTER), 3)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(DataError, match="GaussianBlur cannot be applied to an image of 2 x 1 pixels"):
        blur = Augmentation(transforms({"name": "GaussianBlur", "kernel_size": 5}))
        blur(torch.zeros(3, 1, 2, dtype=torch.uint8), ImageKey(0, 0, "a", 0, 0))
    assert torch.equal(torch.get_rng_state(), before)


def test_number_of_threads_changes_nothing() -> None:
    """Contrast is relative to a mean over the image, whose rounding depends on how threads share the sum."""
    augmentation = Augmentation(transforms({"name": "ColorJitter", "contrast": 0.5, "saturation": 0.5}))
    pixels = v2.functional.pil_to_tensor(noise(1201, 907))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append([augmentation(pixels, ImageKey(1, 0, str(n), 0, 0)) for n in range(4)])
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("field", range(5))
def test_every_part_of_the_key_matters(field: int) -> None:
    augmentation, pixels = Augmentation(transforms(*JITTER)), v2.functional.pil_to_tensor(noise(40, 30))
    key = ImageKey(1, 0, "a", 0, 0)
    other = ImageKey(*("b" if i == field == 2 else 7 if i == field else value for i, value in enumerate(key)))
    assert torch.equal(augmentation(pixels, key), augmentation(pixels, key))
    assert not torch.equal(augmentation(pixels, key), augmentation(pixels, other))


def test_transforms_see_the_decoded_picture(assets: Assets) -> None:
    """All ways of preprocessing: the processor gets what the transform returned of the upright uint8 RGB image."""
    buffer = io.BytesIO()
    noise(70, 50).save(buffer, "PNG")
    seen = []

    def invert(pixels: Tensor) -> Tensor:
        seen.append((pixels.dtype, tuple(pixels.shape)))
        return 255 - pixels

    inverted = io.BytesIO()
    Image.fromarray((255 - decode_pixels(buffer.getvalue())).permute(1, 2, 0).numpy()).save(inverted, "PNG")
    assert isinstance(assets.images, ImagePreprocessor)
    for is_plain in (True, False):
        assets.images._is_plain, before = is_plain, assets.images._is_plain
        try:
            one = span(assets, buffer.getvalue(), augment=invert)
            tiles = assets.images.tiles([one, one]), assets.images.tiles([one])
            expected = assets.images.tiles([span(assets, inverted.getvalue())])
        finally:
            assets.images._is_plain = before
        assert torch.equal(tiles[0], torch.cat([expected, expected])) and torch.equal(tiles[1], expected)
    assert set(seen) == {(torch.uint8, (3, 50, 70))}


def test_frames_of_a_video_have_the_same_draws(assets: Assets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets.images, "_process_video", lambda frames, tokens: frames)
    frame = io.BytesIO()
    noise(60, 40).save(frame, "PNG")
    clip = Video((frame.getvalue(),) * 3)
    augment = partial(Augmentation(transforms({"name": "GaussianNoise"})), key=ImageKey(1, 0, "a", 0, 0))
    tokens = span(assets, frame.getvalue()).tokens
    plain, noisy = (assets.images.tiles([MediaSpan(clip, 0, tokens, augment=x)]) for x in (None, augment))
    assert plain.shape == noisy.shape == (3, 3, 40, 60)
    assert not torch.equal(plain, noisy)
    assert torch.equal(noisy[0], noisy[1]) and torch.equal(noisy[0], noisy[2])


# -- what is refused ---------------------------------------------------------------------------------------------------


def refusal(*entries: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as raised:
        Augmentation(transforms(*entries))
    return str(raised.value)


@pytest.mark.parametrize("name", sorted(offered()))
def test_what_is_offered_can_be_used(name: str) -> None:
    augmentation = Augmentation(transforms({"name": name, **NEEDED.get(name, {})}))
    pixels = v2.functional.pil_to_tensor(noise(64, 48))
    for index in range(8):
        result = augmentation(pixels, ImageKey(0, 0, "a", 0, index))
        assert result.dtype == torch.uint8 and result.shape == pixels.shape


def test_refused_classes_exist() -> None:
    """All others are offered, and so tried by the test above, also those of a newer torchvision."""
    assert all(issubclass(getattr(v2, name), v2.Transform) for name in REFUSED)


def test_all_problems_at_once() -> None:
    """All wrong transforms are listed in one message."""
    message = refusal(
        {"name": "ColourJitter"},
        {"name": "Resize", "size": 224},
        {"name": "Compose", "transforms": ["x"]},
        {"name": "ColorJitter", "bright": 0.2},
        {"name": "RandomHorizontalFlip", "p": 2},
        {"name": "RandomHorizontalFlip", "p": 0.5},
        {"name": "RandomRotation", "degrees": 30, "expand": True},
        {"name": "RandomRotation", "degrees": 30, "interpolation": "sharp"},
        {"name": "Grayscale"},
        {"name": "GaussianBlur"},
    )
    for expected in (
        "data.augment cannot be used; transforms that can be: AugMix, AutoAugment, ColorJitter, ",
        "(9 problems)",
        "data.augment.0: torchvision 0.",
        "has no transform 'ColourJitter' (did you mean ColorJitter?)",
        "data.augment.1: Resize is refused: it changes the size of an image, but tokens are counted",
        "data.augment.2: Compose is refused: it takes other transforms or code",
        "data.augment.3 (ColorJitter): ColorJitter.__init__() got an unexpected keyword argument 'bright'",
        "its arguments: brightness, contrast, saturation, hue",
        "data.augment.4 (RandomHorizontalFlip): `p` should be a floating point value in the interval [0.0, 1.0]",
        "data.augment.6 (RandomRotation): RandomRotation makes torch.uint8 [3, ",
        "may not change type or size",
        "data.augment.7 (RandomRotation): interpolation is 'sharp', expected one of nearest, ",
        "data.augment.8 (Grayscale): Grayscale makes torch.uint8 [1, ",
        "data.augment.9 (GaussianBlur): GaussianBlur.__init__() missing 1 required positional argument: 'kernel_size'",
    ):
        assert expected in message, expected


def test_a_run_without_pictures_refuses_it(dataset: Path, assets: Assets) -> None:
    refused = {"<image>": "the model does not support images", "<video>": "nor videos"}
    mute = Assets(**{name: getattr(assets, name) for name in Assets.__dataclass_fields__} | {"refused": refused})
    with pytest.raises(ConfigError, match=r"data\.augment has no effect: the model does not support images; omit it"):
        open_loader(dataset, mute, augment=JITTER)


def test_moved_content_is_warned_of(dataset: Path, assets: Assets, caplog: pytest.LogCaptureFixture) -> None:
    open_loader(dataset, assets, augment=[{"name": "ColorJitter"}])
    assert "moves" not in caplog.text
    open_loader(dataset, assets, augment=JITTER)
    assert "data.augment: RandomHorizontalFlip moves what is in an image, but the text stays" in caplog.text


def test_a_size_that_changes_later_ends_the_run(dataset: Path, assets: Assets, monkeypatch: pytest.MonkeyPatch) -> None:
    def shrunk(self: v2.ColorJitter, pixels: Tensor, params: dict[str, Any]) -> Tensor:
        return pixels if pixels.shape[-1] > 90 else pixels[:, 1:]

    monkeypatch.setattr(v2.ColorJitter, "transform", shrunk)
    loader = open_loader(dataset, assets, augment=JITTER)
    with pytest.raises(DataError, match=r"ColorJitter makes torch.uint8 \[3, 59, 80\] of an image of 80 x 60 pixels"):
        take(loader, 1)


# -- the configuration -------------------------------------------------------------------------------------------------


def test_the_file_and_the_command_line_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    entries = "[{name: ColorJitter, brightness: [0.8, 1.2]}, {name: RandomHorizontalFlip, p: 0.5}]"
    file.write_text(f"data: {{augment: {entries}}}")
    run = load_run_config(file)
    assert [item.name for item in run.data.augment] == ["ColorJitter", "RandomHorizontalFlip"]
    assert run.data.augment[0].arguments == {"brightness": (0.8, 1.2)}
    assert load_run_config(None, [f"data.augment={entries}"]) == run
    save_run_config(run, tmp_path / "saved.yaml")
    assert load_run_config(tmp_path / "saved.yaml") == run
    assert load_run_config(file, ["data.augment=none"]).data.augment == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ColorJitter", "data.augment (from 'data.augment=ColorJitter'): found 'ColorJitter', expected a list such as"),
        (
            "[ColorJitter]",
            "data.augment.0 (from 'data.augment=[ColorJitter]'): found 'ColorJitter', expected",
        ),
        ("[{p: 1}]", "data.augment.0.name (from 'data.augment=[{p: 1}]')"),
        ("[{name: [}]", "in quotes on the command line"),
        ("[{name: A, x: {y: 1}}]", "x must be a number, a text, or a list of these, found a dict"),
        ("[{name: A, x: .nan}]", "x must be finite"),
        ("[{name: A, 'x y': 1}]", "'x y' cannot be the name of an argument"),
    ],
)
def test_bad_lists_name_their_place(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_run_config(None, [f"data.augment={text}"])
    assert expected in str(raised.value) and "(1 problem)" in str(raised.value)


def test_problems_are_reported_before_a_run_starts(dataset: Path, assets: Assets) -> None:
    """With those of the rest of the run; the loader refuses them too."""
    run = load_run_config(None, ["data.augment=[{name: Nothing}]", "training.train_iters=1"])
    errors = preflight(run, 1, 0)
    assert len(errors) > 1 and any("data.augment.0: torchvision" in error for error in errors)
    data = DataConfig.model_validate({"path": dataset, "seq_length": 64, "augment": [{"name": "Nothing"}]})
    with pytest.raises(ConfigError, match="has no transform 'Nothing'"):
        TrainLoader(data, assets, micro_batch_size=1, dp_rank=0, dp_size=1, seed=1)
