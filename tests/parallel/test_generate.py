"""Answers of Megatron checkpoints at every layout: the tokens of transformers' `generate`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.samples import IMAGE_MARK, VIDEO_MARK, Audio, Conversation, Turn
from llava_mcore.inference.answering.hf_model import HfModel
from llava_mcore.inference.generation.settings import TokenSampling, read_settings
from tests.helpers.cases import SHORT_AUDIO, TWO_ROPES, YARN, Case, make_sharp_case
from tests.helpers.tiny_audio import encoded
from tests.helpers.videos import noise, video
from tests.helpers.world import run_world
from tests.parallel import answer_checks, generate_checks
from tests.parallel.validation_checks import make_material

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
CASES = [
    Case("clip", "llama", {}),
    Case("siglip", "qwen2", {"text_overrides": {"rope_parameters": YARN}}),
    Case("dinov2", "gemma2", {"tie": True}),
    Case("siglip", "gemma3", {"text_overrides": {"rope_parameters": TWO_ROPES}}),
    Case("clip", "mistral", {}, None, "llava_next"),
    Case("siglip", "qwen2", {"feature_layer": -1, "tie": True}, None, "llava_onevision"),
    Case("internvit", "qwen2", {"tie": True}, None, "internvl"),
    Case("siglip", "llama", {}, None, "idefics3"),
    Case("siglip", "llama", {"tie": True, "marks": False}, None, "smolvlm"),
    Case("siglip", "mistral", {}, None, "idefics2"),
    Case("qwen2_vl", "qwen2", {"tie": True}, None, "qwen2_vl"),
    Case("qwen2_5_vl", "qwen2", {}, None, "qwen2_5_vl"),
    Case("qwen3_vl", "qwen3", {}, None, "qwen3_vl"),
    Case("qwen3_vl_moe", "qwen3_vl_moe", {}, None, "qwen3_vl_moe"),
    Case("qwen3_5", "qwen3_5", {}, None, "qwen3_5"),
    Case("qwen3_5_moe", "qwen3_5_moe", {}, None, "qwen3_5_moe"),
    SHORT_AUDIO,
    Case("mllama", "mllama", {}, ((1, 1), (2, 1)), "mllama"),
]
NUM_NEW = 12
DIVIDED_PROMPTS = [
    case.name
    for case in CASES
    if case.architecture in ("llava_next", "qwen2_5_vl", "qwen3_vl", "qwen3_5") or case.text == "gemma3"
]


def conversations(refused: Collection[str]) -> list[Conversation]:
    """An image, none, two of other sizes, an earlier answer, and a video where the class takes them.

    refused: the marks of media that it does not take. Audio clips, if it takes no images.
    """
    if IMAGE_MARK in refused:
        short, long = Audio(encoded(0.3)), Audio(encoded(2.7, 1))
        return [
            Conversation((Turn("user", "<audio>\nWhat is this?"),), (), audios=(short,)),
            Conversation((Turn("user", "Which digit is said? Is it even?"),), ()),
            Conversation((Turn("user", "<audio>\n<audio>\nquick brown fox"),), (), audios=(long, short)),
        ]
    large, wide, small = noise(100, 40), noise(30, 110, 1), noise(56, 56, 2)
    asked = [
        Conversation((Turn("user", "<image>\nWhat is this?"),), (large,)),
        Conversation((Turn("user", "Which digit is shown? Is it even?"),), ()),
        Conversation((Turn("user", "<image>\n<image>\nquick brown fox"),), (wide, small)),
        Conversation(
            (
                Turn("user", "<image>\nWhich?"),
                Turn("assistant", "It is seven."),
                Turn("user", "Is it even? The text </s> is not special."),
            ),
            (small,),
        ),
    ]
    if VIDEO_MARK not in refused:
        clip = video(4, 40, 60, fps=2.0)
        asked.append(Conversation((Turn("user", "<video>\nWhat is this?"),), (), None, (clip,)))
    return asked


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every case as a Megatron checkpoint, with transformers' answers."""
    with pytest.MonkeyPatch.context() as patch:
        # SmolVLM's processor asks for a package that spells the number of a video's frames.
        patch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str)
        return answered(tmp_path_factory.mktemp("generate"))


