"""Differences between versions of other packages, and that each fix is still needed."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import functools
import inspect
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.optimizer import ChainedOptimizer, distrib_optimizer
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, common
from megatron.core.transformer import attention
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorProperties

from llava_mcore.compat import cpu
from llava_mcore.compat.energon import named_code, shards, storage_clients
from llava_mcore.compat.megatron import checkpoints as megatron_checkpoints
from llava_mcore.compat.megatron import frozen_linears
from llava_mcore.compat.megatron import layers as megatron_layers
from llava_mcore.compat.megatron import optimizer as megatron_optimizer
from llava_mcore.compat.megatron.checkpoints import FACTORY_OPTIONS, LoadStrategy
from llava_mcore.compat.megatron.gradients import gradient_ranges
from llava_mcore.compat.required import replace_name, required
from llava_mcore.compat.torch import (
    NUM_STATE,
    accept_newer_metadata,
    end_loader_processes,
    file_offset,
    is_view_of,
    rebuild_tensor,
    storage_info,
)
from llava_mcore.compat.transformers import encoded_lengths, model_without_weights, tower_names_in_files
from llava_mcore.models.model_table import detect_names, usual_names
from llava_mcore.models.probes import Recorder, watch_hf
from tests.helpers.tiny_hf import make_hf_llava


def test_load_strategy_is_still_needed() -> None:
    """If not: megatron-core has fixed it, and LoadStrategy can go."""
    source = inspect.getsource(TorchDistLoadShardedStrategy.load_tensors_metadata)
    assert "torch.empty(tp.size, **tp.properties.__dict__" in source
    assert {x.name for x in fields(TensorProperties)} - {"strides"} == set(FACTORY_OPTIONS)
    taken = inspect.signature(LoadStrategy.load_tensors_metadata).parameters
    assert taken.keys() == inspect.signature(TorchDistLoadShardedStrategy.load_tensors_metadata).parameters.keys()


def test_delta_nets_still_need_what_is_replaced() -> None:
    """If not: `building_without_kernels`, or our own forward pass, can go."""
    built, forward = (inspect.getsource(x) for x in (common._GDNBase.__init__, GatedDeltaNet.forward))
    assert "if not HAVE_FLA" in built and "device=torch.cuda.current_device()" in built
    assert "Packed sequence does not support deterministic mode" in forward
    assert "GDN does not support inference for now" in forward


def test_metadata_of_a_newer_torch_are_read() -> None:
    """torch 2.15 pickles a tensor's strides after what torch 2.14 does."""
    accept_newer_metadata()
    state = TensorProperties(dtype=torch.bfloat16, pin_memory=True).__getstate__()[:NUM_STATE]
    for more in ((), ((4, 1),)):
        found = TensorProperties.__new__(TensorProperties)
        found.__setstate__((*state, *more))
        assert found.dtype == torch.bfloat16 and found.pin_memory
        assert found.memory_format == torch.contiguous_format


def test_a_name_that_is_gone_is_not_replaced_in_silence() -> None:
    module = ModuleType("megatron.core.some")
    with pytest.raises(AttributeError, match=r"megatron\.core\.some has no '_queue' \(megatron-core 0\.19"):
        replace_name(module, "_queue", 1)
    module._queue = None  # type: ignore[attr-defined]
    replace_name(module, "_queue", 1)
    assert module._queue == 1
    with pytest.raises(AttributeError, match=r"test_compat\.Changed has no 'step': llava_mcore relies on it"):
        required(Changed(), "step")


class Changed:
    """A class or an object of another version, which lacks what is replaced."""


