"""Answers on GPUs: the tokens of transformers' `generate`, also by Transformer Engine; and while training."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.samples import Conversation
from llava_mcore.inference.answering.hf_model import HfModel
from llava_mcore.inference.evaluation.languages import NAMES
from llava_mcore.inference.generation.settings import Settings, TokenSampling, read_settings
from llava_mcore.models.language.families.registry import language_family
from tests.gpu.supported_cases import supported
from tests.helpers.cases import make_sharp_case
from tests.helpers.packages import needs
from tests.helpers.world import run_world
from tests.parallel import answer_checks, generate_checks
from tests.parallel.test_generate import CASES, conversations
from tests.parallel.validation_checks import make_material

pytestmark = pytest.mark.gpu
LAYOUTS = [x for x in [(1, 1), (2, 1), (1, 2), (2, 2)] if math.prod(x) <= torch.cuda.device_count()]
NUM_NEW = 12
KINDS = {"smolvlm": "SmolVLM", "qwen2_audio": "audio"}
PROCESSOR_NEEDS = {"SmolVLM": ("num2words",), "audio": ("soundfile", "soxr")}
"""Packages that the processors of these classes need, which a machine with GPUs may lack."""
NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}
"""Transformer Engine asks cuBLAS for TF32 in products of fp32."""
TIE = 1e-4
"""Of two tokens whose logits are as near as this either may be first: kernels of GPUs add in other orders."""


@pytest.fixture(autouse=True)
def _whole_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers embeds patches by convolutions, for which torch allows TF32 by default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("kind", ["images", "SmolVLM", "audio"])
@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_tokens_are_those_of_transformers(tmp_path: Path, tp: int, pp: int, kind: str) -> None:
    """In fp32, from torch's layers and, where it has them, Transformer Engine's."""
    for package in PROCESSOR_NEEDS.get(kind, ()):
        needs(package)
    jobs, able = {}, {}
    expected: dict[str, Answers] = {}
    for case in supported([case for case in CASES if KINDS.get(case.architecture, "images") == kind], pp=pp):
        folder = tmp_path / case.name
        make_sharp_case(case, folder / "hf")
        import_hf(folder / "hf", folder / "megatron")
        hf = HfModel.load(folder / "hf")
        config = hf.model.config
        settings = read_settings(folder / "hf", config, None, max_new_tokens=NUM_NEW, sampling=TokenSampling())
        asked = conversations(hf.assets.refused)
        expected[case.name] = Answers(hf, settings, asked)
        jobs[case.name] = (str(folder / "megatron"), asked)
        if not language_family(config.text_config).shape(config.text_config).needs_local_layers:
            able[case.name] = jobs[case.name]
    for layers in ({"jobs": jobs}, {"jobs": able, "transformer_impl": "transformer_engine"}):
        arguments: dict[str, Any] = {"num_new": NUM_NEW, **layers}
        for found in run_world(tp * pp, generate_checks.answers, environment=NO_TF32, tp=tp, pp=pp, **arguments):
            assert found.keys() == layers["jobs"].keys()
            assert not [text for name, answers in found.items() for text in expected[name].unlike(name, answers)]


class Answers:
    """transformers' answers of one model."""

    def __init__(self, hf: HfModel, settings: Settings, asked: list[Conversation]) -> None:
        self.hf, self.settings, self.asked = hf, settings, asked
        self.tokens = [hf.answer(conversation, settings) for conversation in asked]

    def unlike(self, name: str, found: list[list[int]]) -> list[str]:
        """Describe the answers that are not transformers', except for those that part at a tie."""
        wrong = []
        for number, (ours, theirs) in enumerate(zip(found, self.tokens, strict=True)):
            place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
            if place is not None:
                gap = self.gap(number, place, ours[place])
                print(f"{name}, answer {number}, token {place}: {gap:.1e} below the best")
                wrong += [f"{name}: {ours} for {theirs}, {gap:.1e} below the best"] if gap > TIE else []
            elif len(ours) != len(theirs):
                wrong.append(f"{name}: {ours} for {theirs}")
        return wrong

    def gap(self, number: int, place: int, token: int) -> float:
        """Return how far a token's logit is below the best, after the first `place` tokens of an answer."""
        config = copy.deepcopy(self.settings.config)
        config.update(max_new_tokens=place + 1, output_logits=True, return_dict_in_generate=True)
        with torch.no_grad():
            out = self.hf.model.generate(**self.hf.inputs(self.asked[number]), generation_config=config)
        logits = out.logits[place][0].float()
        return float(logits.max() - logits[token])


@pytest.mark.parametrize("more", [{}, {"training.fp8": True}], ids=["bf16", "fp8"])
def test_training_is_the_same_with_answers(tmp_path: Path, more: dict[str, Any]) -> None:
    """With Transformer Engine's layers; losses, weights and FP8 scales."""
    for package in NAMES:
        needs(package)
    material = make_material(tmp_path)
    te = {"model.transformer_impl": "transformer_engine", "training.precision": "bf16", **more}
    if more:
        te |= {"training.micro_batch_size": 8}  # 8 x 48 tokens: a multiple of 128
    given: dict[str, Any] = {"tp": 1, "pp": 1, "save_dir": str(tmp_path), "more": te, **material}
    (found,) = run_world(1, answer_checks.with_and_without, **given)
    assert found["with"]["losses"] == found["without"]["losses"]
    assert found["with"]["weights"] == found["without"]["weights"]
