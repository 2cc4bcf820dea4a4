"""Reading a run's configuration: precedence, messages, and that every flag does what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llava_mcore.__main__ import main
from llava_mcore.cli import show_config
from llava_mcore.cli.base.commands import COMMANDS
from llava_mcore.config.flag_table import flag_table
from llava_mcore.config.flags import ALL_FLAGS, TRAINER_NAMES, make_parser, parse_command_line
from llava_mcore.config.load import (
    REMOVED_KEYS,
    RENAMED_KEYS,
    as_run_config,
    config_fields,
    load_run_config,
    run_config_yaml,
    save_run_config,
    settings_of_file,
)
from llava_mcore.config.schema import RunConfig
from llava_mcore.config.sections.faults import parse_ranges
from llava_mcore.errors import ConfigError

# flag as typed -> key -> value it must have; every value differs from the default
FLAG_TABLE: list[tuple[str, str, Any]] = [
    ("-g 3", "launch.num_gpus", 3),
    ("--gpus 3", "launch.num_gpus", 3),
    ("--gpu-ids 0,2", "launch.gpu_ids", "0,2"),
    ("--node 3", "launch.num_nodes", 3),
    ("-r 1", "launch.node_rank", 1),
    ("--rank 1", "launch.node_rank", 1),
    ("-m host", "launch.master_addr", "host"),
    ("--master-addr host", "launch.master_addr", "host"),
    ("-p 4000", "launch.master_port", 4000),
    ("--rdzv-port 4000", "launch.master_port", 4000),
    ("--master-port 4000", "launch.master_port", 4000),
    ("--interface eth1", "launch.interface", "eth1"),
    ("--slurm-job-id 77", "launch.slurm_job_id", "77"),
    ("--slurm-output-name /o.txt", "launch.slurm_output_name", "/o.txt"),
    ("--sbatch-options x", "launch.sbatch_options", "x"),
    ("--k8s jobset", "launch.k8s", "jobset"),
    ("--vertex a3-highgpu-8g", "launch.vertex", "a3-highgpu-8g"),
    ("--image reg/x:1", "launch.image", "reg/x:1"),
    ("--volume data:/data /x:/y:ro", "launch.volumes", ("data:/data", "/x:/y:ro")),
    ("--job-options /o.yaml", "launch.job_options", Path("/o.yaml")),
    ("--debug", "logging.debug", True),
    ("--profile 3:4", "logging.profile", "3:4"),
    ("--memory-snapshot 3", "logging.memory_snapshot", 3),
    ("--tensorboard", "logging.tensorboard", True),
    ("--mlflow", "logging.mlflow", True),
    ("--wandb", "logging.wandb", True),
    ("--image-token-id 4", "data.image_token_id", 4),
    ("--pad-token-id 3", "data.pad_token_id", 3),
    ("--min-pixels 3136", "data.min_pixels", 3136),
    ("--max-pixels 1003520", "data.max_pixels", 1003520),
    ("--video-min-pixels 3136", "data.video_min_pixels", 3136),
    ("--video-max-pixels 1003520", "data.video_max_pixels", 1003520),
    ("--adam-beta2 0.95", "optimizer.adam_beta2", 0.95),
    ("--loss-scale 128", "training.loss_scale", 128.0),
    ("--no-add-class-token", "model.drop_class_token", True),
    ("--fused-attn", "model.attention_backend", "fused"),
    ("--flash-attn", "model.attention_backend", "flash"),
    ("--async-save", "checkpoint.async_save", True),
    ("--keep-last 2", "checkpoint.keep_last", 2),
    ("--non-persistent-save-interval 3", "checkpoint.non_persistent_save_interval", 3),
    ("--non-persistent-ckpt-dir /n", "checkpoint.non_persistent_dir", Path("/n")),
    ("--non-persistent-local-ckpt-dir /l", "checkpoint.non_persistent_local_dir", Path("/l")),
    ("--keep-every 100", "checkpoint.keep_every", 100),
    ("--timeout 30", "faults.timeout", 30),
    ("--exit-duration-in-mins 90", "faults.exit_duration_in_mins", 90.0),
    ("--on-nan skip", "faults.on_nan", "skip"),
    ("--alert-spike", "faults.alert_spike", True),
    ("--spike-thr 3", "faults.spike_thr", 3.0),
    ("--skip-train-iteration-range 2-4", "faults.skip_train_iteration_range", "2-4"),
    ("--name abc", "name", "abc"),
    ("--log-interval 5", "logging.log_interval", 5),
    ("--megatron-load-dir /m", "checkpoint.load", Path("/m")),
    ("--tokenizer-load-dir /t", "checkpoint.hf_dir", Path("/t")),
    ("--save-dir /s", "checkpoint.save_dir", Path("/s")),
    ("--save", "checkpoint.save", True),
    ("--save-interval 7", "checkpoint.save_interval", 7),
    ("--sequence-parallel", "parallel.sequence_parallel", True),
    ("--cp 2", "parallel.context_parallel_size", 2),
    ("--cp-comm-type a2a+p2p", "parallel.cp_comm_type", "a2a+p2p"),
    ("--cp-a2a-size 2", "parallel.cp_a2a_size", 2),
    ("--vision-data-parallel", "parallel.vision_data_parallel", "on"),
    ("--vision-data-parallel off", "parallel.vision_data_parallel", "off"),
    ("--ep 2", "parallel.expert_model_parallel_size", 2),
    ("--etp 2", "parallel.expert_tensor_parallel_size", 2),
    ("--recompute full", "model.recompute", "full"),
    ("--save-optim", "checkpoint.save_optim", True),
    ("--load-optim", "checkpoint.load_optim", True),
    ("--init", "checkpoint.init", True),
    ("--no-verify-checkpoint", "checkpoint.skip_verification", True),
    ("--sif-path /i.sif", "launch.sif_path", Path("/i.sif")),
    ("--data-path /d", "data.path", Path("/d")),
    ("--seq-length 4096", "data.seq_length", 4096),
    ("--num-workers 5", "data.num_workers", 5),
    ("--packing", "data.packing", True),
    ("--on-too-long error", "data.on_too_long", "error"),
    ("--max-skip-rate 0.5", "data.max_skip_rate", 0.5),
    ("--chat-template vicuna", "data.chat_template", "vicuna"),
    ("--lang jp", "data.lang", "jp"),
    ("--tp 2", "parallel.tensor_model_parallel_size", 2),
    ("--pp 4", "parallel.pipeline_model_parallel_size", 4),
    ("--dist-optim", "parallel.use_distributed_optimizer", True),
    ("--tp-comm-overlap", "parallel.tp_comm_overlap", True),
    ("--fsdp optim_grads", "parallel.fsdp", "optim_grads"),
    ("--hsdp 2", "parallel.hsdp_replicas", 2),
    ("--backend gloo", "parallel.backend", "gloo"),
    ("--stage 1", "stage", 1),
    ("--freeze-lm", "model.freeze_language_model", True),
    ("--train-expanded", "model.train_expanded", True),
    ("--train-expanded", "model.train_expanded", True),
    ("--train-iters 9", "training.train_iters", 9),
    ("--micro-batch-size 4", "training.micro_batch_size", 4),
    ("--global-batch-size 8", "training.global_batch_size", 8),
    ("--lr 1e-4", "optimizer.lr", 1e-4),
    ("--precision fp16", "training.precision", "fp16"),
    ("--fp8", "training.fp8", True),
    ("--fp8-recipe blockwise", "training.fp8_recipe", "blockwise"),
    ("--fp8-format e4m3", "training.fp8_format", "e4m3"),
    ("--lora-r 8", "adapter.r", 8),
    ("--lora-alpha 32", "adapter.alpha", 32),
    ("--lora-dropout 0.1", "adapter.dropout", 0.1),
    ("--lora-targets q_proj v_proj", "adapter.targets", ("q_proj", "v_proj")),
    ("--lora-modules-to-save lm_head", "adapter.modules_to_save", ("lm_head",)),
    ("--lora-dora", "adapter.dora", True),
    ("--lora-rslora", "adapter.rslora", True),
    ("--lora-quantize nf4", "adapter.quantize", "nf4"),
    ("--cuda-graphs", "model.cuda_graphs", True),
    ("--cuda-graphs-vision", "model.cuda_graphs_vision", True),
    ("--fp8-vision", "training.fp8_vision", True),
    ("--deterministic", "training.deterministic", True),
    ("--train-samples 900", "training.train_samples", 900),
    ("--train-epochs 0.5", "training.train_epochs", 0.5),
    ("--rampup-batch-size 2,2,100", "training.rampup_batch_size", "2,2,100"),
    ("--lr-decay-style WSD", "optimizer.lr_decay_style", "WSD"),
    ("--lr-wsd-decay-style linear", "optimizer.lr_wsd_decay_style", "linear"),
    ("--lr-wsd-decay-iters 3", "optimizer.lr_wsd_decay_iters", 3),
    ("--lr-wsd-decay-samples 30", "optimizer.lr_wsd_decay_samples", 30),
    ("--eval-interval 3", "validation.eval_interval", 3),
    ("--eval-iters 4", "validation.eval_iters", 4),
    ("--eval-generate 3", "validation.eval_generate", 3),
    ("--eval-generate-samples 4", "validation.eval_generate_samples", 4),
    ("--eval-generate-max-new-tokens 5", "validation.eval_generate_max_new_tokens", 5),
]


def values_of(run: RunConfig) -> dict[str, Any]:
    """Return every value by its dotted key."""
    flat = {}
    for key, _ in config_fields():
        value: Any = run
        for part in key.split("."):
            value = getattr(value, part)
        flat[key] = value
    return flat


def message_of(action: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as raised:
        action()
    return str(raised.value)


@pytest.mark.parametrize(("typed", "key", "value"), FLAG_TABLE, ids=[row[0].split()[0] for row in FLAG_TABLE])
def test_flag_changes_its_key_and_no_other(typed: str, key: str, value: Any) -> None:
    before = values_of(load_run_config())
    after = values_of(parse_command_line(typed.split(), "run.py").load())
    changed = {name: after[name] for name in after if after[name] != before[name]}
    expected = {key: value}
    if key == "stage":
        expected |= {"optimizer.lr": 1e-3, "training.global_batch_size": 256}
    assert changed == expected


def test_every_flag_is_in_the_table_and_in_the_help() -> None:
    names = {name for flag in ALL_FLAGS for name in flag.names}
    assert names == {typed.split()[0] for typed, _, _ in FLAG_TABLE}
    text = " ".join(make_parser("run.py", "", dry_run=True).format_help().split())
    fields = dict(config_fields())
    for flag in ALL_FLAGS:
        assert flag.name in text
        assert " ".join(str(fields[flag.key].description).split()) in text
    assert "default: 0.001 in stage 1, 2e-05 in stage 2" in text
    assert "{bf16,fp16,fp32}" in text


def test_documentation_is_made_from_the_code() -> None:
    page = Path(show_config.__file__).parents[2] / "docs" / "flags.md"
    assert page.read_text(encoding="utf-8") == flag_table(), "python -m llava_mcore.config.flag_table > docs/flags.md"
    text = flag_table()
    assert all(f"`{key}`" in text for key, _ in config_fields())


def test_every_value_is_documented() -> None:
    assert [key for key, field in config_fields() if not field.description] == []


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["--tpp", "2"], "--tpp: no such flag (did you mean --tp?)"),
        (["--micro-batch", "2"], "--micro-batch: no such flag (did you mean --micro-batch-size?)"),
        (["--wandbb"], "--wandbb: no such flag (did you mean --wandb?)"),
        (["--freeze_lm"], "did you mean --freeze-lm?"),
        (["--tp"], "--tp: expected one argument"),
        (["--skip-train-iteration-range", "name=x"], "--skip-train-iteration-range: expected at least one value"),
        (["--fused-attn", "--flash-attn"], "not allowed with argument --fused-attn"),
    ],
)
def test_unknown_flag_is_an_error(typed: list[str], expected: str) -> None:
    assert expected in message_of(lambda: parse_command_line(typed, "run.py"))


@pytest.mark.parametrize("name", TRAINER_NAMES)
def test_a_trainers_flag_is_answered_with_ours(name: str) -> None:
    """What the message says is understood, and sets what the trainer's flag would."""
    for typed in (name, name.replace("-", "_").replace("__", "--", 1)):
        message = message_of(lambda typed=typed: parse_command_line([typed, "4", "--tp", "2"], "run.py"))
        assert message == f"{typed}: no such flag (did you mean {TRAINER_NAMES[name]}?)"
    for ours in TRAINER_NAMES[name].partition(",")[0].split(" or "):
        words = ours.replace("=X", "=0.5").split()
        is_whole = "=" in ours or len(words) > 1
        parsed = parse_command_line(words if is_whole else [*words, "4"], "run.py")
        assert parsed.load() != load_run_config() or "default" in TRAINER_NAMES[name]


