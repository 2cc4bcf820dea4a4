"""examples/small-vlm: DINOv2's weights out of an ONNX file, emoji that are held out, scores."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.torch import save_file

EXAMPLE = Path(__file__).parents[3] / "examples" / "small-vlm"
WIDTH = 384


@pytest.fixture(scope="module", autouse=True)
def example_on_path() -> Iterator[None]:
    sys.path.insert(0, str(EXAMPLE))
    yield
    sys.path.remove(str(EXAMPLE))


@pytest.fixture
def pictures() -> ModuleType:
    import pictures

    return pictures


def test_the_tower_is_dinov2_bit_for_bit(tmp_path: Path) -> None:
    """`Dinov2Model` takes every weight, and the tower of InternVL's class computes the same hidden states."""
    import dinov2
    from transformers import Dinov2Config, Dinov2Model, InternVLVisionModel

    try:
        weights = dinov2.read_weights(dinov2.find_file())
    except FileNotFoundError as error:
        pytest.skip(str(error))
    config = Dinov2Config(hidden_size=WIDTH, num_hidden_layers=12, num_attention_heads=6, image_size=518, patch_size=14)
    config.save_pretrained(tmp_path / "dinov2")
    save_file(weights, tmp_path / "dinov2" / "model.safetensors", metadata={"format": "pt"})
    theirs, keys = Dinov2Model.from_pretrained(tmp_path / "dinov2", output_loading_info=True)
    assert set(keys["missing_keys"]) == {"embeddings.mask_token"} and not keys["unexpected_keys"]
    assert dinov2.write_tower(weights, tmp_path) == sum(x.numel() for x in weights.values()) - 2 * WIDTH
    ours = InternVLVisionModel.from_pretrained(tmp_path).eval()
    pixels = torch.randn(2, 3, 112, 112, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs.eval()(pixels, output_hidden_states=True).hidden_states[-1]
        assert torch.equal(ours(pixels).last_hidden_state, expected)


def test_a_file_with_other_matrices_is_refused(tmp_path: Path) -> None:
    import dinov2
    import onnx

    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([], "nothing", [], [])), str(tmp_path / "no.onnx"))
    with pytest.raises(ValueError, match="multiplies by 0 matrices with a bias, expected 72"):
        dinov2.read_weights(tmp_path / "no.onnx")


def drawing(shape: str, place: tuple[int, int, int, int], color: str) -> Image.Image:
    image = Image.new("RGBA", (144, 144))
    getattr(ImageDraw.Draw(image), shape)(place, fill=color)
    return image


