"""megatron-core beside other versions of torch. Import `llava_mcore.parallel` first, as for megatron.core itself."""

from __future__ import annotations

import copy
import dataclasses
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

FACTORY_OPTIONS = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")
"""Those fields of torch's TensorProperties that torch.empty takes."""


class LoadStrategy(TorchDistLoadShardedStrategy):
    """megatron-core's own, for torch 2.15 too.

    megatron-core 0.19.2 hands all fields of TensorProperties to torch.empty, which does not take the one that is new in
    torch 2.15 (`strides`).
    """

    def load_tensors_metadata(self, checkpoint_dir: Path, metadata: Metadata | None = None) -> Any:
        """Return the tensors of a checkpoint without their data."""
        if metadata is None:
            metadata = FileSystemReader(checkpoint_dir).read_metadata()
        known = copy.copy(metadata)
        known.state_dict_metadata = {key: _without_newer(x) for key, x in metadata.state_dict_metadata.items()}
        return super().load_tensors_metadata(checkpoint_dir, known)


def _without_newer(stored: Any) -> Any:
    """Leave out the properties of a tensor that torch.empty does not take."""
    if not isinstance(stored, TensorStorageMetadata):
        return stored
    # No TensorProperties: one of these always has all fields.
    known: Any = SimpleNamespace(**{name: getattr(stored.properties, name) for name in FACTORY_OPTIONS})
    return dataclasses.replace(stored, properties=known)


def replace_name(module: ModuleType, name: str, value: Any) -> None:
    """Set a module's private name; one that the module does not have would be set without any effect.

    Raises:
        RuntimeError: the module has no such name: it is of a version that llava_mcore was not written for.
    """
    if not hasattr(module, name):
        raise RuntimeError(
            f"{module.__name__} has no {name!r} (megatron-core {version('megatron-core')}): llava_mcore replaces it; "
            "install a version that pyproject.toml allows"
        )
    setattr(module, name, value)
