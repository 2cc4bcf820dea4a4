"""Answers on GPUs: the tokens of transformers' `generate`, also by Transformer Engine; and while training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from llava_mcore.answering.hf_model import HfModel
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.generation.settings import TokenSampling, read_settings
from llava_mcore.models.language.registry import language_family
from tests.helpers.cases import make_sharp_case
from tests.helpers.world import run_world
from tests.parallel.test_generate import CASES, conversations
from tests.parallel.validation_checks import make_material

pytestmark = pytest.mark.gpu
LAYOUTS = [x for x in [(1, 1), (2, 1), (1, 2), (2, 2)] if math.prod(x) <= torch.cuda.device_count()]
NUM_NEW = 12


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_tokens_are_those_of_transformers(tmp_path: Path, tp: int, pp: int) -> None:
    """In fp32, from torch's layers and, where it has them, Transformer Engine's."""
    jobs, expected, able = {}, {}, {}
    for case in CASES:
        folder = tmp_path / case.name
        make_sharp_case(case, folder / "hf")
        import_hf(folder / "hf", folder / "megatron")
        hf = HfModel.load(folder / "hf")
        config = hf.model.config
        settings = read_settings(folder / "hf", config, None, max_new_tokens=NUM_NEW, sampling=TokenSampling())
        asked = conversations(hf.assets.refused)
        expected[case.name] = [hf.answer(conversation, settings) for conversation in asked]
        jobs[case.name] = (str(folder / "megatron"), asked)
        if not language_family(config.text_config).shape(config.text_config).needs_local_layers:
            able[case.name] = jobs[case.name]
    function = "tests.parallel.generate_checks:answers"
    for found in run_world(tp * pp, function, tp=tp, pp=pp, jobs=jobs, num_new=NUM_NEW):
        assert found == expected
    te: dict[str, Any] = {"jobs": able, "num_new": NUM_NEW, "transformer_impl": "transformer_engine"}
    for found in run_world(tp * pp, function, tp=tp, pp=pp, **te):
        assert found == {name: expected[name] for name in able}


@pytest.mark.parametrize("more", [{}, {"training.fp8": True}], ids=["bf16", "fp8"])
def test_training_is_the_same_with_answers(tmp_path: Path, more: dict[str, Any]) -> None:
    """With Transformer Engine's layers; losses, weights and FP8 scales."""
    material = make_material(tmp_path)
    te = {"model.transformer_impl": "transformer_engine", "training.precision": "bf16", **more}
    if more:
        te |= {"training.micro_batch_size": 8}  # 8 x 48 tokens: a multiple of 128
    given: dict[str, Any] = {"tp": 1, "pp": 1, "save_dir": str(tmp_path), "more": te, **material}
    (found,) = run_world(1, "tests.parallel.answer_checks:with_and_without", **given)
    assert found["with"]["losses"] == found["without"]["losses"]
    assert found["with"]["weights"] == found["without"]["weights"]
