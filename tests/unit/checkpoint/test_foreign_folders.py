"""Hugging Face folders and checkpoints' companions of strangers: one message, nothing outside is read or written."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llava_mcore.checkpoint.checksums import write_checksums
from llava_mcore.checkpoint.layout import hf_folder, iteration_folder
from llava_mcore.cli import check, export_hf
from llava_mcore.cli import import_hf as import_command
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.encode.assets import load_assets
from llava_mcore.errors import DataError
from tests.helpers.tiny_hf import make_hf_llava

Change = Callable[[Path], object]
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("foreign")
    make_hf_llava(root / "hf")
    import_hf(root / "hf", root / "m")
    return root


@pytest.fixture
def hf(source: Path, tmp_path: Path) -> Path:
    shutil.copytree(source / "hf", tmp_path / "hf")
    return tmp_path / "hf"


@pytest.fixture
def megatron(source: Path, tmp_path: Path) -> Path:
    shutil.copytree(source / "m", tmp_path / "m")
    return tmp_path / "m"


def write(name: str, data: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(data)


def index(files: object) -> Change:
    return write(INDEX, json.dumps({"weight_map": files}).encode())


def header(text: str, num_bytes: int = 8) -> Change:
    """Make a safetensors file of a header and so many bytes of numbers."""
    return write(WEIGHTS, struct.pack("<Q", len(text)) + text.encode() + bytes(num_bytes))


def setting(part: str, key: str, value: object) -> Change:
    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        config[part][key] = value
        (folder / CONFIG).write_text(json.dumps(config))

    return change


def put(name: str, make: Callable[[Path], object]) -> Change:
    """Replace a file with something else."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


ONE = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
REFUSED: list[tuple[str, Change, str]] = [
    ("index: a file elsewhere", index({"a": "../outside/w.safetensors"}), "not safetensors files in its folder"),
    ("index: an absolute path", index({"a": "/etc/w.safetensors"}), "'/etc/w.safetensors'"),
    ("index: another kind", index({"a": "pytorch_model.bin"}), "'pytorch_model.bin'"),
    ("index: a name that is none", index({"a": "a\0.safetensors", "b": 5, "c": ["x"]}), "3 problems"),
    ("index: a long name", index({"a": "x" * 3000 + ".safetensors"}), "not safetensors files in its folder"),
    ("index: no table", index([1]), "not an index of weight files"),
    ("index: too deep", write(INDEX, b"[" * 100_000), "nested too deeply"),
    ("weights: a header of 2^64 bytes", write(WEIGHTS, b"\xff" * 8 + b"{}"), "header too large"),
    (
        "weights: a header longer than the file",
        write(WEIGHTS, struct.pack("<Q", 5000) + b"{}"),
        "invalid header length",
    ),
    ("weights: empty", write(WEIGHTS, b""), "header too small"),
    ("weights: a deep header", header('{"a":' * 50_000), "recursion limit"),
    ("weights: overlapping", header(f'{{"a":{ONE},"b":{ONE}}}'), "invalid offset"),
    ("weights: cut short", header(f'{{"a":{ONE}}}', 4), "not fully covered"),
    ("weights: sizes overflow", header(f'{{"a":{ONE.replace("[2]", "[4294967296,4294967296]")}}}'), "overflow"),
    ("weights: an unknown dtype", header(f'{{"a":{ONE.replace("F32", "Q9")}}}'), "unknown variant `Q9`"),
    ("weights: a dtype nobody trains", header('{"a":{"dtype":"C64","shape":[1],"data_offsets":[0,8]}}'), "dtype C64"),
    ("weights: a pipe", put(WEIGHTS, os.mkfifo), "not a regular file"),
    ("weights: a device", put(WEIGHTS, lambda path: path.symlink_to("/dev/zero")), "not a regular file"),
    ("config: a pipe", put(CONFIG, os.mkfifo), "no config.json"),
    ("config: too deep", write(CONFIG, b'{"a":' * 100_000), "nested too deeply"),
    ("config: no object", write(CONFIG, b"[1]"), "expected a JSON object, found a list"),
    ("config: not UTF-8", write(CONFIG, b'{"a": "\xff"}'), "not valid JSON"),
    ("config: thousands of digits", write(CONFIG, b'{"a": ' + b"9" * 5000 + b"}"), "not valid JSON"),
    ("config: more layers than any model", setting("text_config", "num_hidden_layers", 10**9), "from 1 to 2,000"),
    ("config: a negative size", setting("text_config", "hidden_size", -64), "hidden_size is -64"),
    ("config: no heads", setting("text_config", "num_attention_heads", 0), "ZeroDivisionError"),
    ("config: a vocabulary of 10^30", setting("text_config", "vocab_size", 10**30), "from 1 to 67,108,864"),
    ("config: a text for a number", setting("text_config", "rope_parameters", {"factor": "x"}), "expected a number"),
    ("config: a function", setting("text_config", "hidden_act", "os.system"), "os.system"),
]


