"""Terms beside the cross-entropy: gradients against plain torch, named sums, and what they leave unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from llava_mcore.models.loss.linear_cross_entropy import linear_cross_entropy
from llava_mcore.models.loss.terms import ChunkLogits, LossTerm
from llava_mcore.parallel.groups import single_process
from llava_mcore.parallel.named_sums import add_sum, collect_sums, with_loss
from tests.unit.models.test_linear_cross_entropy import VOCAB, case, difference, gradients

COEFFICIENT = 0.3


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with single_process():
        yield


def z_loss(chunk: ChunkLogits) -> Tensor:
    return chunk.log_sum.square()


def spread(chunk: ChunkLogits) -> Tensor:
    """A term of the logits themselves."""
    return (chunk.log_sum - chunk.logits.mean(1)).pow(3)


def ours(inputs: dict[str, Tensor], terms: dict[str, LossTerm]) -> Tensor:
    total, _ = linear_cross_entropy(**inputs, vocab_size=VOCAB, tp_group=dist.group.WORLD, chunk_tokens=16, terms=terms)
    return total


def plain(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The cross-entropy and both terms, from whole logits."""
    logits = F.linear(inputs["hidden"], inputs["weight"][:VOCAB]).transpose(0, 1).flatten(0, 1).float()
    weights = inputs["token_weights"].flatten()
    losses = F.cross_entropy(logits, inputs["labels"].flatten(), reduction="none")
    log_sum = logits.logsumexp(1)
    values = losses, log_sum.square(), (log_sum - logits.mean(1)).pow(3)
    loss, z, other = ((x * weights).sum() for x in values)
    return loss, z, other


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_gradients_are_those_of_plain_torch(dtype: torch.dtype, most: float) -> None:
    inputs = case(37, 3, dtype)
    terms = {"z_loss": LossTerm(z_loss, COEFFICIENT), "spread": LossTerm(spread, 0.01)}
    with collect_sums() as sums:
        total = ours(inputs, terms)
    loss, z, other = plain(inputs)
    assert torch.equal(total, ours(inputs, {})), "the loss is the cross-entropy alone"
    expected = gradients(loss + COEFFICIENT * z + 0.01 * other, inputs)
    assert difference(gradients(loss, inputs)[1], expected[1]) > 10 * most
    for scale in (1.0, 8.0):  # fp16's loss scale
        for mine, right in zip(gradients(total, inputs, scale), expected, strict=True):
            assert difference(mine, scale * right) <= most
    assert not gradients(total, inputs)[1][VOCAB:].any()
    weight = float(inputs["token_weights"].sum())
    assert sums.keys() == terms.keys()
    assert sums["z_loss"].tolist() == pytest.approx([z.item(), weight], rel=most)
    assert sums["spread"].tolist() == pytest.approx([other.item(), weight], rel=most)


def test_a_term_without_coefficient_is_only_reported() -> None:
    inputs = case(20, 2)
    with collect_sums() as sums:
        total = ours(inputs, {"z": LossTerm(z_loss, None)})
    assert sums["z"][0].item() == pytest.approx(plain(inputs)[1].item(), rel=1e-5)
    for mine, without in zip(gradients(total, inputs), gradients(ours(inputs, {}), inputs), strict=True):
        assert torch.equal(mine, without)
    with torch.no_grad(), collect_sums() as sums:
        ours(inputs, {"z": LossTerm(z_loss, COEFFICIENT)})
    assert "z" in sums


class Config:
    """What `with_loss` reads of a module's configuration."""

    @staticmethod
    def grad_scale_func(x: Tensor) -> Tensor:
        return x * torch.tensor([4.0])


def test_a_term_inside_the_model_has_the_loss_scale() -> None:
    x = torch.randn(5, 3, requires_grad=True)
    with collect_sums() as sums:
        kept = with_loss(x, "size", x.square().sum(), 5, coefficient=0.5, config=Config)  # type: ignore[arg-type]
        add_sum("size", torch.tensor(1.0), torch.tensor(2))
    assert torch.equal(kept, x)
    (found,) = torch.autograd.grad((4 * kept).sum(), x)  # as a scaled loss
    assert torch.allclose(found, 4 + 4 * 0.5 * 2 * x)
    assert sums["size"].tolist() == pytest.approx([x.square().sum().item() + 1, 7])


def test_a_recomputed_layer_counts_once() -> None:
    x = torch.randn(4, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        return with_loss(2 * x, "size", x.sum(), 4, coefficient=1.0, config=Config)  # type: ignore[arg-type]

    with collect_sums() as sums:
        out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
    out.sum().backward()
    assert sums["size"].tolist() == pytest.approx([x.sum().item(), 4])
    assert torch.allclose(x.grad, torch.full((4,), 2.0 + 4.0))