@pytest.mark.parametrize(
    ("patch", "owner"),
    [
        (shards.forget_read_members, "ITarFile"),
        (named_code.refuse_named_code, "REPLACED"),
        (megatron_checkpoints.keep_write_results_here, "filesystem_async"),
        (storage_clients.remember_clients_at_forks.__wrapped__, "shortcuts"),
        (functools.partial(storage_clients.register_provider, "x", Changed), "config"),  # type: ignore[arg-type]
        (functools.partial(storage_clients.register_provider, "x", Changed), "schema"),  # type: ignore[arg-type]
        (functools.partial(megatron_checkpoints.by_sharded_key, {}, keep_only_main_replica=True), "strategies"),
    ],
)
def test_each_patch_notices_that_its_name_is_gone(
    patch: Callable[[], object], owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: Any = {Changed: "_resolve_object"} if owner == "REPLACED" else Changed
    function = patch.func if isinstance(patch, functools.partial) else patch
    monkeypatch.setitem(function.__globals__, owner, names)
    with pytest.raises(AttributeError, match="Changed"):
        patch()


def test_the_place_of_a_tensor_in_another_torch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.checkpoint.filesystem", Changed)
    with pytest.raises(AttributeError, match=r"Changed has no '_StorageInfo'"):
        storage_info("a", 0, 1)


@pytest.mark.parametrize("name", ["_lazy_call", "current_device", "default_generators", "manual_seed"])
def test_the_cpu_platform_notices_another_torch_before_it_changes_anything(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.cuda, name)
    before = dict(vars(torch.cuda))
    with pytest.raises(AttributeError, match=rf"torch\.cuda has no '{name}' \(torch 2\."):
        cpu._patch_torch()
    assert vars(torch.cuda) == before


@pytest.mark.parametrize("name", ["_set_main_param_and_optimizer_states", "load_state_dict"])
def test_the_cpu_platform_notices_another_optimizer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = type("Optimizer", (), {"_set_main_param_and_optimizer_states": 1, "load_state_dict": 1})
    delattr(optimizer, name)
    monkeypatch.setattr(distrib_optimizer, "DistributedOptimizer", optimizer)
    with pytest.raises(AttributeError, match=f"Optimizer has no '{name}'"):
        cpu._patch_distributed_optimizer()


def test_layers_of_another_megatron_core_are_noticed() -> None:
    layer: Any = torch.nn.Linear(1, 1)
    with pytest.raises(AttributeError, match="has no 'inv_freq'"):
        megatron_layers.set_frequencies(layer, torch.ones(1))
    with pytest.raises(AttributeError, match="has no '_yarn_concentration_factor'"):
        megatron_layers.set_rotary_factor(layer, 1.0)
    with pytest.raises(AttributeError, match="has built a Linear: Conv1d is not a subclass of it"):
        megatron_layers.change_class(layer, torch.nn.Conv1d)


def test_linear_layers_that_multiply_elsewhere_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttributeError, match="expected one of megatron-core's linear layers, found a Linear"):
        frozen_linears.freeze_with(torch.nn.Linear(2, 2), lambda: torch.ones(2, 2))
    monkeypatch.setattr(frozen_linears, "RowParallelLinear", Changed)
    with pytest.raises(AttributeError, match="has no '_forward_impl'"):
        frozen_linears.freeze_with(Changed(), lambda: torch.ones(2, 2))


def test_a_trained_bias_beside_a_frozen_matrix_in_another_transformer_engine_is_noticed() -> None:
    kind = type("Linear", (torch.nn.Linear,), {"__module__": "transformer_engine.pytorch.module.linear"})
    layer: Any = kind(2, 2)
    layer.weight.requires_grad_(False)
    with pytest.raises(AttributeError, match="has no 'apply_bias'"):
        frozen_linears.train_biases(layer)
    layer.apply_bias = True
    with pytest.raises(AttributeError, match="has no 'gemm_bias_unfused_add'"):
        frozen_linears.train_biases(layer)
    layer.gemm_bias_unfused_add = False
    frozen_linears.train_biases(layer)
    assert layer.gemm_bias_unfused_add


def test_attention_of_another_megatron_core_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    utils: Any = ModuleType("transformer_engine.pytorch.utils")
    utils.SplitAlongDim = SimpleNamespace(apply=torch.split)
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", ModuleType("transformer_engine.pytorch"))
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    monkeypatch.setattr(attention, "SplitAlongDim", None)
    megatron_layers.split_gradients_without_copy()
    assert attention.SplitAlongDim is torch.split
    monkeypatch.setattr(megatron_layers, "attention", Changed)
    with pytest.raises(AttributeError, match="has no 'SplitAlongDim'"):
        megatron_layers.split_gradients_without_copy()


class Optimizer(ChainedOptimizer):
    """One parameter, and a step that may forget to ask for the norm."""

    def __init__(self, norm: float | torch.Tensor, *, asks: bool) -> None:
        self.weight, self.norm, self.asks = 0, norm, asks
        self.used: float | torch.Tensor | None = None

    def get_grad_norm(self) -> float | torch.Tensor:
        return self.norm

    def step(self) -> tuple[bool, float | torch.Tensor, None]:
        self.used = self.get_grad_norm() if self.asks else self.norm
        self.weight += 1
        return True, self.used, None


def test_an_update_without_a_look_at_the_norm_is_noticed() -> None:
    asking = Optimizer(2.0, asks=True)
    assert megatron_optimizer.update_unless(asking, lambda norm: False) == (True, 2.0)
    assert megatron_optimizer.update_unless(asking, math.isfinite) == (False, 2.0)
    assert asking.weight == 1 and "get_grad_norm" not in vars(asking)
    with pytest.raises(AttributeError, match=r"Optimizer\.step no longer calls get_grad_norm"):
        megatron_optimizer.update_unless(Optimizer(math.nan, asks=False), lambda norm: not math.isfinite(norm))


def test_gradients_are_clipped_by_the_norm_as_it_is() -> None:
    """On GPUs megatron-core divides by a tensor; by a float, every run with --on-nan skip was off in the last bit."""
    optimizer = Optimizer(torch.tensor(2.0), asks=True)
    with mock.patch.object(torch.Tensor, "__float__", side_effect=[2.0]):  # a second read would wait for the update
        assert megatron_optimizer.update_unless(optimizer, lambda norm: False) == (True, 2.0)
    assert optimizer.used is optimizer.norm
    assert megatron_optimizer.update_unless(optimizer, math.isfinite) == (False, 2.0)