@pytest.mark.parametrize(("change", "message"), [x[1:] for x in REFUSED], ids=[x[0] for x in REFUSED])
def test_what_is_refused(
    change: Change, message: str, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(hf)
    assert import_command.main(["--hf-dir", str(hf), "--megatron-dir", str(tmp_path / "m")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and not (tmp_path / "m").exists()


def test_no_weights_are_read_from_elsewhere(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The very case: an index whose file is outside was imported, and the export wrote there."""
    outside = tmp_path / "outside" / "w.safetensors"
    outside.parent.mkdir()
    (hf / WEIGHTS).rename(outside)
    index(dict.fromkeys(load_file(outside), "../outside/w.safetensors"))(hf)
    flags = ["--hf-dir", str(hf)]
    for main, more in ((import_command.main, ["--megatron-dir", str(tmp_path / "m")]), (check.main, [])):
        assert main([*flags, *more]) == 2
        assert "not safetensors files in its folder" in capsys.readouterr().err


def change_record(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = hf_folder(checkpoint) / "tensors.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    write_checksums(checkpoint, {})  # a stranger's are right


@pytest.mark.parametrize("name", ["../stolen.safetensors", "/tmp/stolen.safetensors", "config.json", 5])
def test_an_export_writes_nothing_elsewhere(
    name: object, megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = iteration_folder(megatron, 0)
    change_record(checkpoint, lambda x: [info.update(file=name) for info in x["tensors"].values()])
    (tmp_path / "to").mkdir()
    assert export_hf.main(["--megatron-dir", str(megatron), "--hf-dir", str(tmp_path / "to" / "out")]) == 2
    assert repr(name) in capsys.readouterr().err
    assert not list((tmp_path / "to").iterdir()) and not Path("/tmp/stolen.safetensors").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.pop("tensors"),
        lambda x: x.update(tensors=[1]),
        lambda x: x["tensors"].update(a={"file": "a.safetensors"}),
        lambda x: x["tensors"].update(a={"file": "a.safetensors", "dtype": "Q9", "shape": [1]}),
        lambda x: x["tensors"].update(a={"file": "a.safetensors", "dtype": "F32", "shape": ["x"]}),
    ],
)
def test_damaged_records(
    change: Callable[[dict[str, Any]], object], megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged record of tensors is one message that names it."""
    change_record(iteration_folder(megatron, 0), change)
    assert export_hf.main(["--megatron-dir", str(megatron), "--hf-dir", str(tmp_path / "out")]) == 2
    assert "hf/tensors.json: " in capsys.readouterr().err


def test_links_in_a_checkpoint_are_not_followed(
    megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").write_text("secret")
    (hf_folder(iteration_folder(megatron, 0)) / "notes.txt").symlink_to(tmp_path / "secret")
    assert export_hf.main(["--megatron-dir", str(megatron), "--hf-dir", str(tmp_path / "out")]) == 2
    assert f"notes.txt is a link to {tmp_path / 'secret'}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_s_own_code_is_not_run(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither for a config, a tokenizer nor an image processor; and nobody is asked whether to."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    proof = tmp_path / "proof"
    (hf / "evil.py").write_text(f"import os; os.mkdir({str(proof)!r})\nclass X: pass\n")
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("a question on the terminal"))
    for name, keys in {
        CONFIG: ["AutoConfig", "AutoModelForCausalLM"],
        "tokenizer_config.json": ["AutoTokenizer"],
        "processor_config.json": ["AutoProcessor", "AutoImageProcessor"],
    }.items():
        content = json.loads((hf / name).read_text())
        entry = ["evil.X", None] if name == "tokenizer_config.json" else "evil.X"
        content |= {"auto_map": dict.fromkeys(keys, entry), "tokenizer_class": "X", "processor_class": "X"}
        (hf / name).write_text(json.dumps(content))
    assert import_command.main(["--hf-dir", str(hf), "--megatron-dir", str(tmp_path / "m")]) == 0
    assert check.main(["--hf-dir", str(hf)]) == 0
    try:
        load_assets(hf, checkpoint_hf_dir=hf, chat_template=None, lang=None, image_token_id=None, pad_token_id=None)
    except DataError as error:
        assert "trust_remote_code" not in str(error)
    assert not proof.exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "processor_config.json"])
@pytest.mark.parametrize("data", [b"[" * 100_000, b"[1]", b'{"a"', b'{"tokenizer_class": 5}', b"\xff\xfe\xfd"])
def test_tokenizers_and_processors_that_cannot_be_read(name: str, data: bytes, hf: Path) -> None:
    (hf / name).write_bytes(data)
    try:
        load_assets(hf)
    except DataError as error:
        assert "cannot prepare conversations for the model" in str(error)


def test_pipes_are_not_carried(hf: Path, tmp_path: Path) -> None:
    os.mkfifo(hf / "notes.txt")
    (hf / "zero.txt").symlink_to("/dev/zero")
    import_hf(hf, tmp_path / "m")
    carried = {path.name for path in hf_folder(iteration_folder(tmp_path / "m", 0)).iterdir()}
    assert CONFIG in carried and not {"notes.txt", "zero.txt"} & carried


def test_weights_that_are_no_numbers_are_named(hf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = load_file(hf / WEIGHTS)
    names = sorted(name for name, x in weights.items() if x.is_floating_point())[:3]
    weights[names[0]].flatten()[-1] = torch.nan
    weights[names[1]].flatten()[0] = -torch.inf
    weights[names[2]].flatten()[0] = 1e6  # not in fp16
    save_file(weights, hf / WEIGHTS, metadata={"format": "pt"})
    import_hf(hf, tmp_path / "m", workers=2)
    assert f"2 tensors of {hf} hold NaN or infinite values: {names[0]}, {names[1]}" in caplog.text
    caplog.clear()
    import_hf(hf, tmp_path / "m16", dtype=torch.float16)
    assert f"3 tensors of {hf} hold NaN or infinite values as float16: {', '.join(names)}" in caplog.text
