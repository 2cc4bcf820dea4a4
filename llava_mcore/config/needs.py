"""Keys that only have an effect together with another one. The table is checked, and shown in docs/flags.md."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

from llava_mcore.config.flag_names import ALL_FLAGS
from llava_mcore.config.load import config_fields, excerpt
from llava_mcore.config.schema import RunConfig

_NAMES = {flag.key: flag.long_name for flag in ALL_FLAGS if flag.value is None}


def name_of(key: str) -> str:
    """Return the name by which users set a key: its flag, if there is one."""
    return _NAMES.get(key, key)


@dataclass(frozen=True)
class Condition:
    """Condition for a key to have an effect: `test` is true for the value of one of `keys`. `words` describe it."""

    keys: tuple[str, ...]
    test: Callable[[Any], bool]
    words: str

    def holds(self, run: RunConfig) -> bool:
        """Return whether a run meets it."""
        return any(self.test(value_of(run, key)) for key in self.keys)


def _is_set(*keys: str) -> Condition:
    """A switch is on, or a value is given, of one of the keys."""
    return Condition(keys, bool, " or ".join(map(name_of, keys)))


def _is(key: str, value: str) -> Condition:
    return Condition((key,), lambda current: bool(current == value), f"{name_of(key)} {value}")


def _several(key: str) -> Condition:
    return Condition((key,), lambda current: bool(current > 1), f"{name_of(key)} 2 or more")


_SAVING = _is_set("checkpoint.save", "checkpoint.save_interval")
_FP8 = _is_set("training.fp8")
_PRECISION_AWARE = _is_set("optimizer.use_precision_aware_optimizer")
_WSD = _is("optimizer.lr_decay_style", "WSD")
_PIPELINE = _several("parallel.pipeline_model_parallel_size")
_NON_PERSISTENT = _is_set("checkpoint.non_persistent_save_interval")
_LORA = _is_set("adapter.r", "adapter.vision_r", "adapter.projection_r")
_ADAPTER = _is_set("adapter.r", "adapter.vision_r", "adapter.projection_r", "adapter.load")

NEEDS: dict[str, Condition] = {
    "logging.wandb_project": _is_set("logging.wandb"),
    "logging.mlflow_experiment": _is_set("logging.mlflow"),
    "logging.profile_ranks": _is_set("logging.profile"),
    "checkpoint.save_optim": _SAVING,
    "checkpoint.keep_last": _SAVING,
    "checkpoint.keep_every": _is_set("checkpoint.keep_last"),  # without it, nothing is deleted
    # A run always waits for its last checkpoint.
    "checkpoint.async_save": _is_set("checkpoint.save_interval", "checkpoint.non_persistent_save_interval"),
    "checkpoint.non_persistent_dir": _NON_PERSISTENT,
    "checkpoint.non_persistent_local_dir": _NON_PERSISTENT,
    "data.packing_buffer_size": _is_set("data.packing"),
    "model.cuda_graphs": _is_set("data.packing"),  # other batches have other lengths
    "model.cuda_graphs_vision": _is_set("model.cuda_graphs"),
    "model.recompute_modules": _is("model.recompute", "selective"),
    "model.recompute_method": _is("model.recompute", "full"),
    "model.recompute_num_layers": _is("model.recompute", "full"),
    **{
        f"adapter.{name}": _LORA
        for name in ("alpha", "dropout", "targets", "dora", "rslora", "bias", "modules_to_save")
    },
    **{f"adapter.{name}": _ADAPTER for name in ("name", "frozen", "quantize")},
    "parallel.sequence_parallel": _several("parallel.tensor_model_parallel_size"),
    "parallel.vision_data_parallel": _several("parallel.tensor_model_parallel_size"),
    "parallel.num_layers_in_first_pipeline_stage": _PIPELINE,
    "parallel.num_layers_in_last_pipeline_stage": _PIPELINE,
    "parallel.num_layers_per_virtual_pipeline_stage": _PIPELINE,
    "optimizer.min_lr": Condition(
        ("optimizer.lr_decay_style",), lambda current: bool(current != "constant"), "a schedule that is not constant"
    ),
    "optimizer.lr_wsd_decay_style": _WSD,
    "optimizer.lr_wsd_decay_iters": _WSD,
    "optimizer.lr_wsd_decay_samples": _WSD,
    "optimizer.decay_norms_and_biases": _is_set("optimizer.weight_decay"),
    "optimizer.exp_avg_dtype": _PRECISION_AWARE,
    "optimizer.exp_avg_sq_dtype": _PRECISION_AWARE,
    "optimizer.cpu_offload": _PRECISION_AWARE,
    "optimizer.cpu_offload_fraction": _is_set("optimizer.cpu_offload"),
    "training.loss_scale": _is("training.precision", "fp16"),
    "training.fp8_vision": _FP8,
    "training.fp8_recipe": _FP8,
    "training.fp8_format": _FP8,
    "training.fp8_maximum_over": _FP8,
    "training.fp8_first_layers_bf16": _FP8,
    "training.fp8_last_layers_bf16": _FP8,
    "validation.eval_iters": _is_set("validation.eval_interval"),
    **{
        f"validation.eval_generate_{name}": _is_set("validation.eval_generate")
        for name in ("samples", "max_new_tokens", "batch_size", "examples")
    },
    "faults.spike_thr": _is_set("faults.alert_spike"),
}


def check_needs(run: RunConfig, typed: Collection[str] = ()) -> Iterator[str]:
    """Yield keys that were set but have no effect.

    A key counts as set if its value is not the default, or if it is in `typed`, the keys of flags on the command
    line: a file written by a run contains every key.
    """
    fields = dict(config_fields())
    for key, condition in NEEDS.items():
        default = fields[key].default
        value = value_of(run, key)
        if (value != default or key in typed) and not condition.holds(run):
            name = name_of(key)
            back = "" if value == default or default in (None, False) else f" (key {key}, default {excerpt(default)})"
            yield f"{name} has no effect without {condition.words}: add that, or omit {name}{back}"


def value_of(run: RunConfig, key: str) -> Any:
    """Return the value of a dotted key."""
    return reduce(lambda section, name: getattr(section, name), key.split("."), run)
