"""What `generate` and `chat` make of a folder's settings, of the flags for images, and of a model's length."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from llava_mcore.cli import chat as chat_command
from llava_mcore.config.sections.data import PixelRange
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.samples import Conversation, Turn
from llava_mcore.inference.answering import megatron_worker
from llava_mcore.inference.answering.answer_file import written_to
from llava_mcore.inference.answering.chat import Chat
from llava_mcore.inference.answering.hf_model import HfModel
from llava_mcore.inference.answering.job import ReadOptions
from llava_mcore.inference.generation.records import Record
from llava_mcore.inference.generation.settings import FILE, TokenSampling, read_settings
from llava_mcore.prepare.sampling import Sampling
from tests.helpers.cases import Case, make_sharp_case
from tests.helpers.generating import Ask, generate_here
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.tiny_mllama import make_hf_mllama
from tests.helpers.videos import noise

SPLIT = "split_parts: {train: [000001.tar], val: [000000.tar], test: []}\nexclude: []\n"
POSITIONS, EOS, VOCABULARY = 64, 2, 401
ASKED = Conversation((Turn("user", "What is this?"),), ())
LONG = {"messages": [{"role": "user", "content": "<image>\nWhich digit? " + "0z" * 40},
                     {"role": "assistant", "content": "0"}]}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of few positions, its checkpoint, and a dataset with one question that is too long."""
    root = tmp_path_factory.mktemp("asking")
    make_hf_llava(root / "hf", text_overrides={"max_position_embeddings": POSITIONS})
    import_hf(root / "hf", root / "megatron")
    replace: dict[int, dict[str, Any]] = {2: {"json": json.dumps(LONG).encode(), "txt": None}}
    make_dataset(root / "data", num_samples=12, replace=replace, sample_type="CrudeWebdataset")
    (root / "data" / ".nv-meta" / "split.yaml").write_text(SPLIT)
    (root / "picture.png").write_bytes(noise(60, 80))
    return root


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ask:
    return generate_here(capsys, monkeypatch)


def with_settings(source: Path, folder: Path, **values: Any) -> Path:
    """Copy a folder with another generation_config.json."""
    shutil.copytree(source, folder)
    (folder / FILE).write_text(json.dumps(values))
    return folder


def test_the_folder_s_sampling_settings_are_not_used(root: Path, tmp_path: Path, ask: Ask) -> None:
    """They would leave the most probable token only."""
    narrow = {"do_sample": True, "top_p": 0.001, "min_p": 0.5, "top_k": 1, "typical_p": 0.001, "epsilon_cutoff": 0.5,
              "eta_cutoff": 0.5, "top_h": 0.01, "temperature": 0.01}  # fmt: skip
    folder = with_settings(root / "hf", tmp_path / "hf", **narrow, eos_token_id=EOS)
    import_hf(folder, tmp_path / "megatron")
    given = ("--question", "What is this?", "--max-new-tokens", 8, "--temperature", 1)
    for model in (("--hf-dir", folder), ("--megatron-dir", tmp_path / "megatron")):
        found = [ask(*model, *given, "--seed", seed) for seed in range(3)]
        assert all(code == 0 for code, _, _ in found), found
        assert len({answer for _, answer, _ in found}) == 3, model


def test_samples_of_a_folder_have_the_distribution_of_its_logits(root: Path, tmp_path: Path) -> None:
    """top_k would be 50 where neither the flags nor the folder name one."""
    model = HfModel.load(with_settings(root / "hf", tmp_path / "hf", top_k=3, min_p=0.5))
    settings = read_settings(tmp_path / "hf", model.model.config, EOS, max_new_tokens=1, sampling=TokenSampling(1.0))
    given = {"generation_config": settings.config, "output_scores": True, "return_dict_in_generate": True}
    (scores,) = model.model.generate(**model.inputs(ASKED), **given).scores
    assert torch.isfinite(scores).all(), "no token is left out"


