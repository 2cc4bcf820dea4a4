"""The embedding's gradient beside autograd's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from llava_mcore.models.language.embedding import Lookup, sums_of_rows

ROWS, WIDTH = 50, 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_has_the_bits_of_autograds(dtype: torch.dtype) -> None:
    """Two micro-batches with repeated ids, those of the first and the last row among them."""
    torch.manual_seed(1)
    weight = torch.randn(ROWS, WIDTH, dtype=dtype).requires_grad_()
    plain = weight.detach().clone().requires_grad_()
    total, expected = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)
    vars(weight)["main_grad"] = total
    for ids in (torch.randint(ROWS, (2, 40)), torch.tensor([[0, ROWS - 1, 0, 7, 7, 7]])):
        gradient = torch.randn(*ids.shape, WIDTH, dtype=dtype)
        found = Lookup.apply(weight, ids)
        wanted = F.embedding(ids, plain)
        assert found.equal(wanted)
        found.backward(gradient)
        wanted.backward(gradient)
        assert plain.grad is not None and weight.grad is not None
        assert vars(weight)["grad_added_to_main_grad"]
        expected += plain.grad
        plain.grad = weight.grad = None
        assert total.equal(expected)


def test_placeholder_is_zero_where_another_gradient_is_added_to_it() -> None:
    """As megatron-core marks a weight that is the output layer's too."""
    weight = torch.randn(ROWS, WIDTH).requires_grad_()
    vars(weight).update(main_grad=torch.zeros(ROWS, WIDTH), zero_out_wgrad=True)
    Lookup.apply(weight, torch.tensor([3, 3])).sum().backward()
    assert weight.grad is not None and not weight.grad.any()
    assert vars(weight)["main_grad"][3].eq(2).all()


def test_sums_of_rows() -> None:
    """Each id once, with its sum, then zeros for row 0."""
    ids = torch.tensor([5, 2, 5, 9])
    rows, sums = sums_of_rows(ids, torch.arange(1.0, 5)[:, None])
    assert rows.tolist() == [2, 5, 9, 0]
    assert sums.flatten().tolist() == [2.0, 4.0, 4.0, 0.0]
