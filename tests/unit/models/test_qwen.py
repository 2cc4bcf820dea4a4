"""Qwen2-VL, 2.5-VL, 3-VL and Qwen3.5: tokens, positions, logits and gradients are transformers', by the real loader."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import numpy as np
import pytest
import torch
from transformers import AutoProcessor, AutoVideoProcessor
from transformers.image_utils import SizeDict
from transformers.video_utils import VideoMetadata

from llava_mcore.checkpoint.layout import iteration_folder
from llava_mcore.cli import import_hf as import_command
from llava_mcore.cli import inspect_folder
from llava_mcore.config.rules.all_rules import check_layout, check_parts
from llava_mcore.config.rules.parallel import check_stages
from llava_mcore.config.sections.data import PixelRange
from llava_mcore.convert.compare_logits import check_logits
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.convert.logits_worker import LogitsLayout
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.processors.images import decode_image
from llava_mcore.data.processors.pixel_range import write_pixel_range
from llava_mcore.data.samples import Conversation, Turn, Video
from llava_mcore.errors import ConfigError, ConversionError, DataError
from llava_mcore.inference.answering.job import Layout
from llava_mcore.inference.answering.megatron_answers import usable_checkpoint
from llava_mcore.media.batch_fields import PIXEL_SCALE, PIXEL_VALUES, media_work, normalize
from llava_mcore.models.architectures.hf_config import load_hf_config, model_dims
from llava_mcore.models.architectures.registry import architecture_of
from llava_mcore.models.language.decoder import require_deepstack_layers
from tests.helpers.class_checks import assert_logits_and_gradients, assert_torch_counts_the_same, batch_of, edited
from tests.helpers.photos import CHINA
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.tiny_qwen import KINDS, make_each_kind, make_hf_qwen
from tests.helpers.videos import as_arrays, noise, video
from tests.parallel.training_checks import run_config

PICTURE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_each_kind(tmp_path_factory.mktemp("qwen"))


PICTURES = [noise(100, 40), noise(30, 70), noise(56, 56)]
VIDEOS = [video(5, 50, 70, fps=2.0), video(2, 30, 40, fps=0.5)]
CONVERSATIONS = [
    Conversation(
        (Turn("user", "<image>\nWhat? <video> <image>"), Turn("assistant", "This.")),
        tuple(PICTURES[:2]),
        videos=(VIDEOS[0],),
    ),
    Conversation((Turn("user", "Is it even?"), Turn("assistant", "no.")), ()),
    Conversation(
        (
            *(Turn("user", "<video>\nWhat is it?"), Turn("assistant", "It is seven.")),
            *(Turn("user", "<image>\nthis?"), Turn("assistant", "yes.")),
        ),
        (PICTURES[2],),
        videos=(VIDEOS[1],),
    ),
]


def theirs_of(folder: Path, conversation: Conversation) -> Any:
    """Return what the folder's own processor makes of a conversation with `<image>` and `<video>` in its text."""
    processor = AutoProcessor.from_pretrained(folder)
    text = ""
    for turn in conversation.turns:
        said = turn.text.replace("<image>\n", PICTURE).replace("<image>", PICTURE)
        said = said.replace("<video>\n", VIDEO).replace("<video>", VIDEO)
        text += f"USER: {said} ASSISTANT:" if turn.role == "user" else f" {said}</s>"
    given: dict[str, Any] = {}
    if conversation.images:
        given["images"] = [as_arrays(Video((x,)))[0] for x in conversation.images]
    if conversation.videos:
        given["videos"] = [as_arrays(x) for x in conversation.videos]
        given["video_metadata"] = [
            VideoMetadata(total_num_frames=len(x.frames), fps=x.fps, frames_indices=list(range(len(x.frames))))
            for x in conversation.videos
        ]
    return processor(text=text, do_sample_frames=False, add_special_tokens=False, return_tensors="pt", **given)


@pytest.mark.parametrize("name", KINDS)
def test_tokens_positions_and_pixels_are_the_processors(folders: dict[str, Path], name: str) -> None:
    assets = load_assets(folders[name])
    assert "<video>" not in assets.refused
    whole: Any = architecture_of(load_hf_config(folders[name])).model_class.from_pretrained(folders[name]).model
    for conversation in CONVERSATIONS:
        batch, theirs = batch_of(assets, [conversation], packed=True), theirs_of(folders[name], conversation)
        n = theirs["input_ids"].shape[1]
        assert batch.input_ids[0, :n].tolist() == theirs["input_ids"][0].tolist()
        grids = {k: v for k, v in theirs.items() if k.endswith("grid_thw") or k == "second_per_grid_ts"}
        positions, _ = whole.get_rope_index(theirs["input_ids"], theirs["mm_token_type_ids"], **grids)
        assert torch.equal(batch.position_ids[:, 0, :n], positions[:, 0])
        pixels = normalize(batch.media[PIXEL_VALUES], batch.media[PIXEL_SCALE])
        # The processor has all images first, the loader has them in the order of the text.
        expected = torch.cat(
            [theirs[k] for k in ("pixel_values", "pixel_values_videos") if k in theirs] or [pixels[:0]]
        )
        assert batch.media[PIXEL_VALUES].dtype == torch.uint8 or not len(pixels)
        assert torch.equal(pixels.sort(0).values, expected.sort(0).values)


