"""A key that has an effect only beside another one is refused without it, and with it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from llava_mcore.cli import train
from llava_mcore.config.flags import name_of, parse_command_line
from llava_mcore.config.load import config_fields, load_run_config, save_run_config
from llava_mcore.config.needs import NEEDS, check_needs, words_of

# key -> a value that is not its default, and what it needs
CASES: dict[str, tuple[str, list[str]]] = {
    "launch.image": ("x", ["launch.k8s=jobset"]),
    "launch.volumes": ("a:/b", ["launch.vertex=m"]),
    "launch.job_options": ("/o.yaml", ["launch.k8s=jobset"]),
    "logging.wandb_project": ("x", ["logging.wandb=true"]),
    "logging.mlflow_experiment": ("x", ["logging.mlflow=true"]),
    "logging.memory_snapshot_ranks": ("0", ["logging.memory_snapshot=2"]),
    "logging.profile_ranks": ("0", ["logging.profile=1:2"]),
    "checkpoint.save_optim": ("true", ["checkpoint.save=true"]),
    "checkpoint.keep_last": ("2", ["checkpoint.save_interval=5"]),
    "checkpoint.keep_every": ("2", ["checkpoint.keep_last=2", "checkpoint.save=true"]),
    "checkpoint.async_save": ("true", ["checkpoint.non_persistent_save_interval=5"]),
    "checkpoint.non_persistent_dir": ("/d", ["checkpoint.non_persistent_save_interval=5"]),
    "checkpoint.non_persistent_local_dir": ("/d", ["checkpoint.non_persistent_save_interval=5"]),
    "data.max_waiting_bytes": ("1000", ["data.packing=true"]),
    "data.packing_buffer_size": ("8", ["data.packing=true"]),
    "data.sample_multiple": ("8", ["data.packing=true"]),
    "model.cuda_graphs": ("true", ["data.packing=true"]),
    "model.cuda_graphs_vision": ("true", ["model.cuda_graphs=true", "data.packing=true"]),
    "model.recompute_modules": ("core_attn", ["model.recompute=selective"]),
    "model.recompute_method": ("block", ["model.recompute=full"]),
    "model.recompute_num_layers": ("2", ["model.recompute=full"]),
    "adapter.alpha": ("8", ["adapter.r=4"]),
    "adapter.dropout": ("0.1", ["adapter.vision_r=4"]),
    "adapter.targets": ("q_proj", ["adapter.projection_r=4"]),
    "adapter.dora": ("true", ["adapter.r=4"]),
    "adapter.rslora": ("true", ["adapter.r=4"]),
    "adapter.bias": ("all", ["adapter.r=4"]),
    "adapter.modules_to_save": ("lm_head", ["adapter.r=4"]),
    "adapter.name": ("mine", ["adapter.load=/d"]),
    "adapter.quantize": ("nf4", ["adapter.r=4"]),
    "adapter.frozen": ("/d", ["adapter.r=4"]),
    "parallel.cp_comm_type": ("a2a", ["parallel.context_parallel_size=2"]),
    "parallel.cp_a2a_size": ("2", ["parallel.context_parallel_size=4", "parallel.cp_comm_type=a2a+p2p"]),
    "parallel.sequence_parallel": ("true", ["parallel.tensor_model_parallel_size=2"]),
    "parallel.tp_comm_overlap": ("true", ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]),
    "parallel.vision_data_parallel": ("true", ["parallel.tensor_model_parallel_size=2"]),
    "parallel.hsdp_replicas": ("2", ["parallel.fsdp=optim"]),
    "parallel.num_layers_in_first_pipeline_stage": ("2", ["parallel.pipeline_model_parallel_size=2"]),
    "parallel.num_layers_in_last_pipeline_stage": ("2", ["parallel.pipeline_model_parallel_size=2"]),
    "parallel.num_layers_per_virtual_pipeline_stage": ("2", ["parallel.pipeline_model_parallel_size=2"]),
    "parallel.balance": ("auto", ["parallel.pipeline_model_parallel_size=2"]),
    "optimizer.min_lr": ("1e-9", []),  # the usual schedule is not constant
    "optimizer.lr_wsd_decay_style": ("linear", ["optimizer.lr_decay_style=WSD"]),
    "optimizer.lr_wsd_decay_iters": ("2", ["optimizer.lr_decay_style=WSD"]),
    "optimizer.lr_wsd_decay_samples": ("2", ["optimizer.lr_decay_style=WSD"]),
    "optimizer.decay_norms_and_biases": ("true", ["optimizer.weight_decay=0.1"]),
    "optimizer.exp_avg_dtype": ("bf16", ["optimizer.use_precision_aware_optimizer=true"]),
    "optimizer.exp_avg_sq_dtype": ("bf16", ["optimizer.use_precision_aware_optimizer=true"]),
    "optimizer.cpu_offload": ("true", ["optimizer.use_precision_aware_optimizer=true"]),
    "optimizer.cpu_offload_fraction": (
        "0.5",
        ["optimizer.cpu_offload=true", "optimizer.use_precision_aware_optimizer=true"],
    ),
    "optimizer.muon_momentum": ("0.9", ["optimizer.name=muon"]),
    "optimizer.muon_nesterov": ("false", ["optimizer.name=muon"]),
    "optimizer.muon_steps": ("6", ["optimizer.name=muon"]),
    "optimizer.muon_coefficients": ("simple", ["optimizer.name=muon"]),
    "optimizer.muon_scale": ("shape_scaling", ["optimizer.name=muon"]),
    "optimizer.muon_scale_factor": ("1.0", ["optimizer.name=muon"]),
    "optimizer.muon_matmul_precision": ("high", ["optimizer.name=muon"]),
    "training.loss_scale": ("8", ["training.precision=fp16"]),
    "training.fp8_vision": ("true", ["training.fp8=true"]),
    "training.epoch_samples": ("9", ["training.train_epochs=2"]),
    "training.fp8_recipe": ("blockwise", ["training.fp8=true"]),
    "training.fp8_format": ("e4m3", ["training.fp8=true"]),
    "training.fp8_first_layers_bf16": ("1", ["training.fp8=true"]),
    "training.fp8_last_layers_bf16": ("1", ["training.fp8=true"]),
    "validation.eval_iters": ("1", ["validation.eval_interval=5"]),
    "validation.eval_generate_samples": ("1", ["validation.eval_generate=5"]),
    "validation.eval_generate_max_new_tokens": ("1", ["validation.eval_generate=5"]),
    "validation.eval_generate_batch_size": ("1", ["validation.eval_generate=5"]),
    "validation.eval_generate_examples": ("1", ["validation.eval_generate=5"]),
    "faults.spike_thr": ("3", ["faults.alert_spike=true"]),
}
OFF = {"optimizer.min_lr": ["optimizer.lr_decay_style=constant"]}


def found(*overrides: str) -> list[str]:
    return list(check_needs(load_run_config(None, overrides)))


def test_every_row_has_a_case() -> None:
    assert CASES.keys() == NEEDS.keys()
    known = {key for key, _ in config_fields()}
    assert known >= NEEDS.keys() | {key for needs in NEEDS.values() for key in needs.keys}


@pytest.mark.parametrize("key", CASES)
def test_without_what_it_needs(key: str) -> None:
    value, needed = CASES[key]
    (message,) = found(f"{key}={value}", *OFF.get(key, []))
    assert message.startswith(f"{name_of(key)} has no effect without {words_of(NEEDS[key])}: add that, or omit")
    assert found(f"{key}={value}", *needed) == []


def test_the_default_is_an_error_only_where_a_flag_says_it() -> None:
    run = load_run_config(None, ["training.fp8_recipe=delayed"])
    assert list(check_needs(run)) == []
    typed = parse_command_line(["--fp8-recipe", "delayed", "--spike-thr", "2"], "run.py")
    messages = list(check_needs(typed.load(), typed.typed))
    assert [message.split()[0] for message in messages] == ["--fp8-recipe", "--spike-thr"]


def test_a_file_that_a_run_wrote_holds_every_key_and_asks_for_nothing(tmp_path: Path) -> None:
    save_run_config(load_run_config(), tmp_path / "run.yaml")
    assert list(check_needs(load_run_config(tmp_path / "run.yaml"))) == []
    save_run_config(
        load_run_config(None, ["training.fp8=true", "training.fp8_recipe=blockwise"]), tmp_path / "run.yaml"
    )
    run = load_run_config(tmp_path / "run.yaml", ["training.fp8=false"])
    (message,) = check_needs(run)
    assert "(key training.fp8_recipe, default 'delayed')" in message
    run = load_run_config(tmp_path / "run.yaml", ["training.fp8=false", "training.fp8_recipe=delayed"])
    assert list(check_needs(run)) == []


def test_all_at_once_and_with_the_other_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags without effect are listed together with everything else that is wrong."""
    typed = [
        "--fp8-format",
        "hybrid",
        "--spike-thr",
        "3",
        "--sbatch-options=--partition=x",
        "data.packing_buffer_size=9",
    ]
    assert train.main([*typed, "--save-dir", str(tmp_path), "-g", "1"]) == 2
    printed = capsys.readouterr().err
    for expected in (
        "--fp8-format has no effect without --fp8: add that",
        "--spike-thr has no effect without --alert-spike",
        "data.packing_buffer_size has no effect without --packing",
        "--sbatch-options has no effect without --submit",
    ):
        assert expected in printed


def test_values_that_ask_for_nothing_need_nothing(tmp_path: Path) -> None:
    """A run that is started again without --tp still has `off` in its file, older ones `false`."""
    for value in ("auto", "off", "false"):
        assert found(f"parallel.vision_data_parallel={value}") == []
    assert parse_command_line(["--vision-data-parallel", "off"], "train").load().parallel.vision_data_parallel == "off"
    for old, new in ((True, "on"), (False, "off")):
        (tmp_path / "old.yaml").write_text(f"parallel: {{vision_data_parallel: {old}}}\n", encoding="utf-8")
        run = load_run_config(tmp_path / "old.yaml", [])
        assert run.parallel.vision_data_parallel == new
        save_run_config(run, tmp_path / "new.yaml")
        assert load_run_config(tmp_path / "new.yaml", []) == run


def test_a_choice_may_stand_alone_before_other_words() -> None:
    line = parse_command_line(["--vision-data-parallel", "training.seed=7", "--tp", "2"], "train")
    run = line.load()
    assert run.parallel.vision_data_parallel == "on" and run.training.seed == 7
    assert "parallel.vision_data_parallel" in line.typed
