"""transformers' server for one model: its handler of chat requests, with what it lacks.

It ignores a request's sampling, cannot end an answer at `stop`, and does not check that prompt and answer fit into the
model's positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from starlette.exceptions import HTTPException
from starlette.responses import Response
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.cli.serving import chat_completion, model_manager
from transformers.cli.serving import utils as serving_utils

from llava_mcore.compat.required import replace_name, required

_Handler: Any = required(chat_completion, "ChatCompletionHandler")
_Models: Any = required(model_manager, "ModelManager")
_State: Any = required(serving_utils, "GenerationState")
_Generations: Any = required(serving_utils, "GenerateManager")
_response_template: Any = required(serving_utils, "get_response_template")
for _owner, _names in {
    _Handler: ("_resolve_model", "_build_generation_config", "_build_completion", "_build_chunk_sse"),
    _State: ("get_manager",),
    _Generations: ("generate_streaming", "generate_non_streaming"),
}.items():
    for _name in _names:
        required(_owner, _name)  # overridden or called below

USUAL_TOKENS = 1024
"""Maximum number of tokens of an answer if the request does not set one; transformers' default."""
GREEDY_BELOW = 1e-5
"""Temperatures below this count as 0: the division of logits would overflow. vLLM has the same limit."""
SAMPLING: dict[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "top_k": 0,
    "min_p": None,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
"""Settings of a folder's generation_config.json that change how tokens are chosen, with values that do nothing;
beside them `temperature` and `top_p`, which a request has."""
OUR_OPTIONS = ("temperature", "top_p", "seed", "stop")
"""Fields of a request that transformers' handler does not see, because it does the wrong thing with them."""


def _fitting_template(processor: Any, model: Any) -> Any:
    """Return how transformers finds thoughts in an answer; None if the chat template does not begin answers like that.

    For Qwen's classes transformers (5.17) looks for what begins an answer in ChatML. In a prompt of another template it
    finds none, and the answer would repeat the whole prompt.
    """
    template = _response_template(processor, model)
    start = () if template is None else template.get("start_anchor", ())
    starts = (start,) if isinstance(start, str) else start
    fits = not starts or any(each.strip() in str(processor.chat_template) for each in starts)
    return template if fits else None


replace_name(serving_utils, "get_response_template", _fitting_template)


class StopCut:
    """Cuts a text, which comes in pieces, before the first of some other texts."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = stops, ""
        self.is_stopped = False

    def feed(self, piece: str) -> str:
        """Return what can be shown now. An end that may be the beginning of a stop waits for the next piece."""
        if self.is_stopped:
            return ""
        text = self._held + piece
        places = [text.index(stop) for stop in self._stops if stop in text]
        if places:
            self.is_stopped, self._held = True, ""
            return text[: min(places)]
        beginnings = [stop[:n] for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        num_shown = len(text) - max(map(len, beginnings), default=0)
        self._held = text[num_shown:]
        return text[:num_shown]

    def rest(self) -> str:
        """Return what still waits when the text has ended."""
        rest, self._held = self._held, ""
        return rest


class _EndAtStop(StoppingCriteria):
    """Ends an answer when its text has one of some texts.

    transformers' own criterion reads the prompt too: a stop that begins there would end the answer.
    """

    def __init__(self, tokenizer: Any, prompt_tokens: int, stops: Sequence[str]) -> None:
        self._tokenizer, self._prompt_tokens, self._stops = tokenizer, prompt_tokens, stops
        # A token has at least a byte, so these have the longest stop, and a few are special tokens without text.
        self._last = max(len(stop.encode()) for stop in stops) + 8

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        start = max(self._prompt_tokens, input_ids.shape[1] - self._last)
        text = self._tokenizer.decode(input_ids[0, start:], skip_special_tokens=True)
        ends = any(stop in text for stop in self._stops)
        return torch.full((len(input_ids),), ends, dtype=torch.bool, device=input_ids.device)


@dataclass(frozen=True)
class _Pinned:
    """A model's name for clients, its number of positions, and transformers' managers of models and of generation."""

    name: str
    positions: int
    models: Any
    generations: Any


class _RequestGeneration:
    """Generates one answer as its request asks. transformers' handler calls it as it would its own manager."""

    def __init__(self, pinned: _Pinned, body: dict[str, Any], stops: Sequence[str]) -> None:
        self._pinned, self._body, self._stops = pinned, body, stops

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, config: Any, **options: Any) -> Any:
        self._limit(config, inputs)
        wrapped = self._generating(model, processor, inputs)
        return self._pinned.generations.generate_streaming(wrapped, processor, inputs, config, **options)

    async def generate_non_streaming(self, model: Any, processor: Any, inputs: Any, config: Any, **options: Any) -> Any:
        self._limit(config, inputs)
        wrapped = self._generating(model, processor, inputs)
        return await self._pinned.generations.generate_non_streaming(wrapped, processor, inputs, config, **options)

    def _limit(self, config: Any, inputs: Any) -> None:
        """Set the longest answer. HTTPException if prompt and answer exceed the model's positions."""
        prompt, most_positions = inputs["input_ids"].shape[-1], self._pinned.positions
        asked = self._body.get("max_tokens")
        if prompt + (asked or 1) > most_positions:
            positions = f"{most_positions} positions (max_position_embeddings)"
            raise HTTPException(
                400,
                f"the prompt has {prompt} tokens, images included, "
                + (
                    f"and the model only {positions}: shorten the conversation"
                    if asked is None
                    else f"and max_tokens is {asked}: together more than the model's {positions}; shorten the "
                    "conversation or lower max_tokens"
                ),
            )
        config.max_new_tokens = asked or min(USUAL_TOKENS, most_positions - prompt)

    def _generating(self, model: Any, processor: Any, inputs: Any) -> Any:
        """Return a model whose `generate` has the request's seed and stops."""
        seed, prompt = self._body.get("seed"), inputs["input_ids"].shape[-1]
        ends = [_EndAtStop(processor.tokenizer, prompt, self._stops)] if self._stops else []

        def generate(**kwargs: Any) -> Any:
            # In the only thread that generates, so no other request draws numbers in between.
            if seed is None:
                torch.seed()
            else:
                torch.manual_seed(seed)
            return model.generate(**kwargs, stopping_criteria=StoppingCriteriaList(ends))

        return SimpleNamespace(generate=generate)


