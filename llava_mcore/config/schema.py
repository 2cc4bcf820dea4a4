"""The configuration of a run, section by section.

The text under each field is its documentation: the help of the command line is made from it.
Every object is frozen; a wrong type, a value out of range or an unknown key is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from llava_mcore.config.faults import FaultConfig
from llava_mcore.config.launch import LaunchConfig
from llava_mcore.config.optimizer import OptimizerConfig
from llava_mcore.config.section import Section, UserPath

STAGE_DEFAULTS: dict[int, dict[str, float | int]] = {
    1: {"optimizer.lr": 1e-3, "training.global_batch_size": 256},
    2: {"optimizer.lr": 2e-5, "training.global_batch_size": 128},
}
"""Values of each training stage that stand where nothing is given."""


def _folder_name(value: str) -> str:
    if not value.strip() or value.startswith(".") or set(value) & set("/\\\n\0"):
        raise ValueError("expected the name of a folder: no '/', not empty, not starting with '.'")
    return value


def _number(value: Any) -> Any:
    """Literal[1, 2] does not convert text by itself, as int does."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _parts(value: Any) -> Any:
    """Names divided by commas, or a list of them."""
    return value.split(",") if isinstance(value, str) else value


def _path_or_url(value: Any) -> Any:
    """A Path would take one of the two slashes out of a URL."""
    if not isinstance(value, str | Path):
        raise ValueError("expected a path or a URL")
    return value if "://" in str(value) else Path(value).expanduser()


DataPath = Annotated[Path | str, BeforeValidator(_path_or_url)]


class CheckpointConfig(Section):
    """Where the weights come from and where they go."""

    load: UserPath | None = None
    """Megatron checkpoint folder whose weights the run starts from."""
    hf_dir: UserPath | None = None
    """Hugging Face folder with the tokenizer, the image processor and, for a run from scratch, the model's config."""
    save_dir: UserPath | None = None
    """Folder under which the run makes its own folder SAVE_DIR/NAME."""
    save: bool = False
    """Save a checkpoint at the end of the run; a save interval asks for that too."""
    save_interval: int | None = Field(None, ge=1)
    """Iterations between two checkpoints, beside the one at the end; not given: only that one, if asked for."""
    async_save: bool = False
    """Write checkpoints behind the training, which waits only until the tensors have been copied to the host."""
    keep_last: int | None = Field(None, ge=1)
    """Checkpoints of the run that are kept, older ones are deleted; not given: all."""
    keep_every: int | None = Field(None, ge=1)
    """Checkpoints whose iteration is a multiple of this are kept for ever; with keep_last."""
    save_optim: bool = False
    """Also save the optimizer, the schedule, the random state and the place in the data, so that a run can resume."""
    load_optim: bool = False
    """Resume what --save-optim saved: from SAVE_DIR/NAME if it holds a checkpoint, else from the load folder."""
    init: bool = False
    """Start from random weights of the model that hf_dir describes instead of loading a checkpoint."""

    @property
    def saves(self) -> bool:
        """Whether the run saves at all."""
        return self.save or self.save_interval is not None


class DataConfig(Section):
    """What is trained on."""

    path: DataPath | None = None
    """Prepared folder of shards, or the .yaml file of a blend; or the URL of either in an object store."""
    seq_length: int = Field(2048, ge=1)
    """Most tokens of a sample, or of a pack of samples; image tokens included."""
    num_workers: int = Field(2, ge=0)
    """Loader processes of each data-parallel rank; 0 loads in the training process."""
    timeout: int = Field(600, ge=1)
    """Seconds that a loader process may take for a batch before the run ends; without any, only storage has limits."""
    shuffle_buffer_size: int = Field(100, ge=0)
    """Samples that each stream keeps to shuffle among; 0 or 1 keeps the order within a shard."""
    num_streams: int | None = Field(None, ge=1)
    """Streams that the data are divided into for the whole run: at least as many as data-parallel ranks will ever
    serve them, best a multiple of their number. Not given: a multiple of it from 16 on, which a resumed run keeps."""
    image_token_id: int | None = Field(None, ge=0)
    """Id of the tokenizer's placeholder for pictures; not given: the one the tokenizer names, else that of <image>."""
    pad_token_id: int | None = Field(None, ge=0)
    """Id of the token that fills up batches, which is never trained; not given: the tokenizer's pad token."""
    packing: bool = False
    """Pack samples into sequences of seq_length tokens; they neither see nor follow each other."""
    packing_buffer_size: int = Field(64, ge=1)
    """Samples among which each stream looks for those that fill a pack best."""
    on_too_long: Literal["drop", "truncate", "error"] = "drop"
    """What becomes of a conversation longer than seq_length: left out and counted, cut (never inside a picture), or an
    error that ends the run."""
    max_skip_rate: float = Field(0.01, ge=0, le=1)
    """Part of the samples that may be left out as broken or too long before the run ends with a list of them."""
    chat_template: str | None = None
    """Chat template to train with and to export: vicuna, llama-2, llama-3, chatml, llm-jp, mistral, plain, or a .jinja
    file. Not given: the tokenizer's own."""
    lang: Literal["jp", "en"] | None = None
    """Language of prompts for data without questions; a tokenizer without a chat template gets llm-jp (jp) or vicuna
    (en)."""