def test_several_trainers_flags_at_once() -> None:
    """Flags of transformers' trainer are refused together, each with the flag that was probably meant."""
    typed = "--learning_rate 1e-4 --num_train_epochs 3 --bf16 --output_dir out --weight-decay=0.1"
    message = message_of(lambda: parse_command_line(typed.split(), "run.py"))
    expected = [
        "--lr",
        "--train-epochs",
        "--precision bf16",
        "--save-dir",
        "optimizer.weight_decay=X",
    ]
    lines = message.splitlines()
    assert [line.partition("did you mean ")[2] for line in lines] == [f"{x}?)" for x in expected]


def test_several_values_mix_with_overrides() -> None:
    typed = ["training.seed=7", "--skip-train-iteration-range", "100-110", "300-400,500-500", "name=x", "--lr", "1"]
    run = parse_command_line([*typed, "data.lang=jp"], "run.py").load()
    assert run.faults.skip_train_iteration_range == "100-110,300-400,500-500"
    assert (run.training.seed, run.name, run.optimizer.lr, run.data.lang) == (7, "x", 1.0, "jp")
    assert parse_ranges("100-110 300-400") == (range(100, 111), range(300, 401))
    found = message_of(parse_command_line(["--skip-train-iteration-range", "1-2", "huh"], "run.py").load)
    assert "expected ranges of iterations such as 100-110 300-300, found 'huh'" in found


