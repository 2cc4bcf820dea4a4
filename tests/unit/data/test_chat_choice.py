"""Which template a run gets, what is said about it, and the prompts for data without questions."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llava_mcore.build.chat_template import choose_template as build_template
from llava_mcore.build.tiny.classes import write_tiny
from llava_mcore.config.flags import parse_command_line
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.data.encode.prompts import POOLS, choose_prompt
from llava_mcore.data.samples import Turn
from llava_mcore.errors import ConfigError, DataError
from llava_mcore.launch.preflight import resolve
from llava_mcore.templates.named import NAMES, check_choice, flatten_parts, named_template
from tests.helpers.build_parts import make_text_tokenizer
from tests.helpers.tiny_hf import CHAT_TEMPLATE, make_hf_llava

PLAIN_ONLY = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
ASKED = [Turn("user", "Hi"), Turn("assistant", "Yes.")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf") / "llava"
    make_hf_llava(path)
    (path / "model.safetensors").unlink()
    return path


@pytest.fixture
def without(folder: Path, tmp_path: Path) -> Path:
    """A folder whose tokenizer brings no template."""
    path = Path(shutil.copytree(folder, tmp_path / "without"))
    (path / "chat_template.jinja").unlink()
    return path


def test_the_tokenizers_own_comes_first(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assets = load_assets(folder, lang="jp")
    assert (assets.chat.template, assets.lang) == (CHAT_TEMPLATE, "jp")
    assert f"chat template: {folder / 'chat_template.jinja'}; prompts for data without questions: jp" in caplog.text
    assert load_assets(folder).lang == "en"


@pytest.mark.parametrize(("lang", "name"), [("jp", "llm-jp"), ("en", "vicuna")])
def test_the_language_picks_where_there_is_none(
    without: Path, lang: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assets = load_assets(without, lang=lang)
    assert assets.chat.template == load_assets(without, chat_template=name).chat.template
    assert assets.lang == lang
    assert f"chat template: {name} (--lang {lang}, as the tokenizer has none)" in caplog.text


def test_without_any_choice_the_ways_out_are_named(without: Path) -> None:
    with pytest.raises(DataError, match=r"--chat-template .*mistral.* or --lang .*chat_template\.jinja"):
        load_assets(without)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "mllama"])
def test_a_file_for_a_class_with_another_placeholder(kind: str, tmp_path: Path) -> None:
    """A changed copy of the folder's own template is used as it is. What writes <image> is refused with the way out."""
    folder = tmp_path / "hf"
    write_tiny(kind, folder, 0)
    own = (folder / "chat_template.jinja").read_text()
    for name, text in (("own", own), ("changed", "Short. " + own), ("strings", PLAIN_ONLY)):
        (tmp_path / f"{name}.jinja").write_text(text)
    plain, same, changed = (
        load_assets(folder, chat_template=name and str(tmp_path / f"{name}.jinja")).chat
        for name in (None, "own", "changed")
    )
    asked = [Turn("user", "<image>Hi"), Turn("assistant", "Yes.")]
    assert same.template == plain.template and changed.render(asked) == "Short. " + plain.render(asked)
    token = "<|image_pad|>" if kind == "qwen2_5_vl" else "<|image|>"
    assert plain.render(asked).count(token) == 1
    for choice in ("chatml", str(tmp_path / "strings.jinja")):
        with pytest.raises(DataError, match=re.escape(token) + r".*\. Omit --chat-template for the folder's own"):
            load_assets(folder, chat_template=choice)


def test_a_name_goes_before_the_tokenizers_own(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assets = load_assets(folder, chat_template="llm-jp")
    assert assets.chat.render(ASKED).endswith("\n\n### 指示:\nHi\n\n### 応答:\nYes.</s>")
    assert assets.lang == "jp"
    assert load_assets(folder, chat_template="llm-jp", lang="en").lang == "en"
    assert "chat template: llm-jp (--chat-template)" in caplog.text
    load_assets(folder, chat_template="chatml")
    assert "the tokenizer has no <|im_start|>, <|im_end|>: written as plain text" in caplog.text


def test_a_file_of_plain_text_learns_to_take_parts(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "my.jinja"
    file.write_text(PLAIN_ONLY)
    assets = load_assets(folder, chat_template=str(file))
    assert assets.chat.template == flatten_parts() + PLAIN_ONLY
    assert assets.chat.render(ASKED) == "[user] Hi</s>[assistant] Yes.</s>"
    file.write_text(CHAT_TEMPLATE)
    assert load_assets(folder, chat_template=str(file)).chat.template == CHAT_TEMPLATE


def test_an_eos_that_only_training_adds_is_told(without: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (without / "chat_template.jinja").write_text(PLAIN_ONLY.replace(" + eos_token", " + '\n'"))
    load_assets(without)
    assert "it does not end answers with </s>: training adds that" in caplog.text


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            "vicunia",
            r"--chat-template vicunia: no such template \(did you mean vicuna\?\); choose one of .*",
        ),
        ("gpt", "no such template; choose one of vicuna, llama-2, llama-3, chatml, llm-jp, mistral, plain"),
        ("nowhere.jinja", "--chat-template nowhere.jinja: cannot be read: .*No such file"),
        ("{tmp}/latin.jinja", "latin.jinja: cannot be read: .*codec"),
        ("{tmp}", "cannot be read: .*is a folder"),
        ("{tmp}/open.jinja", "open.jinja.*cannot render a question about an image"),
        ("{tmp}/silent.jinja", "silent.jinja.*the question, its image or the answer is missing"),
    ],
)
def test_choices_that_cannot_be(folder: Path, tmp_path: Path, choice: str, message: str) -> None:
    (tmp_path / "latin.jinja").write_bytes("{# é #}".encode("latin-1"))
    (tmp_path / "open.jinja").write_text("{% for m in messages %}")
    (tmp_path / "silent.jinja").write_text("{% for m in messages %}{{ m.role }}{% endfor %}")
    with pytest.raises(DataError, match=message) as raised:
        load_assets(folder, chat_template=choice.format(tmp=tmp_path))
    assert "(1 problem)" in str(raised.value)