class ModelConfig(Section):
    """Which parts are trained. The architecture comes from the Hugging Face config."""

    freeze_language_model: bool = False
    """Keep the language model as it is (usual in stage 1)."""
    freeze_vision_model: bool = True
    """Keep the vision tower as it is."""
    freeze_vision_projection: bool = False
    """Keep the projection between the vision tower and the language model as it is."""
    transformer_impl: Literal["transformer_engine", "local"] | None = None
    """Whose layers are used: Transformer Engine's fused ones, or torch's; not given: the former on GPUs if it is
    installed. Checkpoints are the same."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What of the language model is computed again in the backward pass instead of being kept: nothing, the
    recompute_modules of every layer, or whole layers."""
    recompute_modules: Annotated[
        tuple[Literal["core_attn", "mlp"], ...], BeforeValidator(_parts), Field(min_length=1)
    ] = ("mlp",)
    """What --recompute selective computes again: mlp (saves most), core_attn (useful without fused
    attention), or both."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """What --recompute full computes again: all layers, in units of recompute_num_layers (uniform), or the first
    recompute_num_layers of each pipeline stage (block)."""
    recompute_num_layers: int = Field(1, ge=1)
    """Layers of a unit (uniform) or of a stage (block) that --recompute full computes again."""
    recompute_vision: Literal["none", "full"] = "none"
    """The same for a vision tower that is trained; a frozen one keeps nothing anyway."""
    attention_backend: Literal["fused", "flash"] | None = None
    """Transformer Engine's attention: cuDNN's fused kernels, or those of the package flash-attn; not given: its own
    choice."""
    make_vocab_size_divisible_by: int = Field(128, ge=1)
    """The embedding is padded to a multiple of this times the tensor-parallel size; the padding is never exported."""

    def frozen_parts(self) -> str:
        """Return the names of the parts that are not trained."""
        parts = {
            "language model": self.freeze_language_model,
            "vision tower": self.freeze_vision_model,
            "projection": self.freeze_vision_projection,
        }
        return ", ".join(name for name, frozen in parts.items() if frozen) or "none"


class ParallelConfig(Section):
    """How the model is spread. The data-parallel size is what remains: processes / (tensor x pipeline)."""

    tensor_model_parallel_size: int = Field(1, ge=1)
    """Processes that share every layer (tensor parallelism)."""
    pipeline_model_parallel_size: int = Field(1, ge=1)
    """Pipeline stages that the layers are divided into."""
    num_layers_in_first_pipeline_stage: int | None = Field(None, ge=1)
    """Language-model layers of the first pipeline stage, which also has the vision tower; not given: as the others."""
    num_layers_in_last_pipeline_stage: int | None = Field(None, ge=1)
    """Language-model layers of the last pipeline stage, which also has the output layer; not given: as the others."""
    num_layers_per_virtual_pipeline_stage: int | None = Field(None, ge=1)
    """Interleave the pipeline: cut each stage into chunks of so many layers that lie apart in the model; smaller
    bubbles, more messages. Not given: one chunk a stage."""
    sequence_parallel: bool = False
    """With tensor parallelism, divide the tokens too where the layers are not divided: less activation memory."""
    use_distributed_optimizer: bool = False
    """Divide the optimizer's state over the data-parallel ranks."""
    overlap_grad_reduce: bool = True
    """On GPUs, reduce gradients over the data-parallel ranks while the backward pass still runs."""
    overlap_param_gather: bool = True
    """On GPUs with the distributed optimizer, gather updated weights while the next forward pass already runs."""
    backend: Literal["nccl", "gloo"] | None = None
    """Communication backend; not given: nccl with GPUs, gloo without."""