def test_what_is_always_so_is_accepted_and_said() -> None:
    asked = parse_command_line(["--dist-ckpt"], "run.py")
    assert asked.load() == load_run_config() and "--dist-ckpt is always on: all checkpoints" in asked.notices[0]
    assert parse_command_line([], "run.py").notices == ()


def test_overrides_may_stand_between_flags() -> None:
    run = parse_command_line(["training.seed=7", "--tp", "2", "data.num_workers=0", "--save"], "run.py").load()
    assert (run.training.seed, run.data.num_workers, run.parallel.tensor_model_parallel_size) == (7, 0, 2)


@given(st.sets(st.sampled_from(["file", "override", "flag"])))
def test_flag_beats_override_beats_file_beats_default(
    tmp_path_factory: pytest.TempPathFactory, given: set[str]
) -> None:
    lr = {"file": 0.1, "override": 0.2, "flag": 0.3}
    path = tmp_path_factory.mktemp("config") / "run.yaml"
    path.write_text(yaml.safe_dump({"optimizer": {"lr": lr["file"]}} if "file" in given else {}))
    overrides = [f"optimizer.lr={lr['override']}"] if "override" in given else []
    run = load_run_config(path, overrides, {"optimizer.lr": str(lr["flag"])} if "flag" in given else {})
    winner = next((name for name in ("flag", "override", "file") if name in given), None)
    assert run.optimizer.lr == (2e-5 if winner is None else lr[winner])


