"""The vocab-parallel loss at tensor-parallel sizes 1, 2 and 4, and the gradients that data parallelism receives."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.world import run_world

HIDDEN = 24
# Samples, tokens (both divide by 4 for sequence parallelism, but not by a chunk), vocabulary, rows.
SHAPES = [(2, 20, 101, 128), (1, 36, 128, 128), (3, 8, 33, 128)]  # in the last, some ranks hold padding alone


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest entry of `b`."""
    return ((a - b).abs().max() / b.abs().max()).item()


def group_of(tp: int) -> dist.ProcessGroup:
    """Cut the world into groups of `tp` ranks and return this rank's."""
    groups = [dist.new_group(list(range(i, i + tp))) for i in range(0, dist.get_world_size(), tp)]
    return groups[dist.get_rank() // tp]


def compare_shape(group: dist.ProcessGroup, shape: tuple[int, int, int, int], *, sequence_parallel: bool) -> float:
    """Return the largest difference to the plain head of the whole vocabulary, over values and gradients."""
    from llava_mcore.models.loss.linear_cross_entropy import linear_cross_entropy

    b, s, vocab, rows = shape
    g = torch.Generator().manual_seed(s)
    hidden, weight = torch.randn(s, b, HIDDEN, generator=g), torch.randn(rows, HIDDEN, generator=g)
    labels, token_weights = torch.randint(0, vocab, (b, s), generator=g), torch.rand(b, s, generator=g)
    hidden.requires_grad_(), weight.requires_grad_()
    logits = F.linear(hidden, weight[:vocab]).transpose(0, 1)
    right = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(b, s)
    (right * token_weights).sum().backward()

    n, i = group.size(), group.rank()
    mine = weight.detach().chunk(n)[i].clone().requires_grad_()
    part = (hidden.detach().chunk(n)[i] if sequence_parallel else hidden.detach()).clone().requires_grad_()
    total, losses = linear_cross_entropy(
        part,
        mine,
        labels,
        token_weights,
        vocab_size=vocab,
        tp_group=group,
        sequence_parallel=sequence_parallel,
        chunk_tokens=16,
    )
    total.backward()
    grad_hidden = hidden.grad.chunk(n)[i] if sequence_parallel else hidden.grad
    pairs = [(total, (right * token_weights).sum()), (losses, right), (part.grad, grad_hidden)]
    if weight.grad.chunk(n)[i].any():
        pairs.append((mine.grad, weight.grad.chunk(n)[i]))
    else:
        assert not mine.grad.any()
    return max(difference(x.detach(), y.detach()) for x, y in pairs)


def data_parallel_gradients(tied: bool, adds: bool) -> float:
    """Return the largest difference in main_grad between the plain loss and the chunked one, at tp 2 x dp 2.

    Args:
        adds: with the chunked one, output layer and embedding add the gradients of their weights themselves.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from transformers import LlavaConfig

    from llava_mcore.models.configs import ModelOptions, part_configs
    from llava_mcore.models.language.decoder import LanguageModel
    from llava_mcore.models.language.families.llama import Llama
    from tests.helpers.tiny_hf import text_config, vision_config

    hf = LlavaConfig(vision_config=vision_config("clip"), text_config=text_config("llama"), tie_word_embeddings=tied)
    config = part_configs(hf, ModelOptions(tensor_model_parallel_size=2, on_cpu=True)).language
    model = LanguageModel(
        config,
        hf.text_config,
        Llama().shape(hf.text_config),
        tied=tied,
        num_rows=512,
        pre_process=True,
        post_process=True,
    )
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    g = torch.Generator().manual_seed(dist.get_rank() // 2)
    found: list[dict[str, Tensor]] = []
    for chunked in (False, True):
        if chunked and adds:
            model.add_to_main_grad(scales_loss=False)
        wrapped.zero_grad_buffer()
        for _ in range(2):  # micro-batches add up
            ids = torch.randint(0, 401, (2, 21), generator=g.manual_seed(dist.get_rank() // 2))
            mask = (torch.rand(2, 21, generator=g) < 0.5).float()
            out = wrapped(
                ids,
                torch.arange(21).expand(2, -1),
                None,
                labels=ids.roll(-1, 1),
                loss_mask=mask if chunked else None,
                output_processor=model.loss_or_logits,
            )
            (out if chunked else (out * mask).sum()).backward()
        found.append({name: p.main_grad.clone() for name, p in model.named_parameters()})
    assert all(x.any() for x in found[0].values())
    return max(difference(x, found[0][name]) for name, x in found[1].items())


def compare_all() -> dict[str, float]:
    """Run on every rank of a world of four."""
    from tests.parallel.checks import join

    join(2, 1)
    found = {}
    for tp in (1, 2, 4):
        group = group_of(tp)
        for shape in SHAPES:
            for sequence_parallel in (False, True):
                name = f"tp {tp}, {shape}, sequence parallel {sequence_parallel}"
                found[name] = compare_shape(group, shape, sequence_parallel=sequence_parallel)
    for tied, adds in itertools.product((False, True), repeat=2):
        found[f"main_grad, tied {tied}, added {adds}"] = data_parallel_gradients(tied, adds)
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_world(4, compare_all)


def test_fp32_is_the_plain_head_at_every_tensor_parallel_size(results: list[dict[str, float]]) -> None:
    worst = {name: max(rank[name] for rank in results) for name in results[0]}
    print(worst)
    assert all(x <= (2e-6 if name.startswith("main_grad") else 1e-6) for name, x in worst.items()), worst
