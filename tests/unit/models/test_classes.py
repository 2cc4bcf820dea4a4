"""Classes beside LLaVA: images of any size become the class's own tokens, FLOPs, `check`, refusals."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import Idefics3Config
from transformers.image_processing_backends import TorchvisionBackend
from transformers.image_utils import SizeDict
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

from llava_mcore.cli import import_hf as import_command
from llava_mcore.cli import inspect_folder
from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.errors import ConversionError, DataError, LlavaMcoreError
from llava_mcore.media.batch_fields import MediaWork
from llava_mcore.media.media import Processing
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.architectures.idefics3 import Idefics3
from llava_mcore.models.architectures.registry import architecture_of, features_per_tile
from llava_mcore.models.vision.families.idefics import is_plain_grid
from tests.helpers.cases import PICTURE_SIZES, hf_pixels
from tests.helpers.class_checks import assert_torch_counts_the_same, edited
from tests.helpers.class_tokens import assert_same_ids, assert_same_tiles, random_sizes
from tests.helpers.photos import CHINA
from tests.helpers.tiny_classes import MAKERS, idefics3_processor

MODULES = {
    "internvl": 3 + 2 + 2 + 4 * 9 + 4 * 10,
    "idefics3": 1 + 3 + 2 + 4 * 9 + 4 * 10,
    "smolvlm": 1 + 3 + 2 + 4 * 9 + 4 * 10,
}
"""Whose outputs are compared: of the connector, the ends of tower and decoder, and the layers of both."""


@pytest.fixture(autouse=True)
def spelt_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolVLM's processor asks for a package that spells the number of a video's frames."""
    monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("classes")
    for name, make in MAKERS.items():
        make(root / name)
    return {name: root / name for name in MAKERS}


@pytest.mark.parametrize("name", MAKERS)
def test_pictures_of_any_size_have_the_processors_tokens(folders: dict[str, Path], name: str) -> None:
    assert_same_ids(folders[name], load_assets(folders[name]), random_sizes(600, 400))


@pytest.mark.long
@pytest.mark.parametrize("name", MAKERS)
def test_thousands_of_sizes(folders: dict[str, Path], name: str) -> None:
    """Images of every size have the processor's tokens."""
    sizes = random_sizes(1_000, 600, seed=1) + random_sizes(3_000, 250, seed=2)
    assert_same_ids(folders[name], load_assets(folders[name]), sizes)


@pytest.mark.parametrize("name", MAKERS)
def test_the_tiles_are_the_processors(folders: dict[str, Path], name: str) -> None:
    assets = load_assets(folders[name])
    assert assets.images._takes_tensors == isinstance(assets.images.processor, TorchvisionBackend)
    assert_same_tiles(folders[name], assets, [*PICTURE_SIZES, *random_sizes(40, 400)])


@pytest.mark.parametrize("name", MAKERS)
def test_torch_counts_the_same_flops_over_hugging_face(folders: dict[str, Path], name: str) -> None:
    hf = load_hf_config(folders[name])
    n, num_tiles, side = features_per_tile(hf), 3, 56
    ids = torch.randint(300, 400, (1, num_tiles * n + 5))
    ids[:, 1 : 1 + num_tiles * n] = hf.image_token_id
    pixels = hf_pixels(hf, torch.randn(num_tiles, 3, side, side))
    assert_torch_counts_the_same(folders[name], {"input_ids": ids, "pixel_values": pixels}, MediaWork(num_tiles))


