"""megatron-core 0.19.2's checkpoints, made to work with other versions of torch.

Import `llava_mcore.parallel` first, as for megatron.core itself.
"""

from __future__ import annotations

import copy
import dataclasses
import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from llava_mcore.compat.required import replace_name, required

FACTORY_OPTIONS = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")
"""The fields of torch's TensorProperties that torch.empty accepts."""


class LoadStrategy(TorchDistLoadShardedStrategy):
    """megatron-core's load strategy, which also works with torch 2.15.

    megatron-core 0.19.2 passes all fields of TensorProperties to torch.empty, which does not accept the one that is new
    in torch 2.15 (`strides`).
    """

    def load_tensors_metadata(self, checkpoint_dir: Path, metadata: Metadata | None = None) -> Any:
        """Return the tensors of a checkpoint without their data."""
        if metadata is None:
            metadata = FileSystemReader(checkpoint_dir).read_metadata()
        known = copy.copy(metadata)
        known.state_dict_metadata = {key: _without_newer(x) for key, x in metadata.state_dict_metadata.items()}
        return super().load_tensors_metadata(checkpoint_dir, known)


def _without_newer(stored: Any) -> Any:
    """Remove the properties of a tensor that torch.empty does not accept."""
    if not isinstance(stored, TensorStorageMetadata):
        return stored
    # No TensorProperties: one of these always has all fields.
    known: Any = SimpleNamespace(**{name: getattr(stored.properties, name) for name in FACTORY_OPTIONS})
    return dataclasses.replace(stored, properties=known)


class SaveStrategy(TorchDistSaveShardedStrategy):
    """megatron-core's save strategy, which plans once: later saves reuse the plan of the first.

    megatron-core 0.19.2 can do so too, but only trusts the plan after a second save in which all ranks have planned and
    sent their plans to rank 0. Use one for saves of the same tensors only, with the same sharding on every rank.
    """

    def __init__(self) -> None:
        super().__init__(cached_metadata=True)
        required(TorchDistSaveShardedStrategy, "_get_save_and_finalize_callbacks")
        for name in (
            "validated_cache_reuse",
            "cached_global_metadata",
            "cached_central_plan",
            "cached_local_plan",
            "thread_count",
        ):
            required(self, name)

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any, async_strategy: str) -> Any:
        """Called at the end of planning: keep what rank 0 has put together, and trust the plan from now on."""
        _, global_metadata, _ = save_state_dict_ret
        if global_metadata is not None:
            self.cached_global_metadata = global_metadata
        self.validated_cache_reuse = True
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret, async_strategy)


def keep_write_results_here() -> None:
    """Give the next save a queue in this process for the reports of its writers.

    megatron-core 0.19.2 would create the queue in a manager process, which imports the whole program once more.
    """
    replace_name(filesystem_async, "_results_queue", queue.Queue())


def read_with(reader: type[FileSystemReader]) -> None:
    """Let load strategies read checkpoints with another class; megatron-core 0.19.2 names torch's own."""
    replace_name(strategies, "_get_filesystem_reader", lambda folder, *_, **__: reader(folder))


def by_sharded_key(state: ShardedStateDict, *, keep_only_main_replica: bool) -> dict[str, Any]:
    """Return a sharded state's parts as megatron-core stores them: in a flat dictionary by key."""
    by_key = required(strategies, "_replace_state_dict_keys_with_sharded_keys")
    return by_key(state, keep_only_main_replica)[0]
