"""A class compared with its own model in transformers: the loader's batches, logits, gradients, FLOPs; edited
folders."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from llava_mcore.compat.delta_rule import torch_step
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.encode.assets import Assets, load_assets
from llava_mcore.data.encode.encode import tokenize
from llava_mcore.data.loader.collate import collate
from llava_mcore.data.samples import Batch, Conversation, EncodedSample
from llava_mcore.media.batch_fields import MediaWork
from llava_mcore.models.architectures.hf_config import load_hf_config, model_dims
from llava_mcore.models.architectures.registry import architecture_of
from llava_mcore.models.flops import TrainedParts, Workload, model_flops
from llava_mcore.models.model_table import detect_names, mapping_table
from llava_mcore.models.multimodal import VisionLanguageModel
from llava_mcore.parallel.batch import MicroBatch, longest, longest_media
from llava_mcore.parallel.groups import single_process
from tests.helpers.encoding import assets_once
from tests.parallel.checks import load_model

TheirInputs = Callable[[Path, Conversation], Any]
"""What a folder's own processor makes of a conversation."""


_batches: dict[Any, tuple[Sequence[Conversation], Batch]] = {}


def batch_once(folder: Path, conversations: Sequence[Conversation], **options: Any) -> Batch:
    """Return what the loader makes of conversations; of the same ones in the same way, the same batch.

    Steps repeat their conversations, and encoding these takes as long as training on them.
    """
    key = folder, tuple(map(id, conversations)), tuple(sorted(options.items()))
    if key not in _batches:  # the conversations are kept, so that no others get their ids
        _batches[key] = conversations, batch_of(assets_once(folder), conversations, **options)
    return _batches[key][1]


def batch_of(
    assets: Assets,
    conversations: Sequence[Conversation],
    *,
    packed: bool,
    multiple: int = 8,
    sample_multiple: int = 1,
) -> Batch:
    """Return what the loader makes of conversations."""
    samples = []
    for number, conversation in enumerate(conversations):
        tokens = tokenize(conversation, assets, str(number))
        pixels = assets.images.tiles(tokens.media)
        samples.append(
            EncodedSample(__key__=str(number), __restore_key__=(), conversations=[tokens], pixel_values=pixels)
        )
    return collate(
        samples,
        seq_length=512,
        pad_token_id=assets.pad_token_id,
        packed=packed,
        pixel_scale=assets.images.pixel_scale,
        fields=assets.plan.fields,
        num_axes=assets.plan.num_axes,
        multiple=multiple,
        sample_multiple=sample_multiple,
    )


def packed_params(batch: Batch) -> PackedSeqParams | None:
    """Return megatron-core's description of a pack; None for padded rows."""
    tokens = (batch.input_ids, batch.labels, batch.loss_mask, batch.position_ids)
    return MicroBatch(*tokens, batch.media, batch.cu_seqlens, longest(batch.cu_seqlens)).packed_seq_params


def hf_model(folder: Path, **options: Any) -> PreTrainedModel:
    """Return a folder's model in transformers."""
    hf = load_hf_config(folder)
    if model_dims(hf).num_experts:  # a loop over experts: torch has no grouped product in fp64, and does not count it
        options |= {"experts_implementation": "eager"}
    return architecture_of(hf).model_class.from_pretrained(folder, **options)


def assert_logits_and_gradients(
    folder: Path, conversations: Sequence[Conversation], theirs_of: TheirInputs, target: Path, *, noisy: bool = False
) -> None:
    """Compare conversations, packed and padded, with transformers' model on each of them alone.

    Logits within 1e-5, packed and padded within 1e-6 of the largest, every gradient within 1e-5 of its largest value.

    Args:
        noisy: a model that amplifies rounding: instead of these, logits differ from transformers' in fp64 by at most
            twice of what its own in fp32 do.
    """
    checkpoint, assets = import_hf(folder, target), load_assets(folder)
    packed, padded = (batch_of(assets, conversations, packed=x) for x in (True, False))
    model = hf_model(folder)
    given = [theirs_of(folder, x) for x in conversations]
    expected = _train_theirs(model, given, padded)
    wide = hf_model(folder).double() if noisy else model
    precise = _train_theirs(wide, given, padded) if noisy else expected
    noise = [(x - y).abs().max().item() for x, y in zip(expected, precise, strict=True)]
    with single_process() as groups:
        ours = load_model(groups, checkpoint)
        found = {}
        for kind, batch in (("packed", packed), ("padded", padded)):
            out = _logits(ours, batch)
            rows = [out[0, a:b] for a, b in itertools.pairwise(batch.cu_seqlens.tolist())] or list(out)
            found[kind] = [x[: len(y)] for x, y in zip(rows, expected, strict=False)]
            errors = [(x - y).abs().max().item() for x, y in zip(found[kind], precise, strict=True)]
            assert all(x <= max(1e-5, 2 * n) for x, n in zip(errors, noise, strict=True)), (kind, errors, noise)
        for x, y, n in zip(*found.values(), noise, strict=True):
            assert (x - y).abs().max() <= max(1e-6 * y.abs().max().item(), 2 * n)
        given = (padded.input_ids, padded.position_ids, padded.media)
        most = longest_media(padded.media)
        ours(*given, labels=padded.labels, loss_mask=padded.loss_mask, max_media_seqlen=most).backward()
        _assert_same_gradients(ours, model, wide)


