"""Predictions of layouts whose processes divide the tokens of samples (--cp)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llava_mcore.cli import plan
from llava_mcore.plan.context import keys_and_values
from llava_mcore.plan.hardware.efficiency import Efficiency
from llava_mcore.plan.hardware.gpus import GPUS
from llava_mcore.plan.material import packs_for
from llava_mcore.plan.memory import decoder_activations
from llava_mcore.plan.parameters import owned, stage_parameters
from llava_mcore.plan.predict import predict
from llava_mcore.plan.seconds import Machine
from llava_mcore.plan.work import Sample, like_llava
from tests.unit.plan.test_command import LLAVA_7B
from tests.unit.plan.test_predict import DECODER, H200, MODEL, layout, predicted

CP, TP = "parallel.context_parallel_size", "parallel.tensor_model_parallel_size"
FLAGS: dict[str, Any] = {"training.micro_batch_size": 1, "data.seq_length": 65536}
LONG = [Sample(60000, 30000, pictures=((640, 480),) * 4)]


def test_a_rank_has_its_part_of_the_tokens_and_all_media() -> None:
    one, four = (packs_for(MODEL, layout(4, **FLAGS, **{CP: cp}), LONG) for cp in (1, 4))
    for name in ("tokens", "computed", "causal_pairs", "trained"):
        assert getattr(four.mean, name) == pytest.approx(getattr(one.mean, name) / 4, rel=1e-3), name
    assert four.mean.positions == one.mean.positions and four.mean.pixel_bytes == one.mean.pixel_bytes
    # Of the pack with most trained tokens one rank may have nothing else.
    assert four.peaks[1].trained == four.peaks[1].computed == pytest.approx(65536 / 4)


def test_activations_and_state_are_divided_and_weights_are_not() -> None:
    one, four = layout(4, **FLAGS), layout(4, **FLAGS, **{CP: 4})
    memory = [predicted(x).stages[0].memory for x in (one, four)]
    assert memory[1].activations == pytest.approx(memory[0].activations / 4, rel=1e-3)
    assert memory[1].weights == memory[0].weights and memory[1].gradients == memory[0].gradients
    # The same ranks divide the optimizer's state.
    assert memory[1].optimizer == memory[0].optimizer
    assert owned(four, stage_parameters(MODEL, four, 0)) == stage_parameters(MODEL, four, 0).trained / 4
    work = packs_for(MODEL, four, LONG).mean
    assert decoder_activations(MODEL, four, work, 32, 0) == pytest.approx(
        decoder_activations(MODEL, one, packs_for(MODEL, one, LONG).mean, 32, 0) / 4, rel=1e-3
    )


def test_a_step_of_long_samples_takes_as_long_as_with_replicas() -> None:
    """Attention is balanced, and a ring of long samples hides its messages: four ranks and four packs per step."""
    flags = FLAGS | {"training.global_batch_size": 4, "model.recompute": "full"}
    packs, divided = (predict(MODEL, x, packs_for(MODEL, x, LONG), H200) for x in _layouts(flags))
    assert divided.tokens == pytest.approx(packs.tokens, rel=1e-3)
    attention = [x.stages[0].forward.attention for x in (packs, divided)]
    assert attention[1] == pytest.approx(attention[0] / 4, rel=1e-3)
    assert divided.stages[0].forward.messages == 0
    assert divided.passes == pytest.approx(packs.passes, rel=0.05)
    assert divided.memory < packs.memory


def _layouts(flags: dict[str, Any]) -> tuple[Any, Any]:
    return layout(4, **flags), layout(4, **flags, **{CP: 4})


def test_messages_by_kind() -> None:
    link = 1e9  # so slow that nothing is hidden
    slow = Machine(replace(GPUS["h200"], link=link / 0.4), Efficiency())
    chosen = layout(4, **FLAGS, **{CP: 4})
    packs = packs_for(MODEL, chosen, like_llava())
    tokens = packs.mean.computed
    assert keys_and_values(DECODER, chosen) == 4 * 4096
    seconds = {}
    for kind in ("p2p", "all_gather", "a2a"):
        of_kind: Any = replace(chosen, cp_comm_type=kind)
        seconds[kind] = predict(MODEL, of_kind, packs, slow).stages[0].forward.messages / 32
    assert seconds["all_gather"] == pytest.approx(3 * tokens * 4 * 4096 / link, rel=1e-3)
    assert seconds["p2p"] == pytest.approx(seconds["all_gather"], rel=0.1)  # less what is multiplied meanwhile
    assert seconds["a2a"] == pytest.approx(0.75 * tokens * 2 * 4 * 4096 / link, rel=1e-3)
    # Two neighbors exchange half of each tensor, and a ring of two passes the keys of both, of half of the heads.
    levels: Any = replace(chosen, cp_comm_type="a2a+p2p", cp_a2a_size=2)
    both = predict(MODEL, levels, packs, slow).stages[0].forward.messages / 32
    assert both == pytest.approx(seconds["p2p"] / 3 + seconds["a2a"] * 2 / 3, rel=0.1)
    # With fewer key/value heads than query heads a ring sends less, with tensor parallelism both.
    grouped = replace(MODEL, decoder=replace(DECODER, groups=8))
    assert predict(grouped, chosen, packs, slow).stages[0].forward.messages / 32 < seconds["p2p"] / 3.5


def test_the_tower_is_divided() -> None:
    trained = FLAGS | {"model.freeze_vision_model": False}
    one, two = (predicted(layout(4, **trained, **{CP: cp})) for cp in (1, 2))
    assert two.stages[0].memory.tower_activations < 0.6 * one.stages[0].memory.tower_activations
    assert two.stages[0].forward.tower < 0.6 * one.stages[0].forward.tower
    # With tensor parallelism only if the run says so: else each of the context-parallel ranks computes all images.
    flags = trained | {TP: 2, CP: 2}
    parts, whole = (predicted(layout(4, **flags, **{"parallel.vision_data_parallel": x})) for x in ("off", "on"))
    assert whole.stages[0].forward.tower < 0.6 * parts.stages[0].forward.tower


def test_a_search_divides_long_samples_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = LLAVA_7B["text_config"] | {"max_position_embeddings": 131072}
    (tmp_path / "config.json").write_text(json.dumps(LLAVA_7B | {"text_config": text}), encoding="utf-8")

    def sizes(*arguments: str) -> set[int]:
        given = ["--hf-dir", str(tmp_path / "config.json"), "-g", "4", "--packing", "--global-batch-size", "8"]
        assert plan.main([*given, "--json", *arguments]) == 0
        found = json.loads(capsys.readouterr().out)
        return {x["changes"][CP] for x in found["fitting"]}

    assert sizes("--seq-length", "4096") == {1}
    assert sizes("--seq-length", "4096", "--cp", "2") == {1, 2}
    assert sizes("--seq-length", "65536") >= {2, 4}
    long = ["--packing", "--seq-length", "65536", "--global-batch-size", "8", "--cp", "4", "--as-given"]
    long += ["model.recompute=full", "--dist-optim"]
    assert plan.main(["--hf-dir", str(tmp_path / "config.json"), "-g", "4", *long]) == 0
    assert "tp 1, cp 4, pp 1, dp 1" in capsys.readouterr().out
