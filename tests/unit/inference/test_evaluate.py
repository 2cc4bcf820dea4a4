"""`evaluate`: one score for the dataset, lm-eval's task and lmms-eval's; models side by side; messages."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from llava_mcore.cli.evaluate import main
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.errors import DataError, problems
from llava_mcore.inference.answering import megatron_answers, transformers_answers
from llava_mcore.inference.answering.evaluation import score_records
from llava_mcore.inference.answering.job import DataJob, Job, ReadOptions
from llava_mcore.inference.answering.transformers_answers import answer_folder
from llava_mcore.inference.evaluation import lm_harness
from llava_mcore.inference.generation.records import Record
from llava_mcore.inference.generation.settings import TokenSampling
from llava_mcore.training.answers.result import scored
from tests.helpers.shards import jpeg, make_dataset
from tests.helpers.tiny_hf import make_hf_llava

NUM_SAMPLES, NUM_TOKENS = 12, 6
SPLIT = "split_parts: {train: [000001.tar], val: [000000.tar], test: []}\nexclude: []\n"
WORLD = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")
FAKE_LMMS = """
import argparse, json, pathlib, urllib.request
p = argparse.ArgumentParser()
for name in ("model", "model_args", "tasks", "batch_size", "output_path", "include_path", "limit"):
    p.add_argument("--" + name)
p.add_argument("--log_samples", action="store_true")
args = p.parse_args()
options = dict(pair.split("=", 1) for pair in args.model_args.split(","))
assert args.model == "openai" and pathlib.Path(args.include_path).is_dir()
body = {"model": options["model_version"], "max_tokens": 6, "temperature": 0,
        "messages": [{"role": "user", "content": "Which digit is shown?"}]}
request = urllib.request.Request(options["base_url"] + "/chat/completions", json.dumps(body).encode())
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
folder = pathlib.Path(args.output_path, "model")
folder.mkdir()
tasks = args.tasks.split(",")
metrics = {task: {"alias": task, "exact_match,none": 0.25, "exact_match_stderr,none": "N/A"} for task in tasks}
(folder / "1_results.json").write_text(json.dumps({"results": metrics}))
for task in tasks:
    if task == "a_refused":
        answer, kept = "[LMMS_EVAL_REQUEST_FAILED after 1 retries] too large", answer
    sample = {"doc_id": 0, "target": "0", "filtered_resps": answer}
    (folder / f"1_samples_{task}.jsonl").write_text(json.dumps(sample) + "\\n")
    if task == "a_refused":
        answer = kept
"""


def answers(root: Path, data: Path) -> list[Record]:
    job = Job(DataJob(data, "val"), ReadOptions(), TokenSampling(), NUM_TOKENS)
    return answer_folder(root / "hf", job)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, a checkpoint, and a dataset in which every other reference is what the first model answers."""
    root = tmp_path_factory.mktemp("evaluate")
    make_hf_llava(root / "hf")
    make_hf_llava(root / "other", seed=1)
    import_hf(root / "hf", root / "megatron")
    make_dataset(root / "draft", num_samples=NUM_SAMPLES, sample_type="CrudeWebdataset")
    (root / "draft" / ".nv-meta" / "split.yaml").write_text(SPLIT)
    records = answers(root, root / "draft")
    assert len(records) == NUM_SAMPLES // 2
    numbers = [int(re.sub(r"\D", "", record.key)) for record in records]
    replace: dict[int, dict[str, Any]] = {
        number: {"txt": record.answer} for number, record in list(zip(numbers, records, strict=True))[::2]
    }
    make_dataset(root / "data", num_samples=NUM_SAMPLES, sample_type="CrudeWebdataset", replace=replace)
    (root / "data" / ".nv-meta" / "split.yaml").write_text(SPLIT)
    write_task(root / "tasks", numbers, answers(root, root / "data"))
    return root


