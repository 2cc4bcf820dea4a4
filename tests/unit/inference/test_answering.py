"""`generate` and `chat` as a user sees them: answers, files, and one message for everything that cannot be asked."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from llava_mcore.cli import chat as chat_command
from llava_mcore.config.sections.data import Limits
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.encode.assets import Assets, load_assets
from llava_mcore.data.encode.encode import tokenize
from llava_mcore.data.samples import Conversation, Skip, Turn
from llava_mcore.errors import ConfigError, DataError
from llava_mcore.inference.answering.chat import Chat
from llava_mcore.inference.answering.hf_model import HfModel
from llava_mcore.inference.answering.user_files import asked_turn, read_video
from llava_mcore.inference.generation.generate import most_probable
from llava_mcore.inference.generation.prompt import encode_prompt
from llava_mcore.inference.generation.questions import Question, Questions
from llava_mcore.inference.generation.settings import FILE, TokenSampling, read_settings, require_known
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.parallel.groups import join_alone, shut_down
from llava_mcore.prepare.media.video_files import decode_video
from llava_mcore.prepare.sampling import Sampling
from tests.helpers.cases import Case, make_sharp_case
from tests.helpers.generating import Ask, generate_here
from tests.helpers.shards import make_dataset
from tests.helpers.tiny_audio import encoded
from tests.helpers.tiny_hf import make_hf_llava
from tests.helpers.videos import noise, video_file

SPLIT = "split_parts: {train: [000001.tar], val: [000000.tar], test: []}\nexclude: []\n"
TALK = {"messages": [{"role": "user", "content": "<image>\nWhich digit?"}, {"role": "assistant", "content": "0"},
                     {"role": "user", "content": "Is it even?"}, {"role": "assistant", "content": "yes"}]}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, its checkpoint, a dataset with a broken image and a conversation of two answers, images."""
    root = tmp_path_factory.mktemp("answering")
    make_hf_llava(root / "hf")
    import_hf(root / "hf", root / "megatron")
    replace: dict[int, dict[str, Any]] = {
        4: {"jpg": b"no image"},
        6: {"json": json.dumps(TALK).encode(), "txt": None},
    }
    make_dataset(root / "data", num_samples=12, replace=replace, sample_type="CrudeWebdataset")
    (root / "data" / ".nv-meta" / "split.yaml").write_text(SPLIT)
    (root / "picture.png").write_bytes(noise(60, 80))
    (root / "text.jpg").write_text("hello")
    (root / "adapter").mkdir()
    (root / "adapter" / "adapter_config.json").write_text("{}")
    (root / "cut.png").write_bytes(noise(60, 80)[:200])
    Image.new("1", (20000, 9000)).save(root / "huge.png")
    with (root / "large.jpg").open("wb") as file:
        file.truncate(300 << 20)
    video_file(root / "video.mp4")
    (root / "sound.wav").write_bytes(encoded(0.5))
    return root