class TrainingConfig(Section):
    """How long, how much at a time, and in which number format."""

    train_iters: int = Field(0, ge=0)
    """Iterations (optimizer steps) of the whole run, those before a resume included; required to train."""
    micro_batch_size: int = Field(1, ge=1)
    """Samples of one forward pass on one data-parallel rank."""
    global_batch_size: int = Field(ge=1)
    """Samples of one iteration over all data-parallel ranks and micro-batches."""
    precision: Literal["bf16", "fp16", "fp32"] | None = None
    """Number format of weights and activations; not given: bf16 with GPUs, fp32 without."""
    loss_scale: float | None = Field(None, gt=0)
    """What fp16 multiplies the loss by; not given: a factor that adapts, from 65536 on."""
    fp8: bool = False
    """Multiply in FP8 in the language model's layers (Transformer Engine on Hopper or newer), beside bf16."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise"] = "delayed"
    """How FP8 values are scaled: by the largest value of earlier steps, of this tensor, or of its blocks."""
    fp8_format: Literal["hybrid", "e4m3"] = "hybrid"
    """FP8 numbers: e4m3 forward and e5m2 for gradients (hybrid), or e4m3 for all."""
    fp8_first_layers_bf16: int = Field(0, ge=0)
    """First layers of the language model that stay in bf16 (not with the delayed recipe)."""
    fp8_last_layers_bf16: int = Field(0, ge=0)
    """Last layers of the language model that stay in bf16 (not with the delayed recipe)."""
    seed: int = Field(1234, ge=0)
    """Seed of initialisation, dropout and shuffling."""
    deterministic: bool = False
    """Use only deterministic kernels: equal runs give equal bits, more slowly."""


class LoggingConfig(Section):
    """What is reported."""

    log_interval: int = Field(1, ge=1)
    """Iterations between two lines on the console; metrics.jsonl gets every iteration."""
    tensorboard: bool = False
    """Also write TensorBoard's event files, in SAVE_DIR/NAME/tensorboard."""
    wandb: bool = False
    """Also log to Weights & Biases; a resumed run goes on in the same one. WANDB_MODE=offline needs no network."""
    wandb_project: str = "llava_mcore"
    """Project of Weights & Biases that the run belongs to."""
    debug: bool = False
    """Print the first batch in words, trained parts marked, and the shapes that enter and leave each part of the model
    on every pipeline stage."""


class RunConfig(Section):
    """One training run."""

    name: Annotated[str, AfterValidator(_folder_name)] = "run"
    """Name of the run, and of its folder under the save folder."""
    stage: Annotated[Literal[1, 2], BeforeValidator(_number)] = 2
    """Training stage; it sets the defaults of the learning rate and the global batch size."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig
    training: TrainingConfig
    logging: LoggingConfig = LoggingConfig()
    faults: FaultConfig = FaultConfig()
    launch: LaunchConfig = LaunchConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_stage_defaults(cls, values: Any) -> Any:
        """Put the stage's defaults where nothing was given; leave every mistake for the fields to report."""
        if not isinstance(values, dict):
            return values
        stage = str(values.get("stage", cls.model_fields["stage"].default))
        filled = dict(values)
        for dotted, default in STAGE_DEFAULTS[int(stage) if stage in ("1", "2") else 2].items():
            section, field = dotted.split(".")
            given = filled.setdefault(section, {})
            if isinstance(given, dict):
                filled[section] = {field: default, **given}
        return filled

    @property
    def run_dir(self) -> Path:
        """SAVE_DIR/NAME. Only for runs that passed `check_run`, which demands a save folder."""
        assert self.checkpoint.save_dir is not None
        return self.checkpoint.save_dir / self.name
