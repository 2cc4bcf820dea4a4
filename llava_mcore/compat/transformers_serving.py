"""transformers' server for one model: its handler of chat requests, with a name for the model that clients use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.responses import Response
from transformers.cli.serving import chat_completion, model_manager
from transformers.cli.serving import utils as serving_utils

from llava_mcore.compat.required import replace_name, required

_Handler: Any = required(chat_completion, "ChatCompletionHandler")
_Manager: Any = required(model_manager, "ModelManager")
_State: Any = required(serving_utils, "GenerationState")
required(_Handler, "_resolve_model")
_response_template: Any = required(serving_utils, "get_response_template")


def _fitting_template(processor: Any, model: Any) -> Any:
    """Return how transformers finds thoughts in an answer; None if the chat template does not begin answers like that.

    For Qwen's classes transformers (5.17) looks for what begins an answer in ChatML. In a prompt of another template it
    finds none, and the answer would repeat the whole prompt.
    """
    found = _response_template(processor, model)
    start = () if found is None else found.get("start_anchor", ())
    starts = (start,) if isinstance(start, str) else start
    fits = not starts or any(each.strip() in str(processor.chat_template) for each in starts)
    return found if fits else None


replace_name(serving_utils, "get_response_template", _fitting_template)


class PinnedHandler(_Handler):
    """Answers chat requests with one model. The base class names it by its path."""

    def __init__(self, manager: Any, name: str) -> None:
        super().__init__(manager, _State())
        self._name = name

    def _resolve_model(self, body: dict[str, Any]) -> tuple[str, Any, Any]:
        _, model, processor = super()._resolve_model({"model": self.model_manager.force_model})
        return self._name, model, processor

    async def answer(self, body: dict[str, Any], request_id: str) -> Response:
        """Return the answer to a checked request, or a stream of events.

        Raises:
            fastapi.HTTPException: a field is unknown.
        """
        response: Response = await self.handle_request(body, request_id)
        return response

    def close(self) -> None:
        """Free the model."""
        self.model_manager.shutdown()


def load_handler(hf_dir: Path, name: str, device: str) -> PinnedHandler:
    """Load a folder's model and processor.

    Args:
        name: of the model, in answers.
        device: as of transformers: auto, cpu, cuda:0.
    """
    return PinnedHandler(_Manager(device=device, dtype="auto", force_model=str(hf_dir)), name)