RANGES = [PixelRange(2000, 4000), PixelRange(smallest=6000), PixelRange(largest=1000)]


@pytest.mark.parametrize("pixels", RANGES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_a_range_of_areas_is_applied_as_the_processor_would(
    folders: dict[str, Path], name: str, pixels: PixelRange, tmp_path: Path
) -> None:
    assets, images = (
        load_assets(folders[name], pixels=pixels),
        AutoProcessor.from_pretrained(folders[name]).image_processor,
    )
    limits = {"min_pixels": assets.pixels.smallest, "max_pixels": assets.pixels.largest}
    assert limits == {"min_pixels": pixels.smallest or 24 * 24, "max_pixels": pixels.largest or 96 * 96}
    for picture in PICTURES:
        batch = batch_of(
            assets, [Conversation((Turn("user", "<image>"), Turn("assistant", "yes.")), (picture,))], packed=True
        )
        theirs = images(decode_image(picture), return_tensors="pt", **limits)["pixel_values"]
        assert torch.equal(normalize(batch.media[PIXEL_VALUES], batch.media[PIXEL_SCALE]), theirs)
    shutil.copytree(folders[name], tmp_path / "hf")
    write_pixel_range(tmp_path / "hf", assets.pixels)
    later, videos = (
        AutoProcessor.from_pretrained(tmp_path / "hf"),
        AutoProcessor.from_pretrained(folders[name]).video_processor,
    )
    assert later.image_processor.size == SizeDict(shortest_edge=limits["min_pixels"], longest_edge=limits["max_pixels"])
    assert later.video_processor.size == videos.size


def test_a_range_in_the_files_of_older_folders(folders: dict[str, Path], tmp_path: Path) -> None:
    """Published folders have preprocessor_config.json alone, with min_pixels and max_pixels, for videos too."""
    shutil.copytree(folders["qwen2_vl"], tmp_path / "hf")
    (tmp_path / "hf" / "processor_config.json").unlink()
    AutoProcessor.from_pretrained(folders["qwen2_vl"]).image_processor.save_pretrained(tmp_path / "hf")
    edited(
        tmp_path / "hf",
        tmp_path / "old",
        "preprocessor_config.json",
        lambda c: c.update(min_pixels=900, max_pixels=9000),
    )
    folder = tmp_path / "old"
    assert load_assets(folder).pixels == PixelRange(900, 9000)
    write_pixel_range(folder, load_assets(folder, pixels=PixelRange(largest=4000)).pixels)
    assert load_assets(folder).pixels == PixelRange(900, 4000)
    of_videos = AutoVideoProcessor.from_pretrained(folder).size
    assert (of_videos["shortest_edge"], of_videos["longest_edge"]) == (900, 9000)


def test_a_range_that_cannot_be_used_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"--min-pixels 5000 and --max-pixels 4000: images would have between 5000 and 4000"
    ):
        load_assets(folders["qwen2_vl"], pixels=PixelRange(5000, 4000))
    with pytest.raises(DataError, match=r"--max-pixels 100: .* at least 144, the pixels of a token"):
        load_assets(folders["qwen2_vl"], pixels=PixelRange(largest=100))
    make_hf_llava(tmp_path)
    with pytest.raises(
        DataError, match="--max-pixels 4000 cannot be used: LlavaForConditionalGeneration does not resize"
    ):
        load_assets(tmp_path, pixels=PixelRange(largest=4000))


@pytest.mark.parametrize("name", KINDS)
def test_logits_and_gradients_are_hugging_faces(folders: dict[str, Path], name: str, tmp_path: Path) -> None:
    """Images, videos and text in one pack: every conversation's logits are those of transformers for it alone."""
    assert_logits_and_gradients(folders[name], CONVERSATIONS, theirs_of, tmp_path / "m", noisy="qwen3_5" in name)


@pytest.mark.parametrize("name", KINDS)
def test_torch_counts_the_same_flops_over_hugging_face(folders: dict[str, Path], name: str) -> None:
    batch = batch_of(load_assets(folders[name]), CONVERSATIONS[:1], packed=True)
    theirs = theirs_of(folders[name], CONVERSATIONS[0])
    tokens = theirs["input_ids"].shape[1]
    of_delta_rule = 3 * tokens * 8 * (3 * 2 * 8 * 16) if "qwen3_5" in name else 0  # layers, tokens, heads, products
    assert_torch_counts_the_same(folders[name], theirs, media_work(batch.media), of_delta_rule=of_delta_rule)


