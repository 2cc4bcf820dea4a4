"""What is loaded of a Hugging Face folder, images as its processor makes them, and everything that may be wrong."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from sklearn.datasets import load_sample_images
from transformers import LlavaProcessor

from llava_mcore.data.encode.assets import Assets, load_assets
from llava_mcore.data.processors.image_header import image_size
from llava_mcore.data.processors.images import decode_image
from llava_mcore.data.samples import IMAGE_MARK, Turn
from llava_mcore.errors import DataError
from llava_mcore.media.batch_fields import normalize
from tests.helpers.encoding import encoded, tiles
from tests.helpers.tiny_hf import CHAT_TEMPLATE, make_hf_llava
from tests.unit.data.test_data_shards import picture

KINDS = [("clip", "default", 16), ("clip", "full", 17), ("siglip", "full", 16), ("siglip", "default", 15)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf") / "llava"
    make_hf_llava(path)
    (path / "model.safetensors").unlink()
    return path


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


@pytest.fixture(scope="module")
def assets(folder: Path) -> Assets:
    return load_assets(folder)


def photos() -> list[bytes]:
    """Real photographs, and images of every mode, shape and size."""
    found = []
    for photo in load_sample_images().images:
        buffer = io.BytesIO()
        Image.fromarray(photo).save(buffer, "JPEG")
        found.append(buffer.getvalue())
    found += [picture(1, "PNG", mode) for mode in ("L", "RGBA", "P", "1", "LA")]
    found += [picture(2, "JPEG", "CMYK"), picture(3, size=(1, 1)), picture(4, size=(300, 3)), picture(5, size=(3, 300))]
    return found


@pytest.mark.parametrize(("vision", "strategy", "expected"), KINDS)
def test_tokens_and_pixels_are_hugging_faces(tmp_path: Path, vision: str, strategy: str, expected: int) -> None:
    """Ids, pixels and the model's own features agree: no token too many or too few."""
    model = make_hf_llava(tmp_path, vision=vision, strategy=strategy)
    assets = load_assets(tmp_path)
    processor = LlavaProcessor.from_pretrained(tmp_path)
    data = photos()
    assert tiles(assets.images, data).dtype == torch.uint8
    pixels = normalized(assets, data)
    theirs = processor.image_processor([decode_image(d) for d in data], return_tensors="pt")["pixel_values"]
    assert torch.equal(pixels, theirs)
    assert pixels.shape == (len(data), *assets.images.pixel_shape) and pixels.dtype == torch.float32

    turns = [Turn("user", f"{IMAGE_MARK}\nWhat?"), Turn("assistant", "A house.")]
    ids = encoded(assets.chat, turns, num_images=1, num_tokens=expected).input_ids
    served = processor(images=decode_image(data[0]), text=assets.chat.render(turns), return_tensors="pt")
    assert ids.tolist() == served["input_ids"][0].tolist()
    assert assets.plan.tokens_per_tile == expected == (ids == assets.plan.image_token_id).sum()
    with torch.no_grad():
        features = model.get_image_features(pixels[:1]).pooler_output
        model(input_ids=torch.from_numpy(ids)[None], pixel_values=pixels[:1])  # raises where the numbers differ
    assert features[0].shape[0] == expected


def normalized(assets: Assets, data: list[bytes]) -> torch.Tensor:
    """What the vision tower gets."""
    return normalize(tiles(assets.images, data), assets.images.pixel_scale)


def test_processor_that_does_not_normalize(copy: Path) -> None:
    _edit(copy / "processor_config.json", lambda c: c["image_processor"].update(do_normalize=False))
    assets = load_assets(copy)
    pixels = tiles(assets.images, [picture(7)])
    assert pixels.dtype == torch.float32 and not len(assets.images.pixel_scale)
    assert tiles(assets.images, []).dtype == torch.float32 and 0.5 < pixels.max() <= 1
    theirs = LlavaProcessor.from_pretrained(copy).image_processor([decode_image(picture(7))], return_tensors="pt")
    assert torch.equal(normalized(assets, [picture(7)]), theirs["pixel_values"])


@pytest.mark.parametrize("data", [b"", b"no image", picture(0)[:400], picture(0, "PNG")[:60], picture(0, "PNG")[:-30]])
def test_broken_pictures(data: bytes, assets: Assets) -> None:
    """An image that cannot be decoded is a DataError with its size in bytes."""
    with pytest.raises(DataError, match=f"the image cannot be decoded \\({len(data)} bytes\\)"):
        tiles(assets.images, [data])


