"""The flags that users of the launcher before this one type: each is understood, and a test proves its effect.

The column on the right names that test; one that is renamed or deleted fails here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llava_mcore.config.flags import ALL_FLAGS, ALWAYS_ON_FLAGS, parse_command_line
from tests.e2e import test_errors, test_logs, test_operations, test_options, test_resume
from tests.gpu import test_transformer_engine
from tests.parallel import test_faults as test_faults_on_ranks
from tests.parallel import test_training
from tests.unit.config import test_config, test_flag_effects, test_rules
from tests.unit.data import test_chat_choice, test_data_loader
from tests.unit.launch import test_launch, test_slurm_launch, test_train_launcher
from tests.unit.training import test_faults, test_sinks

OPERATIONS = test_operations.test_sigterm_to_every_process_still_saves
RESUME = test_resume.test_killed_and_resumed_equals_unbroken
RANDOM = test_options.test_deterministic_runs_from_random_weights_are_equal
LAYOUT = test_training.test_loss_curve_equals_one_process
MACHINES = test_slurm_launch.test_commands_of_one_and_many_machines
WITHOUT_SLURM = test_slurm_launch.test_without_slurm_flags_say_everything
JOB_STEP = test_slurm_launch.test_everything_comes_from_the_job_step
REACH = test_slurm_launch.test_interface_and_chosen_gpus_reach_the_workers
OPTIMIZER = test_flag_effects.test_optimizer
KERNELS = test_flag_effects.test_attention_kernels
TOKENS = test_flag_effects.test_token_ids
STAGE = test_config.test_stage_sets_what_is_not_given

# as typed -> the test of its effect
FLAGS: dict[str, Callable[..., Any]] = {
    "-g 2": OPERATIONS,
    "--gpus 2": test_train_launcher.test_what_the_machine_decides,
    "--gpu-ids 1,3": REACH,
    "--save": RANDOM,
    "--name abc": RESUME,
    "--wandb": test_sinks.test_a_resumed_run_continues_its_logs,
    "--log-interval 2": test_operations.test_lines_of_the_chosen_interval,
    "--megatron-load-dir /m": RESUME,
    "--tokenizer-load-dir /t": test_errors.test_a_folder_without_tokenizer,
    "--save-dir /s": RESUME,
    "--sif-path /i.sif": test_launch.test_command_is_run_again_inside_the_image,
    "--save-optim": RESUME,
    "--load-optim": RESUME,
    "--init": RANDOM,
    "--save-interval 6": test_operations.test_what_is_not_kept_is_replaced,
    "--non-persistent-save-interval 4": test_operations.test_what_is_not_kept_is_replaced,
    "--skip-train-iteration-range 100-110 300-400": test_faults_on_ranks.test_a_step_that_is_not_finite,
    "--tp 2": LAYOUT,
    "--pp 2": LAYOUT,
    "--micro-batch-size 2": test_data_loader.test_batches_are_what_the_model_takes,
    "--global-batch-size 8": LAYOUT,
    "--num-workers 2": OPERATIONS,
    "--node 2": MACHINES,
    "--rank 1": WITHOUT_SLURM,
    "-r 1": WITHOUT_SLURM,
    "--master-addr h": WITHOUT_SLURM,
    "-m h": WITHOUT_SLURM,
    "--master-port 4001": MACHINES,
    "-p 4001": MACHINES,
    "--rdzv-port 4001": MACHINES,
    "--backend gloo": test_train_launcher.test_what_is_given_is_kept,
    "--interface eth1": REACH,
    "--dist-optim": OPTIMIZER,
    "--dist-ckpt": test_config.test_what_is_always_so_is_accepted_and_said,
    "--image-token-id 4": TOKENS,
    "--pad-token-id 0": TOKENS,
    "--freeze-lm": LAYOUT,
    "--stage 1": STAGE,
    "--lang jp": test_chat_choice.test_the_language_picks_where_there_is_none,
    "--lr 1e-4": OPTIMIZER,
    "--train-iters 9": RESUME,
    "--loss-scale 128": OPTIMIZER,
    "--adam-beta2 0.95": OPTIMIZER,
    "--seq-length 64": test_rules.test_one_broken_rule_gives_one_message,
    "--slurm-job-id 7": JOB_STEP,
    "--slurm-output-name /o.txt": test_slurm_launch.test_batch_file,
    "--fp8": test_transformer_engine.test_training,
    "--fused-attn": KERNELS,
    "--flash-attn": KERNELS,
    "--no-add-class-token": test_rules.test_a_class_token_that_must_not_stay,
    "--debug": test_logs.test_debug_shows_the_first_batch_and_the_shapes_of_every_stage,
    "--deterministic": RANDOM,
    "--alert-spike": test_faults.test_a_spike_and_the_range_it_suggests,
    "--spike-thr 3": test_faults.test_a_spike_and_the_range_it_suggests,
}


@pytest.mark.parametrize("typed", FLAGS)
def test_flag_is_understood_and_its_effect_is_tested(typed: str) -> None:
    asked = parse_command_line(typed.split(), "run.py")
    asked.load()
    assert len(asked.flags) + len(asked.notices) == 1
    assert FLAGS[typed].__name__.startswith("test_"), "pytest runs it"


def test_the_whole_command_line_at_once() -> None:
    """All flags are understood together, and each is registered."""
    run = parse_command_line(" ".join(FLAGS).replace("--flash-attn ", "").split(), "run.py").load()
    assert (run.faults.skip_train_iteration_range, run.stage, run.training.global_batch_size) == (
        "100-110,300-400",
        1,
        8,
    )
    names = {typed.split()[0] for typed in FLAGS}
    assert names <= {name for flag in ALL_FLAGS for name in flag.names} | set(ALWAYS_ON_FLAGS)