@pytest.mark.parametrize("name", KINDS)
def test_check_compares_the_output_of_every_module(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an output layer that is the embedding; that of the first test is not."""
    make_hf_qwen(tmp_path / "hf", name, tie=True)
    flags = ["--hf-dir", str(tmp_path / "hf"), "--megatron-dir", str(tmp_path / "m"), "--tp", "2", "--pp", "2"]
    assert import_command.main([*flags, "--workers", "1", "--verify", "--logits", str(CHINA)]) == 0
    # Of the mergers, the ends of tower and decoder, and the layers of both.
    modules = {
        "qwen2_vl": 3 + 3 + 4 * 7 + 4 * 10,
        "qwen2_5_vl": 3 + 3 + 4 * 8 + 4 * 10,
        "qwen3_vl": 9 + 3 + 4 * 7 + 4 * 12,
        "qwen3_vl_moe": 9 + 3 + 4 * 7 + 12 + 3 * 11,  # router and mixture in place of three matrices
        "qwen3_5": 3 + 3 + 4 * 7 + 12 + 3 * 12,
        "qwen3_5_moe": 3 + 3 + 4 * 7 + 14 + 3 * 14,
    }
    assert f"outputs of {modules[name]} modules compared" in capsys.readouterr().out


@pytest.mark.parametrize("name", KINDS)
def test_inspect_shows_the_class_and_its_layers(
    folders: dict[str, Path], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect_folder.main([str(folders[name])]) == 0
    said = capsys.readouterr().out
    assert architecture_of(load_hf_config(folders[name])).model_class.__name__ in said
    assert "images of any size in patches of 6" in said


def test_layers_that_take_inner_features_stay_on_the_first_stage(folders: dict[str, Path], tmp_path: Path) -> None:
    dims = model_dims(load_hf_config(folders["qwen3_vl"]))
    given = {"parallel.num_layers_per_virtual_pipeline_stage": 1}
    run = run_config(1, 2, None, str(tmp_path), **given)
    (said,) = check_stages(run, dims, 2, "hf")
    assert "features of the vision tower are added after the first 2 layers of hf" in said
    assert "must be on the first stage, which has 1 (--pp 2" in said
    assert not list(check_stages(run_config(1, 2, None, str(tmp_path)), dims, 2, "hf"))
    (said,) = check_parts(dims, 1, 4, "hf")
    assert "which has 1 (--pp 4): use --pp 1 or 2" in said
    assert not check_parts(dims, 1, 2, "hf") and not check_layout(dims, 1, 4, "hf")
    # The command that computes at a layout, and a program that builds the model itself.
    import_hf(folders["qwen3_vl"], tmp_path / "m")
    with pytest.raises(ConfigError, match=r"on the first stage, which has 1 \(--pp 4\)"):
        usable_checkpoint(tmp_path / "m", Layout(1, 4, 1), None)
    with pytest.raises(ConversionError, match=r"on the first stage, which has 1 \(--pp 4\)"):
        check_logits(folders["qwen3_vl"], tmp_path / "m", CHINA, layout=LogitsLayout(pp=4))
    with pytest.raises(ConfigError, match="on the first stage, which has 1"):
        require_deepstack_layers(2, 1)


def test_a_plan_can_be_pickled(folders: dict[str, Path]) -> None:
    plan = load_assets(folders["qwen3_vl"]).plan
    copy = pickle.loads(pickle.dumps(plan))
    assert np.array_equal(copy.tokens([(40, 50)])[0].ids, plan.tokens([(40, 50)])[0].ids)


REFUSALS: dict[str, tuple[str, str, Any, str]] = {
    "another patch": (
        "qwen2_vl",
        "processor_config.json",
        lambda c: c["image_processor"].update(patch_size=8),
        "Qwen2VLImageProcessor has patch_size = 8, but the tower takes patch_size = 6, merge_size = 2",
    ),
    "no resizing": (
        "qwen3_vl",
        "processor_config.json",
        lambda c: c["image_processor"].update(do_resize=False),
        "has do_resize = False, but the tower takes",
    ),
    "a merger of another width": (
        "qwen2_5_vl",
        "config.json",
        lambda c: c["vision_config"].update(out_hidden_size=32),
        "vision_config.out_hidden_size = 32 and text_config.hidden_size = 64 must be equal",
    ),
    "sections that do not add up": (
        "qwen2_vl",
        "config.json",
        lambda c: c["text_config"]["rope_parameters"].update(mrope_section=[1, 1, 1]),
        r"mrope_section = \[1, 1, 1\]: expected three numbers whose sum is half the head size, 4",
    ),
    "layers out of order": (
        "qwen3_vl",
        "config.json",
        lambda c: c["vision_config"].update(deepstack_visual_indexes=[2, 0]),
        r"deepstack_visual_indexes = \[2, 0\]: expected layers from 0 to 2, in order",
    ),
    "another tower": (
        "qwen2_vl",
        "config.json",
        lambda c: c["vision_config"].update(model_type="siglip_vision_model"),
        "known: qwen2_vl, qwen2_vl_vision",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_be_computed_is_refused_by_name(folders: dict[str, Path], what: str, tmp_path: Path) -> None:
    name, file, change, expected = REFUSALS[what]
    folder = edited(folders[name], tmp_path / "hf", file, change)
    with pytest.raises((ConversionError, DataError), match=expected):
        import_hf(folder, tmp_path / "m") if file == "config.json" else load_assets(folder)
    assert not iteration_folder(tmp_path / "m", 0).exists()
