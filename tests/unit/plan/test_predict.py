"""Predictions: what follows from counting by hand, and what options must change."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from llava_mcore.compat import flash_attention_4
from llava_mcore.config.load import load_run_config
from llava_mcore.data.loader.packing import online_fill
from llava_mcore.models.vision.attention import HEAD_SIZES_OF_CUDNN
from llava_mcore.plan.balance import balanced_layers
from llava_mcore.plan.hardware.efficiency import Efficiency
from llava_mcore.plan.hardware.gpus import GIB, GPUS
from llava_mcore.plan.layout import Adapter, RunLayout, layout_of
from llava_mcore.plan.material import packs_for
from llava_mcore.plan.memory import decoder_activations, head_padding, layer_bytes, stage_memory
from llava_mcore.plan.parameters import stage_parameters
from llava_mcore.plan.predict import Prediction, predict
from llava_mcore.plan.seconds import Machine, flows_below
from llava_mcore.plan.sizes.model import ConnectorShape, Decoder, ExpertShape, LinearShape, Model, Tower
from llava_mcore.plan.work import Sample, Work, like_llava, packs_of

DECODER = Decoder(32, 4096, 11008, 32, 32, 128, 32064)
TOWER = Tower(
    kind="clip_vision_model", num_layers=23, all_layers=24, hidden=1024, ffn=4096, heads=16, gated=False, patch=14,
    positions=577, patch_values=588, embedding=588 * 1024, small=577 * 1024 + 3 * 1024, layer_small=13 * 1024,
    image_side=336, padded_ffn=4096,
)  # fmt: skip
MODEL = Model("llava", DECODER, TOWER, ConnectorShape((LinearShape(1024, 4096), LinearShape(4096, 4096)), 8192, 4096))
"""LLaVA-1.5-7B."""
MODES = ("none", "optim", "optim_grads", "optim_grads_params")
H200 = Machine(GPUS["h200"], Efficiency())


def layout(world: int = 2, **flags: Any) -> RunLayout:
    common = {"data.packing": True, "data.seq_length": 4096, "training.micro_batch_size": 2}
    common |= {"training.global_batch_size": 96, "parallel.use_distributed_optimizer": True}
    return layout_of(load_run_config(None, (), common | flags), world, DECODER.num_layers)


def predicted(chosen: RunLayout, model: Model = MODEL) -> Prediction:
    return predict(model, chosen, packs_for(model, chosen, like_llava()), H200)


def test_parameters_of_llava_7b() -> None:
    # 6.738 billion of Llama with 64 more rows twice, 23 of 24 layers of CLIP-L, and the projector.
    assert MODEL.language_parameters == 6_738_415_616 + 2 * 64 * 4096
    assert MODEL.connector.parameters == 1024 * 4096 + 4096 * 4096 + 2 * 4096
    assert MODEL.tower.parameters == pytest.approx(23 / 24 * 302e6 + 2e6, rel=0.01)


def test_memory_that_does_not_depend_on_data() -> None:
    memory = predicted(layout()).stages[0].memory
    trained = MODEL.language_parameters + MODEL.connector.parameters
    assert memory.weights == pytest.approx(2 * MODEL.parameters, rel=0.002)  # rows of padding
    assert memory.gradients == pytest.approx(4 * trained, rel=0.002)
    assert memory.optimizer == pytest.approx(12 * trained / 2, rel=0.002)


@pytest.mark.parametrize("world", [2, 8])
def test_fully_sharded_memory(world: int) -> None:
    """By the table in docs/parallel.md, and beside it two layers and what is outside of layers."""
    parameters, trained = MODEL.parameters, MODEL.language_parameters + MODEL.connector.parameters
    layer, ends = DECODER.layer_parameters, 2 * 32128 * 4096 + MODEL.connector.parameters
    of = {x: predicted(layout(world, **{"parallel.fsdp": x})).stages[0].memory for x in MODES}
    weights, gradients, state = 2 * parameters, 4 * trained, 12 * trained / world
    assert [x.optimizer for x in of.values()] == pytest.approx([state] * 4, rel=0.002)
    assert [x.weights for x in of.values()] == pytest.approx(
        [weights] * 3 + [weights / world + 2 * (ends + 2 * layer)], rel=0.002
    )
    assert [x.gradients for x in of.values()] == pytest.approx(
        [gradients] * 2 + [gradients / world + 8 * layer] * 2, rel=0.002
    )
    two = predicted(layout(world, **{"parallel.fsdp": MODES[-1], "parallel.hsdp_replicas": 2})).stages[0].memory
    assert two.optimizer == pytest.approx(2 * state, rel=0.002)


def test_fully_sharded_time() -> None:
    """Divided weights travel in both passes of every micro-batch, so fewer large ones are faster."""
    sharded = {"parallel.fsdp": "optim_grads_params"}
    many, few = (predicted(layout(8, **sharded, **{"training.micro_batch_size": n})) for n in (1, 4))
    assert predicted(layout(8)).messages < few.messages < many.messages
    slow = replace(GPUS["h200"], link=GPUS["h200"].link / 100)
    chosen = layout(8, **sharded)
    found = predict(MODEL, chosen, packs_for(MODEL, chosen, like_llava()), Machine(slow, Efficiency()))
    assert found.messages > found.passes, "what the passes are too short for is waited for"


def test_a_layer_keeps_what_its_backward_pass_reads() -> None:
    plain = layout()
    # Two norms with inputs and outputs, queries to values, attention's output, gate and value, activation.
    assert layer_bytes(MODEL, plain) == 2 * (4 * 4096 + 3 * 4096 + 4096 + 2 * 11008 + 11008)
    with_tp = layout(**{"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True})
    assert layer_bytes(MODEL, with_tp) == layer_bytes(MODEL, plain) / 2
    selective = layout(**{"model.recompute": "selective"})
    assert layer_bytes(MODEL, selective) == 2 * (3 * 4096 + 3 * 4096 + 4096)


def test_what_the_stages_of_a_pipeline_keep() -> None:
    """The first one the tower's activations of all micro-batches in flight, the last one most trained tokens."""
    flags: dict[str, Any] = {"model.freeze_vision_model": False}
    one, two = (layout(**flags, **{"parallel.pipeline_model_parallel_size": n}) for n in (1, 2))
    memory = [predicted(x).stages[0].memory for x in (one, two)]
    assert memory[1].tower_activations == pytest.approx(2 * memory[0].tower_activations) and two.in_flight(0) == 2
    packs = packs_for(MODEL, two, like_llava())
    heavy = replace(packs.mean, trained=2 * packs.mean.trained)
    usual, peak = (replace(packs, peaks=(packs.mean, x)) for x in (packs.mean, heavy))
    for stage in (0, 1):
        increase = [stage_memory(MODEL, two, x, stage, H200.fit).output_layer for x in (usual, peak)]
        assert (increase[1] > increase[0] > 0) == (stage == 1)