class _OneState(_State):
    """transformers' state of generation, with the generation of one request."""

    def __init__(self, generation: _RequestGeneration) -> None:
        super().__init__()
        self._generation = generation

    def get_manager(self, model_id: str, use_cb: bool = False) -> _RequestGeneration:
        return self._generation


class _OneAnswer(_Handler):
    """Handles one request."""

    def __init__(self, pinned: _Pinned, body: dict[str, Any]) -> None:
        stops = body.get("stop") or []
        super().__init__(pinned.models, _OneState(_RequestGeneration(pinned, body, stops)))
        self._pinned, self._cut = pinned, StopCut(stops)

    def _resolve_model(self, body: dict[str, Any]) -> tuple[str, Any, Any]:
        _, model, processor = super()._resolve_model({"model": self.model_manager.force_model})
        return self._pinned.name, model, processor

    def _build_generation_config(self, body: dict[str, Any], model_config: Any, use_cb: bool = False) -> Any:
        """Sample if the request has a temperature, with what the request gives. The folder's settings do not count."""
        for name, value in SAMPLING.items():
            # In the model's own settings, because `generate` replaces a None by what they have.
            setattr(model_config, name, value)
        config = super()._build_generation_config(
            {name: value for name, value in body.items() if name not in OUR_OPTIONS}, model_config, use_cb=use_cb
        )
        temperature = body.get("temperature") or 0
        if temperature >= GREEDY_BELOW:
            config.do_sample, config.temperature = True, float(temperature)
            config.top_p = float(body.get("top_p", 1))
        return config

    def _build_completion(
        self, request_id: str, content: str, model_id: str, finish_reason: str, **options: Any
    ) -> dict[str, Any]:
        text = self._cut.feed(content) + self._cut.rest()
        reason = "stop" if self._cut.is_stopped else finish_reason
        completion: dict[str, Any] = super()._build_completion(request_id, text, model_id, reason, **options)
        return completion

    def _build_chunk_sse(
        self, request_id: str = "", content: str | None = None, finish_reason: str | None = None, **options: Any
    ) -> str:
        text = content if content is None else self._cut.feed(content)
        if finish_reason is not None:
            text = self._cut.rest() or None
            finish_reason = "stop" if self._cut.is_stopped else finish_reason
        return str(super()._build_chunk_sse(request_id, content=text, finish_reason=finish_reason, **options))


class PinnedHandler:
    """Answers chat requests with one model."""

    def __init__(self, pinned: _Pinned) -> None:
        self._pinned = pinned

    async def answer(self, body: dict[str, Any], request_id: str) -> Response:
        """Return the answer to a checked request, or a stream of events.

        Raises:
            fastapi.HTTPException: a field is unknown, or prompt and answer are too long for the model.
        """
        response: Response = await _OneAnswer(self._pinned, body).handle_request(body, request_id)
        return response

    def close(self) -> None:
        """Free the model."""
        self._pinned.models.shutdown()


def load_handler(hf_dir: Path, name: str, positions: int, device: str) -> PinnedHandler:
    """Load a folder's model and processor.

    Args:
        name: of the model, in answers.
        positions: of the model: the most tokens of a prompt and its answer together.
        device: as of transformers: auto, cpu, cuda:0.
    """
    models = _Models(device=device, dtype="auto", force_model=str(hf_dir))
    return PinnedHandler(_Pinned(name, positions, models, _Generations()))
