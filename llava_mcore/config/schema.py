"""The configuration of a run, section by section.

The docstring of each field is its documentation, also in the help of the command line. Every object is frozen; a wrong
type, a value out of range or an unknown key is an error.
"""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator

from llava_mcore.config.sections.adapter import AdapterConfig
from llava_mcore.config.sections.base import Flag, Needs, Parts, Section
from llava_mcore.config.sections.checkpoint import CheckpointConfig
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.config.sections.faults import FaultConfig
from llava_mcore.config.sections.launch import LaunchConfig
from llava_mcore.config.sections.logs import LoggingConfig
from llava_mcore.config.sections.model import ModelConfig
from llava_mcore.config.sections.optimizer import OptimizerConfig
from llava_mcore.config.sections.router import RouterConfig
from llava_mcore.config.sections.training import TrainingConfig
from llava_mcore.config.sections.validation import ValidationConfig

STAGE_DEFAULTS: dict[int, dict[str, float | int]] = {
    1: {"optimizer.lr": 1e-3, "training.global_batch_size": 256},
    2: {"optimizer.lr": 2e-5, "training.global_batch_size": 128},
}
"""Defaults of each training stage."""

NON_PERSISTENT = "non_persistent"


LONGEST_NAME = 200
"""Bytes; file systems allow 255, and temporary files have NAME with a suffix."""


def _folder_name(value: str) -> str:
    controls = any(unicodedata.category(letter) == "Cc" for letter in value)
    if not value.strip() or value[0] in ".-" or set(value) & set("/\\") or controls:
        raise ValueError(
            "expected the name of a folder: no '/', no control characters, not empty, not starting with '.' or '-'"
        )
    size = len(os.fsencode(value))
    if size > LONGEST_NAME:
        raise ValueError(f"expected the name of a folder, of at most {LONGEST_NAME} bytes, found {size}")
    return value


def _as_number(value: Any) -> Any:
    """Literal[1, 2] does not convert text by itself, as int does."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _as_switch(value: Any) -> Any:
    """Return a switch of older configurations, or YAML's on and off, as text."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return {"true": "on", "false": "off"}.get(value, value) if isinstance(value, str) else value


_TENSOR = Needs("parallel.tensor_model_parallel_size", at_least=2)
_PIPELINE = Needs("parallel.pipeline_model_parallel_size", at_least=2)
_TENSOR_OR_CONTEXT = Needs(
    "parallel.tensor_model_parallel_size", "parallel.context_parallel_size", at_least=2, idle=("auto", "off")
)
_CONTEXT = Needs("parallel.context_parallel_size", at_least=2)
_HIERARCHICAL = Needs("parallel.cp_comm_type", value="a2a+p2p")
CpCommType = Literal["p2p", "a2a", "all_gather", "a2a+p2p"]