def test_counts_of_ranks_and_options() -> None:
    one, two = layout(), layout(**{"parallel.pipeline_model_parallel_size": 2})
    table = 32128 * 4096
    # A tied output layer is the embedding, of which a last stage of its own has a copy.
    tied = replace(MODEL, decoder=replace(DECODER, tied=True))
    ends = [stage_parameters(tied, x, stage).ends for x, stage in ((one, 0), (two, 0), (two, 1))]
    assert ends == [table] * 3 and stage_parameters(MODEL, one, 0).ends == 2 * table
    assert replace(one, tp=4).padded_vocab(32001) == 32256 and one.padded_vocab(32001) == 32128
    assert layout(**{"training.precision": "fp32"}).state_bytes == 8
    # Adapters keep what they multiply, and of recomputed units of two layers one input is kept.
    kept = [layer_bytes(MODEL, replace(one, adapter=Adapter(language=r))) for r in (8, 16)]
    assert kept[1] - kept[0] == 14 * 8
    full, units = (replace(one, recompute="full", recompute_unit=unit) for unit in (1, 2))
    work = packs_for(MODEL, one, like_llava()).mean
    stored = [decoder_activations(MODEL, x, work, 32, 0) for x in (full, units)]
    assert stored[1] / stored[0] == pytest.approx((16 + 2) / (32 + 2))
    # Gradients pass through the projector only to a tower that is trained.
    assert flows_below(one, "language") and not flows_below(one, "projection")


