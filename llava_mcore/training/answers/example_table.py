"""Draws example answers with their pictures."""

from __future__ import annotations

import json
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path

from llava_mcore.data.processors.images import decode_image
from llava_mcore.data.samples import IMAGE_MARK, VIDEO_MARK
from llava_mcore.errors import DataError
from llava_mcore.files.text_files import naming
from llava_mcore.training.answers.result import AnswersResult, Example

FOLDER = "answers"
_FONTS = ("Noto Sans CJK JP", "Noto Sans JP", "IPAexGothic", "IPAGothic", "TakaoGothic", "WenQuanYi Zen Hei")
"""Fonts with Japanese or Chinese characters, of which those that are installed are used."""
_WIDTH, _MOST_LINES, _SIDE = 70, 8, 256


def write_answers(run_dir: Path, result: AnswersResult) -> Path:
    """Write all answers of a round into answers/ITERATION.jsonl and the examples into a .png beside it.

    Returns:
        The path of the picture.
    """
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(record.line(), ensure_ascii=False) + "\n" for record in result.records]
    path = folder / f"{result.iteration:07d}.jsonl"
    with naming(path):
        path.write_bytes("".join(lines).encode("utf-8", "surrogatepass"))
    picture = path.with_suffix(".png")
    if result.examples:
        draw_examples(result.examples, picture, title=f"{run_dir.name}, iteration {result.iteration}")
    return picture


def draw_examples(examples: Sequence[Example], path: Path, *, title: str) -> None:
    """Draw a row per example: its picture, the question, the expected and the given answer."""
    from matplotlib import font_manager, rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # the import takes a second
    from matplotlib.figure import Figure

    installed = set(font_manager.get_font_names())
    fonts = ["DejaVu Sans", *(name for name in _FONTS if name in installed)]
    with rc_context({"font.family": fonts, "text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # characters that no installed font has
        figure = Figure(figsize=(9, 0.4 + 1.7 * len(examples)), dpi=100)
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(examples), 2, squeeze=False, width_ratios=(1, 3.5))
        figure.suptitle(title, fontsize=10)
        for (left, right), example in zip(grid, examples, strict=True):
            for axes in (left, right):
                axes.axis("off")
            if example.picture is not None:
                _show(left, example.picture)
            right.text(0, 0.5, _text(example), va="center", fontsize=8, transform=right.transAxes)
        figure.tight_layout()
        with naming(path):
            figure.savefig(path)


def _show(axes: object, data: bytes) -> None:
    try:
        picture = decode_image(data)
    except DataError:  # it was read before: the shard has changed
        return
    picture.thumbnail((_SIDE, _SIDE))
    axes.imshow(picture)  # type: ignore[attr-defined]


def _text(example: Example) -> str:
    record = example.record
    question = record.question.replace(IMAGE_MARK, "").replace(VIDEO_MARK, "").strip()
    parts = (("Q", question), ("expected", record.reference or ""), ("answer", record.answer or ""))
    lines = []
    for name, text in parts:
        wrapped = textwrap.wrap(f"{name}: {text}", _WIDTH) or [f"{name}:"]
        lines += [*wrapped[:_MOST_LINES], *(["…"] if len(wrapped) > _MOST_LINES else [])]
    return "\n".join(lines)