def test_a_folder_s_own_length_and_ends(root: Path, tmp_path: Path, ask: Ask) -> None:
    """The first token is made the one that ends answers; min_length forbids it for a while, with both loops."""
    model = HfModel.load(root / "hf")
    settings = read_settings(root / "hf", model.model.config, EOS, max_new_tokens=1, sampling=TokenSampling())
    (first,), length = model.answer(ASKED, settings), model.inputs(ASKED)["input_ids"].shape[1]
    answers = {}
    for name, more in (("short", {}), ("long", {"min_length": length + 4})):
        folder = with_settings(root / "hf", tmp_path / name, eos_token_id=first, **more)
        import_hf(folder, tmp_path / f"{name}-megatron")
        given = ("--question", "What is this?", "--max-new-tokens", 8)
        answer, again = ask("--hf-dir", folder, *given), ask("--megatron-dir", tmp_path / f"{name}-megatron", *given)
        assert answer == again and answer[0] == 0
        answers[name] = answer[1].strip()
    assert len(answers["long"]) > len(answers["short"])
    stopped = with_settings(root / "hf", tmp_path / "stopped", eos_token_id=EOS, stop_strings=["\x00"])
    import_hf(stopped, tmp_path / "stopped-megatron")
    assert ask("--hf-dir", stopped, *given)[0] == 0
    code, _, said = ask("--megatron-dir", tmp_path / "stopped-megatron", *given)
    assert code == 2 and "sets stop_strings = ['\\x00'], which only transformers knows" in said


RULES: dict[str, dict[str, Any]] = {
    "all": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 1, "min_new_tokens": 3, "min_length": 500},
    "suppressed": {"begin_suppress_tokens": [5, 6], "suppress_tokens": [7], "min_length": 9},
}


@pytest.mark.parametrize("sampling", [TokenSampling(), TokenSampling(0.7, 0.9, 40)], ids=["best", "drawn"])
@pytest.mark.parametrize("name", RULES)
def test_logits_are_changed_as_by_transformers(name: str, sampling: TokenSampling, root: Path, tmp_path: Path) -> None:
    """Every setting of a folder that is supported, in the same order, token by token."""
    model = HfModel.load(with_settings(root / "hf", tmp_path / "hf", eos_token_id=EOS, **RULES[name]))
    settings = read_settings(tmp_path / "hf", model.model.config, EOS, max_new_tokens=5, sampling=sampling)
    inputs = model.inputs(ASKED)
    length = inputs["input_ids"].shape[1]
    given = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    out = model.model.generate(**inputs, generation_config=settings.config, **given)
    processors = settings.processors(length, torch.device("cpu"))
    assert len(out.scores) > 2
    for number, (logits, scores) in enumerate(zip(out.logits, out.scores, strict=True)):
        assert not torch.equal(logits, scores)
        assert torch.equal(processors(out.sequences[:, : length + number], logits.clone()), scores), number


def test_a_placeholder_without_logits_is_counted_as_a_token(tmp_path: Path, ask: Ask) -> None:
    """Mllama cannot predict its placeholder; what a folder forbids at the beginning of an answer is forbidden there."""
    make_hf_mllama(tmp_path / "hf")
    (tmp_path / "picture.png").write_bytes(noise(60, 80))
    asked, answers = ("--question", "What is this?", "--image", tmp_path / "picture.png", "--max-new-tokens", 6), []
    model = HfModel.load(tmp_path / "hf")
    settings = read_settings(tmp_path / "hf", model.model.config, EOS, max_new_tokens=1, sampling=TokenSampling())
    question = Conversation((Turn("user", "<image>\nWhat is this?"),), ((tmp_path / "picture.png").read_bytes(),))
    first = model.answer(question, settings)
    for name, more in (("as it is", {}), ("suppressed", {"begin_suppress_tokens": first, "min_new_tokens": 2})):
        folder = with_settings(tmp_path / "hf", tmp_path / name, eos_token_id=EOS, **more)
        import_hf(folder, tmp_path / f"{name}-megatron")
        answer, again = ask("--hf-dir", folder, *asked), ask("--megatron-dir", tmp_path / f"{name}-megatron", *asked)
        assert answer[:2] == again[:2] and answer[0] == 0
        answers.append(answer[1])
    assert answers[0] != answers[1]