@pytest.mark.parametrize(("stage", "lr", "batch"), [(1, 1e-3, 256), (2, 2e-5, 128)])
def test_stage_sets_what_is_not_given(stage: int, lr: float, batch: int) -> None:
    run = load_run_config(overrides=[f"stage={stage}"])
    assert (run.optimizer.lr, run.training.global_batch_size) == (lr, batch)
    run = load_run_config(overrides=[f"stage={stage}", "optimizer.lr=0.5"])
    assert (run.optimizer.lr, run.training.global_batch_size) == (0.5, batch)


folder_names = st.text(
    st.characters(exclude_characters="/\\", exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=40
).filter(lambda name: name.strip() and name[0] not in ".-")
some_values = st.fixed_dictionaries(
    {},
    optional={
        "name": folder_names,
        "stage": st.sampled_from([1, 2]),
        "optimizer.lr": st.floats(1e-30, 1e3),
        "optimizer.adam_beta2": st.floats(0, 1, exclude_max=True),
        "training.seed": st.integers(0, 2**40),
        "training.precision": st.sampled_from(["bf16", "fp32", None]),
        "checkpoint.save_dir": folder_names.map(lambda name: Path("/data") / name),
        "checkpoint.save": st.booleans(),
    },
)


@given(some_values)
def test_saved_configuration_reads_back_equal(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    run = load_run_config(flags=values)
    path = tmp_path_factory.mktemp("config") / "deeper" / "run.yaml"
    save_run_config(run, path)
    assert load_run_config(path) == run
    assert [file.name for file in path.parent.iterdir()] == ["run.yaml"]


def test_json_is_read_as_well_as_yaml(tmp_path: Path) -> None:
    run = load_run_config(overrides=["stage=1", "training.train_iters=5"])
    path = tmp_path / "run.json"
    path.write_text(json.dumps(yaml.safe_load(run_config_yaml(run))))
    assert load_run_config(path) == run


def test_all_mistakes_come_in_one_error_with_their_origin(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("optimizer:\n  lrr: 3\n  min_lr: -1\nmodel:\nlogging: 4\nnothing: {}\ntraining: {precision: fp8}\n")
    overrides = ["lr=3", "foo", "launch.num_gpus=0", "name=a/b", "data.seqlength=5"]
    flags = {"training.train_iters": "ten", "stage": "2"}
    names = {"training.train_iters": "--train-iters", "stage": "--stage"}
    message = message_of(lambda: load_run_config(path, overrides, flags, names))
    for expected in (
        "(11 problems)",
        f"optimizer.lrr (in {path}): no such key (did you mean optimizer.lr?)",
        f"optimizer.min_lr (in {path}): found -1, expected greater than or equal to 0",
        f"logging (in {path}): a section, expected a mapping of keys, found 4",
        f"nothing (in {path}): no such key",
        f"training.precision (in {path}): found 'fp8', expected 'bf16', 'fp16' or 'fp32'",
        "lr (from 'lr=3'): no such key (did you mean optimizer.lr?)",
        "'foo': expected key=value",
        "launch.num_gpus (from 'launch.num_gpus=0'): found '0', expected -1 (all GPUs) or a number",
        "name (from 'name=a/b'): found 'a/b', expected the name of a folder",
        "data.seqlength (from 'data.seqlength=5'): no such key (did you mean data.seq_length?)",
        "training.train_iters (from --train-iters): found 'ten', expected a valid integer",
    ):
        assert expected in message
    message = message_of(lambda: load_run_config(None, [], {"stage": "3"}, names))
    assert "stage (from --stage): found 3, expected 1 or 2" in message


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.yaml", "training: {seed: 1}\ntraining: {seed: 2}\n", "'training' is given twice"),
        ("a.json", '{"stage": 1, "stage": 2}', "'stage' is given twice"),
        ("a.yaml", "training: [", "not valid YAML"),
        ("a.json", "{", "not valid JSON"),
        ("a.yaml", "- 1\n", "expected a mapping of sections to values, found a list"),
    ],
)
def test_unusable_file(tmp_path: Path, name: str, text: str, expected: str) -> None:
    """Duplicate keys, bad syntax and files that are no mapping are refused with a message."""
    (tmp_path / name).write_text(text)
    message = message_of(lambda: load_run_config(tmp_path / name))
    assert expected in message
    assert str(tmp_path / name) in message


def test_missing_file(tmp_path: Path) -> None:
    """A file that does not exist is one message."""
    assert "cannot be read" in message_of(lambda: load_run_config(tmp_path / "none.yaml"))


def test_empty_file_and_null_override_mean_defaults(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("")
    assert load_run_config(tmp_path / "a.yaml", ["launch.sif_path=null", "data.path="]) == load_run_config()


def test_none_may_be_a_choice(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "model: {recompute: full, recompute_vision: full}\nadapter: {quantize: nf4, bias: all}"
    )
    names = ("model.recompute", "model.recompute_vision", "adapter.quantize", "adapter.bias")
    assert load_run_config(tmp_path / "a.yaml", [f"{name}=none" for name in names]) == load_run_config()


def test_configuration_cannot_be_changed() -> None:
    run = load_run_config()
    with pytest.raises(ValueError, match="frozen"):
        run.optimizer.lr = 1.0


def test_show_config_prints_what_config_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show_config.main(["--tp", "2", "training.seed=5"]) == 0
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    expected = load_run_config(None, ["parallel.tensor_model_parallel_size=2", "training.seed=5"])
    assert load_run_config(tmp_path / "run.yaml") == expected
    assert show_config.main(["--tp", "two"]) == 2
    assert "--tp): found 'two'" in capsys.readouterr().err


def test_command_line_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """Help lists every command; a mistyped one is refused with a suggestion."""
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)
    assert main(["trian"]) == 2
    assert "did you mean train?" in capsys.readouterr().err
    assert main([]) == 2


def test_config_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, llava_mcore.config.flags, llava_mcore.config.rules.all_rules, llava_mcore.cli.train\n"
    code += "print([name for name in ('torch', 'transformers', 'megatron') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_data_imports_no_megatron_core() -> None:
    folder = Path(show_config.__file__).parents[1] / "data"
    files = sorted(folder.rglob("*.py"))
    assert files
    assert [path.name for path in files if "megatron.core" in path.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.train_iters=0", "found '0', expected greater than or equal to 1"),
        (f"training.train_iters={'9' * 26}", "expected less than or equal to 1000000000"),
        (f"training.train_iters={'9' * 5000}", "Unable to parse input string as an integer"),
        (f"training.train_samples={10**16}", "expected less than or equal to"),
        (f"training.seed={2**64}", "expected less than or equal to"),
        ("launch.num_gpus=100000", "expected less than or equal to 1024"),
        ("data.num_workers=100000", "expected less than or equal to 1024"),
        (f"faults.timeout={'9' * 15}", "expected less than or equal to"),
        ("faults.exit_duration_in_mins=1e300", "expected less than or equal to"),
        (f"faults.skip_train_iteration_range=1-{'9' * 30}", "expected ranges of iterations"),
        (f"logging.profile=1:{'9' * 30}", "expected the first and the last iteration"),
        ("name=a\nb", r"expected a line of text without control characters such as '\n'"),
        ("launch.sbatch_options=--comment='a\nid'", "control characters"),
        ("checkpoint.save_dir=/a\x1b[2J", "control characters"),
        ("data.path=/a\udcff", "expected UTF-8; rename it"),
        ("model.freeze=a,b\rc", "control characters"),
    ],
)
def test_numbers_and_text_have_bounds(override: str, expected: str) -> None:
    message = message_of(lambda: load_run_config(None, [override]))
    assert expected in message and "(1 problem)" in message and len(message) < 500


