"""Loads a checkpoint's model into this process."""

from __future__ import annotations

from pathlib import Path

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import torch

from llava_mcore.adapters.adapter_record import holds_adapters, read_base, read_plans
from llava_mcore.adapters.attach import attach_adapters
from llava_mcore.adapters.factors import load_adapters
from llava_mcore.adapters.linear_layers import model_layers
from llava_mcore.adapters.targets import own_parameters
from llava_mcore.checkpoint.dist import load_weights
from llava_mcore.checkpoint.layout import hf_folder, newest_iteration
from llava_mcore.models.architectures.hf_config import load_hf_config
from llava_mcore.models.configs import ModelOptions
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.parallel.groups import Groups, join_alone
from llava_mcore.parallel.together import raise_together


def load_model(
    folder: Path | str, *, dtype: torch.dtype = torch.float32, base_dir: Path | None = None
) -> VisionLanguageModel:
    """Return a checkpoint's whole model with its weights, in eval mode; on the GPU if there is one, else on the CPU.

    The model runs in one process: its process groups (torch.distributed, gloo, no network) exist until
    `llava_mcore.parallel.groups.shut_down()`. Conversions in the same process use them too. torch's seed is reset.

    Examples:
        >>> model = load_model("megatron")
        >>> processor = AutoProcessor.from_pretrained("hf")
        >>> inputs = {"input_ids": torch.tensor([[1, 50, 51, 52]])}  # no image
        >>> with torch.no_grad():
        ...     logits = model(**model_inputs(model, processor, inputs, sizes=[[]]))
        >>> logits.shape  # [b, s, vocabulary]
        torch.Size([1, 4, 401])

    Args:
        folder: a folder of checkpoints, of which the newest is loaded, or of one iteration.
        dtype: dtype of the weights in memory.
        base_dir: folder of checkpoints with the weights below the adapters; None: where they were in training.

    Raises:
        CheckpointError: it is not a checkpoint of llava_mcore, is of another model, or contains NaN.
        ConfigError: this process is part of a larger world.
    """
    # A world of one process, on the GPU if there is one.
    checkpoint = newest_iteration(Path(folder))
    on_cpu = not torch.cuda.is_available()
    model = load_part(join_alone(), checkpoint, dtype=dtype, on_cpu=on_cpu, base_dir=base_dir)
    return model.to(dtype)  # megatron-core creates norms in fp32


def load_part(
    groups: Groups,
    checkpoint: Path,
    *,
    dtype: torch.dtype = torch.float32,
    on_cpu: bool = True,
    vision_data_parallel: bool = False,
    base_dir: Path | None = None,
) -> VisionLanguageModel:
    """Return this rank's part of a model with its weights, in eval mode; a collective call.

    Args:
        checkpoint: folder of one iteration, which contains the model's Hugging Face config. If it holds adapters, they
            work in the model that they were trained on.
        vision_data_parallel: see ModelOptions.
        base_dir: folder of checkpoints with the weights below the adapters; None: where they were in training.

    Raises:
        CheckpointError: the checkpoint does not fill the model.
    """
    # The model without values: every value comes from the checkpoint.
    options = ModelOptions(
        params_dtype=dtype,
        tensor_model_parallel_size=groups.tp_size,
        pipeline_model_parallel_size=groups.pp_size,
        context_parallel_size=groups.cp_size,
        expert_model_parallel_size=groups.ep_size,
        expert_tensor_parallel_size=groups.etp_size,
        initialize=False,
        on_cpu=on_cpu,
        vision_data_parallel=vision_data_parallel,
    )
    hf = load_hf_config(hf_folder(checkpoint))
    model = VisionLanguageModel(hf, options, pre_process=groups.is_first_stage, post_process=groups.is_last_stage)
    # A whole model, or a base model with adapters on it.
    if not holds_adapters(checkpoint):
        raise_together(groups, lambda: load_weights([model], checkpoint))
        return model.eval()
    layers = model_layers(hf)
    plans = read_plans(checkpoint, layers)
    raise_together(groups, lambda: load_weights([model], read_base(checkpoint).found_at(base_dir)))
    attach_adapters(model, plans, layers, tp_size=groups.tp_size, tp_rank=groups.tp_rank, seed=0)
    raise_together(groups, lambda: load_adapters([model], checkpoint, own_parameters(plans, layers), groups.rank))
    return model.eval()
