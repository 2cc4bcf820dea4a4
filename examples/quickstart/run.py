"""The whole way on this machine's CPU: images → shards → Hugging Face model → Megatron, trained at tp 2 x pp 2 by
four processes → Hugging Face → answers about images that were held out.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.common import Stages, console, fresh_folder, progress_bar, read_metrics, script

MARK = ".quickstart"
NUM_SAMPLES = 40_000
GOAL = 0.95


def main() -> int:
    """Run all stages; return 0 if the goal is reached."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "quickstart", help="folder for everything made")
    parser.add_argument("--train-iters", type=int, help="iterations (default: as train.yaml says)")
    parser.add_argument("--num-samples", type=int, default=NUM_SAMPLES, help="training samples (default %(default)s)")
    args = parser.parse_args()
    out, stage = fresh_folder(args.out.absolute(), MARK), Stages()

    stage("write shards and index them", lambda: make_data(out, args.num_samples))
    stage("make a small Llama and a small CLIP", lambda: make_models(out))
    stage("build the LLaVA", lambda: script("convert/build_llava_jp.py", *build_flags(out)))
    stage("Hugging Face → Megatron", lambda: script("convert/convert_hf_to_megatron.py", *import_flags(out)))
    iterations = [] if args.train_iters is None else ["--train-iters", args.train_iters]
    stage("train at tp 2 x pp 2", lambda: script("train/run.py", *train_flags(out), *iterations))
    stage("Megatron → Hugging Face", lambda: script("convert/convert_megatron_to_hf.py", *export_flags(out)))
    accuracies = stage("answer questions about held-out scans", lambda: evaluate(out))
    return summary(out, stage, accuracies)


def make_data(out: Path, num_samples: int) -> None:
    """Write training shards and the exam, and prove that no held-out scan is in a shard."""
    import data

    train, held_out = data.split_scans(data.load_scans())
    with progress_bar() as bar:
        task = bar.add_task("training samples", total=num_samples)
        data.write_shards(out / "shards", train, num_samples, lambda: bar.advance(task))
    data.prepare(out / "shards")
    data.write_exam(out / "exam", held_out)
    leaked = data.trained_scans(out / "shards") & {x.scan for x in data.read_exam(out / "exam")}
    if leaked:
        sys.exit(f"held-out scans are in the shards: {sorted(leaked)}")
    console.print(f"{len(train)} scans to train on, {len(held_out)} held out, none in both")


def make_models(out: Path) -> None:
    """Write the two small models."""
    import models
    from data import IMAGE_SIZE

    language = models.make_language_model(out / "llama")
    vision = models.make_vision_tower(out / "clip", IMAGE_SIZE)
    console.print(f"Llama: {language:,} parameters; CLIP: {vision:,} parameters; both random")


def build_flags(out: Path) -> list[object]:
    return ["--save-dir", out / "hf", "--text-model", out / "llama", "--vision-model", out / "clip"]


def import_flags(out: Path) -> list[object]:
    return ["--tp", 2, "--pp", 2, "--hf-dir", out / "hf", "--megatron-dir", out / "megatron"]


def train_flags(out: Path) -> list[object]:
    layout = ["-g", 4, "--tp", 2, "--pp", 2, "--config", "examples/quickstart/train.yaml"]
    places = [
        "--megatron-load-dir",
        out / "megatron",
        "--tokenizer-load-dir",
        out / "hf",
        "--data-path",
        out / "shards",
    ]
    return [*layout, *places, "--save-dir", out / "runs", "--name", "digits", "--save"]


def export_flags(out: Path) -> list[object]:
    return ["--tp", 2, "--pp", 2, "--megatron-dir", out / "runs" / "digits", "--hf-dir", out / "export"]


def evaluate(out: Path) -> dict[str, float]:
    """Let transformers answer, plot, and return the accuracies."""
    import data
    import evaluate
    import report

    with progress_bar() as bar:
        task = bar.add_task("questions", total=len(data.read_exam(out / "exam")))
        answered = evaluate.answer_all(out / "export", out / "exam", lambda n: bar.advance(task, n))
    report.plot_predictions(answered, out / "exam", out / "predictions.png")
    return evaluate.accuracy(answered)


def summary(out: Path, stages: Stages, accuracies: dict[str, float]) -> int:
    """Print the table, write results.json and loss.png, and say whether the goal was reached."""
    import report

    metrics = read_metrics(out / "runs" / "digits")
    report.plot_loss(metrics, out / "loss.png")
    losses = {"first": metrics[0]["loss"], "last": metrics[-1]["loss"]}
    results = {"seconds": stages.seconds, "loss": losses, "exact_match": accuracies}
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    report.print_summary(stages, metrics, accuracies, out)
    if accuracies["which digit"] < GOAL:
        print(f'"which digit" is below {GOAL:.0%}: something is wrong, or the run was cut short', file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