def test_every_integer_has_bounds() -> None:
    """A number of 26 digits, or one below the least, is never taken."""
    for key, field in config_fields():
        if "int" in str(field.annotation):
            for value in ("9" * 26, "-2"):
                assert key in message_of(lambda key=key, value=value: load_run_config(None, [f"{key}={value}"])), key


def test_a_key_of_an_earlier_version_is_accepted_with_the_value_that_remains(tmp_path: Path) -> None:
    """Checkpoints hold all keys of the run that saved them."""
    path = tmp_path / "run.yaml"
    for key, value in REMOVED_KEYS.items():
        section, leaf = key.split(".")
        path.write_text(f"{section}:\n  {leaf}: {value}\n")
        assert load_run_config(path) == load_run_config()
        path.write_text(f"{section}:\n  {leaf}: another\n")
        with pytest.raises(ConfigError, match=f"{key} .*: no such key any more, found 'another'.*omit it"):
            load_run_config(path)


def test_a_renamed_key_is_read_from_files_and_named_to_who_types_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    for old, new in RENAMED_KEYS.items():
        section, leaf = old.split(".")
        path.write_text(f"{section}:\n  {leaf}: 7777\n")
        expected = load_run_config(None, [f"{new}=7777"])
        assert load_run_config(path) == expected == as_run_config({section: {leaf: 7777}})
        assert (new, 7777) in settings_of_file(path)
        with pytest.raises(ConfigError, match=f"{old} .*: no such key .did you mean {new}"):
            load_run_config(None, [f"{old}=7777"])
