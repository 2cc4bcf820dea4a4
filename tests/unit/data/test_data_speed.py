"""What is done to be fast changes nothing: decoding without copies, fewer steps per image, places now and then."""

from __future__ import annotations

import gc
import io
import multiprocessing
import pickle
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.energon.flavors.webdataset.itar import ITarFile
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor
from transformers import CLIPImageProcessor, SiglipImageProcessor

from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.loader.open_streams import limit_line
from llava_mcore.data.loader.source import Buffered, PixelBuffers
from llava_mcore.data.loader.stream import Stream
from llava_mcore.data.processors import images as images_module
from llava_mcore.data.processors.image_processor import ImagePreprocessor
from llava_mcore.data.processors.images import decode_image, decode_pixels, is_plain_jpeg
from llava_mcore.data.samples import Batch
from llava_mcore.data.storage.tar_files import OPEN_SHARDS
from llava_mcore.errors import DataError
from llava_mcore.media.batch_fields import normalize
from llava_mcore.media.media import SameTokens
from tests.helpers.encoding import tiles
from tests.unit.data.test_data_loader import assert_equal, open_loader, take
from tests.unit.data.test_data_shards import make_vqa

pytest_plugins = ("tests.helpers.llava_fixtures",)


def noise(width: int, height: int, mode: str = "RGB", kind: str = "PNG", orientation: int | None = None) -> bytes:
    values = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(values).convert(mode)
    options: dict[str, Any] = {}
    if orientation is not None:
        exif = image.getexif()
        exif[0x0112] = orientation
        options["exif"] = exif
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("quality", [5, 75, 100])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_jpegs_have_pillows_pixels(quality: int, subsampling: int, progressive: bool) -> None:
    assert images_module.TORCHVISION_DECODES_ALIKE
    buffer = io.BytesIO()
    smooth = Image.open(io.BytesIO(noise(9, 7))).resize((211, 157), Image.Resampling.BICUBIC)
    smooth.save(buffer, "JPEG", quality=quality, subsampling=subsampling, progressive=progressive)
    assert torch.equal(decode_pixels(buffer.getvalue()), pil_to_tensor(Image.open(buffer)))


@given(st.data())
def test_broken_jpegs_are_what_pillow_says(data: st.DataObject) -> None:
    whole = noise(40, 30, kind="JPEG")
    broken = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(DataError) as theirs:
        decode_image(broken)
    with pytest.raises(DataError) as ours:
        decode_pixels(broken)
    assert str(ours.value) == str(theirs.value)


CLIP = CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
SIGLIP = SiglipImageProcessor(size={"height": 60, "width": 60})


@pytest.mark.parametrize(("processor", "size"), [(CLIP, 56), (SIGLIP, 60)])
def test_fewer_steps_give_the_processors_pixels(processor: Any, size: int) -> None:
    images = ImagePreprocessor(processor, (3, size, size), SameTokens(4, 1, 1))
    assert images._is_plain

    @given(st.lists(st.tuples(st.integers(1, 150), st.integers(1, 150)), min_size=1, max_size=3))
    def check(sizes: list[tuple[int, int]]) -> None:
        data = [noise(*size) for size in sizes]
        theirs = processor(images=[decode_image(d) for d in data], return_tensors="pt")["pixel_values"]
        assert torch.equal(normalize(tiles(images, data), images.pixel_scale), theirs)

    check()


class Turning(CLIPImageProcessor):
    """A processor with a step of its own."""

    def _preprocess(self, images: list[torch.Tensor], *args: Any, **options: Any) -> Any:
        return super()._preprocess([image.flip(-1) for image in images], *args, **options)


