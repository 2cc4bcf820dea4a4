"""Configuration files in the style of Hugging Face trainers: a list of {"type": "trainer", "config": {…}}.

Every key is mapped to one of ours or refused with a reason, unless the command line gives ours; none is ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from llava_mcore.config.model_classes import MODEL_CLASSES
from llava_mcore.errors import ConfigError

Values = dict[str, Any]
"""Our dotted keys -> values, for one of their keys."""


class _RefusedValueError(Exception):
    """A value that is not supported; the message says why and what to do.

    replaced_by: our key for the same setting; if the command line gives it, the value is ignored.
    """

    def __init__(self, message: str, replaced_by: str | None = None) -> None:
        super().__init__(message)
        self.replaced_by = replaced_by


def _to(key: str) -> Callable[[Any], Values]:
    return lambda value: {key: value}


def _refuse(reason: str, replaced_by: str | None = None) -> Callable[[Any], Values]:
    def action(_value: Any) -> Values:
        raise _RefusedValueError(reason, replaced_by)

    return action


def _unless_off(reason: str, replaced_by: str) -> Callable[[Any], Values]:
    """A switch that may be off and cannot be on."""

    def action(value: Any) -> Values:
        if value:
            raise _RefusedValueError(reason, replaced_by)
        return {}

    return action


def _always_on(_value: Any) -> Values:
    """A switch for a feature that is always on here."""
    return {}


def _only(*allowed: str, instead: str, replaced_by: str | None = None) -> Callable[[Any], Values]:
    """A value that has to match what is fixed here."""

    def action(value: Any) -> Values:
        if value not in allowed:
            raise _RefusedValueError(instead, replaced_by)
        return {}

    return action


def _precision(name: str) -> Callable[[Any], Values]:
    return lambda value: {"training.precision": name} if value else {}


def _report_to(value: Any) -> Values:
    names = value if isinstance(value, list) else [value]
    known = {"wandb": "logging.wandb", "tensorboard": "logging.tensorboard", "mlflow": "logging.mlflow"}
    wrong = [name for name in names if name not in (*known, "none")]
    if wrong:
        raise _RefusedValueError(f"found {wrong[0]!r}, expected wandb, tensorboard, mlflow or none")
    return {known[name]: True for name in names if name in known}


def _attention(value: Any) -> Values:
    if value == "flash_attention_2":
        return {"model.attention_backend": "flash"}
    if value == "sdpa":
        return {}
    raise _RefusedValueError(f"found {value!r}, expected flash_attention_2 or sdpa")


def _model(value: Any) -> Values:
    if (Path(str(value)) / "latest_checkpointed_iteration.txt").is_file():
        return {"checkpoint.load": value}
    raise _RefusedValueError(
        f"{value} is not a Megatron checkpoint: convert it with 'python -m llava_mcore import-hf --hf-dir … "
        "--megatron-dir FOLDER' and give that folder, here or as --megatron-load-dir",
        "checkpoint.load",
    )


def _dataset(value: Any) -> Values:
    if Path(str(value)).suffix in (".json", ".jsonl", ".parquet"):
        raise _RefusedValueError(
            f"{value}: convert it to shards with 'python -m llava_mcore prepare {value} --out FOLDER …' and give their "
            "folder, here or as --data-path",
            "data.path",
        )
    return {"data.path": value}


_FSDP = "parallel.fsdp"


def _fsdp(value: Any) -> Values:
    """Return how much is divided; HYBRID_SHARD leaves open between how many replicas."""
    words = set(str(value).lower().split()) - {"auto_wrap"}
    if not value:
        return {}
    if words == {"full_shard"}:
        return {_FSDP: "optim_grads_params"}
    if words == {"shard_grad_op"}:
        return {_FSDP: "optim_grads"}
    raise _RefusedValueError(
        f"found {value!r}, expected full_shard or shard_grad_op, with or without auto_wrap; for hybrid_shard give "
        "--fsdp optim_grads_params --hsdp REPLICAS",
        _FSDP,
    )


_CLASS_NAMES = [row.name for row in MODEL_CLASSES.values()]
KEYS: dict[str, Callable[[Any], Values]] = {
    "trainer_type": _only("megatron", "hf_trainer", instead="there is one trainer, on megatron-core: omit the key"),
    "dataset_config.dataset_type": _only("vision", instead="samples say which media they have: use vision, or omit it"),
    "dataset_config.dataset_format": _only(
        "energon",
        instead="convert it to shards first, with 'python -m llava_mcore prepare', and give them as --data-path",
        replaced_by="data.path",
    ),
    "dataset_config.dataset_path": _dataset,
    "dataset_config.packing": _to("data.packing"),
    "dataset_config.processor_config.processor_name": _to("checkpoint.hf_dir"),
    "dataset_config.processor_config.processor_modality": _only("vision", instead="use vision, or omit it"),
    "dataset_config.processor_config.processor_type": _only(
        *MODEL_CLASSES, instead=f"known: {', '.join(MODEL_CLASSES)}; the checkpoint's own processor is used"
    ),
    "model_config.model_name_or_path": _model,
    "model_config.model_class": _only(*_CLASS_NAMES, instead=f"known: {', '.join(_CLASS_NAMES)}"),
    "model_config.attn_implementation": _attention,
    "per_device_train_batch_size": _to("training.micro_batch_size"),
    "gradient_accumulation_steps": _refuse(
        "depends on the number of GPUs: give --global-batch-size instead, per_device_train_batch_size x "
        "gradient_accumulation_steps x data-parallel ranks",
        "training.global_batch_size",
    ),
    "num_train_epochs": _to("training.train_epochs"),
    "max_steps": _to("training.train_iters"),
    "learning_rate": _to("optimizer.lr"),
    "lr_scheduler_type": _to("optimizer.lr_decay_style"),
    "warmup_ratio": _to("optimizer.lr_warmup_fraction"),
    "weight_decay": _to("optimizer.weight_decay"),
    "adam_beta1": _to("optimizer.adam_beta1"),
    "adam_beta2": _to("optimizer.adam_beta2"),
    "adam_epsilon": _to("optimizer.adam_eps"),
    "max_grad_norm": _to("optimizer.clip_grad"),
    "save_steps": _to("checkpoint.save_interval"),
    "save_total_limit": _to("checkpoint.keep_last"),
    "output_dir": _to("checkpoint.save_dir"),
    "run_name": _to("name"),
    "logging_steps": _to("logging.log_interval"),
    "report_to": _report_to,
    "dataloader_num_workers": _to("data.num_workers"),
    "seed": _to("training.seed"),
    "bf16": _precision("bf16"),
    "fp16": _precision("fp16"),
    "use_rmpad": _to("data.packing"),
    "group_by_length": _unless_off(
        "samples are not sorted by length; --packing (use_rmpad) saves the padding", "data.packing"
    ),
    "use_liger_kernel": _always_on,  # its main part: the loss never keeps all logits in memory
    "gradient_checkpointing": lambda value: {"model.recompute": "full"} if value else {},
    "deepspeed": _refuse(
        "--fsdp optim, optim_grads and optim_grads_params are what its ZeRO 1, 2 and 3 are: give one of them", _FSDP
    ),
    "fsdp": _fsdp,
    "fsdp_config": _refuse("wrapping, prefetching and the form of checkpoints have no settings here: omit it", _FSDP),
}


def translate(
    content: list[Any], file: Path, typed: Collection[str] = ()
) -> tuple[list[tuple[str, Any, str]], list[str]]:
    """Return the settings of a trainer list.

    Args:
        typed: our keys that the command line sets.

    Returns:
        (our key, value, their key) for each value, and one line for each key that is refused or unknown.

    Raises:
        ConfigError: the file is not a list of exactly one trainer.
    """
    trainers = [entry for entry in content if isinstance(entry, Mapping) and entry.keys() == {"type", "config"}]
    if len(content) != 1 or not trainers or trainers[0]["type"] != "trainer" or not _is_section(trainers[0]["config"]):
        raise ConfigError(
            f"{file}: expected a mapping of sections to values, found a list that is not "
            '[{"type": "trainer", "config": {…}}] with one trainer'
        )
    # Each key is one of ours, or refused; all refusals are reported together.
    values: list[tuple[str, Any, str]] = []
    refused: list[str] = []
    for key, value in _leaves(trainers[0]["config"]):
        if key not in KEYS:
            refused.append(f"{key} (in {file}): no such key{_suggestion(key)}")
            continue
        try:
            values += [(our_key, our_value, key) for our_key, our_value in KEYS[key](value).items()]
        except _RefusedValueError as error:
            if error.replaced_by in typed:
                continue
            refused.append(f"{key} (in {file}): {error}")
    return values, refused


def _is_section(value: Any) -> bool:
    return isinstance(value, Mapping)


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value); a mapping at a key that is known itself is its value."""
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in KEYS:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _suggestion(key: str) -> str:
    close = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.7)
    return f" (did you mean {close[0]}?)" if close else ""