class ParallelConfig(Section):
    """How the model is divided. The data-parallel size is processes / (tensor x context x pipeline)."""

    flag_group = "parallel"

    tensor_model_parallel_size: Annotated[Parts, Flag("--tp")] = 1
    """Tensor parallelism: processes that share every layer."""
    pipeline_model_parallel_size: Annotated[Parts, Flag("--pp")] = 1
    """Pipeline parallelism: stages that the layers are divided into."""
    context_parallel_size: Annotated[Parts, Flag("--cp")] = 1
    """Context parallelism: processes that divide the tokens of every sample, for long samples."""
    cp_comm_type: Annotated[CpCommType | None, Flag("--cp-comm-type"), _CONTEXT] = None
    """With context parallelism on GPUs, how attention reaches the tokens of the other processes: keys and values go
    around a ring (p2p), heads are exchanged for tokens (a2a), all keys and values are gathered (all_gather), or
    neighbors exchange heads and groups of them pass keys and values around (a2a+p2p). Default: p2p, which works with
    any number of heads."""
    cp_a2a_size: Annotated[Parts | None, Flag("--cp-a2a-size"), _HIERARCHICAL] = None
    """With --cp-comm-type a2a+p2p, size of the groups that exchange heads for tokens, such as the GPUs of a node. These
    groups pass keys and values around."""
    num_layers_in_first_pipeline_stage: Annotated[Parts | None, _PIPELINE] = None
    """Decoder layers of the first pipeline stage, which also has the vision tower. Default: like the others."""
    num_layers_in_last_pipeline_stage: Annotated[Parts | None, _PIPELINE] = None
    """Decoder layers of the last pipeline stage, which also has the output layer. Default: like the others."""
    num_layers_per_virtual_pipeline_stage: Annotated[Parts | None, _PIPELINE] = None
    """Interleave the pipeline: divide each stage into chunks of this many layers; less idle time, more messages.
    Default: one chunk per stage."""
    balance: Annotated[Literal["none", "auto"], _PIPELINE] = "none"
    """auto: divide the layers so that all stages should take equally long, as `plan` predicts; the vision tower's stage
    gets fewer. none: equal stages, or as set by num_layers_in_first_pipeline_stage and …_last_…."""
    sequence_parallel: Annotated[bool, Flag("--sequence-parallel"), _TENSOR] = False
    """With tensor parallelism, also divide the tokens between the divided parts of a layer: less activation memory."""
    tp_comm_overlap: Annotated[bool, Flag("--tp-comm-overlap"), Needs("parallel.sequence_parallel")] = False
    """With sequence parallelism on GPUs of one node, send the messages of tensor parallelism while matrix products run,
    by Transformer Engine's user buffers."""
    vision_data_parallel: Annotated[
        Literal["auto", "on", "off"],
        BeforeValidator(_as_switch),
        Flag("--vision-data-parallel", alone="on"),
        _TENSOR_OR_CONTEXT,
    ] = "auto"
    """With tensor or context parallelism, give every rank the whole vision tower (or audio encoder) and a part of the
    images, in place of a part of the tower (on; also the flag alone). Its widths then need not be divisible by --tp.
    auto: where `plan` predicts a shorter step, or the tower's widths do not divide; the log says which and why."""
    expert_model_parallel_size: Annotated[Parts, Flag("--ep")] = 1
    """Expert parallelism, for mixtures of experts: processes that divide the experts of a layer. They are taken from a
    stage's tensor- and data-parallel processes."""
    expert_tensor_parallel_size: Annotated[Parts, Flag("--etp")] = 1
    """Processes that divide each expert. It is independent of --tp, because experts are small, and whole ones are
    faster."""
    use_distributed_optimizer: Annotated[bool, Flag("--dist-optim")] = False
    """Distributed optimizer: divide the optimizer state over the data-parallel ranks."""
    fsdp: Annotated[Literal["none", "optim", "optim_grads", "optim_grads_params"], Flag("--fsdp")] = "none"
    """Fully sharded data parallelism: divide the optimizer state over model replicas, as --dist-optim does (optim), the
    gradients too (optim_grads), or also the weights (optim_grads_params)."""
    hsdp_replicas: Annotated[Parts, Flag("--hsdp"), Needs("parallel.fsdp", other_than="none", words="--fsdp")] = 1
    """With --fsdp, number of groups of model replicas that each hold all shards: weights are gathered within a group,
    gradients are also summed between groups."""
    overlap_grad_reduce: bool = True
    """On GPUs, reduce gradients over the data-parallel ranks while the backward pass still runs."""
    overlap_param_gather: bool = True
    """On GPUs with the distributed optimizer, gather updated weights while the next forward pass already runs."""
    backend: Annotated[Literal["nccl", "gloo"] | None, Flag("--backend")] = None
    """Communication backend. Default: nccl with GPUs, gloo without. torch's packages are built without mpi."""

    @property
    def divides_images(self) -> bool:
        """Whether the ranks of a stage have the whole tower each, and divide the images.

        The launcher replaces auto, except with context parallelism alone: its ranks have whole towers anyway, and
        would all compute the same.
        """
        if self.vision_data_parallel == "auto":
            return self.context_parallel_size > 1 and self.tensor_model_parallel_size == 1
        return self.vision_data_parallel == "on"

    @property
    def whole_towers(self) -> bool:
        """Whether tensor-parallel ranks have the whole tower each, in place of a part of it."""
        return self.divides_images and self.tensor_model_parallel_size > 1

    @property
    def replica_size(self) -> int:
        """Processes of a model replica."""
        return self.tensor_model_parallel_size * self.context_parallel_size * self.pipeline_model_parallel_size

    @property
    def divides_optimizer(self) -> bool:
        """Whether data-parallel ranks hold parts of the optimizer's state."""
        return self.use_distributed_optimizer or self.fsdp != "none"

    @property
    def divides_weights(self) -> bool:
        """Whether data-parallel ranks hold parts of the weights, and gather them for each pass."""
        return self.fsdp == "optim_grads_params"


class RunConfig(Section):
    """One training run."""

    name: Annotated[str, AfterValidator(_folder_name), Flag("--name", group="logging")] = "run"
    """Name of the run, and of its folder under the save folder."""
    stage: Annotated[Literal[1, 2], BeforeValidator(_as_number), Flag("--stage", group="training")] = 2
    """Training stage; it sets the defaults of the learning rate and the global batch size."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    adapter: AdapterConfig = AdapterConfig()
    router: RouterConfig = RouterConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig
    training: TrainingConfig
    validation: ValidationConfig = ValidationConfig()
    logging: LoggingConfig = LoggingConfig()
    faults: FaultConfig = FaultConfig()
    launch: LaunchConfig = LaunchConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_stage_defaults(cls, values: Any) -> Any:
        """Fill in the stage's defaults for missing values; the fields report invalid ones."""
        if not isinstance(values, dict):
            return values
        stage = str(values.get("stage", cls.model_fields["stage"].default))
        filled = dict(values)
        for dotted, default in STAGE_DEFAULTS[int(stage) if stage in ("1", "2") else 2].items():
            section, field = dotted.split(".")
            section_values = filled.setdefault(section, {})
            if isinstance(section_values, dict):
                filled[section] = {field: default, **section_values}
        return filled

    @property
    def run_dir(self) -> Path:
        """SAVE_DIR/NAME. Only for runs that passed `check_run`, which requires a save folder."""
        assert self.checkpoint.save_dir is not None
        return self.checkpoint.save_dir / self.name

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether all forward passes of training have the same number of tokens, as CUDA graphs and Transformer
        Engine's user buffers need."""
        return self.model.cuda_graphs or self.parallel.tp_comm_overlap

    @property
    def non_persistent_dir(self) -> Path:
        """Folder of checkpoints that the next one replaces: DIR/NAME, or SAVE_DIR/NAME/non_persistent."""
        chosen = self.checkpoint.non_persistent_dir
        return self.run_dir / NON_PERSISTENT if chosen is None else chosen / self.name