@pytest.mark.parametrize("name", MAKERS)
def test_check_compares_the_output_of_every_module(
    folders: dict[str, Path], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--hf-dir", str(folders[name]), "--megatron-dir", str(tmp_path / "m"), "--tp", "2", "--pp", "2"]
    assert import_command.main([*flags, "--workers", "1", "--verify", "--logits", str(CHINA)]) == 0
    assert f"outputs of {MODULES[name]} modules compared)" in capsys.readouterr().out


@pytest.mark.parametrize("name", MAKERS)
def test_files_that_transformers_writes_now_are_read_and_written_back(
    folders: dict[str, Path], name: str, tmp_path: Path
) -> None:
    """With the modules' own names, where older files on the hub have others."""
    hf = tmp_path / "hf"
    shutil.copytree(folders[name], hf)
    model = architecture_of(load_hf_config(hf)).model_class.from_pretrained(hf)
    model.save_pretrained(hf, save_original_format=False)
    names = load_file(hf / "model.safetensors").keys()
    assert all(x.startswith(("model.", "lm_head.")) for x in names)
    import_hf(hf, tmp_path / "m", tensor_parallel=2, verify=True)
    export_hf(tmp_path / "m", tmp_path / "out", tensor_parallel=2, verify=True)
    written, read = load_file(tmp_path / "out" / "model.safetensors"), load_file(hf / "model.safetensors")
    assert written.keys() == read.keys() and all(torch.equal(written[x], read[x]) for x in read)


def test_a_processor_that_needs_another_package_says_so(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", None)
    flags = ["--hf-dir", str(folders["smolvlm"]), "--megatron-dir", str(tmp_path / "m"), "--workers", "1"]
    assert import_command.main([*flags, "--logits", str(CHINA)]) == 2
    said = capsys.readouterr().err
    assert "comparing logits needs an image and a processor in" in said and "`num2words` is required" in said


@pytest.mark.parametrize("name", MAKERS)
def test_inspect_shows_the_class_and_its_layers(
    folders: dict[str, Path], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect_folder.main([str(folders[name])]) == 0
    said = capsys.readouterr().out
    assert architecture_of(load_hf_config(folders[name])).model_class.__name__ in said
    assert "56 x 56 pixels in patches of 14, features of layer 4" in said


CONFIG, PROCESSOR, TOKENIZER = "config.json", "processor_config.json", "tokenizer_config.json"
REFUSALS: dict[str, tuple[str, str, Callable[[dict[str, Any]], object], str]] = {
    "another tower": (
        "internvl",
        CONFIG,
        lambda c: c["vision_config"].update(model_type="siglip_vision_model"),
        "vision_config.model_type = 'siglip_vision_model' is not supported; known: internvl_vision",
    ),
    "an odd ratio": ("internvl", CONFIG, lambda c: c.update(downsample_ratio=0.3), "downsample_ratio = 0.3 is not"),
    "a grid that does not divide": (
        "internvl",
        CONFIG,
        lambda c: c.update(downsample_ratio=1 / 3),
        r"downsample_ratio = 0\.33+: the tower's grid is 4 x 4 patches \(vision_config.image_size 56, patch_size 14\)",
    ),
    "the class token": (
        "internvl",
        CONFIG,
        lambda c: c.update(vision_feature_select_strategy="full"),
        "vision_feature_select_strategy = 'full' leaves the class token",
    ),
    "several layers": (
        "internvl",
        CONFIG,
        lambda c: c.update(vision_feature_layer=[-1, -2]),
        r"vision_feature_layer = \[-1, -2\]: InternVL reads one layer",
    ),
    "a last norm": (
        "internvl",
        CONFIG,
        lambda c: c["vision_config"].update(use_mean_pooling=False),
        "use_mean_pooling = False adds a norm",
    ),
    "an unknown class": (
        "internvl",
        CONFIG,
        lambda c: c.update(model_type="blip-2"),
        r"model_type is 'blip-2', expected one of 'llava' \(LlavaFor.*, 'internvl' \(InternVL",
    ),
    "tokens of a tile": (
        "internvl",
        PROCESSOR,
        lambda c: c.update(image_seq_length=16),
        "image_seq_length gives 16 tokens per tile, but the model's config.json gives 4 features",
    ),
    "tiles of another size": (
        "internvl",
        PROCESSOR,
        lambda c: c["image_processor"]["size"].update(height=70, width=70),
        "makes images of 3 x 70 x 70, but the vision tower takes 3 x 56 x 56",
    ),
    "tokens of a tile of a grid": (
        "smolvlm",
        PROCESSOR,
        lambda c: c.pop("image_seq_len"),
        "image_seq_len gives 169 tokens per tile, but the model's config.json gives 4 features",
    ),
    "tiles of another size in a grid": (
        "idefics3",
        PROCESSOR,
        lambda c: c["image_processor"].update(max_image_size={"longest_edge": 70}),
        "max_image_size.longest_edge = 70 is the side of the tiles, but the tower takes 56 x 56",
    ),
    "images of their own size": (
        "idefics3",
        PROCESSOR,
        lambda c: c["image_processor"].update(do_resize=False),
        "must have do_resize = true and a size of longest_edge",
    ),
    "another processor": (
        "idefics3",
        PROCESSOR,
        lambda c: c.update(image_processor={"image_processor_type": "CLIPImageProcessor"}),
        "CLIPImageProcessor has no do_image_splitting and no max_image_size",
    ),
    "another tower in a grid": (
        "smolvlm",
        CONFIG,
        lambda c: c["vision_config"].update(model_type="siglip_vision_model"),
        "vision_config.model_type = 'siglip_vision_model' is not supported; known: smolvlm, smolvlm_vision",
    ),
    "positions that are rounded": (
        "idefics3",
        CONFIG,
        lambda c: c["vision_config"].update(image_size=14 * 40),
        "make a grid of 40 x 40 patches, in which transformers rounds some to the positions of their neighbors",
    ),
    "an odd factor": (
        "idefics3",
        CONFIG,
        lambda c: c.update(scale_factor=3),
        "scale_factor = 3: the tower's grid is 4 x 4 patches",
    ),
    "no marks": (
        "internvl",
        TOKENIZER,
        lambda c: [c.pop(key) for key in ("start_image_token", "end_image_token")],
        "the tokenizer has no start_image_token and no end_image_token",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_be_computed_is_refused_by_name(folders: dict[str, Path], what: str, tmp_path: Path) -> None:
    name, file, change, expected = REFUSALS[what]
    folder = edited(folders[name], tmp_path / "hf", file, change)
    kind: type[LlavaMcoreError] = ConversionError if file == CONFIG else DataError
    with pytest.raises(kind, match=expected):
        if file == CONFIG:
            import_hf(folder, tmp_path / "m")
        else:
            load_assets(folder)


def test_rounded_positions_are_transformers_own() -> None:
    """Of every grid up to 40 x 40 patches, with tiles of the tower's size."""
    for side in range(1, 41):
        config = Idefics3VisionConfig(hidden_size=1, image_size=2 * side, patch_size=2, num_attention_heads=1)
        embeddings = Idefics3VisionEmbeddings(config)
        embeddings.patch_embedding.weight.data.zero_()
        embeddings.patch_embedding.bias.data.zero_()
        embeddings.position_embedding.weight.data = torch.arange(side**2.0)[:, None]
        mask = torch.ones(1, side, side, dtype=torch.bool)
        positions = embeddings(torch.zeros(1, 3, 2 * side, 2 * side), patch_attention_mask=mask)[0, :, 0]
        assert is_plain_grid(side) == torch.equal(positions, torch.arange(side**2.0)), side


def test_marks_may_be_plain_text(tmp_path: Path) -> None:
    """As with a tokenizer that has no tokens for rows and columns."""
    MAKERS["idefics3"](tmp_path, marks=False)
    assets = load_assets(tmp_path)
    assert len(assets.plan.tokens([(100, 40)])[0]) > 2 * 49
    assert_same_ids(tmp_path, assets, random_sizes(60, 400, seed=2))


@pytest.mark.parametrize("name", ["idefics3", "smolvlm"])
def test_pictures_may_stay_whole(folders: dict[str, Path], name: str, tmp_path: Path) -> None:
    folder = edited(
        folders[name], tmp_path / "hf", PROCESSOR, lambda c: c["image_processor"].update(do_image_splitting=False)
    )
    assert_same_ids(folder, load_assets(folder), random_sizes(60, 400, seed=2))


@pytest.mark.parametrize(("longest", "side"), [(150, 56), (56, 56), (5000, 2048)])
def test_the_longest_edge_need_not_be_a_whole_number_of_tiles(longest: int, side: int) -> None:
    processor = idefics3_processor(side=side)
    processor.image_processor.size = SizeDict(longest_edge=longest)
    plan = Idefics3().media(
        Idefics3Config(image_token_id=4, vision_config={"image_size": side, "patch_size": side // 4}),
        Processing(processor.tokenizer, processor.image_processor, {}),
    )
    sizes = random_sizes(60 if side < 100 else 4, 400, seed=3)
    for (height, width), item in zip(sizes, plan.tokens(sizes), strict=True):
        made = processor(images=Image.new("RGB", (width, height)), text="<image>")
        assert item.ids.tolist() == made["input_ids"][0], (height, width)
        assert item.num_rows == len(made["pixel_values"][0])