def _train_theirs(model: PreTrainedModel, inputs: Sequence[Any], padded: Batch) -> list[Tensor]:
    """Return the logits of each conversation; the model then has the gradients of their trained tokens' loss."""
    expected, total = [], torch.zeros(())
    for row, given in enumerate(inputs):
        logits = model(**given).logits[0]
        expected.append(logits.detach())
        mask, labels = padded.loss_mask[row, : len(logits)], padded.labels[row, : len(logits)]
        total = total + (F.cross_entropy(logits, labels, reduction="none") * mask).sum()
    total.backward()
    return expected


def _logits(ours: VisionLanguageModel, batch: Batch) -> Tensor:
    given = (batch.input_ids, batch.position_ids, batch.media)
    with torch.no_grad():
        found: Tensor = ours(
            *given, packed_seq_params=packed_params(batch), max_media_seqlen=longest_media(batch.media)
        )
    return found


def _assert_same_gradients(ours: VisionLanguageModel, model: PreTrainedModel, wide: PreTrainedModel) -> None:
    """Compare with a model's gradients. `wide`: the same model, perhaps in fp64; the largest relative difference from
    its gradients is the noise of all of them."""
    precise = {x: p.grad for x, p in wide.named_parameters() if p.grad is not None}
    gradients = {x: p.grad for x, p in model.named_parameters() if p.grad is not None}
    noise = max(((x - precise[name]).abs().max() / _largest(gradients, name)).item() for name, x in gradients.items())
    names = detect_names(ours.hf, model.state_dict(), source="the model")
    rows = ours.language_model.embedding.word_embeddings.weight.shape[0]
    table = mapping_table(ours.hf, names, hf_tensors=model.state_dict(), padded_vocab_size=rows)
    compared = 0
    for key, p in ours.named_parameters():
        assert p.grad is not None, key
        for hf_name, gradient in table.entries[key].to_hf(p.grad).items():
            largest = _largest(gradients, hf_name)
            allowed = max(1e-5, 2 * noise) * largest + 1e-9
            assert (gradient - gradients[hf_name]).abs().max() <= allowed, hf_name
            compared += 1
    assert compared == len(gradients)


def _largest(gradients: dict[str, Tensor], name: str) -> Tensor:
    """Return the largest value of a gradient, to which its error is relative.

    In SigLIP's attention a bias of the keys adds the same number to all scores of a query, so softmax ignores it. Its
    true gradient is 0, and what both libraries find is rounding of the terms that cancel, whose size is that of the
    weight's gradient.
    """
    if name.startswith("model.vision_model.") and name.endswith(".k_proj.bias"):
        name = name.removesuffix("bias") + "weight"
    return gradients[name].abs().max()


def assert_torch_counts_the_same(
    folder: Path, inputs: dict[str, Any], media: MediaWork, *, of_delta_rule: int = 0, not_counted: int = 0
) -> None:  # fmt: skip
    """Compare our FLOPs of a step on one sample with what torch counts over transformers' model.

    Args:
        of_delta_rule: FLOPs of the delta rule in the forward pass. transformers computes it with other products, in
            chunks, which are not compared.
        not_counted: FLOPs of products that we leave out.
        inputs: of transformers' model, with input_ids [1, s].
        media: what the tower computes on.
    """
    n = inputs["input_ids"].shape[1]
    work = Workload(num_tokens=n, num_pairs=n * n, media=media)
    model = hf_model(folder, attn_implementation="eager")
    with _delta_rule_without_products(), FlopCounterMode(display=False) as counter:
        model(**inputs, use_cache=False).logits.sum().backward()
    by_module = {key: sum(flops.values()) for key, flops in counter.get_flop_counts().items()}
    rotary = sum(x for key, x in by_module.items() if key.endswith(".rotary_emb"))
    expected = model_flops(load_hf_config(folder), work, TrainedParts(True, True, True)).total
    assert counter.get_total_flops() - rotary == expected - 3 * of_delta_rule + not_counted


@contextlib.contextmanager
def _delta_rule_without_products() -> Iterator[None]:
    """Let transformers compute delta rules, and convolutions before them, by sums that torch does not count."""

    def convolve(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
        width = weight.shape[1]
        return F.silu((F.pad(x, (width - 1, 0)).unfold(2, width, 1) * weight[:, None]).sum(-1))

    names = {"torch_chunk_gated_delta_rule": torch_step(), "causal_conv1d_fn": convolve}
    with contextlib.ExitStack() as stack:
        for name, function in names.items():
            for modeling in (modeling_qwen3_5, modeling_qwen3_5_moe):
                stack.enter_context(mock.patch.object(modeling, name, function))
        yield


def edited(folder: Path, target: Path, file: str, change: Callable[[dict[str, Any]], object]) -> Path:
    """Copy a folder and change one of its files."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    values = json.loads((target / file).read_text())
    change(values)
    (target / file).write_text(json.dumps(values))
    return target
