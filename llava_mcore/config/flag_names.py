"""The table of a run's command-line flags and the configuration keys that they set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """One flag. `names`: as for argparse, the long name last; `key` is the dotted configuration key."""

    key: str
    names: tuple[str, ...]
    value: str | None = None
    """Value that the flag sets, if the key is not a switch itself."""
    many: bool = False
    """Takes several values, separated by spaces or commas."""

    @property
    def long_name(self) -> str:
        return self.names[-1]


FLAGS: dict[str, tuple[Flag, ...]] = {
    "GPU": (
        Flag("launch.num_gpus", ("-g", "--gpus")),
        Flag("launch.gpu_ids", ("--gpu-ids",)),
    ),
    "logging": (
        Flag("name", ("--name",)),
        Flag("logging.log_interval", ("--log-interval",)),
        Flag("logging.tensorboard", ("--tensorboard",)),
        Flag("logging.wandb", ("--wandb",)),
        Flag("logging.mlflow", ("--mlflow",)),
        Flag("logging.debug", ("--debug",)),
        Flag("logging.profile", ("--profile",)),
    ),
    "save and load": (
        Flag("checkpoint.load", ("--megatron-load-dir",)),
        Flag("checkpoint.hf_dir", ("--tokenizer-load-dir",)),
        Flag("checkpoint.save_dir", ("--save-dir",)),
        Flag("checkpoint.save", ("--save",)),
        Flag("checkpoint.save_interval", ("--save-interval",)),
        Flag("checkpoint.async_save", ("--async-save",)),
        Flag("checkpoint.keep_last", ("--keep-last",)),
        Flag("checkpoint.keep_every", ("--keep-every",)),
        Flag("checkpoint.non_persistent_save_interval", ("--non-persistent-save-interval",)),
        Flag("checkpoint.non_persistent_dir", ("--non-persistent-ckpt-dir",)),
        Flag("checkpoint.non_persistent_local_dir", ("--non-persistent-local-ckpt-dir",)),
        Flag("checkpoint.save_optim", ("--save-optim",)),
        Flag("checkpoint.load_optim", ("--load-optim",)),
        Flag("checkpoint.skip_verification", ("--no-verify-checkpoint",)),
        Flag("checkpoint.init", ("--init",)),
        Flag("launch.sif_path", ("--sif-path",)),
    ),
    "several machines": (
        Flag("launch.num_nodes", ("--node",)),
        Flag("launch.node_rank", ("-r", "--rank")),
        Flag("launch.master_addr", ("-m", "--master-addr")),
        Flag("launch.master_port", ("-p", "--rdzv-port", "--master-port")),
        Flag("launch.interface", ("--interface",)),
    ),
    "SLURM": (
        Flag("launch.slurm_job_id", ("--slurm-job-id",)),
        Flag("launch.slurm_output_name", ("--slurm-output-name",)),
        Flag("launch.sbatch_options", ("--sbatch-options",)),
    ),
    "data": (
        Flag("data.path", ("--data-path",)),
        Flag("data.seq_length", ("--seq-length",)),
        Flag("data.num_workers", ("--num-workers",)),
        Flag("data.packing", ("--packing",)),
        Flag("data.on_too_long", ("--on-too-long",)),
        Flag("data.max_skip_rate", ("--max-skip-rate",)),
        Flag("data.image_token_id", ("--image-token-id",)),
        Flag("data.pad_token_id", ("--pad-token-id",)),
        Flag("data.min_pixels", ("--min-pixels",)),
        Flag("data.max_pixels", ("--max-pixels",)),
        Flag("data.video_min_pixels", ("--video-min-pixels",)),
        Flag("data.video_max_pixels", ("--video-max-pixels",)),
        Flag("data.chat_template", ("--chat-template",)),
        Flag("data.lang", ("--lang",)),
    ),
    "parallel": (
        Flag("parallel.tensor_model_parallel_size", ("--tp",)),
        Flag("parallel.pipeline_model_parallel_size", ("--pp",)),
        Flag("parallel.sequence_parallel", ("--sequence-parallel",)),
        Flag("parallel.vision_data_parallel", ("--vision-data-parallel",)),
        Flag("parallel.use_distributed_optimizer", ("--dist-optim",)),
        Flag("parallel.backend", ("--backend",)),
    ),
    "training": (
        Flag("stage", ("--stage",)),
        Flag("model.freeze_language_model", ("--freeze-lm",)),
        Flag("training.train_iters", ("--train-iters",)),
        Flag("training.train_samples", ("--train-samples",)),
        Flag("training.micro_batch_size", ("--micro-batch-size",)),
        Flag("training.global_batch_size", ("--global-batch-size",)),
        Flag("training.rampup_batch_size", ("--rampup-batch-size",)),
        Flag("optimizer.lr", ("--lr",)),
        Flag("optimizer.lr_decay_style", ("--lr-decay-style",)),
        Flag("optimizer.lr_wsd_decay_style", ("--lr-wsd-decay-style",)),
        Flag("optimizer.lr_wsd_decay_iters", ("--lr-wsd-decay-iters",)),
        Flag("optimizer.lr_wsd_decay_samples", ("--lr-wsd-decay-samples",)),
        Flag("optimizer.adam_beta2", ("--adam-beta2",)),
        Flag("training.precision", ("--precision",)),
        Flag("training.loss_scale", ("--loss-scale",)),
        Flag("model.drop_class_token", ("--no-add-class-token",)),
        Flag("model.attention_backend", ("--fused-attn",), "fused"),
        Flag("model.attention_backend", ("--flash-attn",), "flash"),
        Flag("training.fp8", ("--fp8",)),
        Flag("training.fp8_vision", ("--fp8-vision",)),
        Flag("training.fp8_recipe", ("--fp8-recipe",)),
        Flag("training.fp8_format", ("--fp8-format",)),
        Flag("model.recompute", ("--recompute",)),
        Flag("model.cuda_graphs", ("--cuda-graphs",)),
        Flag("model.cuda_graphs_vision", ("--cuda-graphs-vision",)),
        Flag("training.deterministic", ("--deterministic",)),
    ),
    "adapters": (
        Flag("adapter.r", ("--lora-r",)),
        Flag("adapter.alpha", ("--lora-alpha",)),
        Flag("adapter.dropout", ("--lora-dropout",)),
        Flag("adapter.targets", ("--lora-targets",), many=True),
        Flag("adapter.modules_to_save", ("--lora-modules-to-save",), many=True),
        Flag("adapter.dora", ("--lora-dora",)),
        Flag("adapter.rslora", ("--lora-rslora",)),
        Flag("adapter.quantize", ("--lora-quantize",)),
    ),
    "validation": (
        Flag("validation.eval_interval", ("--eval-interval",)),
        Flag("validation.eval_iters", ("--eval-iters",)),
        Flag("validation.eval_generate", ("--eval-generate",)),
        Flag("validation.eval_generate_samples", ("--eval-generate-samples",)),
        Flag("validation.eval_generate_max_new_tokens", ("--eval-generate-max-new-tokens",)),
    ),
    "faults and limits": (
        Flag("faults.timeout", ("--timeout",)),
        Flag("faults.exit_duration_in_mins", ("--exit-duration-in-mins",)),
        Flag("faults.on_nan", ("--on-nan",)),
        Flag("faults.alert_spike", ("--alert-spike",)),
        Flag("faults.spike_thr", ("--spike-thr",)),
        Flag("faults.skip_train_iteration_range", ("--skip-train-iteration-range",), many=True),
    ),
}
ALWAYS_ON_FLAGS = {
    "--dist-ckpt": "all checkpoints are distributed and load at any layout",
}
"""Flags of other launchers whose feature is always on here."""
ALL_FLAGS = tuple(flag for group in FLAGS.values() for flag in group)
