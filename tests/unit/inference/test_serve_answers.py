"""Answers of the server: they are sampled as a request asks, end at its stops, and fit into the model's positions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient
from transformers import AutoProcessor, GenerationConfig, LlavaForConditionalGeneration

from llava_mcore.compat.transformers_serving import StopCut, load_handler
from llava_mcore.inference.serving.app import build_app
from llava_mcore.inference.serving.requests import ServedModel
from tests.helpers.server import request
from tests.helpers.shards import jpeg
from tests.helpers.tiny_hf import make_hf_llava

POSITIONS = 256
QUESTION = "Which digit is this?"
OPINIONS = {"do_sample": True, "temperature": 0.01, "top_p": 0.01, "top_k": 1, "min_p": 0.9, "top_h": 0.1,
            "typical_p": 0.1, "epsilon_cutoff": 0.9, "eta_cutoff": 0.9, "num_beams": 2}  # fmt: skip
"""Of a folder: with any of them, sampling is greedy or almost, or a stream is an error."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "tiny"
    make_hf_llava(folder, seed=2, text_overrides={"max_position_embeddings": POSITIONS})  # its answers begin in ASCII
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | OPINIONS))
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    handler = load_handler(folder, "tiny", POSITIONS, "cpu")
    with TestClient(
        build_app(handler, ServedModel("tiny", POSITIONS, lambda text: ()), max_request_bytes=1 << 20)
    ) as x:
        yield x


def post(client: TestClient, text: str = QUESTION, **fields: Any) -> httpx.Response:
    return client.post("/v1/chat/completions", json=request(text, jpeg(1), **fields))


def choice(client: TestClient, **fields: Any) -> dict[str, Any]:
    answer = post(client, **fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


def said(client: TestClient, **fields: Any) -> str:
    return str(choice(client, **fields)["message"]["content"])


def streamed(client: TestClient, **fields: Any) -> tuple[str, str]:
    """Return the text of a streamed answer, and why it ended."""
    lines = post(client, stream=True, **fields).text.splitlines()
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line]
    return "".join(each["delta"].get("content", "") for each in choices), choices[-1]["finish_reason"]


def generated(folder: Path, tokens: int, **settings: Any) -> str:
    """Answer with plain transformers, and nothing of the folder's own settings."""
    model = LlavaForConditionalGeneration.from_pretrained(folder).eval()
    model.generation_config = GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
    processor = AutoProcessor.from_pretrained(folder)
    parts = [{"type": "image", "image": Image.open(BytesIO(jpeg(1)))}, {"type": "text", "text": QUESTION}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": parts}],
        add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
    )  # fmt: skip
    torch.manual_seed(7)
    out = model.generate(**inputs, max_new_tokens=tokens, **settings)
    return str(processor.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_a_request_decides_how_tokens_are_sampled(client: TestClient, folder: Path) -> None:
    sampled = said(client, temperature=1.5, top_p=0.8, seed=7, max_tokens=20)
    assert sampled == generated(folder, 20, do_sample=True, temperature=1.5, top_p=0.8, top_k=0)
    assert said(client, temperature=1.5, seed=7, max_tokens=20) == generated(
        folder, 20, do_sample=True, temperature=1.5, top_k=0
    )
    assert said(client, temperature=1.5, top_p=0.8, seed=7, max_tokens=20) == sampled
    assert streamed(client, temperature=1.5, top_p=0.8, seed=7, max_tokens=20)[0] == sampled
    assert said(client, temperature=1.5, top_p=0.8, seed=8, max_tokens=20) != sampled
    without_seed = {said(client, temperature=1.5, top_p=0.8, max_tokens=20) for _ in range(3)}
    assert len(without_seed) == 3, "an answer without a seed repeats the one before"


def test_without_a_temperature_the_most_probable_token_is_taken(client: TestClient, folder: Path) -> None:
    """As in `generate` and `chat`, and whatever the folder says."""
    wanted = generated(folder, 20, do_sample=False)
    for fields in ({"temperature": 0}, {"temperature": None}, {"temperature": None, "top_p": 0.5, "seed": 3}):
        assert said(client, max_tokens=20, **fields) == wanted
    assert said(client, max_tokens=20, temperature=1e-40) == wanted, "a division of logits that would overflow"


def test_requests_at_the_same_time_do_not_share_a_seed(client: TestClient) -> None:
    alone = said(client, temperature=1.5, seed=7, max_tokens=60)
    with ThreadPoolExecutor(4) as threads:
        answers = threads.map(lambda _: said(client, temperature=1.5, seed=7, max_tokens=60), range(4))
    assert set(answers) == {alone}


def test_an_answer_ends_before_a_stop(client: TestClient) -> None:
    whole = said(client, max_tokens=40)
    stop = whole[12:15]
    assert stop.isascii() and len(stop) == 3
    wanted = whole[: whole.index(stop)]
    for fields in ({"stop": stop}, {"stop": ["nowhere", stop]}):
        found = choice(client, max_tokens=40, **fields)
        assert (found["message"]["content"], found["finish_reason"]) == (wanted, "stop")
        assert streamed(client, max_tokens=40, **fields) == (wanted, "stop")
    used = post(client, max_tokens=40, stop=stop).json()["usage"]["completion_tokens"]
    assert used <= len(wanted) + len(stop) < 40, "the rest was generated"
    assert said(client, max_tokens=40, stop="nowhere") == whole
    assert streamed(client, max_tokens=40, stop=whole[-1] + "nowhere") == (whole, "length")


def test_a_stop_in_the_prompt_is_none(client: TestClient) -> None:
    """The prompt ends with `ASSISTANT:`."""
    whole = said(client, max_tokens=8)
    assert whole[0].isascii()
    found = choice(client, max_tokens=8, stop=":" + whole[0])
    assert (found["message"]["content"], found["finish_reason"]) == (whole, "length")


@pytest.mark.parametrize("size", [1, 2, 3, 20])
@pytest.mark.parametrize(
    ("stops", "wanted"),
    [(["abc"], "xababyab"), (["by", "abab"], "x"), (["none", "yababcz"], "xababyababc"), ([], "xababyababc")],
)
def test_pieces_of_any_size_are_cut_at_the_same_place(size: int, stops: list[str], wanted: str) -> None:
    text = "xababyababc"
    cut = StopCut(stops)
    pieces = [cut.feed(text[start : start + size]) for start in range(0, len(text), size)]
    assert "".join(pieces) + cut.rest() == wanted
    assert cut.is_stopped == (wanted != text)


def test_prompt_and_answer_fit_into_the_model(client: TestClient) -> None:
    usage = post(client, max_tokens=None).json()["usage"]
    assert usage["total_tokens"] == POSITIONS, "without max_tokens, an answer may be as long as fits"
    prompt = usage["prompt_tokens"]
    room = POSITIONS - prompt
    assert post(client, max_tokens=room).status_code == 200
    for stream in (False, True):
        refused = post(client, max_tokens=room + 1, stream=stream)
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert f"the prompt has {prompt} tokens, images included, and max_tokens is {room + 1}" in message
        assert f"{POSITIONS} positions (max_position_embeddings)" in message


def test_a_long_text_is_refused_at_once(client: TestClient) -> None:
    start = time.monotonic()
    refused = post(client, "x" * 200_000, max_tokens=None)
    assert refused.status_code == 400
    assert f"and the model only {POSITIONS} positions" in refused.json()["error"]["message"]
    assert time.monotonic() - start < 10