def pattern(seed: int, color: str) -> Image.Image:
    """Return some of 36 squares in a color: other seeds look different, other colors do not."""
    image, rng = Image.new("RGBA", (144, 144)), random.Random(seed)
    for place in rng.sample(range(36), 18):
        x, y = 24 * (place % 6), 24 * (place // 6)
        ImageDraw.Draw(image).rectangle((x, y, x + 23, y + 23), fill=color)
    return image


def some_emoji(pictures: ModuleType) -> list:
    """Return 20 patterns as animals and 20 as foods, each in two colors, which are two emoji."""
    found = []
    for number in range(20):
        for place, kind in enumerate(("animal", "food")):
            for color in ("red", "blue"):
                code, name = f"{len(found):X}", f"{color} {kind} {chr(65 + number)}"
                found.append(pictures.Emoji(code, name, kind, color, pattern(2 * number + place, color)))
    return found


def test_families_are_never_divided(pictures: ModuleType) -> None:
    """Emoji that differ by a color in the name, or look alike in gray, are on one side; a fifth is held out."""
    emoji = some_emoji(pictures)
    twin = pictures.Emoji("FFF", "something else", "food", "red", emoji[-1].drawing)
    sets = pictures.families([*emoji, twin])
    assert sorted(one.code for family in sets for one in family) == sorted(one.code for one in [*emoji, twin])
    side = {}
    for number, part in enumerate(pictures.split(sets)):
        side |= {one.code: number for one in part}
    for i in range(0, len(emoji), 2):
        assert side[emoji[i].code] == side[emoji[i + 1].code]
    assert side["FFF"] == side[emoji[-1].code]
    assert 0 < sum(side.values()) <= 0.2 * len(side) + 2
    assert pictures.split(sets) == pictures.split(pictures.families([*emoji, twin])), "the same every time"


def test_the_table_and_colors_are_read(pictures: ModuleType) -> None:
    lines = [
        "# subgroup: animal-bug",
        "1F41D                                                  ; fully-qualified     # 🐝 E0.6 honeybee",
        "1F577 FE0F                                             ; fully-qualified     # 🕷️ E0.7 spider",
        "1F577                                                  ; unqualified         # 🕷 E0.7 spider",
        "1F468 200D 1F33E                                       ; fully-qualified     # 👨‍🌾 E4.0 man farmer",
        "# subgroup: country-flag",
        "1F3C1                                                  ; fully-qualified     # 🏁 E0.6 chequered flag",
    ]
    assert list(pictures._named(lines)) == [("1F41D", "honeybee", "animal"), ("1F577", "spider", "animal")]
    for color in ("red", "orange", "yellow", "green", "blue", "purple", "white", "gray", "black", "brown"):
        assert pictures.main_color(drawing("rectangle", (20, 20, 100, 100), color)) == color
    two = drawing("rectangle", (0, 0, 71, 143), "red")
    ImageDraw.Draw(two).rectangle((72, 0, 143, 70), fill="blue")
    ImageDraw.Draw(two).rectangle((72, 71, 143, 143), fill="yellow")
    assert pictures.main_color(two) == "red"
    ImageDraw.Draw(two).rectangle((0, 0, 10, 143), fill="green")
    assert pictures.main_color(two) is None


def test_scores_and_the_majority_answer(pictures: ModuleType, tmp_path: Path) -> None:
    import conversations
    import scores

    rows = list(conversations.exam_rows(some_emoji(pictures), random.Random(0)))
    truth = [scores.right_answer(row) for row in rows]
    assert scores.number_of_questions(rows) == {form: 80 for form in conversations.FORMS}
    assert scores.accuracy(rows, truth) == {form: 1.0 for form in conversations.FORMS}
    assert scores.majority(rows) == {form: 0.5 for form in conversations.FORMS}, "both kinds, both of two, both colors"
    animals = scores.accuracy(rows, ["animal"] * len(rows))
    assert animals == {conversations.WHAT_KIND: 0.5, conversations.ONE_OF_TWO: 0.5, conversations.MAIN_COLOR: 0.0}
    samples = [{"key": f"000000.tar/{i:09d}", "answer": f" {x}"} for i, x in enumerate(truth)]
    file = tmp_path / "answers.json"
    file.write_text(json.dumps({"models": [{"model": "exports/stage2", "data": {"samples": samples[::-1]}}]}))
    assert scores.read_answers(file, rows) == {"stage2": truth}
    file.write_text(json.dumps({"models": [{"model": "exports/stage2", "data": {"samples": samples[1:]}}]}))
    with pytest.raises(ValueError, match="stage2 has not answered each of 240 questions"):
        scores.read_answers(file, rows)


def test_the_text_only_rows_are_the_same_without_pictures(pictures: ModuleType) -> None:
    import conversations

    emoji = some_emoji(pictures)
    rows = [conversations.training_row(one, emoji, 0, "x.png", random.Random(i)) for i, one in enumerate(emoji)]
    bare = conversations.without_picture(rows)
    for row, text in zip(rows, bare, strict=True):
        assert row["messages"][0]["content"] == "<image>\n" + text["messages"][0]["content"]
        assert row["messages"][1:] == text["messages"][1:] and "images" not in text


def test_the_page_has_the_scores_of_the_recorded_run() -> None:
    docs = Path(__file__).parents[3] / "docs"
    results = json.loads((docs / "small_vlm.json").read_text(encoding="utf-8"))
    page = (docs / "quickstart.md").read_text(encoding="utf-8")
    for name, shares in results["exact_match"].items():
        assert f"| {name} | {' | '.join(f'{100 * share:.1f} %' for share in shares.values())} |" in page
    for kind in ("seconds", "cpu_seconds"):
        assert f"{sum(results[kind].values()):,.0f} seconds" in page