def test_an_eos_with_id_0_ends_answers(root: Path, tmp_path: Path, ask: Ask) -> None:
    folder = with_settings(root / "hf", tmp_path / "hf", suppress_tokens=list(range(1, VOCABULARY)))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<unk>"}))
    import_hf(folder, tmp_path / "megatron")
    given = ("--data-path", root / "data", "--max-new-tokens", 3, "--num-samples", 1, "--out", tmp_path / "out")
    for model in (("--hf-dir", folder), ("--megatron-dir", tmp_path / "megatron")):
        assert ask(*model, *given)[0] == 0
        assert json.loads((tmp_path / "out").read_text())["num_tokens"] == 1, model


def test_what_does_not_fit_is_a_problem_of_its_question(root: Path, tmp_path: Path, ask: Ask) -> None:
    out = [tmp_path / "folder", tmp_path / "checkpoint"]
    given = ("--data-path", root / "data", "--max-new-tokens", 4)
    for model, file in zip(("hf", "megatron"), out, strict=True):
        flag = "--hf-dir" if model == "hf" else "--megatron-dir"
        assert ask(flag, root / model, *given, "--out", file)[0] == 0
        code, _, said = ask(flag, root / model, "--question", "0z" * 40)
        assert code == 2 and f"the model has {POSITIONS} positions for question and answer" in said
    assert out[0].read_bytes() == out[1].read_bytes()
    lines = [json.loads(line) for line in out[0].read_text().splitlines()]
    assert [line["answer"] is None for line in lines] == [False, True, False, False, False, False]
    assert "positions for question and answer (max_position_embeddings" in lines[1]["problem"]
    assert lines[1]["problem"].endswith(": shorten the question")


def test_an_answer_ends_with_the_last_position(root: Path, tmp_path: Path, ask: Ask) -> None:
    folder = with_settings(root / "hf", tmp_path / "hf", suppress_tokens=[EOS])
    import_hf(folder, tmp_path / "megatron")
    given = ("--data-path", root / "data", "--max-new-tokens", POSITIONS, "--num-samples", 1, "--out", tmp_path / "out")
    lengths = []
    for model in (("--hf-dir", folder), ("--megatron-dir", tmp_path / "megatron")):
        assert ask(*model, *given)[0] == 0
        lengths.append(json.loads((tmp_path / "out").read_text())["num_tokens"])
    assert lengths[0] == lengths[1] < POSITIONS - 10


def test_chat_says_what_does_not_fit_and_continues(root: Path) -> None:
    model, said = HfModel.load(root / "hf"), list[str]()
    settings = read_settings(root / "hf", model.model.config, EOS, max_new_tokens=20, sampling=TokenSampling())
    chat = Chat(model, settings, Sampling(), said.append)
    chat.run(iter(["0z" * 40, "Which?"]))
    assert "error: the question has" in said[0] and "the model has 64 positions" in said[0]
    assert [turn.text for turn in chat.turns][:1] == ["Which?"]


