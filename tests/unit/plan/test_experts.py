"""Mixtures of experts in FP8 and in CUDA graphs, as `plan` counts them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llava_mcore.plan.experts import expert_gradients, graphed_experts, mixture_of
from llava_mcore.plan.hardware.efficiency import Efficiency
from llava_mcore.plan.hardware.gpus import GPUS
from llava_mcore.plan.material import packs_for
from llava_mcore.plan.memory import stage_memory
from llava_mcore.plan.seconds import Machine
from llava_mcore.plan.sizes.model import Decoder, ExpertShape
from llava_mcore.plan.work import like_llava
from tests.unit.plan.test_predict import H200, MODEL, layout

EXPERTS = ExpertShape(count=128, chosen=8, ffn=768, layers=8)
MIXTURE = replace(MODEL, decoder=Decoder(8, 2048, 0, 32, 4, 128, 151936, head_norms=True, experts=EXPERTS))
FP8 = {"training.fp8": True}
MATRICES = 128 * 768 * 2048
"""Weights of the second matrix of a layer's experts; the first one is twice as large."""


def test_products_of_experts_in_fp8() -> None:
    plain, fast = layout(2), layout(2, **FP8)
    work = packs_for(MIXTURE, plain, like_llava()).mean
    seconds = [mixture_of(MIXTURE, x, work, H200).products for x in (plain, fast)]
    router = H200.product(work.computed, 2048, 128)
    large = (H200.product(1e5, 1e5, 1e5, fp8=x) for x in (True, False))
    ratio = (seconds[1] - router) / (seconds[0] - router)
    # Faster, and by less than large products are.
    assert next(large) / next(large) < ratio < 1
    # The fraction of their rate is a constant of its own.
    same = Machine(GPUS["h200"], Efficiency(grouped_fp8=1.0))
    full = mixture_of(MIXTURE, fast, work, same).products
    assert full - router == pytest.approx(Efficiency().grouped_fp8 * (seconds[1] - router))
    # A GPU without FP8 gains nothing.
    old = Machine(GPUS["a100-80"], Efficiency())
    assert mixture_of(MIXTURE, fast, work, old).products >= mixture_of(MIXTURE, plain, work, old).products
    # The gradients of matrices are products in bf16.
    assert mixture_of(MIXTURE, fast, work, H200).of_matrices == mixture_of(MIXTURE, plain, work, H200).products
    # What is quantized: inputs of both matrices, and in the backward pass the gradients of their outputs.
    of_rows = work.computed * 8 * 3
    both = of_rows * (2048 + 768) + of_rows * (2 * 768 + 2048)
    assert 3 * mixture_of(MIXTURE, fast, work, H200).quantized == pytest.approx(both)


def test_what_graphs_keep_of_experts() -> None:
    plain = layout(1)
    graphed = replace(plain, graphs=True)
    packs = packs_for(MIXTURE, plain, like_llava())
    eager, captured = (stage_memory(MIXTURE, x, packs, 0, H200.fit) for x in (plain, graphed))
    # One tensor in place of the gradients of each of the two matrices, for all layers.
    assert graphed_experts(MIXTURE, graphed) == 2 * 3 * MATRICES
    # The memory of graphs is their own: the output layer has none of a layer's.
    assert captured.temporary > 0 and captured.output_layer > 0
    assert min(eager.temporary, eager.output_layer) == 0
    assert captured.reserved - eager.reserved > graphed_experts(MIXTURE, graphed)
    # Divided experts are in no graph.
    divided = replace(layout(2), graphs=True, ep=2)
    assert graphed_experts(MIXTURE, divided) == 0
    assert graphed_experts(MODEL, graphed) == 0


def test_the_gradients_of_a_layer_with_experts() -> None:
    work = packs_for(MIXTURE, layout(1), like_llava()).mean
    of_rows = work.computed * 8 * (4 * 768 + 2 * 2048)
    assert expert_gradients(MIXTURE, layout(1), work) == of_rows + 2 * 2 * MATRICES
    frozen = layout(1, **{"model.freeze_language_model": True})
    assert expert_gradients(MIXTURE, frozen, work) == of_rows
    assert expert_gradients(MODEL, layout(1), work) == 0
