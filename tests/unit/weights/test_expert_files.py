"""Experts in files: every form becomes the same two tensors and comes back bit for bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3VLMoeConfig

from llava_mcore.errors import ConversionError
from llava_mcore.models.language.families.qwen3_moe import is_sparse
from llava_mcore.models.language.families.registry import language_family
from llava_mcore.weights.expert_files import ExpertForm, ExpertSizes, expert_entries, expert_form
from llava_mcore.weights.layouts import StackExperts
from llava_mcore.weights.names import TextNames
from llava_mcore.weights.slices import TensorSlice
from llava_mcore.weights.table import EXPERT_COLUMN, EXPERT_ROW, Entry, MappingTable, check_coverage

SIZES = ExpertSizes(num_experts=4, hidden=6, inner=5)
EXPERTS = "model.layers.0.mlp.experts."


def fused(sizes: ExpertSizes = SIZES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    h, f = sizes.hidden, sizes.inner
    return {
        EXPERTS + "gate_up_proj": torch.randn(4, 2 * f, h, generator=generator),
        EXPERTS + "down_proj": torch.randn(4, h, f, generator=generator),
        "model.layers.0.mlp.gate.weight": torch.randn(4, h, generator=generator),
    }


def of_form(form: ExpertForm, sizes: ExpertSizes = SIZES) -> dict[str, Tensor]:
    """Return the same weights as files of a form have them."""
    weights = fused(sizes)
    if form is ExpertForm.TRANSPOSED:
        return {name: x.transpose(1, 2).contiguous() if "experts" in name else x for name, x in weights.items()}
    if form is ExpertForm.FUSED:
        return weights
    gate, up = weights.pop(EXPERTS + "gate_up_proj").chunk(2, dim=1)
    down = weights.pop(EXPERTS + "down_proj")
    named = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    return weights | {f"{EXPERTS}{i}.{name}.weight": x[i].clone() for name, x in named.items() for i in range(4)}


def names_of(tensors: dict[str, Any]) -> TextNames:
    return TextNames("language_model.", "model.", "", "", tensors)


def table_of(tensors: dict[str, Tensor], sizes: ExpertSizes = SIZES) -> MappingTable:
    names = names_of(tensors)
    form = expert_form(names, 0, sizes, usual=ExpertForm.FUSED)
    return MappingTable.of(x for entry in expert_entries(names, sizes, form) for x in entry.expand(layer=[0]))


# The shape of a square tensor does not tell whether it is transposed: gate_up_proj is square where hidden is 2 x inner
# (10), down_proj where they are equal (5).
@pytest.mark.parametrize("hidden", [6, 10, 5])
@pytest.mark.parametrize("usual", [ExpertForm.FUSED, ExpertForm.TRANSPOSED])
@pytest.mark.parametrize("form", ExpertForm)
def test_every_form_is_recognized_and_comes_back(form: ExpertForm, usual: ExpertForm, hidden: int) -> None:
    sizes = ExpertSizes(num_experts=4, hidden=hidden, inner=5)
    weights = of_form(form, sizes)
    assert expert_form(names_of(weights), 0, sizes, usual=usual) is form
    entries = table_of(weights, sizes).entries
    found = {name.rpartition("mlp.")[2]: entry.to_megatron(weights) for name, entry in entries.items()}
    expected = fused(sizes)
    assert torch.equal(found["experts.linear_fc1.weight"], expected[EXPERTS + "gate_up_proj"])
    assert torch.equal(found["experts.linear_fc2.weight"], expected[EXPERTS + "down_proj"])
    assert torch.equal(found["router.weight"], expected["model.layers.0.mlp.gate.weight"])
    back = {k: x for entry in entries.values() for k, x in entry.to_hf(entry.to_megatron(weights)).items()}
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], x) and back[name].is_contiguous() for name, x in weights.items())


def test_a_matrix_of_an_expert_is_a_slice_of_the_stacked_tensor() -> None:
    entry = Entry("m", ("a", "b", "c", "d"), EXPERT_COLUMN, StackExperts(2, 2))
    assert entry.hf_slices((2, 6, 5)) == (
        TensorSlice((0, 0, 0), (1, 3, 5)),
        TensorSlice((0, 3, 0), (1, 3, 5)),
        TensorSlice((1, 0, 0), (1, 3, 5)),
        TensorSlice((1, 3, 0), (1, 3, 5)),
    )
    assert entry.hf_shapes((2, 6, 5)) == ((3, 5),) * 4


def test_slices_of_ranks_have_whole_experts_and_their_part_of_gate_and_up() -> None:
    into, out = fused()[EXPERTS + "gate_up_proj"], torch.randn(4, 6, 8)
    into = torch.cat([into, into], dim=1)  # an even width: 10
    for ep, parts in enumerate(EXPERT_COLUMN.split_experts(into, 2, 2)):
        mine = into[2 * ep : 2 * ep + 2]
        for etp, part in enumerate(parts):
            gate, up = mine.chunk(2, dim=1)
            rows = slice(5 * etp, 5 * etp + 5)
            assert torch.equal(part, torch.cat([gate[:, rows], up[:, rows]], dim=1))
    for ep, parts in enumerate(EXPERT_ROW.split_experts(out, 4, 2)):
        assert [torch.equal(part, out[ep : ep + 1, :, 4 * i : 4 * i + 4]) for i, part in enumerate(parts)] == [True] * 2
    with pytest.raises(ConversionError, match="4 experts cannot be divided over ep 3"):
        EXPERT_ROW.split_experts(out, 3, 1)


def test_a_missing_or_wrong_expert_is_named_briefly() -> None:
    weights = of_form(ExpertForm.PER_EXPERT)
    table = table_of(weights)
    ours = {name: tuple(entry.to_megatron(weights).shape) for name, entry in table.entries.items()}
    shapes = {name: tuple(x.shape) for name, x in weights.items()}
    check_coverage(table, hf_shapes=shapes, megatron_shapes=ours, source="hf")
    shapes[f"{EXPERTS}2.up_proj.weight"] = (4, 6)
    with pytest.raises(ConversionError, match="and 4 more") as error:
        check_coverage(table, hf_shapes=shapes, megatron_shapes=ours, source="hf")
    assert len(str(error.value)) < 900
    del shapes[f"{EXPERTS}2.up_proj.weight"]
    with pytest.raises(ConversionError, match=rf"tensor is missing: {EXPERTS}2\.up_proj\.weight"):
        check_coverage(table, hf_shapes=shapes, megatron_shapes=ours, source="hf")


TEXT = {"num_hidden_layers": 6, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}


def test_megatrons_fields_follow_from_the_config() -> None:
    config = Qwen3MoeConfig(**TEXT, norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[3])
    assert is_sparse(config) == [False, True, False, False, False, True]
    fields = language_family(config).config_from_hf(config)
    assert fields["moe_layer_freq"] == [0, 1, 0, 0, 0, 1]
    assert (fields["num_moe_experts"], fields["moe_router_topk"], fields["moe_ffn_hidden_size"]) == (8, 3, 24)
    assert fields["moe_router_pre_softmax"]
    normalized = Qwen3MoeConfig(**TEXT, norm_topk_prob=True)
    assert not language_family(normalized).config_from_hf(normalized)["moe_router_pre_softmax"]
    vision_language = Qwen3VLMoeConfig(text_config=TEXT).text_config
    assert not language_family(vision_language).config_from_hf(vision_language)["moe_router_pre_softmax"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 exceeds num_experts = 8"),
        ({"num_experts_per_tok": 1, "norm_topk_prob": True}, "the router would get no gradient"),
        ({"mlp_only_layers": list(range(6))}, "no layer has experts by decoder_sparse_step and mlp_only_layers"),
    ],
)
def test_what_cannot_be_trained_is_refused(change: dict[str, Any], said: str) -> None:
    config = Qwen3MoeConfig(**TEXT | change)
    with pytest.raises(ConversionError, match=said):
        language_family(config).config_from_hf(config)


def test_weights_that_a_token_uses() -> None:
    """A layer of 3 of 8 experts has the weights of one of 8 of 8, less those of 5."""
    config = Qwen3MoeConfig(**TEXT, hidden_size=32)
    family = language_family(config)
    whole = Qwen3MoeConfig(**TEXT | {"num_experts_per_tok": 8}, hidden_size=32)
    assert family.layer_weights(config) + family.inactive_weights(config) == family.layer_weights(whole)
    assert family.inactive_weights(config) == 6 * 5 * 3 * 32 * 24 and family.inactive_weights(whole) == 0


def test_names_without_tensors_are_those_of_published_files() -> None:
    for config, expected in (
        (Qwen3MoeConfig(**TEXT), "model.layers.0.mlp.experts.0.gate_proj.weight"),
        (Qwen3VLMoeConfig(text_config=TEXT).text_config, "model.layers.0.mlp.experts.gate_up_proj"),
    ):
        entries = language_family(config).weight_entries(config, names_of({}))
        assert expected in {name for entry in entries for name in entry.hf_names}
    shape = SimpleNamespace(shape=(8, config.hidden_size, 48))
    names = names_of({"model.layers.0.mlp.experts.gate_up_proj": shape})
    found = expert_form(names, 0, ExpertSizes(8, config.hidden_size, 24), usual=ExpertForm.FUSED)
    assert found is ExpertForm.TRANSPOSED