def test_processor_with_more_steps_does_all_of_them() -> None:
    processor = Turning(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    images = ImagePreprocessor(processor, (3, 56, 56), SameTokens(4, 1, 1))
    assert not images._is_plain
    data = noise(90, 60)
    theirs = processor(images=[decode_image(data)], return_tensors="pt")["pixel_values"]
    assert torch.equal(normalize(tiles(images, [data]), images.pixel_scale), theirs)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vqa(tmp_path_factory.mktemp("data"), shards=3, samples=16)


@pytest.mark.parametrize("packing", [False, True])
def test_stopped_anywhere(dataset: Path, assets: Assets, packing: bool) -> None:
    """Six stops at random on varying ranks: the uninterrupted run's batches, from positions of a few numbers."""
    options: dict[str, Any] = {"num_streams": 4, "packing": packing, "packing_buffer_size": 5}
    uninterrupted = take(open_loader(dataset, assets, **options), 6 * 5 * 4)
    random, found, saved = Random(3), list[Batch](), None
    for _ in range(6):
        dp = random.choice((1, 2, 4))
        ranks = [open_loader(dataset, assets, dp_rank=r, dp_size=dp, saved=saved, **options) for r in range(dp)]
        for _ in range(random.randrange(2, 6)):
            parts = [take(rank, 4 // dp) for rank in ranks]
            found += [parts[r][j] for j in range(4 // dp) for r in range(dp)]
        saved = [rank.state() for rank in ranks]
        for rank in ranks:
            rank.close()
    assert saved is not None
    places = [place for state in saved for place in state["streams"].values()]
    assert all(len(pickle.dumps(place)) < 1000 for place in places)
    assert_equal(found, uninterrupted[: len(found)])


def test_samples_that_wait_keep_to_their_memory(dataset: Path, assets: Assets) -> None:
    """Whatever does not fit is read again: the same packs, and no more memory than allowed."""
    options: dict[str, Any] = {"num_streams": 4, "packing": True, "packing_buffer_size": 12}
    expected = take(open_loader(dataset, assets, **options), 20)
    for limit in (0, 5000):
        loader = open_loader(dataset, assets, max_waiting_bytes=limit, **options)
        batches = []
        for _ in range(20):
            batches.append(next(loader))
            (reader,) = {id(x._reader): x._reader for x in loader._sources[0]._loader.dataset.streams.values()}.values()
            assert reader.waiting.num_bytes <= limit
        assert_equal(batches, expected)


def test_the_limit_of_waiting_samples_is_said_in_fitting_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small limits, too: they would otherwise be shown as 0.0 GiB."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for limit, both in {
        4 << 30: ("4.0 GiB", "256.0 MiB"),
        24_000_000: ("22.9 MiB", "1.4 MiB"),
        0: ("0 bytes",) * 2,
    }.items():
        line = limit_line(DataConfig(path=Path("data"), packing=True, num_workers=2, max_waiting_bytes=limit))
        assert line is not None and f"at most {both[0]} of a node" in line and f"{both[1]} in each process" in line
    assert limit_line(DataConfig(path=Path("data"))) is None


def test_open_shards_keep_no_record_of_what_was_read(dataset: Path, assets: Assets) -> None:
    """Energon's would, through tarfile's: 8 GB in ten million samples. Ours are read without it."""
    loader = open_loader(dataset, assets)
    take(loader, 40)
    opened = [thing for thing in gc.get_objects() if isinstance(thing, ITarFile) and not thing.closed]
    assert len(OPEN_SHARDS) and not opened
    loader.close()


@pytest.mark.parametrize(("dtype", "ahead"), [(torch.uint8, 2), (torch.float32, 2), (torch.uint8, 4)])
def test_pixels_stay_in_buffers_until_they_are_taken(dtype: torch.dtype, ahead: int) -> None:
    """As many as are asked for in advance, however many images each has; what does not fit stays with its batch."""
    buffers = PixelBuffers(5 * 3 * 4 * 4 * dtype.itemsize, ahead)
    values = [torch.arange(k * 48).view(k, 3, 4, 4).to(dtype) for k in (5, 1, 4, 2, 3, 5, 2)]
    waiting: list[tuple[torch.Tensor, Buffered]] = []
    for pixels in values:
        if len(waiting) == ahead + 1:
            expected, buffered = waiting.pop(0)
            assert torch.equal(buffers.take(buffered, pinned=False), expected)
        found = buffers.put(pixels + 1)
        assert found is not None
        waiting.append((pixels + 1, found))
    assert all(torch.equal(buffers.take(buffered, pinned=False), expected) for expected, buffered in waiting)
    assert pickle.loads(pickle.dumps(buffers)) is buffers
    assert buffers.put(torch.zeros(6, 3, 4, 4, dtype=dtype)) is None
    assert buffers.put(torch.zeros(0, 3, 4, 4, dtype=dtype)) is None


def test_a_step_is_made_while_the_one_before_is_computed(
    dataset: Path, assets: Assets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a step that is larger than what torch's loader makes in advance, and not more."""
    made, original = multiprocessing.Value("i", 0), Stream.batch

    def counted(stream: Stream, index: int) -> Batch:
        with made.get_lock():
            made.value += 1
        return original(stream, index)

    monkeypatch.setattr(Stream, "batch", counted)
    for in_step, ahead in ((1, 4), (10, 10)):
        made.value = 0
        loader = open_loader(dataset, assets, workers=2, num_micro_batches=in_step)
        take(loader, 2)
        deadline = time.monotonic() + 60
        while made.value < 2 + ahead and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        assert made.value == 2 + ahead
        loader.close()


def test_only_plain_pictures_do_without_pillows_look(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = noise(30, 20, "RGB", "JPEG")
    assert is_plain_jpeg(plain)
    others = [noise(30, 20, "L", "JPEG"), noise(30, 20, "CMYK", "JPEG"), noise(30, 20), noise(30, 20, "RGB", "JPEG", 1)]
    assert not any(map(is_plain_jpeg, [*others, *(plain[:end] for end in range(0, 600, 40)), b"", plain[2:]]))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 599)
    assert not is_plain_jpeg(plain)
