"""The server answers as transformers does, refuses what is wrong with a message, and continues."""

from __future__ import annotations

import base64
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
import yaml
from PIL import Image
from starlette.testclient import TestClient
from torchvision.io import ImageReadMode, decode_image
from transformers import AutoProcessor
from transformers.cli.serving import utils as serving_utils

from llava_mcore.cli.serve import DEFAULT_PORT, main
from llava_mcore.compat.transformers_serving import load_handler
from llava_mcore.data.processors.images import decode_pixels
from llava_mcore.inference.serving.app import build_app
from llava_mcore.inference.serving.requests import RequestError, ServedModel, check_chat
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.architectures.registry import ARCHITECTURES, architecture_of
from tests.helpers.bad_data_samples import animated, picture, rotated
from tests.helpers.cases import EACH_CLASS, Case, make_sharp_case
from tests.helpers.commands import ROOT
from tests.helpers.server import Started, request, serving
from tests.helpers.shards import jpeg
from tests.helpers.tiny_hf import make_hf_llava

MODEL = ServedModel("tiny", 64, lambda text: {"<image>"} if "<image>" in text else ())
MEGABYTE = 1 << 20
NAME = "tiny"
PICTURE = request("x", jpeg(1))["messages"][0]["content"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "folder"
    make_hf_llava(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Started]:
    flags = ("--device", "cpu", "--max-request-bytes", MEGABYTE, "--served-model-name", NAME)
    with serving(folder, *flags) as server:
        yield server


def greedy(folder: Path, question: str, picture: bytes, tokens: int) -> str:
    """Answer with plain transformers."""
    model = architecture_of(load_hf_config(folder)).model_class.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder)
    parts = [{"type": "image", "image": Image.open(BytesIO(picture))}, {"type": "text", "text": question}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": parts}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return str(processor.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def message(answer: httpx.Response) -> str:
    """Return the message of an error as OpenAI's clients read it."""
    return str(answer.json()["error"]["message"])


def test_answers_are_those_of_transformers(server: Started, folder: Path) -> None:
    answers = {}
    for number in (1, 2):
        answer = server.chat("Which digit is this?", jpeg(number))
        assert answer.status_code == 200
        assert answer.json()["model"] == "tiny"
        answers[number] = answer.json()["choices"][0]["message"]["content"]
    wanted = {number: greedy(folder, "Which digit is this?", jpeg(number), 8) for number in (1, 2)}
    assert answers == wanted
    assert answers[1] != answers[2], "the image does not reach the model"


@pytest.mark.parametrize(
    "case", [x for x in EACH_CLASS if ARCHITECTURES[x.architecture].takes_images], ids=lambda case: case.architecture
)
def test_every_class_is_served(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: what the command prepares is the same for all of them."""
    # SmolVLM's processor asks for a package that spells the number of a video's frames.
    monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str)
    make_sharp_case(case, tmp_path)
    positions = load_hf_config(tmp_path).get_text_config().max_position_embeddings
    app = build_app(load_handler(tmp_path, "tiny", positions, "cpu"), MODEL, max_request_bytes=MEGABYTE)
    with TestClient(app) as client:
        answer = client.post("/v1/chat/completions", json=request("Which digit is this?", jpeg(1)))
    assert answer.status_code == 200, message(answer)
    found = answer.json()["choices"][0]["message"]["content"]
    assert found == greedy(tmp_path, "Which digit is this?", jpeg(1), 8)


@pytest.mark.parametrize(("template", "is_read"), [("<|im_start|>assistant\n", True), ("ASSISTANT:", False)])
def test_thoughts_are_looked_for_in_chatml_only(template: str, is_read: bool) -> None:
    """In a prompt of another template, transformers would take the prompt for a part of the answer."""
    model = SimpleNamespace(config=SimpleNamespace(model_type="qwen3_vl"))
    processor = SimpleNamespace(chat_template=template, tokenizer=SimpleNamespace())
    assert (serving_utils.get_response_template(processor, model) is not None) == is_read


def test_a_stream_is_the_same_answer(server: Started) -> None:
    whole = server.chat("Which digit is this?", jpeg(1)).json()["choices"][0]["message"]["content"]
    streamed = server.chat("Which digit is this?", jpeg(1), stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if '"content"' in line]
    assert "".join(httpx.Response(200, text=x).json()["choices"][0]["delta"]["content"] for x in events) == whole


def test_bad_requests_get_a_message_and_the_server_continues(server: Started) -> None:
    with_text_file = server.chat("What is it?", b"just a text file")
    assert with_text_file.status_code == 400
    assert "cannot be decoded" in message(with_text_file)
    empty = server.chat(" \n", jpeg(1))
    assert (empty.status_code, message(empty)) == (400, "the question is empty")
    start = time.monotonic()
    large = server.chat("What is it?", bytes(7 * MEGABYTE))
    assert large.status_code == 413
    assert "--max-request-bytes" in message(large)
    assert time.monotonic() - start < 10
    other = server.chat("What is it?", jpeg(1), model="gpt")
    assert (other.status_code, message(other)) == (404, "the model 'gpt' is not served here; this server has \"tiny\"")
    unknown = server.chat("What is it?", jpeg(1), colour="red")
    assert unknown.status_code == 422
    assert "colour" in message(unknown)
    broken = httpx.post(f"{server.url}/chat/completions", content=b"{")
    assert broken.status_code == 400
    assert "not valid JSON" in message(broken)
    assert server.chat("What is it?", jpeg(1), model="tiny").status_code == 200


def test_nothing_else_is_offered(server: Started) -> None:
    assert [entry["id"] for entry in httpx.get(f"{server.url}/models").json()["data"]] == ["tiny"]
    root = server.url.removesuffix("/v1")
    assert httpx.get(f"{root}/health").json() == {"status": "ok"}
    for path in ("/load_model", "/reset", "/v1/responses", "/v1/completions"):
        assert httpx.post(root + path, json={"model": "x"}).status_code == 404


def test_it_is_healthy_for_compose(server: Started) -> None:
    text = (ROOT / "environments" / "compose.yaml").read_text(encoding="utf-8")
    how, _, *check = yaml.safe_load(text)["services"]["server"]["healthcheck"]["test"]
    check[-1] = check[-1].replace(f"http://localhost:{DEFAULT_PORT}", server.url.removesuffix("/v1"))
    assert server.url.removesuffix("/v1") in check[-1]
    assert (how, subprocess.run([sys.executable, *check]).returncode) == ("CMD", 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"messages": []}, '"messages" must be a non-empty list'),
        ({"messages": [{"role": "tool", "content": "x"}]}, "the role is 'tool'; allowed: system, user, assistant"),
        ({"messages": [{"role": "user", "content": 3}]}, "a text or a list of parts, found int 3"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "the last message must be the user's"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "allowed: text, image_url"),
        (request("one <image> more"), "special tokens of the model, <image>"),
        (request("x" * 1_000_001), "1000001 characters; the limit is 1000000"),
        ({"max_tokens": 0}, '"max_tokens" must be an integer from 1 to 64, found 0'),
        ({"max_tokens": True}, '"max_tokens" must be an integer'),
        ({"temperature": "hot", "top_p": 2}, '"temperature" must be a number'),
        ({"temperature": float("nan")}, '"temperature" must be a number'),
        ({"temperature": 10**400}, '"temperature" must be a number from 0 to 100, found 1000'),
        ({"generation_config": "{}"}, '"generation_config" is not allowed'),
        ({"stop": 3}, '"stop" must be a text or a list of up to 4 texts of 1 to 1000 characters, found int 3'),
        ({"stop": ["a", 3]}, '"stop" must be a text or a list'),
        ({"stop": ""}, '"stop" must be a text or a list'),
        ({"stop": ["x"] * 5}, '"stop" must be a text or a list'),
        ({"stop": "\ud800"}, '"stop" must be a text or a list'),
        ({"logit_bias": "x"}, "\"logit_bias\" is not supported by this server: remove it, found 'x'"),
        ({"logit_bias": {"1": 5}}, '"logit_bias" is not supported'),
        ({"frequency_penalty": "x"}, "\"frequency_penalty\" is not supported by this server: remove it, found 'x'"),
        ({"presence_penalty": 0.5}, '"presence_penalty" is not supported by this server: remove it, found 0.5'),
        ({"n": 2}, '"n" is not supported by this server: remove it, found 2'),
        ({"response_format": {"type": "json_object"}}, '"response_format" is not supported'),
        ({"functions": [{"name": "f"}]}, '"functions" is not supported'),
        ({"modalities": ["text", "audio"], "audio": {"voice": "x"}}, '"audio" is not supported'),
        ({"logprobs": True, "top_logprobs": 5}, '"logprobs" is not supported by this server: remove it, found True'),
        ({"messages": [{"role": "assistant", "tool_calls": 3}]}, 'message 0: "tool_calls" are not supported'),
        (request("a \ud800"), "half of a surrogate pair"),
        (
            {"messages": [{"role": "system", "content": PICTURE}, {"role": "user", "content": "x"}]},
            "message 0: only the user's messages can have images",
        ),
    ],
)
def test_checks_of_a_request(change: dict[str, Any], words: str) -> None:
    """A request that cannot be answered is refused with status 400 and its reason."""
    with pytest.raises(RequestError) as found:
        check_chat(request("What is it?", jpeg(1)) | change, MODEL)
    assert words in str(found.value)
    assert found.value.status == 400


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://example.org/cat.jpg", "must be in the request"),
        ("file:///etc/hostname", "must be in the request"),
        ("/etc/hostname", "must be in the request"),
        ("data:text/plain;base64,aGk=", "must be in the request"),
        ("data:image/png;base64,#", "not valid base64"),
        ("data:image/png;base64," + base64.b64encode(jpeg(1)[:200]).decode(), "cannot be decoded"),
        (None, '"image_url" must be'),
    ],
)
def test_no_file_and_no_address_is_opened(url: Any, words: str) -> None:
    body = request("What is it?")
    body["messages"][0]["content"].insert(0, {"type": "image_url", "image_url": {"url": url}})
    with pytest.raises(RequestError, match=words):
        check_chat(body, MODEL)


@pytest.mark.parametrize(
    "data",
    [rotated(), animated(), *(picture(kind) for kind in ("PNG", "WEBP", "BMP", "TIFF")), picture(mode="CMYK")],
    ids=["rotated", "gif", "png", "webp", "bmp", "tiff", "cmyk"],
)
def test_pictures_reach_transformers_as_they_are_trained_on(data: bytes) -> None:
    """It decodes them by torchvision, which does not rotate and reads fewer formats."""
    part = check_chat(request("What is it?", data), MODEL)["messages"][0]["content"][0]
    sent = base64.b64decode(part["image_url"]["url"].partition(",")[2])
    taken = decode_image(torch.frombuffer(bytearray(sent), dtype=torch.uint8), mode=ImageReadMode.RGB)
    assert torch.equal(taken, decode_pixels(data))


def test_a_checked_request_has_one_form() -> None:
    body = request("What is it?", jpeg(1))
    assert check_chat(body, MODEL) == body
    assert check_chat(body | {"max_completion_tokens": 5}, MODEL) == body | {"max_tokens": 5}
    assert check_chat(body | {"stop": "x"}, MODEL) == body | {"stop": ["x"]}
    without_effect = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "tools": None, "seed": None}
    assert check_chat(body | without_effect | {"chat_template_kwargs": None}, MODEL) == body
    without_effect = {"n": 1, "response_format": {"type": "text"}, "logprobs": False, "top_logprobs": 0}
    without_effect |= {"tool_choice": "none", "functions": [], "modalities": ["text"]}
    assert check_chat(body | without_effect, MODEL) == body
    # As OpenAI's client returns an answer, for the next question.
    answer = {"role": "assistant", "content": "a cat", "tool_calls": None, "refusal": None}
    checked = check_chat(body | {"messages": [*body["messages"], answer, *body["messages"]]}, MODEL)
    assert checked["messages"][1] == {"role": "assistant", "content": "a cat"}


def test_what_cannot_be_served_is_one_message(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def says(*arguments: object) -> str:
        assert main([*map(str, arguments)]) == 2
        return capsys.readouterr().err

    incomplete = tmp_path / "incomplete"
    incomplete.mkdir()
    (incomplete / "config.json").write_text((folder / "config.json").read_text())
    assert "model.safetensors" in says("--port", 0, "--hf-dir", incomplete)
    assert "no-such" in says("--port", 0, "--hf-dir", tmp_path / "no-such")
    assert "revision" in says("--hf-dir", tmp_path / "a@b")
    assert "--max-request-bytes must be at least 1" in says("--hf-dir", folder, "--max-request-bytes", 0)
    assert "choose another --host or --port" in says("--hf-dir", folder, "--host", "no.such.host.invalid")
    assert "--device foo: expected auto, cpu, cuda or cuda:N" in says("--hf-dir", folder, "--device", "foo")
    if not torch.cuda.is_available():
        assert "--device cuda:1: there are 0 GPUs here" in says("--hf-dir", folder, "--device", "cuda:1")
    monkeypatch.setenv("PATH", str(tmp_path))
    for engine in ("vllm", "sglang"):
        assert f"{engine} is not installed here" in says("--hf-dir", folder, "--engine", engine)


def test_commands_of_other_engines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--dry-run prints the commands of vLLM and SGLang."""
    assert main(["--hf-dir", str(folder), "--port", "8001", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"vllm serve {folder} --host localhost --port 8001 --served-model-name folder",
        f"python -m sglang.launch_server --model-path {folder} --host localhost --port 8001 --served-model-name folder",
    ]


def test_a_dry_run_checks_the_folder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other engines would read another model from it, or fail later."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for wrong, expected in ((copy, "holds a model and also a PEFT adapter"), (tmp_path / "gone", "no config.json")):
        assert main(["--hf-dir", str(wrong), "--dry-run"]) == 2
        shown = capsys.readouterr()
        assert expected in shown.err and not shown.out


def test_an_installed_engine_is_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program called vllm on PATH, it gets the command, and its exit code is ours."""
    program = tmp_path / "vllm"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path / "got"}\nexit 7\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert main(["--hf-dir", str(folder), "--engine", "vllm"]) == 7
    assert (tmp_path / "got").read_text().startswith(f"serve {folder} --host localhost --port 8000")


def test_ctrl_c_ends_it(server: Started) -> None:
    """The last test here: it ends the server."""
    assert server.stop(signal.SIGINT) == 130
    assert server.output == "interrupted\n"
