"""What differs between versions below us, and that each mend still has something to mend."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import inspect
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.transformer import attention
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import TensorProperties

from llava_mcore.compat.megatron import FACTORY_OPTIONS, LoadStrategy, replace_name
from llava_mcore.compat.torch import NUM_STATE, accept_newer_metadata
from llava_mcore.compat.transformers import tower_names_in_files
from llava_mcore.models.probes import Recorder, watch_hf
from llava_mcore.models.table import detect_names, usual_names
from tests.helpers.tiny_hf import make_hf_llava


def test_load_strategy_is_still_needed() -> None:
    """If not: megatron-core has mended it, and LoadStrategy can go."""
    source = inspect.getsource(TorchDistLoadShardedStrategy.load_tensors_metadata)
    assert "torch.empty(tp.size, **tp.properties.__dict__" in source
    assert {x.name for x in fields(TensorProperties)} - {"strides"} == set(FACTORY_OPTIONS)
    taken = inspect.signature(LoadStrategy.load_tensors_metadata).parameters
    assert taken.keys() == inspect.signature(TorchDistLoadShardedStrategy.load_tensors_metadata).parameters.keys()


def test_metadata_of_a_newer_torch_are_read() -> None:
    """torch 2.15 pickles a tensor's strides behind what torch 2.14 does."""
    accept_newer_metadata()
    state = TensorProperties(dtype=torch.bfloat16, pin_memory=True).__getstate__()[:NUM_STATE]
    for more in ((), ((4, 1),)):
        found = TensorProperties.__new__(TensorProperties)
        found.__setstate__((*state, *more))
        assert found.dtype == torch.bfloat16 and found.pin_memory
        assert found.memory_format == torch.contiguous_format


def test_a_name_that_is_gone_is_not_replaced_in_silence() -> None:
    module = ModuleType("some.module")
    with pytest.raises(RuntimeError, match=r"some\.module has no '_queue' \(megatron-core 0\.19"):
        replace_name(module, "_queue", 1)
    module._queue = None  # type: ignore[attr-defined]
    replace_name(module, "_queue", 1)
    assert module._queue == 1


def test_megatron_core_reads_the_names_that_are_replaced() -> None:
    assert "return _results_queue" in inspect.getsource(filesystem_async.get_write_results_queue)
    assert "SplitAlongDim(mixed_qkv" in inspect.getsource(attention)


@pytest.mark.parametrize("vision", ["dinov2", "dinov2_with_registers"])
def test_modules_of_dinov2_have_their_names_in_files(vision: str, tmp_path: Path) -> None:
    model = make_hf_llava(tmp_path, vision=vision, vision_overrides={"use_swiglu_ffn": True}).eval()
    recorder, files = Recorder(), usual_names(model.config)
    watch_hf(recorder, model, detect_names(model.config, model.state_dict(), source="the model"), files)
    side = model.config.vision_config.image_size
    with torch.no_grad():
        model.model.vision_tower(torch.randn(1, 3, side, side))
    found = tower_names_in_files(recorder.found, files.vision, vision)
    with safe_open(tmp_path / "model.safetensors", "pt") as stored:
        tensors = {x: stored.get_tensor(x) for x in stored.keys()}  # noqa: SIM118  (no dict)
    layers = [x for x in tensors if x.startswith(files.vision + "encoder.layer.") and tensors[x].ndim == 2]
    assert len(layers) == 6 * model.config.vision_config.num_hidden_layers
    for name in layers:
        assert found[name.removesuffix(".weight")].shape[-1] == tensors[name].shape[0], name
    first = files.vision + "encoder.layer.0."
    fused = found[first + "norm2"] @ tensors[first + "mlp.weights_in.weight"].T
    assert torch.allclose(found[first + "mlp.weights_in"], fused + tensors[first + "mlp.weights_in.bias"], atol=1e-5)