@pytest.fixture
def ask(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ask:
    return generate_here(capsys, monkeypatch)


def test_a_damaged_checkpoint_answers_nothing(root: Path, ask: Ask, tmp_path: Path) -> None:
    shutil.copytree(root / "megatron", tmp_path / "damaged")
    file = max((tmp_path / "damaged").rglob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-5000] ^= 64
    file.write_bytes(content)
    code, _, said = ask("--megatron-dir", tmp_path / "damaged", "--image", root / "picture.png", "--question", "x")
    assert code == 2 and "is damaged" in said and file.name in said


def test_one_question(root: Path, ask: Ask) -> None:
    """The checkpoint gives the folder's answer, also drawn; a seed gives the same draws again."""
    given = ("--image", root / "picture.png", "--question", "What is this?", "--max-new-tokens", 12)
    (code, answer, _), again = ask("--hf-dir", root / "hf", *given), ask("--megatron-dir", root / "megatron", *given)
    assert (code, answer) == again[:2] and answer.strip()
    drawn = [
        ask("--megatron-dir", root / "megatron", *given, "--temperature", 1.5, "--top-k", 50, "--seed", seed)[1]
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2] and drawn[0] != answer
    in_4_bits = ask("--hf-dir", root / "hf", *given, "--load-in-4bit")
    assert in_4_bits[0] == 0 and in_4_bits[1].strip()


def test_a_dataset(root: Path, tmp_path: Path, ask: Ask) -> None:
    """A folder and its checkpoint answer the same, and what cannot be asked is listed."""
    out = [tmp_path / "folder.jsonl", tmp_path / "checkpoint.jsonl"]
    given = ("--data-path", root / "data", "--max-new-tokens", 6, "--every-answer")
    code, said, _ = ask("--hf-dir", root / "hf", *given, "--out", out[0])
    assert (
        code == 0 and "6 answers" in said and "questions that could not be asked: 1\n  - sample00004: the image" in said
    )
    assert ask("--megatron-dir", root / "megatron", *given, "--out", out[1], "--batch-size", 2)[0] == 0
    assert out[0].read_bytes() == out[1].read_bytes()
    lines = [json.loads(line) for line in out[0].read_text().splitlines()]
    assert [line["key"] for line in lines][2:5] == ["sample00004", "sample00006@0", "sample00006"]
    assert [line["reference"] for line in lines][2:5] == ["It is 4.", "0", "yes"]
    assert lines[2]["answer"] is None and all(x["answer"] is not None for x in lines[3:])
    code, said, _ = ask("--hf-dir", root / "hf", *given, "--out", out[0], "--num-samples", 2, "--split", "train")
    assert code == 0 and "2 answers" in said
    assert [json.loads(x)["key"] for x in out[0].read_text().splitlines()] == ["sample00001", "sample00007"]


def test_a_question_about_audio_clips(tmp_path: Path, ask: Ask) -> None:
    """Files of several formats and rates; the checkpoint gives the folder's answer, and it hears them."""
    make_sharp_case(Case("qwen2_audio_encoder", "qwen2", {"seconds": 8}, None, "qwen2_audio"), tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    for number, (name, options) in enumerate({"a.wav": {}, "b.flac": {"kind": "FLAC", "rate": 8000}}.items()):
        (tmp_path / name).write_bytes(encoded(1.3 + number, number, **options))
    (tmp_path / "text.wav").write_text("hello")
    (tmp_path / "long.wav").write_bytes(encoded(9.0))
    folder, checkpoint = ("--hf-dir", tmp_path / "hf"), ("--megatron-dir", tmp_path / "megatron")
    asked = ("--question", "What is said?", "--max-new-tokens", 12)
    answers = []
    for files in (("a.wav",), ("b.flac",), ("a.wav", "b.flac")):
        sounds = [x for name in files for x in ("--audio", tmp_path / name)]
        (code, answer, _), again = ask(*folder, *sounds, *asked), ask(*checkpoint, *sounds, *asked)
        assert (code, answer) == again[:2] and answer.strip()
        answers.append(answer)
    assert len(set(answers)) == 3
    for name, message in (("text.wav", "text.wav: an audio clip of 5 bytes cannot be"), ("no.wav", "No such file"),
                          ("long.wav", "seconds")):  # fmt: skip
        for model in (folder, checkpoint):
            code, _, said = ask(*model, "--audio", tmp_path / name, *asked)
            assert code == 2 and message in said and "Traceback" not in said, said
    code, _, said = ask(*folder, "--image", tmp_path / "a.wav", *asked)
    assert code == 2 and "cannot be decoded" in said


Q = ("--question", "What?")
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "no model": (Q, "give one of --hf-dir and --megatron-dir"),
    "two models": (("--hf-dir", "{hf}", "--megatron-dir", "{megatron}", *Q), "give one of --hf-dir and --megatron-dir"),
    "nothing asked": (("--hf-dir", "{hf}"), "give one of --question and --data-path"),
    "no file": (("--hf-dir", "{hf}", "--data-path", "{data}"), "--data-path and --out need each other"),
    "no folder": (("--hf-dir", "{hf}", "--data-path", "{data}", "--out", "{root}/no/x"), "there is no folder"),
    "a folder": (("--hf-dir", "{hf}", "--data-path", "{data}", "--out", "{root}"), "is a folder: give the name"),
    "no effect": (("--hf-dir", "{hf}", "--split", "val", *Q), "--every-answer belong to --data-path"),
    "batch size": (("--hf-dir", "{hf}", "--batch-size", "2", *Q), "--batch-size is for the questions"),
    "layout": (("--hf-dir", "{hf}", "--tp", "2", *Q), "--tp, --cp and --pp are for --megatron-dir"),
    "bits": (("--megatron-dir", "{megatron}", "--load-in-4bit", *Q), "are for --hf-dir: run export-hf first"),
    "both bits": (("--hf-dir", "{hf}", "--load-in-4bit", "--load-in-8bit", *Q), "exclude each other"),
    "top-p": (("--hf-dir", "{hf}", "--top-p", "0.5", *Q), "need --temperature"),
    "top-p value": (("--hf-dir", "{hf}", "--temperature", "1", "--top-p", "2", *Q), "--top-p must be above 0"),
    "empty": (("--hf-dir", "{hf}", "--question", " "), "the question is empty"),
    "only a mark": (("--hf-dir", "{hf}", "--image", "{root}/picture.png", "--question", "<image>"), "is empty"),
    "marks": (("--hf-dir", "{hf}", "--question", "<image> and <image>?", "--image", "{root}/picture.png"), "2 <image>"),
    "text": (("--hf-dir", "{hf}", "--image", "{root}/text.jpg", *Q), "text.jpg: the image cannot be decoded"),
    "cut": (
        ("--megatron-dir", "{megatron}", "--image", "{root}/cut.png", *Q),
        "cut.png: the image cannot be decoded",
    ),
    "pixels": (("--hf-dir", "{hf}", "--image", "{root}/huge.png", *Q), "exceeds limit of 178956970 pixels"),
    "bytes": (("--hf-dir", "{hf}", "--image", "{root}/large.jpg", *Q), "large.jpg has 314572800 bytes; the limit is"),
    "device": (("--hf-dir", "{hf}", "--image", "/dev/zero", *Q), "/dev/zero is a device, not a regular file"),
    "folder": (("--hf-dir", "{hf}", "--image", "{root}", *Q), "is a folder, not a regular file"),
    "missing": (("--hf-dir", "{hf}", "--image", "{root}/no.png", *Q), "no.png cannot be read: No such file"),
    "no video": (("--hf-dir", "{hf}", "--video", "{root}/picture.png", *Q), "video cannot be decoded"),
    "video": (("--hf-dir", "{hf}", "--video", "{root}/video.mp4", *Q), "does not support videos"),
    "sound": (("--hf-dir", "{hf}", "--audio", "{root}/sound.wav", *Q), "does not support audio"),
    "heads": (("--megatron-dir", "{megatron}", "--tp", "3", *Q), "cannot be split into tp 3 x pp 1"),
    "no checkpoint": (("--megatron-dir", "{hf}", *Q), "import a model first"),
    "no config": (("--hf-dir", "{data}", *Q), "no config.json"),
    "not a folder of Hugging Face": (
        ("--hf-dir", "{megatron}", *Q),
        "holds Megatron checkpoints: give it as --megatron-dir",
    ),
    "an adapter": (("--hf-dir", "{root}/adapter", *Q), "holds a PEFT adapter, not a model"),
    "no data": (("--hf-dir", "{hf}", "--data-path", "{root}/no", "--out", "{root}/x"), "does not exist"),
    "no part": (("--hf-dir", "{hf}", "--data-path", "{data}", "--out", "{root}/x", "--split", "test"), "validation"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_asked(case: str, root: Path, ask: Ask) -> None:
    arguments, expected = REFUSED[case]
    places = {"hf": root / "hf", "megatron": root / "megatron", "data": root / "data", "root": root}
    code, out, errors = ask(*(text.format(**places) for text in arguments))
    assert code == 2 and expected in errors and errors.startswith("error: ") and not out
    assert errors.count("error:") == 1 and "Traceback" not in errors


@pytest.mark.parametrize(
    "file", ["model.safetensors", "tokenizer.json", "processor_config.json", "chat_template.jinja"]
)
def test_an_incomplete_folder(file: str, root: Path, tmp_path: Path, ask: Ask) -> None:
    """A missing file is one message."""
    shutil.copytree(root / "hf", tmp_path / "hf")
    (tmp_path / "hf" / file).unlink()
    code, _, errors = ask("--hf-dir", tmp_path / "hf", *Q, "--max-new-tokens", 1)
    assert code == 2 and errors.startswith("error: ") and "Traceback" not in errors


def test_settings_of_the_folder(root: Path, tmp_path: Path) -> None:
    """End tokens are those of generation_config.json, else the tokenizer's."""
    hf = load_hf_config(root / "hf")

    def settings(tokenizer_eos: int | None = None, **values: Any) -> Any:
        (tmp_path / FILE).write_text(json.dumps(values))
        return read_settings(tmp_path, hf, tokenizer_eos, max_new_tokens=3, sampling=TokenSampling())

    assert settings(eos_token_id=[2, 7]).end_ids == {2, 7}
    assert settings(9).end_ids == {9} and settings(9, eos_token_id=4).end_ids == {4}
    assert not settings(do_sample=True, temperature=0.5).draws, "the flags decide"
    with pytest.raises(ConfigError, match="sets num_beams = 4, which only transformers knows"):
        require_known(settings(num_beams=4), tmp_path)
    with pytest.raises(ConfigError, match="temperature must be above 0"):
        TokenSampling(temperature=float("nan"))


def test_ties_go_to_the_lowest_id() -> None:
    groups = join_alone()
    try:
        logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])
        assert most_probable(logits, groups.tensor_parallel).tolist() == logits.argmax(-1).tolist() == [1, 0]
    finally:
        shut_down()


@pytest.fixture(scope="module")
def assets(root: Path) -> Assets:
    return load_assets(root / "hf")


@pytest.mark.parametrize("template", [None, "vicuna", "chatml", "llama-3", "mistral", "plain", "llm-jp", "llama-2"])
def test_prompts_are_the_beginning_of_what_is_trained(root: Path, template: str | None) -> None:
    """Also after an earlier answer, whose EOS may not be the template's."""
    assets = load_assets(root / "hf", chat_template=template)
    turns = (Turn("user", "<image>\nWhich digit?"), Turn("assistant", "0"))
    if assets.chat.several_turns is None:
        turns += (Turn("user", "Is </s> it even?"), Turn("assistant", "yes"))
    picture = (noise(30, 40),)
    whole = tokenize(Conversation(turns, picture), assets, "key").input_ids.tolist()
    prompt = encode_prompt(Conversation(turns[:-1], picture), assets, "key")
    ids = prompt.batch.input_ids[0].tolist()
    assert len(ids) == prompt.length == prompt.next_position
    # White space at the border may become a token together with the answer's first characters.
    same = next((i for i, (a, b) in enumerate(zip(ids, whole, strict=False)) if a != b), len(ids))
    assert len(ids) - same <= 1 and len(whole) > len(ids)


def test_questions_are_evenly_distributed_and_say_what_is_broken(root: Path, assets: Assets) -> None:
    found = Questions(root / "data", assets, split="val")
    assert found.indices == list(range(6))
    kinds = list(found.read(found.indices))
    assert all(isinstance(x, Question) for x in kinds), "images are not decoded here"
    assert Questions(root / "data", assets, split="val", most_samples=3).indices == [0, 2, 4]
    talk = [x for x in Questions(root / "data", assets, split="val", every_answer=True).read([3])]
    assert [x.reference for x in talk if not isinstance(x, Skip)] == ["0", "yes"]
    with pytest.raises(DataError, match="no validation part"):
        Questions(root / "data", assets, split="test")


def test_a_question_with_marks_of_its_own() -> None:
    """Marks are added before a question that has none."""
    assert asked_turn(" a <image> b ", 1, 0).text == "a <image> b"
    assert asked_turn("a", 2, 1, 1).text == "<image>\n<image>\n<video>\n<audio>\na"


def test_a_video_of_a_question_is_sampled_as_prepare_does(root: Path) -> None:
    sampling = Sampling(fps=2.0)
    video = read_video(root / "video.mp4", Limits(), sampling)
    with (root / "video.mp4").open("rb") as file:
        decoded = decode_video(file, sampling, Limits())
    assert list(video.frames) == decoded.frames and len(decoded.frames) > 1
    assert video.fps == decoded.fps


def test_chat(root: Path, assets: Assets) -> None:
    """Several turns with an image; whatever is wrong, the chat continues."""
    said: list[str] = []
    model = HfModel.load(root / "hf")
    settings = read_settings(root / "hf", model.model.config, 2, max_new_tokens=5, sampling=TokenSampling())
    chat = Chat(model, settings, Sampling(), said.append)
    lines = [
        f"/image {root / 'picture.png'}", "What is this?", "Is it even?", f"/image {root / 'text.jpg'}", "",
        "/image", "/image /dev/zero", f"/video {root / 'video.mp4'}", f"/audio {root / 'sound.wav'}", "/nothing",
        "/help",
    ]  # fmt: skip
    chat.run(iter(lines))
    text = "".join(said)
    assert [turn.role for turn in chat.turns] == ["user", "assistant"] * 2 and len(chat.images) == 1
    settings_again = model.answer(Conversation((Turn("user", "<image>\nWhat is this?"),), tuple(chat.images)), settings)
    assert chat.turns[1].text == assets.tokenizer.decode(settings_again, skip_special_tokens=True).strip()
    assert re.findall(r"error: (.{12})", text) == [
        str(root / "text.jpg")[:12], "the question", "/image needs", "/dev/zero is", "LlavaForCond", "LlavaForCond",
        "/nothing: no",
    ]  # fmt: skip
    chat.run(iter(["/clear", "/quit", "not reached"]))
    assert not chat.turns and not chat.images


def test_the_chat_command(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It continues after Ctrl-C, /help lists its commands, and the end of the input ends it."""
    typed = iter(["What is this?", KeyboardInterrupt(), "/help"])

    def line(_: str) -> str:
        found = next(typed, EOFError())
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr("builtins.input", line)
    flags = ["--hf-dir", str(root / "hf"), "--image", str(root / "picture.png"), "--max-new-tokens", "4"]
    assert chat_command.main(flags) == 0
    out = capsys.readouterr().out
    assert "on cpu; /help lists the commands" in out and "/clear        begin a new conversation" in out
    assert chat_command.main(["--hf-dir", str(root / "megatron")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
