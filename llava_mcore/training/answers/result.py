"""The result of a round of answers, its files, and an image of examples."""

from __future__ import annotations

import json
import math
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_mcore.data.processors.images import decode_image
from llava_mcore.data.samples import IMAGE_MARK, VIDEO_MARK
from llava_mcore.errors import DataError
from llava_mcore.files.regular import naming
from llava_mcore.inference.evaluation.metrics import Answered, score
from llava_mcore.inference.generation.records import Record

CONSOLE_METRICS = ("exact_match", "rougeL", "bleu")
"""Metrics of the console line."""
FOLDER = "answers"
_FONTS = ("Noto Sans CJK JP", "Noto Sans JP", "IPAexGothic", "IPAGothic", "TakaoGothic", "WenQuanYi Zen Hei")
"""Fonts with Japanese or Chinese characters, of which those that are installed are used."""
_WIDTH, _MOST_LINES, _SIDE = 70, 8, 256


@dataclass(frozen=True)
class Example:
    """A question with its answer and its first image, encoded; None without one."""

    record: Record
    picture: bytes | None


@dataclass(frozen=True)
class AnswersResult:
    """One round. `metrics`: by name, None if one is not defined or nothing was answered."""

    iteration: int
    metrics: dict[str, float | None]
    num_answers: int
    num_skipped: int
    seconds: float
    records: Sequence[Record]
    examples: Sequence[Example]

    def line(self) -> str:
        """Return the console line."""
        metrics = [f"{name} {value:.3f}" for name in CONSOLE_METRICS if (value := self.metrics.get(name)) is not None]
        skipped = f" | questions that could not be asked: {self.num_skipped}" if self.num_skipped else ""
        return (
            f"answers after step {self.iteration} | {' | '.join([*metrics, f'{self.num_answers} answers'])} | "
            f"{self.seconds:.1f} s{skipped}"
        )

    def values(self) -> dict[str, float]:
        """Return the numbers under their names in sinks."""
        return {f"answers/{name}": value for name, value in self.metrics.items() if value is not None}

    def record(self) -> dict[str, Any]:
        """Return the object to write as a JSON line."""
        counts = {"num_answers": self.num_answers, "num_skipped": self.num_skipped, "seconds": self.seconds}
        return {"iteration": self.iteration, "exact_match": None, **self.metrics, **counts}


def scored(records: Sequence[Record]) -> dict[str, float | None]:
    """Return the metrics of all answers; none without any. ConfigError if a package is missing."""
    pairs = [(record.answer, record.reference) for record in records]
    answered = [
        Answered(answer, (reference,)) for answer, reference in pairs if answer is not None and reference is not None
    ]
    if not answered:
        return {}
    return {name: value if math.isfinite(value) else None for name, value in score(answered).metrics.items()}


def write_answers(run_dir: Path, result: AnswersResult) -> Path:
    """Write all answers of a round into answers/ITERATION.jsonl and the examples into a .png beside it.

    Returns:
        The path of the image.
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
    """Draw a row per example: its image, the question, the expected and the given answer."""
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
    except DataError:  # it could be read before, so the shard has changed
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
