"""Images and videos of any size: every gradient is Hugging Face's, and packed samples are those that are padded."""

from __future__ import annotations

import re
from pathlib import Path

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import pytest
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams

from llava_mcore.convert.import_hf import import_hf
from llava_mcore.convert.logits_worker import given_media
from llava_mcore.data.loader.collate import collate
from llava_mcore.models.model_table import detect_names, mapping_table
from llava_mcore.parallel.groups import single_process
from tests.helpers.cases import CASES, THEIRS, Case, any_size_samples, make_case, make_inputs, media_plan
from tests.parallel.checks import load_model


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.architecture.startswith("llava_")], ids=lambda case: case.name
)
def test_gradients_are_hugging_faces(case: Case, tmp_path: Path) -> None:
    theirs = make_case(case, tmp_path / "hf")
    checkpoint = import_hf(tmp_path / "hf", tmp_path / "megatron")
    inputs = make_inputs(theirs)
    ids = inputs["input_ids"]
    labels, mask = torch.roll(ids, -1, 1), (ids != theirs.config.image_token_id).float()
    given = {name.removeprefix(THEIRS): x for name, x in inputs.items() if name.startswith(THEIRS)}
    logits = theirs(input_ids=ids, **given).logits
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    (losses * mask.flatten()).sum().backward()
    expected = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    media = given_media({name: x for name, x in inputs.items() if not name.startswith(THEIRS)})
    with single_process() as groups:
        model = load_model(groups, checkpoint)
        positions = torch.arange(ids.shape[1]).expand(ids.shape)
        model(ids, positions, media, labels=labels, loss_mask=mask).backward()
        names = detect_names(theirs.config, theirs.state_dict(), source="the model")
        rows = model.language_model.embedding.word_embeddings.weight.shape[0]
        table = mapping_table(theirs.config, names, hf_tensors={}, padded_vocab_size=rows)
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        compared = set()
        for name, entry in table.entries.items():
            for hf_name, gradient in entry.to_hf(found[name]).items():
                theirs_name, their_gradient = gradient_of(hf_name, expected)
                largest = their_gradient.abs().max()
                assert (gradient - their_gradient).abs().max() <= 2e-5 * largest + 1e-6, hf_name
                compared.add(theirs_name)
    assert compared == expected.keys()


def gradient_of(name: str, gradients: dict[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    """Return a parameter of transformers' model and its gradient; files have a tensor for each expert, it has one."""
    of_expert = re.fullmatch(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
    if of_expert is None:
        return name, gradients[name]
    experts, number, part = of_expert.groups()
    fused = f"{experts}.down_proj" if part == "down" else f"{experts}.gate_up_proj"
    gradient = gradients[fused][int(number)]
    return fused, gradient if part == "down" else gradient.chunk(2)[part == "up"]


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.architecture.startswith("llava_")], ids=lambda case: case.name
)
def test_packed_samples_are_those_that_are_padded(case: Case, tmp_path: Path) -> None:
    """With images, videos and text; and a sample without its neighbors gives the same."""
    theirs = make_case(case, tmp_path / "hf")
    checkpoint = import_hf(tmp_path / "hf", tmp_path / "megatron")
    samples, fields = any_size_samples(theirs.config), media_plan(theirs.config).fields
    length = len(samples[0].conversations[0])
    options = {"seq_length": length * len(samples), "pad_token_id": 3, "fields": fields, "multiple": 1}
    padded, packed = (collate(samples, packed=packing, **options) for packing in (False, True))
    with single_process() as groups, torch.no_grad():
        model = load_model(groups, checkpoint)
        expected = model(padded.input_ids, padded.position_ids, padded.media)
        bounds = packed.cu_seqlens
        params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=length, max_seqlen_kv=length
        )
        found = model(packed.input_ids, packed.position_ids, packed.media, packed_seq_params=params)
        alone = collate(samples[-1:], packed=False, **options)
        last = model(alone.input_ids, alone.position_ids, alone.media)
    assert (found.view_as(expected) - expected).abs().max() <= 1e-5
    assert (last - expected[-1:]).abs().max() <= 1e-5
