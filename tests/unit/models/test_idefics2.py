"""Idefics2: tokens, patches, positions, logits and gradients are Hugging Face's, by the real loader."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor
from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionEmbeddings

from llava_mcore.cli import import_hf as import_command
from llava_mcore.cli import inspect_folder
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.encode.chat_format import rewritten
from llava_mcore.data.samples import Conversation, Turn
from llava_mcore.errors import ConversionError, DataError
from llava_mcore.media.batch_fields import PIXEL_SCALE, PIXEL_VALUES, media_work, normalize
from llava_mcore.media.media import AroundMedia, Size
from llava_mcore.models.vision.families.idefics import position_rows
from llava_mcore.parallel.groups import single_process
from tests.helpers.class_checks import assert_logits_and_gradients, assert_torch_counts_the_same, batch_of, edited
from tests.helpers.photos import CHINA
from tests.helpers.tiny_hf import PATCH
from tests.helpers.tiny_idefics2 import (
    FAKE,
    LATENTS,
    NAMED,
    assert_the_processors_tokens,
    make_hf_idefics2,
    pixels_of,
    theirs_of,
)
from tests.helpers.videos import noise
from tests.parallel.checks import load_model

KINDS = ("whole", "split")
"""Folders whose images stay whole, and are split into quarters."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("idefics2")
    for name in KINDS:
        make_hf_idefics2(root / name, splits=name == "split")
    return {name: root / name for name in KINDS}


PICTURES = [noise(100, 40), noise(30, 70), noise(56, 56), noise(301, 97)]
CONVERSATIONS = [
    Conversation(
        (
            *(Turn("user", "<image>\nWhat? <image><image> this"), Turn("assistant", "This.")),
            *(Turn("user", "<image>"), Turn("assistant", "It is seven.")),
        ),
        tuple(PICTURES),
    ),
    Conversation((Turn("user", "Is it even?"), Turn("assistant", "no.")), ()),
    Conversation((Turn("user", "Is it <image>?"), Turn("assistant", "yes.")), (PICTURES[2],)),
]


@pytest.mark.parametrize("name", KINDS)
def test_tokens_and_pixels_are_the_processors(folders: dict[str, Path], name: str) -> None:
    assets = load_assets(folders[name])
    for conversation in CONVERSATIONS:
        batch, theirs = batch_of(assets, [conversation], packed=True), theirs_of(folders[name], conversation)
        n = theirs["input_ids"].shape[1]
        assert batch.input_ids[0, :n].tolist() == theirs["input_ids"][0].tolist()
        trained = batch.labels[batch.loss_mask > 0]
        answers = [f" {turn.text}</s>" for turn in conversation.turns if turn.role == "assistant"]
        assert assets.tokenizer.decode(trained) == "".join(answers)
        if not conversation.images:
            continue
        tokens = assets.plan.tokens([pixels_of(x).shape[:2] for x in conversation.images])
        expected = assets.plan.processed_pixels(theirs, [tokens], (3 * PATCH * PATCH,))
        assert batch.media[PIXEL_VALUES].dtype == torch.uint8
        assert torch.equal(normalize(batch.media[PIXEL_VALUES], batch.media[PIXEL_SCALE]), expected)


@pytest.mark.parametrize("name", KINDS)
def test_patches_of_many_sizes_are_the_processors(folders: dict[str, Path], name: str) -> None:
    """Bit for bit, each image in a conversation with another one."""
    assets, processor = load_assets(folders[name]), AutoProcessor.from_pretrained(folders[name])
    for size in random_sizes(40, 400, seed=4):
        data = (noise(*size), PICTURES[0])
        conversation = Conversation((Turn("user", "<image><image>What?"), Turn("assistant", "This.")), data)
        media = batch_of(assets, [conversation], packed=True).media
        made = processor.image_processor([[Image.fromarray(pixels_of(x)) for x in data]], return_tensors="pt")
        expected = assets.plan.processed_pixels(made, [], (3 * PATCH * PATCH,))
        assert torch.equal(normalize(media[PIXEL_VALUES], media[PIXEL_SCALE]), expected), size


def random_sizes(number: int, longest: int, seed: int) -> list[Size]:
    """Sizes of every proportion, small ones and equal sides among them."""
    choose = random.Random(seed)
    sides = [2 + round(longest ** choose.random()) for _ in range(2 * number)]
    return [(a, choose.choice([a, b, b])) for a, b in zip(sides[::2], sides[1::2], strict=True)]