def test_decompression_bomb(assets: Assets, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image beyond Pillow's limit is refused."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(DataError, match="decompression bomb"):
        tiles(assets.images, [picture(0)])


def test_processor_settings_of_the_checkpoint_count(copy: Path, assets: Assets) -> None:
    """Mean and deviation come from the folder, and a folder that names Pillow's processor gets torchvision's."""
    _edit(
        copy / "processor_config.json", lambda c: c["image_processor"].update(image_mean=[0.0] * 3, image_std=[1.0] * 3)
    )
    _edit(
        copy / "processor_config.json",
        lambda c: c["image_processor"].update(image_processor_type="CLIPImageProcessorPil"),
    )
    pixels, usual = normalized(load_assets(copy), [picture(7)]), normalized(assets, [picture(7)])
    assert pixels.min() >= 0 and pixels.max() <= 1
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
    np.testing.assert_allclose(usual[0], (pixels[0] - mean) / std, atol=1e-5)


def _edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def _remove_pad(path: Path) -> None:
    _edit(path / "tokenizer_config.json", lambda c: c.pop("pad_token"))


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no tokenizer": (
        lambda p: [(p / n).unlink() for n in ("tokenizer.json", "tokenizer_config.json")],
        "no tokenizer in .*--tokenizer-load-dir",
    ),
    "tokenizer cut off": (lambda p: (p / "tokenizer.json").write_text("{"), "tokenizer in .* cannot be loaded"),
    "no template": (lambda p: (p / "chat_template.jinja").unlink(), "put a chat_template.jinja there"),
    "template in Python": (lambda p: (p / "chat_template.jinja").write_text("{{ x.y.z }}"), "cannot render"),
    "no processor": (lambda p: (p / "processor_config.json").unlink(), "no image processor in"),
    "processor cut off": (
        lambda p: (p / "processor_config.json").write_text("{"),
        r"processor_config\.json: not valid JSON",
    ),
    "no config": (lambda p: (p / "config.json").unlink(), "no config.json"),
    "another model": (
        lambda p: _edit(p / "config.json", lambda c: c.update(model_type="llama")),
        "expected one of 'llava'",
    ),
    "no pad": (_remove_pad, "no pad token"),
    "no EOS": (lambda p: _edit(p / "tokenizer_config.json", lambda c: c.pop("eos_token")), "no EOS token"),
    "another image id": (
        lambda p: _edit(p / "config.json", lambda c: c.update(image_token_index=7)),
        "image_token_id is 7 in config.json, but <image> is token 4",
    ),
    "pad is image": (
        lambda p: _edit(p / "tokenizer_config.json", lambda c: c.update(pad_token="<image>")),
        "the pad token and <image> are the same token",
    ),
    "vocabulary too small": (
        lambda p: _edit(p / "config.json", lambda c: c["text_config"].update(vocab_size=320)),
        "tokens have ids beyond the model's vocab_size 320",
    ),
    "another strategy": (
        lambda p: _edit(p / "processor_config.json", lambda c: c.update(vision_feature_select_strategy="full")),
        "give 17 tokens per image, but .* gives 16 features",
    ),
    "another image size": (
        lambda p: _edit(
            p / "processor_config.json", lambda c: c["image_processor"].update(crop_size={"height": 42, "width": 42})
        ),
        "images of 3 x 42 x 42, but the vision tower takes 3 x 56 x 56",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_folders(case: str, copy: Path) -> None:
    """Each kind of damage to a folder is refused with its own message."""
    damage, message = WRONG[case]
    damage(copy)
    with pytest.raises(DataError, match=message):
        load_assets(copy)


def test_all_that_is_wrong_is_told_at_once(copy: Path) -> None:
    for name in ("chat_template.jinja", "processor_config.json"):
        (copy / name).unlink()
    _remove_pad(copy)
    with pytest.raises(DataError, match=r"\(3 problems\)"):
        load_assets(copy)


def test_folder_with_only_a_tokenizer_is_completed_by_the_checkpoint(folder: Path, copy: Path) -> None:
    for name in ("chat_template.jinja", "processor_config.json", "config.json"):
        (copy / name).unlink()
    assets = load_assets(copy, checkpoint_hf_dir=folder)
    assert assets.plan.tokens_per_tile == 16
    with pytest.raises(DataError, match=r"\(3 problems\)"):
        load_assets(copy)


def test_legacy_chat_template_file(copy: Path) -> None:
    """chat_template.json is read where there is no chat_template.jinja."""
    (copy / "chat_template.jinja").unlink()
    (copy / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    assert load_assets(copy).chat.content_format["user"] == "list"


def test_size_is_read_from_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    data = picture(0)
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)
    assert image_size(data) == image_size(data[:-20])
    with pytest.raises(DataError, match="no known format"):
        image_size(b"nothing")