def answered(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in CASES:
        folder = root / case.name
        make_sharp_case(case, folder / "hf")
        import_hf(folder / "hf", folder / "megatron")
        hf = HfModel.load(folder / "hf")
        settings = read_settings(folder / "hf", hf.model.config, None, max_new_tokens=NUM_NEW, sampling=TokenSampling())
        asked = conversations(hf.assets.refused)
        answers = [hf.answer(conversation, settings) for conversation in asked]
        if case is CASES[0]:
            settings.config.update(repetition_penalty=1.5, no_repeat_ngram_size=2)
            found["penalty"] = [hf.answer(conversation, settings) for conversation in asked]
        found[case.name] = {"megatron": str(folder / "megatron"), "asked": asked, "answers": answers}
    return found


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_tokens_are_those_of_transformers(expected: dict[str, Any], tp: int, pp: int) -> None:
    # One kind of parallelism alone has half of the models, both together all.
    chosen = CASES if tp == pp else CASES[tp - 1 :: 2]
    cases = {case.name: expected[case.name] for case in chosen if case.layouts is None or (tp, pp) in case.layouts}
    jobs = {name: (x["megatron"], x["asked"]) for name, x in cases.items()}
    ranks = run_world(tp * pp, generate_checks.answers, tp=tp, pp=pp, jobs=jobs, num_new=NUM_NEW)
    for found in ranks:
        for name, case in cases.items():
            assert found[name] == case["answers"], name


@pytest.mark.parametrize(("tp", "cp", "pp"), [(1, 2, 1), (2, 2, 1), (1, 2, 2)])
def test_tokens_of_prompts_that_ranks_divide(expected: dict[str, Any], tp: int, cp: int, pp: int) -> None:
    """Rotary positions of one axis and three, windows, features of inner layers, delta nets; images that the ranks
    divide, too."""
    cases = {name: expected[name] for name in DIVIDED_PROMPTS}
    jobs = {name: (x["megatron"], x["asked"]) for name, x in cases.items()}
    given = {"tp": tp, "pp": pp, "cp": cp, "jobs": jobs, "num_new": NUM_NEW, "vision_data_parallel": tp == 1}
    for found in run_world(tp * cp * pp, generate_checks.answers, **given):
        for name, case in cases.items():
            assert found[name] == case["answers"], name


@pytest.mark.long
def test_other_settings_and_layouts(expected: dict[str, Any]) -> None:
    """Draws, penalties, numbers of rows, sequence parallelism, interleaved stages; and the cache itself."""
    case = expected[CASES[0].name]
    given = {"root": case["megatron"], "asked": case["asked"], "num_new": NUM_NEW}
    drawn = None
    for tp, pp in ((1, 1), (2, 2)):
        for found in run_world(tp * pp, generate_checks.with_options, tp=tp, pp=pp, **given):
            assert found.pop("penalty") == expected["penalty"] != case["answers"]
            draws = [found.pop(name) for name in ("drawn", "drawn, other rows", "other draws")]
            drawn = drawn or draws[0]
            assert draws[0] == draws[1] == drawn, "the same at every layout"
            assert case["answers"] != drawn != draws[2]
            for name, tokens in found.items():
                assert tokens == case["answers"], (name, tp, pp)


def test_answers_while_training(tmp_path: Path) -> None:
    """The same answers and metrics at every layout; training continues bitwise as without them."""
    material = make_material(tmp_path)  # with dropout, so that later rounds differ between layouts
    rounds: list[Any] = []
    for tp, pp, dp in ((1, 1, 1), (2, 2, 1), (1, 1, 2)):
        given: dict[str, Any] = {"save_dir": str(tmp_path), **material}
        ranks = run_world(tp * pp * dp, answer_checks.with_and_without, tp=tp, pp=pp, **given)
        for found in ranks:
            assert found["with"]["losses"] == found["without"]["losses"]
            assert found["with"]["weights"] == found["without"]["weights"]
        for name, found in ranks[0].items():
            rounds = rounds or found["rounds"]
            assert found["rounds"][:1] in (rounds[:1], []), (name, tp, pp, dp)
        assert Image.open(tmp_path / "answers" / f"{tp * pp * dp:07d}.png").size == (900, 1400)
    metrics, records = rounds[0]
    assert len(records) == 15 and [record.problem is None for record in records].count(False) == 1
    assert {"exact_match", "rougeL", "bleu", "anls"} <= metrics.keys()
    assert records != rounds[2][1], "training has changed the answers"