@pytest.mark.parametrize("name", KINDS)
def test_pictures_of_any_size_have_the_processors_tokens(folders: dict[str, Path], name: str) -> None:
    assert_the_processors_tokens(folders[name], load_assets(folders[name]), random_sizes(399, 400, seed=0))


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_thousands_of_sizes(folders: dict[str, Path], name: str) -> None:
    """Images of every size have the processor's tokens."""
    sizes = random_sizes(1_002, 600, seed=1) + random_sizes(3_000, 250, seed=2)
    assert_the_processors_tokens(folders[name], load_assets(folders[name]), sizes)


def test_a_picture_that_cannot_be_split(folders: dict[str, Path]) -> None:
    with pytest.raises(DataError, match="an image of 1 x 9 pixels cannot be split into quarters"):
        load_assets(folders["split"]).plan.tokens([(9, 1)])
    assert len(load_assets(folders["whole"]).plan.tokens([(9, 1)])) == 1


@pytest.mark.parametrize("side", [5, 27, 70])
def test_positions_are_transformers_own(side: int) -> None:
    """Of images that transformers pads, bit for bit; 70 is the published models' table."""
    config = Idefics2VisionConfig(hidden_size=1, image_size=14 * side, patch_size=14, num_attention_heads=1)
    embeddings = Idefics2VisionEmbeddings(config)
    for values in (embeddings.patch_embedding.weight, embeddings.patch_embedding.bias):
        values.data.zero_()
    embeddings.position_embedding.weight.data = torch.arange(float(side**2))[:, None]
    choose = random.Random(side)
    for _ in range(60):
        (rows, columns), padding = (choose.randint(1, 70), choose.randint(1, 70)), choose.randint(0, 9)
        mask = torch.zeros(1, rows + padding, columns + padding, dtype=torch.bool)
        mask[:, :rows, :columns] = True
        pixels = torch.zeros(1, 3, *(14 * n for n in mask.shape[1:]))
        expected = embeddings(pixels, patch_attention_mask=mask)[0, :, 0][mask.flatten()]
        assert torch.equal(position_rows(config, rows, columns).float(), expected), (rows, columns)


@pytest.mark.parametrize("name", KINDS)
def test_logits_and_gradients_are_hugging_faces(folders: dict[str, Path], name: str, tmp_path: Path) -> None:
    """Images of several sizes and text alone in one pack: every conversation as transformers computes it alone."""
    assert_logits_and_gradients(folders[name], CONVERSATIONS, theirs_of, tmp_path / "m")


def test_a_batch_without_pictures(folders: dict[str, Path], tmp_path: Path) -> None:
    """Every parameter has a gradient, so that ranks with images and without agree; those of images are zero."""
    checkpoint, assets = import_hf(folders["split"], tmp_path / "m"), load_assets(folders["split"])
    batch = batch_of(assets, CONVERSATIONS[1:2], packed=False)
    assert not len(batch.media[PIXEL_VALUES])
    with single_process() as groups:
        model = load_model(groups, checkpoint)
        given = (batch.input_ids, batch.position_ids, batch.media)
        model(*given, labels=batch.labels, loss_mask=batch.loss_mask).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.any() == name.startswith("language_model."), name


@pytest.mark.parametrize("name", KINDS)
def test_torch_counts_the_same_flops_over_hugging_face(folders: dict[str, Path], name: str) -> None:
    """Of a small image, all parts of which get the shortest edges: transformers computes on padding too."""
    conversation = Conversation(CONVERSATIONS[2].turns, (noise(20, 20),))
    batch = batch_of(load_assets(folders[name]), [conversation], packed=True)
    assert_torch_counts_the_same(folders[name], theirs_of(folders[name], conversation), media_work(batch.media))