@pytest.mark.parametrize("divided", [False, True])
def test_a_rank_adds_up_the_gradients_that_it_has(divided: bool) -> None:
    """Of a buffer of two buckets, those of the first, third and fourth of five matrices, on four ranks."""
    ends = (0, 20, 40, 64, 80, 120)
    places = {f"matrix {i}": (*span, 0) for i, span in enumerate(itertools.pairwise(ends))}
    yielded = torch.zeros(4, 120)
    for rank in range(4):
        buffer = SimpleNamespace(
            param_index_map=places,
            grad_data=yielded[rank],
            ddp_config=SimpleNamespace(use_distributed_optimizer=divided),
            data_parallel_group=SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 4),
            buckets=[
                SimpleNamespace(offset=0, grad_data=torch.zeros(64)),
                SimpleNamespace(offset=64, grad_data=torch.zeros(56)),
            ],
        )
        for gradients in gradient_ranges(SimpleNamespace(buffers=[buffer]), {"matrix 0", "matrix 2", "matrix 3"}):  # type: ignore[arg-type]
            gradients += 1
    expected = torch.tensor([1.0] * 20 + [0.0] * 20 + [1.0] * 40 + [0.0] * 40)
    assert torch.equal(yielded.sum(0), expected * (1 if divided else 4))


def with_replaced(owner: object, name: str, value: object, use: Callable[[], object]) -> None:
    with mock.patch.object(owner, name, value):
        use()


@pytest.mark.parametrize(
    "use",
    [
        lambda x: list(megatron_optimizer.own_ranges(x)),
        lambda x: megatron_optimizer.own_part(x, x),
        lambda x: megatron_optimizer.weights_and_moments(x, x),
        lambda x: megatron_optimizer.set_weights_and_moments(x, x, {}),
        megatron_optimizer.hand_state_to_parts,
        lambda x: file_offset(SimpleNamespace(untyped_storage=Changed)),  # type: ignore[arg-type]
        lambda x: is_view_of(x, torch.empty(1)),
        end_loader_processes,
        lambda x: model_without_weights(x, x),
        lambda x: encoded_lengths(x, 7),
        lambda x: with_replaced(shards, "WebdatasetPreparator", x, lambda: shards.rows_of_shard("", {}, x, 1)),
        lambda x: with_replaced(torch, "_utils", x, rebuild_tensor),
        lambda x: with_replaced(
            megatron_checkpoints, "strategies", x, lambda: megatron_checkpoints.read_with(FileSystemReader)
        ),
    ],
)
def test_private_names_that_are_used_are_noticed_too(use: Callable[[Any], object]) -> None:
    with pytest.raises(AttributeError, match="Changed has no "):
        use(Changed())


def test_metadata_of_another_torch_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llava_mcore.compat.torch.fields", lambda of: ())
    monkeypatch.setattr("torch.distributed.checkpoint.metadata.TensorProperties", Changed)
    with pytest.raises(AttributeError, match=r"Changed has no '__setstate__'"):
        accept_newer_metadata.__wrapped__()


def test_megatron_core_reads_the_names_that_are_replaced() -> None:
    assert "return _results_queue" in inspect.getsource(filesystem_async.get_write_results_queue)
    assert "SplitAlongDim(mixed_qkv" in inspect.getsource(attention)
    step = inspect.getsource(ChainedOptimizer.step)
    assert step.index("self.get_grad_norm()") < step.index("self.step_with_ready_grads()")


@pytest.mark.parametrize("vision", ["dinov2", "dinov2_with_registers"])
def test_modules_of_dinov2_have_their_names_in_files(vision: str, tmp_path: Path) -> None:
    model = make_hf_llava(tmp_path, vision=vision, vision_overrides={"use_swiglu_ffn": True}).eval()
    recorder, files = Recorder(), usual_names(model.config)
    watch_hf(recorder, model, detect_names(model.config, model.state_dict(), source="the model"), files)
    side = model.config.vision_config.image_size
    with torch.no_grad():
        model.model.vision_tower(torch.randn(1, 3, side, side))
    found = tower_names_in_files(recorder.outputs, files.vision, vision)
    with safe_open(tmp_path / "model.safetensors", "pt") as stored:
        tensors = {x: stored.get_tensor(x) for x in stored.keys()}  # noqa: SIM118  (no dict)
    layers = [x for x in tensors if x.startswith(files.vision + "encoder.layer.") and tensors[x].ndim == 2]
    assert len(layers) == 6 * model.config.vision_config.num_hidden_layers
    for name in layers:
        assert found[name.removesuffix(".weight")].shape[-1] == tensors[name].shape[0], name
    first = files.vision + "encoder.layer.0."
    fused = found[first + "norm2"] @ tensors[first + "mlp.weights_in.weight"].T
    assert torch.allclose(found[first + "mlp.weights_in"], fused + tensors[first + "mlp.weights_in.bias"], atol=1e-5)
