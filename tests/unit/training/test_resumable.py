"""Settings with which a checkpoint cannot be resumed, and the way out that the message names."""

from __future__ import annotations

from pathlib import Path

import pytest

from llava_mcore.config.load import load_run_config
from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import CheckpointError
from llava_mcore.training.saving import state
from tests.helpers.run_settings import smallest_run

SAVED = "checkpoint.save_optim=true"


def test_the_way_out_of_another_optimizer_is_named(tmp_path: Path) -> None:
    def run(*more: str) -> RunConfig:
        return load_run_config(None, smallest_run(tmp_path, SAVED, *more), {})

    before = run("parallel.fsdp=optim_grads_params")
    state._check_resumable(run("parallel.use_distributed_optimizer=true"), before, tmp_path)
    with pytest.raises(CheckpointError) as caught:
        state._check_resumable(run(), before, tmp_path)
    message = str(caught.value)
    assert "--dist-optim: saved with True, now False; --fsdp saves as --dist-optim does: add one of them" in message
    assert f"give another --name and --megatron-load-dir {tmp_path}" in message
    with pytest.raises(CheckpointError, match=r"now True; --fsdp resumes as --dist-optim does: omit both$"):
        state._check_resumable(before, run(), tmp_path)