def test_frozen_matrices_in_fp8_have_two_orders_and_no_16_bit_copy() -> None:
    flags = {"adapter.r": 8, "training.fp8": True}
    plain, fp8 = (predicted(layout(**flags, **{"adapter.quantize": x})).stages[0].memory for x in ("none", "fp8"))
    assert plain.weights - fp8.weights == pytest.approx(2 * DECODER.num_layers * DECODER.layer_weights)


@pytest.mark.parametrize(
    ("flags", "seconds", "gib"),
    [
        ({}, 13.4, 110.4),
        ({"parallel.pipeline_model_parallel_size": 2}, 14.0, 92.5),
        ({"training.fp8": True}, 8.9, 119.6),
    ],
)
def test_measured_runs_on_two_h200s(flags: dict[str, Any], seconds: float, gib: float) -> None:
    prediction = predicted(layout(**flags))
    assert prediction.seconds == pytest.approx(seconds, rel=0.1)
    assert prediction.reserved == pytest.approx(gib, rel=0.05)


def test_options_change_what_they_should() -> None:
    plain = predicted(layout())

    def other(**flags: Any) -> Prediction:
        return predicted(layout(**{key.replace("__", "."): value for key, value in flags.items()}))

    full = other(model__recompute="full")
    assert full.reserved < plain.reserved
    assert full.seconds == pytest.approx(4 / 3 * plain.seconds, rel=0.1)
    assert plain.reserved > other(model__recompute="selective").reserved > full.reserved
    moments = other(
        optimizer__use_precision_aware_optimizer=True,
        optimizer__exp_avg_dtype="bf16",
        optimizer__exp_avg_sq_dtype="bf16",
    )
    saved = 4 * (MODEL.language_parameters + MODEL.connector.parameters) / 2 / GIB
    assert plain.reserved - moments.reserved == pytest.approx(saved, rel=0.02)
    assert other(model__freeze_vision_model=False).seconds > plain.seconds
    lora = other(adapter__r=64)
    assert lora.reserved < plain.reserved - 50
    assert other(adapter__r=64, adapter__quantize="nf4").reserved < lora.reserved - 8
    assert other(parallel__use_distributed_optimizer=False).reserved > plain.reserved + 30
    graphs = other(model__cuda_graphs=True)
    assert graphs.reserved > plain.reserved
    interleaved = other(parallel__pipeline_model_parallel_size=2, parallel__num_layers_per_virtual_pipeline_stage=4)
    assert interleaved.bubble < other(parallel__pipeline_model_parallel_size=2).bubble


def test_stages_are_balanced_with_a_heavy_tower() -> None:
    heavy = replace(MODEL, tower=replace(TOWER, num_layers=46, hidden=3200, padded_ffn=12800, heads=25))
    chosen = layout(**{"parallel.pipeline_model_parallel_size": 2, "model.freeze_vision_model": False})
    packs = packs_for(heavy, chosen, like_llava())
    layers = balanced_layers(heavy, chosen, packs, H200)
    assert sum(layers) == 32
    assert layers[0] < 13
    naive = predict(heavy, chosen, packs, H200)
    balanced = predict(heavy, replace(chosen, layers=layers), packs, H200)
    assert balanced.seconds < 0.85 * naive.seconds
    times = [stage.seconds for stage in balanced.stages]
    assert max(times) / min(times) < 1.15
    # No division is faster.
    others = [predict(heavy, replace(chosen, layers=(n, 32 - n)), packs, H200).seconds for n in range(1, 32)]
    assert balanced.seconds == pytest.approx(min(others), rel=0.01)


def test_a_sample_that_is_too_long_is_left_out() -> None:
    chosen = layout(**{"data.packing": False, "data.seq_length": 1024})
    short, long = Sample(400, 200), Sample(4000, 2000)
    assert packs_for(MODEL, chosen, [short, long]).mean.tokens == 400
    with pytest.raises(ValueError, match="4000 tokens"):
        packs_for(MODEL, chosen, [long])


@pytest.mark.parametrize(
    ("shortest", "longest", "capacity"), [(18000, 26000, 32768), (9000, 20000, 32768), (100, 1200, 4096)]
)
def test_packs_are_as_full_as_the_loaders(shortest: int, longest: int, capacity: int) -> None:
    """Of samples longer than half a pack only one is in each; shorter ones fill packs to the last token."""
    draw = random.Random(1)
    lengths = [draw.randint(shortest, longest) for _ in range(400)]
    packs = packs_of([Work(tokens=float(x)) for x in lengths], capacity, packing=True)
    assert packs.mean.tokens / capacity == pytest.approx(online_fill(lengths, capacity, 128), rel=0.03)


