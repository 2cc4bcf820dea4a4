"""The chunked output layer and loss against the plain ones: values, gradients, precision, memory, frozen parts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlavaConfig

from llava_mcore.models.configs import ModelOptions, part_configs
from llava_mcore.models.language.decoder import LanguageModel
from llava_mcore.models.language.families.llama import Llama
from llava_mcore.models.loss.linear_cross_entropy import linear_cross_entropy
from llava_mcore.parallel.groups import single_process
from tests.helpers.tiny_hf import text_config, vision_config

HIDDEN, VOCAB, ROWS = 24, 101, 128


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with single_process():
        yield


def case(s: int, b: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> dict[str, Tensor]:
    """Random inputs; the weights are those of a loss mask, except for one."""
    g = torch.Generator().manual_seed(seed)
    mask = (torch.rand(b, s, generator=g) < 0.6).float()
    mask[0, 0] = 0.25
    made = {
        "hidden": torch.randn(s, b, HIDDEN, generator=g).to(dtype),
        "weight": (0.5 * torch.randn(ROWS, HIDDEN, generator=g)).to(dtype),
        "labels": torch.randint(0, VOCAB, (b, s), generator=g),
        "token_weights": mask,
    }
    made = {name: x.to(device) for name, x in made.items()}
    for name in ("hidden", "weight"):
        made[name].requires_grad_()
    return made


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, token_weights: Tensor) -> tuple[Tensor, Tensor]:
    """The whole logits, then the loss in fp32."""
    logits = F.linear(hidden, weight[:VOCAB]).transpose(0, 1).flatten(0, 1)
    losses = F.cross_entropy(logits.float(), labels.flatten(), reduction="none").view(labels.shape)
    return (losses * token_weights).sum(), losses


def ours(
    inputs: dict[str, Tensor],
    chunk_tokens: int = 16,
    num_trained: int | None = None,
    adds_to_main_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    return linear_cross_entropy(
        **inputs,
        vocab_size=VOCAB,
        tp_group=dist.group.WORLD,
        chunk_tokens=chunk_tokens,
        num_trained=num_trained,
        adds_to_main_grad=adds_to_main_grad,
    )


def gradients(total: Tensor, inputs: dict[str, Tensor], scale: float = 1.0) -> list[Tensor]:
    return list(torch.autograd.grad(total * scale, [inputs["hidden"], inputs["weight"]], retain_graph=True))


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest entry of `b`."""
    return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()


