"""Configuration files of Hugging Face style trainers: every key is mapped, or refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llava_mcore.build.architectures.registry import folder_class
from llava_mcore.build.options import ARCHITECTURES as BUILT
from llava_mcore.build.options import BuildOptions
from llava_mcore.cli import show_config
from llava_mcore.config.flags import parse_command_line
from llava_mcore.config.load import config_fields, load_run_config
from llava_mcore.config.model_classes import MODEL_CLASSES
from llava_mcore.config.rules.trainer_list import KEYS, _RefusedValueError
from llava_mcore.errors import ConfigError
from llava_mcore.models.architectures.registry import ARCHITECTURES
from tests.unit.config.test_config import message_of, values_of


def write(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "run.json"
    path.write_text(json.dumps([{"type": "trainer", "config": config}]))
    return path


EXAMPLE: dict[str, Any] = {
    "trainer_type": "hf_trainer",
    "dataset_config": {
        "dataset_type": "vision",
        "dataset_format": "json",
        "dataset_path": "./data/some.json",
        "processor_config": {
            "processor_name": "Qwen/Qwen2-VL-2B-Instruct",
            "processor_modality": "vision",
            "processor_type": "blip",
        },
    },
    "model_config": {
        "model_name_or_path": "Qwen/Qwen2-VL-2B-Instruct",
        "model_class": "BlipForConditionalGeneration",
        "attn_implementation": "flash_attention_2",
    },
    "per_device_train_batch_size": 1,
    "learning_rate": 5e-05,
    "weight_decay": 0.0,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 1,
    "save_steps": 1000,
    "report_to": "wandb",
    "output_dir": "./output",
    "warmup_ratio": 0,
    "run_name": "test_run",
    "logging_steps": 1,
    "group_by_length": True,
    "dataloader_num_workers": 8,
    "bf16": True,
}


def test_what_cannot_be_mapped_is_refused_key_by_key(tmp_path: Path) -> None:
    config = EXAMPLE | {"learning_rat": 1, "warmup_ratio": 2}
    message = message_of(lambda: load_run_config(write(tmp_path, config)))
    for expected in (
        "(9 problems)",
        "dataset_config.dataset_format (in",
        "data/some.json: convert it to shards",
        "dataset_config.processor_config.processor_type (in",
        "Qwen/Qwen2-VL-2B-Instruct is not a Megatron checkpoint",
        "model_config.model_class (in",
        "gradient_accumulation_steps (in",
        "give --global-batch-size instead",
        "group_by_length (in",
        "learning_rat (in",
        "no such key (did you mean learning_rate?)",
        f"optimizer.lr_warmup_fraction (warmup_ratio in {tmp_path}/run.json): found 2, expected less than 1",
    ):
        assert expected in message


def test_the_command_line_replaces_what_is_refused(tmp_path: Path) -> None:
    """All but the unknown class and processor of the example."""
    kind = {"model_class": "Qwen2VLForConditionalGeneration", "model_name_or_path": "hub/name"}
    processor = EXAMPLE["dataset_config"]["processor_config"] | {"processor_type": "qwen2_vl"}
    data = EXAMPLE["dataset_config"] | {"processor_config": processor}
    path = write(tmp_path, EXAMPLE | {"model_config": kind, "dataset_config": data, "use_liger_kernel": True})
    typed = ["--data-path", "/shards", "--megatron-load-dir", "/m", "--global-batch-size", "4", "--packing"]
    run = parse_command_line(["--config", str(path), *typed], "run.py").load()
    assert (run.data.path, run.checkpoint.load, run.data.packing) == (Path("/shards"), Path("/m"), True)
    assert (run.training.global_batch_size, run.training.train_epochs, run.optimizer.lr) == (4, 1, 5e-5)
    # Each of them replaces its own only.
    message = message_of(lambda: parse_command_line(["--config", str(path), *typed[:4]], "run.py").load())
    assert "(2 problems)" in message and "gradient_accumulation_steps (in" in message and "group_by_length" in message


def test_mapped_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Values of the other trainer's lists are read as ours."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("0\n")
    processor = {"processor_name": "/hf", "processor_modality": "vision", "processor_type": "qwen2_vl"}
    kind = {"model_class": "Qwen2VLForConditionalGeneration"}
    config = {
        "trainer_type": "megatron",
        "dataset_config": {"dataset_type": "vision", "dataset_path": "/shards", "processor_config": processor},
        "model_config": {
            "model_name_or_path": str(tmp_path / "megatron"),
            **kind,
            "attn_implementation": "flash_attention_2",
        },
        **{"per_device_train_batch_size": 3, "max_steps": 70, "learning_rate": 5e-5, "lr_scheduler_type": "linear"},
        **{"weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6, "max_grad_norm": 2.0},
        **{"warmup_ratio": 0.1, "save_steps": 10, "save_total_limit": 2, "output_dir": "/out", "run_name": "n"},
        **{"logging_steps": 5, "report_to": ["wandb", "tensorboard"], "dataloader_num_workers": 8, "seed": 7},
        **{"bf16": True, "fp16": False, "use_rmpad": True, "gradient_checkpointing": True},
        **{"group_by_length": False, "use_liger_kernel": False},
    }
    path = write(tmp_path, config)
    default, run = values_of(load_run_config()), values_of(load_run_config(path))
    changed = {key: value for key, value in run.items() if value != default[key]}
    assert changed == {
        "name": "n",
        "checkpoint.load": tmp_path / "megatron",
        "checkpoint.hf_dir": Path("/hf"),
        "checkpoint.save_dir": Path("/out"),
        "checkpoint.save_interval": 10,
        "checkpoint.keep_last": 2,
        "data.path": Path("/shards"),
        "data.num_workers": 8,
        "data.packing": True,
        "model.attention_backend": "flash",
        "model.recompute": "full",
        "optimizer.lr": 5e-5,
        "optimizer.lr_decay_style": "linear",
        "optimizer.lr_warmup_fraction": 0.1,
        "optimizer.weight_decay": 0.1,
        "optimizer.adam_beta1": 0.8,
        "optimizer.adam_beta2": 0.9,
        "optimizer.adam_eps": 1e-6,
        "optimizer.clip_grad": 2.0,
        "training.micro_batch_size": 3,
        "training.train_iters": 70,
        "training.precision": "bf16",
        "training.seed": 7,
        "logging.log_interval": 5,
        "logging.tensorboard": True,
        "logging.wandb": True,
    }
    assert load_run_config(path, [], {"optimizer.lr": "1"}).optimizer.lr == 1.0
    assert show_config.main(["--config", str(path)]) == 0
    assert "train_iters: 70" in capsys.readouterr().out


def test_every_target_is_a_key_of_ours() -> None:
    known = {key for key, _ in config_fields()}
    values = {"report_to": "wandb", "model_config.attn_implementation": "flash_attention_2"}
    plain = {"dataset_config.dataset_path": "/x", "lr_scheduler_type": "cosine"}
    reached = set()
    for key, action in KEYS.items():
        try:
            reached |= action((values | plain).get(key, 1)).keys()
        except _RefusedValueError as error:
            assert str(error), key
    assert reached <= known and len(reached) > 20


@pytest.mark.parametrize("content", ["[]", '[{"type": "saver", "config": {}}]', '[{"type": "trainer"}]', "[1]"])
def test_other_lists(tmp_path: Path, content: str) -> None:
    """A list that is no configuration of that trainer is refused."""
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ConfigError, match="found a list that is not"):
        load_run_config(tmp_path / "a.json")


def test_the_register_names_the_classes_of_transformers() -> None:
    for model_type, row in MODEL_CLASSES.items():
        architecture = ARCHITECTURES[model_type]
        assert (architecture.config_class.model_type, architecture.model_class.__name__) == (model_type, row.name)
    assert ARCHITECTURES.keys() == MODEL_CLASSES.keys()


def test_a_build_writes_the_class_of_its_row() -> None:
    for model_type in BUILT:
        assert folder_class(BuildOptions(Path("out"), "text", architecture=model_type)).architecture == model_type