def test_choices_are_checked_before_the_start() -> None:
    check_choice(None)
    for name in NAMES:
        check_choice(name)
    for wrong in ("vicunia", "nowhere.jinja"):
        with pytest.raises(ConfigError, match=f"--chat-template {wrong}"):
            check_choice(wrong)


def test_a_file_means_the_same_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.jinja").write_text(PLAIN_ONLY)
    for typed, resolved in (("my.jinja", str(tmp_path / "my.jinja")), ("vicuna", "vicuna")):
        run = parse_command_line(["--chat-template", typed, "--lang", "jp"], "run.py").load()
        assert resolve(run, 0)[0].data.chat_template == resolved
        assert run.data.lang == "jp"


def test_a_tokenizer_config_may_hold_the_template(without: Path) -> None:
    config = json.loads((without / "tokenizer_config.json").read_text())
    (without / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": CHAT_TEMPLATE}))
    assert load_assets(without, lang="jp").chat.template == CHAT_TEMPLATE


@pytest.mark.parametrize(("name", "content"), [("chat_template.json", b"{}"), ("chat_template.jinja", b"\xff")])
def test_a_template_in_the_checkpoint_that_cannot_be_read(
    folder: Path, without: Path, tmp_path: Path, name: str, content: bytes
) -> None:
    checkpoint = Path(shutil.copytree(without, tmp_path / "checkpoint"))
    (checkpoint / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name} cannot be read as a chat template"):
        load_assets(without, checkpoint_hf_dir=checkpoint)
    assert load_assets(folder, checkpoint_hf_dir=checkpoint).chat.template == CHAT_TEMPLATE


@pytest.mark.parametrize("name", NAMES)
def test_a_built_folder_gets_the_same_template(name: str) -> None:
    tokenizer, lines = make_text_tokenizer(), []
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    assert build_template(tokenizer, Path(name), lines.append) == named_template(name, tokenizer)
    assert lines[0] == f"chat template: {name}"
    with pytest.raises(ConfigError, match="vicunia: no such template"):
        build_template(tokenizer, Path("vicunia"), lines.append)


@pytest.mark.parametrize("pool", POOLS)
def test_pools_speak_both_languages(pool: str) -> None:
    english, japanese = POOLS[pool]["en"], POOLS[pool]["jp"]
    assert len(english) == len(japanese) == len(set(english)) == len(set(japanese))
    assert all(text.isascii() for text in english)
    assert not any(character.isascii() for text in japanese for character in text)


@given(key=st.text(), seed=st.integers(0, 2**63))
def test_a_prompt_depends_on_key_and_seed_alone(key: str, seed: int) -> None:
    prompt = choose_prompt("caption", "jp", key, seed)
    assert prompt in POOLS["caption"]["jp"]
    assert prompt == choose_prompt("caption", "jp", key, seed)


def test_prompts_are_spread_evenly_and_stay_the_same() -> None:
    chosen = [choose_prompt("ocr", "en", f"{i:06d}", 7) for i in range(6000)]
    assert all(850 < chosen.count(prompt) < 1150 for prompt in POOLS["ocr"]["en"])
    assert chosen != [choose_prompt("ocr", "en", f"{i:06d}", 8) for i in range(6000)]
    # Fixed forever: a resumed run must ask what the killed one would have asked.
    places = [POOLS["ocr"]["en"].index(prompt) for prompt in chosen[:12]]
    assert places == [3, 4, 5, 4, 0, 1, 4, 3, 4, 0, 5, 0]


def test_unknown_pool() -> None:
    """A pool of prompts that does not exist is refused with the nearest name."""
    with pytest.raises(DataError, match=r"prompt_pool 'captions': no such pool of prompts \(did you mean caption\?\)"):
        choose_prompt("captions", "en", "000001", 1)
