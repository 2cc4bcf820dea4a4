"""What a machine without CUDA makes of megatron-core, and of what is installed beside it."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.core import tensor_parallel

from llava_mcore.parallel.groups import single_process
from llava_mcore.parallel.random import kept_random_state, seed_everything

PROGRAM = """
import llava_mcore.parallel
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import clip_grads, distrib_optimizer
from megatron.core.utils import local_multi_tensor_l2_norm
assert not HAVE_TE and not distrib_optimizer.HAVE_APEX_OR_TE
assert clip_grads.l2_norm_impl is local_multi_tensor_l2_norm
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_packages_for_gpus_are_not_touched(tmp_path: Path) -> None:
    """A container has them, also where it runs on a login node; what they compute needs a GPU."""
    for package in ("transformer_engine", "apex"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('imported without a GPU')")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | {"PYTHONPATH": path}, check=True)


def test_random_numbers_go_on_as_if_none_had_been_drawn() -> None:
    def draw() -> list[float]:
        with tensor_parallel.get_cuda_rng_tracker().fork():
            inside = torch.rand(2)
        return [*inside.tolist(), *torch.rand(2).tolist()]

    with single_process():
        seed_everything(3)
        expected = draw()
        seed_everything(3)
        with kept_random_state():
            assert draw() == expected
        assert draw() == expected
        assert draw() != expected