def test_chat_cannot_search_beams(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(root / "hf", tmp_path / "hf")
    GenerationConfig(num_beams=2).save_pretrained(tmp_path / "hf")
    assert chat_command.main(["--hf-dir", str(tmp_path / "hf")]) == 2
    assert "generation_config.json sets num_beams = 2: chat prints each word" in capsys.readouterr().err


def test_a_config_without_a_length_has_no_limit(root: Path) -> None:
    config = HfModel.load(root / "hf").model.config
    assert read_settings(root / "hf", config, EOS, max_new_tokens=1, sampling=TokenSampling()).most_positions == 64
    del config.text_config.max_position_embeddings
    settings = read_settings(root / "hf", config, EOS, max_new_tokens=1, sampling=TokenSampling())
    assert settings.longest_answer(10**6) == 1


def test_sizes_of_pictures(root: Path, tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder and its checkpoint see images of the same size; classes that do not resize to a range refuse it."""
    make_sharp_case(Case("qwen2_vl", "qwen2", {"tie": True}, None, "qwen2_vl"), tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    asked = Conversation((Turn("user", "<image>\nWhat is this?"),), (noise(120, 160),))
    ranges = (PixelRange(), PixelRange(None, 60 * 60))
    lengths = [HfModel.load(tmp_path / "hf", ReadOptions(pixels=x)).inputs(asked)["input_ids"].shape[1] for x in ranges]
    assert lengths[0] > lengths[1]
    (tmp_path / "picture.png").write_bytes(noise(120, 160))
    given = ("--image", tmp_path / "picture.png", "--question", "What is this?", "--max-new-tokens", 12)
    small = (*given, "--min-pixels", 28 * 28, "--max-pixels", 60 * 60)
    answers = [ask("--hf-dir", tmp_path / "hf", *flags) for flags in (given, small)]
    assert answers[0] != answers[1] == ask("--megatron-dir", tmp_path / "megatron", *small)
    refused = "--max-pixels 3600 cannot be used: LlavaForConditionalGeneration does not resize images"
    for flag in ("--hf-dir", "--megatron-dir"):
        code, _, said = ask(flag, root / flag[2:].removesuffix("-dir"), *given, "--max-pixels", 3600)
        assert code == 2 and refused in said
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert chat_command.main(["--hf-dir", str(tmp_path / "hf"), "--max-pixels", "3600"]) == 0
    assert chat_command.main(["--hf-dir", str(root / "hf"), "--max-pixels", "3600"]) == 2


def after(number: int, found: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that can be called so many times; then the user presses Ctrl-C."""
    calls = iter(range(number))

    def limited(*given: Any, **options: Any) -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return found(*given, **options)

    return limited


def test_answers_reach_the_file_as_they_come(
    root: Path, tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--data-path", root / "data", "--max-new-tokens", 4, "--out")
    whole = [tmp_path / "folder", tmp_path / "checkpoint"]
    models = [("--hf-dir", root / "hf"), ("--megatron-dir", root / "megatron", "--batch-size", 1)]
    for model, out in zip(models, whole, strict=True):
        assert ask(*model, *given, out)[0] == 0
        assert not out.with_name(f"{out.name}.partial").exists()
    generate = megatron_worker.generate

    def interrupted(*arguments: Any, **options: Any) -> Iterator[Any]:
        answers = generate(*arguments, **options)
        yield next(answers)
        yield next(answers)
        raise KeyboardInterrupt

    monkeypatch.setattr(HfModel, "answer", after(2, HfModel.answer))
    monkeypatch.setattr(megatron_worker, "generate", interrupted)
    for model, complete in zip(models, whole, strict=True):
        out = tmp_path / f"{complete.name}.killed"
        with pytest.raises(KeyboardInterrupt):
            ask(*model, *given, out)
        lines = out.with_name(f"{out.name}.partial").read_bytes().splitlines(keepends=True)
        # Two answers; between them, the question that cannot be asked takes an answer's turn of the folder only.
        assert 2 <= len(lines) <= 3 and complete.read_bytes().startswith(b"".join(lines))
        assert not out.exists()


def test_answers_are_written_in_the_order_of_the_data(tmp_path: Path) -> None:
    done, waits, broken = Record("a", "", "", "1"), Record("b", "", ""), Record("c", "", "", problem="broken")
    with written_to(tmp_path / "x") as write:
        write([done, waits, broken])
        assert [json.loads(x)["key"] for x in (tmp_path / "x").read_text().splitlines()] == ["a"]
        write([done, Record("b", "", "", ""), broken])
        assert [json.loads(x)["key"] for x in (tmp_path / "x").read_text().splitlines()] == ["a", "b", "c"]