def test_an_update_by_muon() -> None:
    """Its time is that of its products, which all ranks share with --dist-optim alone."""

    def update(gpus: int, *, divided: bool = True) -> float:
        flags = {"parallel.use_distributed_optimizer": divided}
        adamw, muon = (predicted(layout(gpus, **flags, **{"optimizer.name": x})) for x in ("adamw", "muon"))
        return muon.update - adamw.update

    short, long = DECODER.hidden, DECODER.ffn
    of_square, of_long = (1.5 * (short**2 * x + short**3) + 2 * short**2 * x for x in (short, long))
    flops = 5 * DECODER.num_layers * (4 * of_square + 3 * of_long)
    peak = GPUS["h200"].bf16
    assert 0.6 * peak < flops / update(1) < 0.73 * peak
    assert update(8) == pytest.approx(update(1) / 8, rel=0.05)
    assert update(8, divided=False) == pytest.approx(update(1), rel=0.05)


def test_experts() -> None:
    experts = ExpertShape(count=128, chosen=8, ffn=768, layers=48)
    decoder = Decoder(48, 2048, 0, 32, 4, 128, 151936, head_norms=True, experts=experts)
    model = replace(MODEL, decoder=decoder)
    # Qwen3-30B-A3B has 30.5 billion parameters.
    assert model.language_parameters == pytest.approx(30.53e9, rel=0.001)
    chosen = replace(layout(8), layers=(48,), recompute="full")

    def with_ep(ep: int) -> Prediction:
        return predicted(replace(chosen, ep=ep), model)

    one, four, eight = with_ep(1), with_ep(4), with_ep(8)
    all_experts = 48 * 128 * 3 * 2048 * 768
    saved = one.stages[0].memory, four.stages[0].memory
    assert saved[0].weights - saved[1].weights == pytest.approx(2 * 0.75 * all_experts)
    assert saved[0].gradients - saved[1].gradients == pytest.approx(4 * 0.75 * all_experts)
    # The state of an expert is on one rank, whoever divides the experts: they have fewer replicas.
    assert saved[0].optimizer == pytest.approx(saved[1].optimizer)
    assert stage_parameters(model, replace(chosen, ep=2, etp=2), 0).experts == all_experts / 4
    assert eight.reserved < four.reserved < one.reserved
    assert eight.stages[0].forward.messages > four.stages[0].forward.messages > one.stages[0].forward.messages == 0
    # A token meets 8 of 128 experts: the products take as long as those of an MLP of 8 times their width, or longer.
    dense = replace(MODEL, decoder=replace(decoder, ffn=8 * 768, experts=None))
    ratio = eight.stages[0].forward.layers / predicted(chosen, dense).stages[0].forward.layers
    assert 1 < ratio < 2
    # Adapters of experts: two pairs of matrices each.
    pairs = 48 * 128 * 4 * (2048 + 2 * 768 + 768 + 2048)
    adapted = stage_parameters(model, replace(chosen, ep=4, adapter=Adapter(experts=4)), 0)
    assert adapted.trained == adapted.trained_experts == pytest.approx(pairs / 4)
    # The inside of the experts is computed again, what is sent to them is kept.
    selective, plain = (predicted(replace(chosen, recompute=x), model).stages[0] for x in ("selective", "none"))
    assert plain.memory.activations > selective.memory.activations > one.stages[0].memory.activations
    assert plain.backward.total < selective.backward.total < one.stages[0].backward.total


@pytest.mark.parametrize("size", [64, 72, 80, 96, 128, 160])
def test_heads_are_padded_as_those_of_towers(size: int) -> None:
    """`plan` does not import torch, so it has the constants of the kernels again."""
    tower = replace(MODEL.tower, positions=0, heads=16, hidden=16 * size)
    has_kernel = size not in HEAD_SIZES_OF_CUDNN and size <= flash_attention_4.LARGEST_HEAD
    more = flash_attention_4.padded_head(size) / size - 1
    assert head_padding(tower) == pytest.approx((8 * more + 2) * tower.hidden if has_kernel and more else 0)
