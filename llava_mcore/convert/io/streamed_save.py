"""Saves a model with dist_checkpointing; each tensor is only read when it is written.

megatron-core gets tensors without data, plans the checkpoint and creates its metadata as usual. Only the bytes are
written here: worker threads fill one file after the other from the Hugging Face tensors.
"""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from llava_mcore.checkpoint.dist import CHECKPOINT_VERSION
from llava_mcore.compat.megatron.checkpoints import by_sharded_key
from llava_mcore.compat.torch import storage_info
from llava_mcore.convert.io.import_jobs import EntryWrite, FileWrite, FileWritten

FILE_BYTES = 512 << 20
"""Size in bytes at which a file is closed; so files do not depend on the number of workers."""

Run = Callable[[Sequence[FileWrite]], Iterable[FileWritten]]


@dataclass(frozen=True)
class Streamed:
    """SHA-256 of each Hugging Face tensor, and the checksums of the files, by name.

    `not_finite`: tensors with NaN or infinite values.
    """

    digests: dict[str, str] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    not_finite: list[str] = field(default_factory=list)


def save_streamed(state: ShardedStateDict, entries: Sequence[EntryWrite], folder: Path, run: Run) -> Streamed:
    """Write one checkpoint folder. Process groups of one must exist.

    Args:
        state: sharded tensors without data, and everything else to store in the checkpoint.
        entries: the contents of the tensors.
        run: writes files and returns the results in order.

    Raises:
        OSError: the disk is full, or the like.
    """
    strategy = _StreamedSave(entries, run)
    dist_checkpointing.save(
        {"checkpoint_version": CHECKPOINT_VERSION, **state},
        str(folder),
        sharded_strategy=strategy,
        content_metadata={"llava_mcore": 1},
    )
    return strategy.streamed


class _StreamedSave(TorchDistSaveShardedStrategy):
    def __init__(self, entries: Sequence[EntryWrite], run: Run) -> None:
        super().__init__()
        self.entries, self.run = entries, run
        self.streamed = Streamed()

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> None:
        """Do the same as torch.distributed.checkpoint.save on one rank, but write the tensors here."""
        folder = Path(checkpoint_dir)
        by_key = by_sharded_key(sharded_state_dict, keep_only_main_replica=self.keep_only_main_replica)
        planner = MCoreSavePlanner(
            dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
        )
        planner.set_up_planner(mcore_to_pyt_state_dict(by_key, False), is_coordinator=True)
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        writer = FileSystemWriter(folder)
        writer.set_up_storage_writer(is_coordinator=True)
        objects = self._write_objects(planner, plans[0], folder / "__0_0.distcp")
        writer.finish(metadata, [objects, self._write_tensors(plans[0], folder)])

    def _write_objects(self, planner: MCoreSavePlanner, plan: SavePlan, path: Path) -> list[WriteResult]:
        results = []
        with path.open("xb") as file:
            for item in plan.items:
                if item.type == WriteItemType.BYTE_IO:
                    data: Any = planner.resolve_data(item)
                    start, length = file.tell(), file.write(data.getbuffer())
                    results.append(_result(item, path, start, length))
            file.flush()
            os.fsync(file.fileno())
        return results

    def _write_tensors(self, plan: SavePlan, folder: Path) -> list[WriteResult]:
        items = {
            (item.index.fqn, tuple(item.index.offset)): item
            for item in plan.items
            if item.type != WriteItemType.BYTE_IO and item.index.offset is not None
        }
        results = []
        for written in self.run(list(_files(self.entries, folder))):
            self.streamed.digests.update(written.digests)
            self.streamed.not_finite.extend(written.not_finite)
            self.streamed.checksums[written.path.name] = written.checksum
            results += [
                _result(items.pop(key), written.path, start, length) for key, (start, length) in written.pieces.items()
            ]
        assert not items, f"megatron-core planned tensors that were not written: {sorted(items)}"
        return results


def _result(item: WriteItem, path: Path, start: int, length: int) -> WriteResult:
    return WriteResult(index=item.index, size_in_bytes=length, storage_data=storage_info(path.name, start, length))


def _files(entries: Iterable[EntryWrite], folder: Path) -> Iterator[FileWrite]:
    """Distribute the entries over files, in order."""
    waiting: list[EntryWrite] = []
    index, num_bytes = 1, 0
    for entry in entries:
        waiting.append(entry)
        num_bytes += entry.num_bytes
        if num_bytes >= FILE_BYTES:
            yield FileWrite(folder / f"__0_{index}.distcp", tuple(waiting))
            waiting, index, num_bytes = [], index + 1, 0
    if waiting:
        yield FileWrite(folder / f"__0_{index}.distcp", tuple(waiting))