@pytest.mark.parametrize("name", KINDS)
def test_check_compares_the_output_of_every_module(
    folders: dict[str, Path], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the perceiver, the ends of tower and decoder, and the layers of both; images are compared whole."""
    flags = ["--hf-dir", str(folders[name]), "--megatron-dir", str(tmp_path / "m"), "--tp", "2", "--pp", "2"]
    assert import_command.main([*flags, "--workers", "1", "--verify", "--logits", str(CHINA)]) == 0
    assert f"outputs of {2 + 2 * 8 + 2 + 2 + 4 * 9 + 4 * 10} modules compared)" in capsys.readouterr().out


def test_inspect_shows_the_class_and_its_layers(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_folder.main([str(folders["whole"])]) == 0
    said = capsys.readouterr().out
    assert "Idefics2ForConditionalGeneration" in said
    assert "images of any size in patches of 14, features of layer 4" in said


def test_a_plan_can_be_pickled(folders: dict[str, Path]) -> None:
    plan = load_assets(folders["split"]).plan
    copy = pickle.loads(pickle.dumps(plan))
    assert np.array_equal(copy.tokens([(40, 50)])[0].ids, plan.tokens([(40, 50)])[0].ids)


def test_spans_move_with_the_text() -> None:
    around = AroundMedia(rules=(("I", "FIF"), ("FF", "F"), (r"F(?=[^\s<FI])", "F ")))
    text = "aIIb[answer]I[x]"
    spans = [(text.index("[answer]"), text.index("]") + 1), (text.index("[x]"), len(text))]
    found, moved = rewritten(text, spans, around)
    assert found == "aFIFIF b[answer]FIF [x]"
    assert [found[a:b] for a, b in moved] == ["[answer]", "[x]"]


def test_stored_tokens_depend_on_what_is_rewritten(folders: dict[str, Path], tmp_path: Path) -> None:
    whole, split = (load_assets(folders[name]).chat.fingerprint for name in KINDS)
    assert whole == split  # the parts of an image are not stored
    change = {"image_boundary_token": "<end_of_utterance>"}
    folder = edited(folders["whole"], tmp_path / "hf", TOKENIZER, lambda c: c.update(change))
    assert load_assets(folder).chat.fingerprint != whole


CONFIG, PROCESSOR, TOKENIZER = "config.json", "processor_config.json", "tokenizer_config.json"
REFUSALS: dict[str, tuple[str, Any, str]] = {
    "another tower": (
        CONFIG,
        lambda c: c["vision_config"].update(model_type="siglip_vision_model"),
        "vision_config.model_type = 'siglip_vision_model' is not supported; known: idefics2, idefics2_vision",
    ),
    "too many latents": (
        CONFIG,
        lambda c: c["perceiver_config"].update(resampler_n_latents=1 << 40),
        "perceiver_config.resampler_n_latents is 1099511627776, expected a whole number from 1 to 65,536",
    ),
    "groups that do not divide": (
        CONFIG,
        lambda c: c["perceiver_config"].update(num_key_value_heads=3),
        "resampler_n_heads 4 a multiple of num_key_value_heads 3",
    ),
    "a decoder whose activation has another name": (
        CONFIG,
        lambda c: (c["text_config"].update(model_type="gemma2"), c["text_config"].pop("hidden_act")),
        "text_config has no hidden_act, from which .*: gemma2 cannot be its language model",
    ),
    "tokens of an image": (
        PROCESSOR,
        lambda c: c.pop("image_seq_len"),
        f"image_seq_len gives 64 tokens per image, but the model's config.json has {LATENTS} latents",
    ),
    "another processor": (
        PROCESSOR,
        lambda c: c.update(image_processor={"image_processor_type": "CLIPImageProcessor"}),
        "the image processor is CLIPImageProcessor; Idefics2 has an Idefics2ImageProcessor",
    ),
    "images of their own size": (
        PROCESSOR,
        lambda c: c["image_processor"].update(do_resize=False),
        "the image processor has do_resize = False and size = .*; it must resize images to edges",
    ),
    "images smaller than a patch": (
        PROCESSOR,
        lambda c: c["image_processor"]["size"].update(shortest_edge=PATCH - 1),
        r"'shortest_edge': 13.*of at least a patch \(14 px\)",
    ),
    "no mark": (
        TOKENIZER,
        lambda c: c.pop("image_boundary_token"),
        "names its image_token but no image_boundary_token",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_be_computed_is_refused_by_name(folders: dict[str, Path], what: str, tmp_path: Path) -> None:
    file, change, expected = REFUSALS[what]
    folder = edited(folders["whole"], tmp_path / "hf", file, change)
    with pytest.raises((ConversionError, DataError), match=expected):
        import_hf(folder, tmp_path / "m") if file == CONFIG else load_assets(folder)


def test_the_mark_may_be_unnamed(folders: dict[str, Path], tmp_path: Path) -> None:
    """As in the published models, whose tokenizer has no names for tokens of images."""
    folder = edited(folders["whole"], tmp_path / "hf", TOKENIZER, lambda c: [c.pop(key) for key in NAMED])
    assets = load_assets(folder)
    assert not NAMED.keys() & assets.tokenizer.special_tokens_map.keys()
    assert_the_processors_tokens(folder, assets, random_sizes(30, 400, seed=2))


def test_another_mark(folders: dict[str, Path], tmp_path: Path) -> None:
    """The processor takes the one that the tokenizer names."""
    change = {"image_boundary_token": "<end_of_utterance>"}
    folder = edited(folders["whole"], tmp_path / "hf", TOKENIZER, lambda c: c.update(change))
    assets = load_assets(folder)
    assert_the_processors_tokens(folder, assets, random_sizes(30, 400, seed=2))
    assert FAKE not in assets.tokenizer.decode(batch_of(assets, CONVERSATIONS[:1], packed=True).input_ids[0])