def widened(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same numbers in fp64."""
    made = {name: x.detach().double() if x.is_floating_point() else x for name, x in inputs.items()}
    for name in ("hidden", "weight"):
        made[name].requires_grad_()
    return made


# 16 tokens a chunk: less than one, exactly one and two, one more and one less, several that are not full.
@pytest.mark.parametrize(("s", "b"), [(1, 1), (5, 3), (16, 1), (32, 1), (17, 1), (31, 1), (37, 3)])
def test_fp32_is_the_plain_head_and_loss(s: int, b: int) -> None:
    inputs = case(s, b)
    (total, losses), (total_plain, losses_plain) = ours(inputs), plain(**inputs)
    assert losses.shape == (b, s) and losses.dtype == torch.float32 and not losses.requires_grad
    assert difference(total, total_plain) <= 1e-6 and difference(losses, losses_plain) <= 1e-6
    for scale in (1.0, 0.125, 3.0):  # backward can run more than once, with any gradient of the sum
        for x, y in zip(gradients(total, inputs, scale), gradients(total_plain, inputs, scale), strict=True):
            assert difference(x, y) <= 1e-6
    assert not gradients(total, inputs)[1][VOCAB:].any()  # rows that pad the vocabulary


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 50))
def test_the_chunk_size_changes_rounding_only(num_tokens: int, chunk_tokens: int) -> None:
    inputs = case(num_tokens, 1, torch.float64)
    total, losses = ours(inputs, chunk_tokens)
    whole, losses_whole = ours(inputs, num_tokens)
    assert difference(losses, losses_whole) <= 1e-13
    for x, y in zip(gradients(total, inputs), gradients(whole, inputs), strict=True):
        assert difference(x, y) <= 1e-13


def test_gradients_equal_finite_differences() -> None:
    """Along random directions: one difference for each of the weight's elements would take minutes."""
    inputs = case(5, 2, torch.float64)

    def total(hidden: Tensor, weight: Tensor) -> Tensor:
        return ours(inputs | {"hidden": hidden, "weight": weight}, chunk_tokens=3)[0]

    for _ in range(5):
        assert torch.autograd.gradcheck(total, (inputs["hidden"], inputs["weight"]), fast_mode=True)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_the_plain_path(device: str, dtype: torch.dtype) -> None:
    inputs = case(61, 3, dtype, device)
    exact = widened(inputs)
    total, losses = ours(exact)
    total_half, losses_half = ours(inputs)
    total_plain, losses_plain = plain(**inputs)
    assert difference(losses_half, losses) <= 0.01 * difference(losses_plain, losses)  # unrounded logits
    right, half, other = gradients(total, exact), gradients(total_half, inputs), gradients(total_plain, inputs)
    for x, y, z in zip(half, other, right, strict=True):
        assert x.dtype == dtype
        assert (x.double() - z).norm() <= 0.9 * (y.double() - z).norm()


def test_fp16_gradients_are_rounded_after_the_loss_scale() -> None:
    inputs = case(20, 2, torch.float16)
    with torch.no_grad():
        inputs["weight"].mul_(4e-6)  # the hidden states' gradient is below what fp16 resolves until it is scaled
    exact = widened(inputs)
    right, half = gradients(ours(exact)[0], exact, 2.0**14), gradients(ours(inputs)[0], inputs, 2.0**14)
    assert (half[0].double() - right[0]).norm() <= 1e-3 * right[0].norm()


def test_extreme_logits_stay_finite() -> None:
    inputs = case(20, 1)
    with torch.no_grad():
        inputs["hidden"].mul_(1e4)
    total, _ = ours(inputs)
    assert difference(total, plain(**inputs)[0]) <= 1e-6
    assert all(x.isfinite().all() for x in gradients(total, inputs))


def test_only_what_is_trained_gets_a_gradient() -> None:
    inputs = case(20, 2)
    whole = gradients(ours(inputs)[0], inputs)
    frozen_head = inputs | {"weight": inputs["weight"].detach()}
    assert torch.equal(torch.autograd.grad(ours(frozen_head)[0], inputs["hidden"])[0], whole[0])
    frozen_below = inputs | {"hidden": inputs["hidden"].detach()}
    assert torch.equal(torch.autograd.grad(ours(frozen_below)[0], inputs["weight"])[0], whole[1])
    with torch.no_grad():
        assert torch.equal(ours(inputs)[0], ours(frozen_head)[0]) and not ours(inputs)[0].requires_grad


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_gradient_can_be_added_to_its_sum(device: str, dtype: torch.dtype) -> None:
    inputs = case(61, 3, dtype, device)
    expected = gradients(ours(inputs)[0], inputs)
    weight = torch.nn.Parameter(inputs["weight"].detach())
    weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    weight.grad_added_to_main_grad = False
    total, _ = ours(inputs | {"weight": weight}, adds_to_main_grad=True)
    (found,) = torch.autograd.grad(total, inputs["hidden"], retain_graph=True)
    assert torch.equal(found, expected[0]) and weight.grad_added_to_main_grad
    assert difference(weight.main_grad - 1, expected[1]) <= (1e-6 if dtype == torch.float32 else 4e-3)
    if device == "cpu":  # the assertion would end a process with a GPU
        with pytest.raises(RuntimeError, match="before the loss was scaled"):
            torch.autograd.grad(2 * total, inputs["hidden"])


@pytest.mark.parametrize(("s", "b", "part"), [(200, 1, 0.3), (90, 3, 0.1), (130, 2, 0.0), (130, 2, 0.97)])
def test_tokens_that_are_not_trained_need_not_meet_the_vocabulary(s: int, b: int, part: float) -> None:
    inputs = case(s, b, torch.float64)
    inputs["token_weights"] = (torch.rand(b, s, generator=torch.Generator().manual_seed(1)) < part).double()
    trained = inputs["token_weights"] != 0
    number = int(trained.sum())
    whole, losses_whole = ours(inputs)
    with _Rows() as seen:
        total, losses = ours(inputs, num_trained=number)
    assert seen.numel == min(s * b, max(64, -(-number // 64) * 64))  # what a matrix product with the head needs
    assert total.item() == pytest.approx(whole.item(), rel=1e-14)
    assert not ((losses - losses_whole)[trained].abs() > 1e-13).any()
    assert (losses[~trained] == 0).sum() >= s * b - seen.numel
    for x, y in zip(gradients(total, inputs), gradients(whole, inputs), strict=True):
        assert (x - y).abs().max() <= 1e-13
        assert part == 0 or y.any()


def test_nothing_trained_gives_zeros() -> None:
    inputs = case(20, 2)
    inputs["token_weights"].zero_()
    inputs["labels"].fill_(-100)  # where the weight is 0 any label is fine
    total, losses = ours(inputs)
    assert total == 0 and losses.isfinite().all()
    assert all((x == 0).all() for x in gradients(total, inputs))


class _Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


class _Rows(TorchDispatchMode):
    """Adds up the rows of the logits."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and out.shape[1] == ROWS:
            self.numel += out.shape[0]
        return out


def test_the_logits_never_exist_as_a_whole() -> None:
    inputs = case(200, 4)
    with _Largest() as seen:
        ours(inputs)[0].backward()
    with _Largest() as seen_plain:
        plain(**inputs)[0].backward()
    assert seen_plain.numel >= 800 * VOCAB
    assert seen.numel <= max(16 * ROWS, ROWS * HIDDEN, 800 * HIDDEN)


@pytest.mark.gpu
def test_no_host_synchronization() -> None:
    """Forward and backward never wait for the GPU."""
    inputs = case(200, 4, torch.bfloat16, "cuda")
    ours(inputs)[0].backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours(inputs)[0].backward()
        ours(inputs, num_trained=300)[0].backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("tied", [False, True])
def test_the_language_model_gives_the_masked_sum(tied: bool) -> None:
    hf = LlavaConfig(vision_config=vision_config("clip"), text_config=text_config("llama"), tie_word_embeddings=tied)
    torch.manual_seed(0)
    config = part_configs(hf, ModelOptions(on_cpu=True)).language
    model = LanguageModel(
        config,
        hf.text_config,
        Llama().shape(hf.text_config),
        tied=tied,
        num_rows=512,
        pre_process=True,
        post_process=True,
    )
    ids = torch.randint(0, 401, (2, 21))
    mask = (torch.rand(2, 21) < 0.5).float()
    entered = []
    model.output_layer.register_forward_pre_hook(lambda *_: entered.append(True))

    def run(loss_mask: Tensor | None) -> Tensor:
        positions = torch.arange(21).expand(2, -1)
        given = {"labels": ids.roll(-1, 1), "loss_mask": loss_mask, "output_processor": model.loss_or_logits}
        return model(ids, positions, None, **given)

    names = [name for name, _ in model.named_parameters()]
    assert ("output_layer.weight" in names) is not tied
    total, losses = run(mask), run(None)
    assert len(entered) == 2  # data parallelism waits for gathered weights in these hooks
    assert total.shape == () and losses.shape == (2, 21)
    assert difference(total, (losses * mask).sum()) <= 1e-6
    found = torch.autograd.grad(total, list(model.parameters()))
    right = torch.autograd.grad((losses * mask).sum(), list(model.parameters()))
    for name, x, y in zip(names, found, right, strict=True):
        assert difference(x, y) <= 2e-6, name