def write_task(folder: Path, numbers: list[int], records: list[Record]) -> None:
    """Write the same questions as tasks of lm-eval; no code is needed."""
    folder.mkdir()
    columns = {
        "picture": [{"bytes": jpeg(number), "path": None} for number in numbers],
        "question": [record.question.removeprefix("<image>\n") for record in records],
        "answer": [record.reference for record in records],
    }
    documents = datasets.Dataset.from_dict(columns).cast_column("picture", datasets.Image())
    documents.to_parquet(folder / "digits.parquet")
    task = {
        "task": "digits",
        "dataset_path": "parquet",
        "dataset_kwargs": {"data_files": {"test": str(folder / "digits.parquet")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_image": ["picture"],
        "doc_to_text": "<image>{{question}}",
        "doc_to_target": "answer",
        "generation_kwargs": {"until": [], "do_sample": False, "temperature": 0.0, "max_gen_toks": NUM_TOKENS},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "digits.yaml").write_text(yaml.safe_dump(task))
    text_only = task | {"task": "choices", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
                        "doc_to_choice": ["one", "two"], "doc_to_target": 0}  # fmt: skip
    del text_only["doc_to_image"], text_only["generation_kwargs"]
    text_only["metric_list"] = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    (folder / "choices.yaml").write_text(yaml.safe_dump(text_only))


@pytest.fixture(autouse=True)
def no_world_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the variables that a Megatron model of one process sets: accelerate would wait for other ranks."""
    for name in WORLD:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def evaluate(*arguments: object, out: Path) -> list[dict[str, Any]]:
    """Run the command and return what it wrote of each model."""
    assert main([*map(str, arguments), "--json", str(out)]) == 0
    return list(json.loads(out.read_text())["models"])


def test_a_dataset_scores_the_same_with_every_model_s_own_loop(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = ["--hf-dir", root / "hf", "--hf-dir", root / "other", "--megatron-dir", root / "megatron"]
    flags = ["--data-path", root / "data", "--max-new-tokens", NUM_TOKENS]
    export, other, megatron = evaluate(*models, *flags, out=tmp_path / "scores.json")
    assert export["data"] == megatron["data"]
    assert export["data"]["metrics"] == scored(answers(root, root / "data")), "what --eval-generate logs"
    assert export["data"]["metrics"]["exact_match"] == 1 / 2
    assert export["data"]["num_answers"] == len(export["data"]["samples"]) == NUM_SAMPLES // 2
    assert [sample["exact_match"] for sample in export["data"]["samples"]] == [1, 0] * 3
    assert other["data"]["metrics"]["exact_match"] == 0
    shown = capsys.readouterr().out
    assert re.search(r"│ data +│ questions +│ \d +│ \d +│ \d +│\n│ data +│ not asked +│ 0 +│ 0 +│ 0 +│", shown), shown
    assert re.search(r"│ data +│ exact_match +│ 0.5000 +│ 0.0000 +│ 0.5000 +│", shown), shown


def test_lm_eval_gives_the_score_of_our_loop(root: Path, tmp_path: Path) -> None:
    flags = ["--data-path", root / "data", "--max-new-tokens", NUM_TOKENS]
    tasks = ["--tasks", "digits,choices", "--include-path", root / "tasks"]
    (found,) = evaluate("--hf-dir", root / "hf", *flags, *tasks, out=tmp_path / "scores.json")
    by_name = {task["task"]: task for task in found["tasks"]}
    assert [x["answer"].strip() for x in by_name["digits"]["samples"]] == [
        x["answer"] for x in found["data"]["samples"]
    ]
    assert by_name["digits"]["metrics"]["exact_match"] == found["data"]["metrics"]["exact_match"]
    assert 0 <= by_name["choices"]["metrics"]["acc"] <= 1


def fake_python(folder: Path, *, has_lmms: bool = True) -> Path:
    """Return a Python with a package lmms_eval that asks one question as the real one does, or without."""
    package = folder / "site" / "lmms_eval"
    package.mkdir(parents=True)
    if has_lmms:
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(FAKE_LMMS)
    else:
        package.rmdir()
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={package.parent} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.long
def test_lmms_eval_asks_our_server(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--hf-dir", root / "hf", "--include-path", root / "tasks", "--lmms-python", fake_python(tmp_path)]
    (found,) = evaluate(*flags, "--lmms-tasks", "ocr", out=tmp_path / "scores.json")
    (task,) = found["tasks"]
    assert (task["task"], task["metrics"]) == ("ocr", {"exact_match": 0.25})
    assert task["samples"][0]["answer"]
    out = tmp_path / "kept.json"
    assert main([*map(str, flags), "--lmms-tasks", "a_refused,ocr", "--json", str(out)]) == 2
    said = capsys.readouterr()
    assert "a_refused: 1 of 1 questions could not be asked" in said.err and "ocr" in said.out
    assert [task["task"] for task in json.loads(out.read_text())["models"][0]["tasks"]] == ["ocr"]


def test_what_is_finished_stays(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that fails, and a model that fails: the scores before them are printed and in the file."""
    data = ["--data-path", root / "data", "--max-new-tokens", NUM_TOKENS, "--num-samples", 2]
    out = tmp_path / "scores.json"

    def kept(*arguments: object) -> list[tuple[str, bool]]:
        assert main([*map(str, [*arguments, *data]), "--json", str(out)]) == 2
        said = capsys.readouterr()
        assert re.search(r"│ data +│ exact_match +│", said.out) and re.search(r"^error: ", said.err, re.M)
        return [(Path(x["model"]).name, x["data"] is not None) for x in json.loads(out.read_text())["models"]]

    model = ("--hf-dir", root / "hf")

    def task_fails(*_: object) -> None:
        raise DataError("the data cannot be read any more")

    with monkeypatch.context() as patch:
        patch.setattr(lm_harness, "run_tasks", task_fails)
        assert kept(*model, "--tasks", "digits", "--include-path", root / "tasks") == [("hf", True)]
    answer = transformers_answers.answer_folder

    def fails_later(folder: Path, job: Job) -> list[Record]:
        if folder.name == "other":
            assert [x["model"] for x in json.loads(out.read_text())["models"]] == [str(root / "hf")]
            raise DataError("the disk is gone")
        return answer(folder, job)

    monkeypatch.setattr(transformers_answers, "answer_folder", fails_later)
    out.unlink()
    assert kept(*model, "--hf-dir", root / "other") == [("hf", True)]


def test_scoring_compares_no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look for each among all would take the square of their number."""
    monkeypatch.setattr(Record, "__eq__", lambda *_: pytest.fail("compared"))
    records = [Record("a", "", "x", "x"), Record("b", "", "x", None, problem="broken"), Record("a", "", "x", "x")]
    found = score_records(records)
    assert (found.num_answers, found.num_skipped) == (2, 1)
    assert ["exact_match" in sample for sample in found.samples] == [True, False, True]


def test_what_cannot_be_scored_is_one_message(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def says(*arguments: object) -> str:
        assert main([*map(str, arguments)]) == 2
        return capsys.readouterr().err

    model, data = ("--hf-dir", root / "hf"), ("--data-path", root / "data")
    nothing = ["give a model: --hf-dir or --megatron-dir", "give --data-path, --tasks or --lmms-tasks"]
    assert says() == f"error: {problems('nothing was evaluated', nothing)}\n"
    assert "run export-hf first" in says("--megatron-dir", root / "megatron", "--tasks", "x")
    assert "need each other" in says(*model, "--lmms-tasks", "x")
    assert "there is no folder" in says(*model, *data, "--json", tmp_path / "no" / "x.json")
    missing = says(*model, "--tasks", "digts,nothing-like-it", "--include-path", root / "tasks")
    assert "2 problems" in missing
    assert "digts: no such task (did you mean digits?)" in missing
    assert "there is no folder" in says(*model, "--tasks", "digits", "--include-path", tmp_path / "no")
    assert "val" in says(*model, "--data-path", tmp_path)
    assert "config.json" in says("--hf-dir", tmp_path, *data)
    lmms = [*model, "--lmms-tasks", "x", "--lmms-python"]
    assert "cannot be run" in says(*lmms, tmp_path / "no-python")
    assert "has no lmms-eval" in says(*lmms, fake_python(tmp_path, has_lmms=False))
    (root / "tasks" / "digits.parquet").rename(tmp_path / "moved")
    monkeypatch.setattr(lm_harness, "run_tasks", lambda *_: pytest.fail("a model is loaded"))
    assert "the tasks digits cannot be run" in says(*model, "--tasks", "digits", "--include-path", root / "tasks")
    (tmp_path / "moved").rename(root / "tasks" / "digits.parquet")


def test_everything_wrong_is_said_before_a_model_is_loaded(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((transformers_answers, "answer_folder"), (megatron_answers, "answer_checkpoint")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("a model is loaded"))
    models = ["--hf-dir", root / "hf", "--hf-dir", tmp_path / "no", "--hf-dir", root / "data"]
    checkpoints = ["--megatron-dir", root / "megatron", "--megatron-dir", tmp_path / "gone", "--tp", 3]
    rest = ["--data-path", root / "nothing", "--json", tmp_path, "--top-p", 0.5]
    assert main([*map(str, [*models, *checkpoints, *rest])]) == 2
    said = capsys.readouterr().err
    for text in (
        f"--hf-dir {tmp_path / 'no'}: there is no such folder",
        f"{root / 'data'} cannot prepare conversations",
        "cannot be split into tp 3 x pp 1",
        f"{tmp_path / 'gone'}: no such folder",
        f"data path {root / 'nothing'} does not exist",
        f"--json {tmp_path} is a folder",
        "--top-p and --top-k need --temperature",
    ):
        assert text in said, (text, said)


NO_EFFECT = {
    "answers": ("--chat-template vicuna --max-new-tokens 5 --temperature 1 --top-p 0.5 --top-k 3 --seed 1 "
                "--special-tokens-in-text text --max-frames 3 --min-pixels 784 --max-pixels 3600 --split val "
                "--every-answer"),
    "dtype": "--dtype bf16",
    "batch": "--batch-size 2",
    "layout": "--tp 1 --pp 1",
}  # fmt: skip


@pytest.mark.parametrize("case", NO_EFFECT)
def test_flags_without_effect_are_refused_by_name(
    case: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = NO_EFFECT[case].split()
    lmms = ["--lmms-tasks", "x", "--lmms-python", str(fake_python(tmp_path))]
    assert main(["--hf-dir", str(root / "hf"), *lmms, *flags]) == 2
    said = capsys.readouterr().err
    assert all(flag in said.split("only for")[0] for flag in flags if flag.startswith("--")), said
    assert "problems" not in said
