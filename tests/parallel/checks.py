"""What the ranks of a test world run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from llava_mcore.checkpoint.dist import load_weights, model_state, save_state
from llava_mcore.checkpoint.layout import hf_folder, latest_checkpoint
from llava_mcore.config.sections.model import ModelConfig
from llava_mcore.convert.logits_worker import forward
from llava_mcore.media.batch_fields import FEATURE_POSITIONS, PIXEL_VALUES
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.configs import ModelOptions
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.models.trainable import trained_parameters, whole_names
from llava_mcore.parallel.groups import Groups, initialize
from llava_mcore.parallel.random import seed_everything


def join(tp: int, pp: int, ep: int = 1, etp: int = 1, cp: int = 1, replicas: int = 1, a2a: int | None = None) -> Groups:
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    groups = initialize(
        backend=backend,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        cp_a2a_size=a2a,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        sharding_replicas=replicas,
        timeout_seconds=60,
    )
    seed_everything(1)
    return groups


def load_model(groups: Groups, checkpoint: Path, **options_: Any) -> VisionLanguageModel:
    """Build this rank's part and fill it from a checkpoint. `options_`: other fields of ModelOptions."""
    hf = load_hf_config(hf_folder(checkpoint))
    options = ModelOptions(
        tensor_model_parallel_size=groups.tp_size,
        pipeline_model_parallel_size=groups.pp_size,
        context_parallel_size=groups.cp_size,
        expert_model_parallel_size=groups.ep_size,
        expert_tensor_parallel_size=groups.etp_size,
        initialize=False,
        **options_,
    )
    model = VisionLanguageModel(hf, options, pre_process=groups.is_first_stage, post_process=groups.is_last_stage)
    load_weights([model], checkpoint)
    return model.to(groups.device).eval()


def logits(groups: Groups, model: VisionLanguageModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Run one micro-batch through the pipeline; the last stage returns [b, s, vocabulary], on the CPU."""
    out = forward(model, {name: x.to(groups.device) for name, x in inputs.items()})
    return None if out is None else out.cpu()


def parity_and_reshard(tp: int, pp: int, cases: list[dict[str, Any]], cp: int = 1) -> list[torch.Tensor | None]:
    """Load every case's checkpoint, compute logits, and save it again from this layout."""
    groups = join(tp, pp, cp=cp)
    results = []
    for case in cases:
        checkpoint, _ = latest_checkpoint(Path(case["megatron"]))
        model = load_model(groups, checkpoint)
        hf = load_hf_config(hf_folder(checkpoint))
        assert whole_names(model).keys() <= trained_parameters(hf, ModelConfig()).keys(), "what --freeze chooses from"
        results.append(logits(groups, model, case["inputs"]))
        if "resharded" in case:
            target = Path(case["resharded"])
            save_state({"iteration": 0, **model_state([model], is_loading=False)}, target)
    return results


def greedy(tp: int, checkpoint: str, prompt: torch.Tensor, num_new: int) -> tuple[torch.Tensor, list[int]]:
    """Return the logits of a text prompt [1, s] and its greedy continuation, from the parallel model."""
    groups = join(tp, 1)
    model = load_model(groups, latest_checkpoint(Path(checkpoint))[0])
    pictures = {PIXEL_VALUES: torch.empty(0, 3, 56, 56), FEATURE_POSITIONS: torch.empty(0, dtype=torch.long)}
    ids = prompt
    first = None
    for _ in range(num_new):
        out = logits(groups, model, {"input_ids": ids, **pictures})
        assert out is not None
        first = out if first is None else first
        ids = torch.cat([ids, out[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert first is not None
    return first, ids[0, prompt.shape[1] :].tolist()
