"""A checkpoint whose tensors are on each node's own disk: every rank writes and reads its own tensors.

The iteration's folder, which all nodes see, holds everything else: run.yaml, the positions in the data, the Hugging
Face files, and local.json, which names every rank's file. It only works with the same layout on the same nodes.
"""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import json
import logging
import os
import re
import uuid
from collections.abc import Container, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.transformer.module import MegatronModule

from llava_mcore.checkpoint.checksums import KEY, damage, of_file
from llava_mcore.checkpoint.dist import fill_model, model_state, without_absent_extra_state
from llava_mcore.checkpoint.sharded import convert_data, sharded_tensors
from llava_mcore.errors import CheckpointError, problems
from llava_mcore.files.atomic import sync
from llava_mcore.files.regular import read_object
from llava_mcore.files.torch_files import load_tensors
from llava_mcore.parallel.agreement import agree
from llava_mcore.parallel.groups import Groups, gather_to_first

logger = logging.getLogger(__name__)

LOCAL = "local.json"
# megatron-core reads the checkpoint's format from here, and refuses this one by name.
METADATA = {"sharded_backend": "llava_mcore_local", "sharded_backend_version": 1}


class LocalWrite:
    """Writes this rank's file to the node's disk. `write` may run in a thread, the other methods are collective
    calls."""

    def __init__(
        self,
        state: ShardedStateDict,
        folder: Path,
        root: Path,
        groups: Groups,
        *,
        copy: bool,
        vision_data_parallel: bool = False,
    ) -> None:
        """Copy the tensors to the host.

        Args:
            folder: the iteration's folder, which rank 0 has created, under its temporary name.
            root: this run's folder on the node's disk.
            copy: copy every tensor, so that training can continue while `write` runs.
            vision_data_parallel: every rank has a whole tower.
        """
        # A file of its own name for each rank and attempt.
        self._own_layout = _layout(groups, vision_data_parallel)
        suffix = [uuid.uuid4().hex[:8]]  # an abandoned attempt may have left a file of the same iteration
        dist.broadcast_object_list(suffix, src=0, group=groups.control)
        self._folder, self._groups = folder, groups
        self.checksums: dict[str, str] = {}  # none: this rank writes no files into the iteration's folder
        self._checksum = ""
        self._path = root / f"{folder.name.strip('.').partition('.')[0]}.{suffix[0]}.rank_{groups.rank:05d}.pt"
        # Tensors are copied to the host; everything else is copied as it is now.
        live = convert_data(sharded_tensors(state))
        sharded, common = save_preprocess(state, validate_access_integrity=False)
        parts = {_name(value): value.data for value in nested_values(sharded)}
        tensors = {name: _on_host(x, live if copy else ()) for name, x in parts.items() if isinstance(x, torch.Tensor)}
        rest = {name: x for name, x in parts.items() if name not in tensors}
        self._content = {"common": deepcopy(common), "parts": tensors | deepcopy(rest)}
        if groups.device.type == "cuda":
            torch.cuda.synchronize()

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that this rank writes."""
        return sum(x.nbytes for x in self._content["parts"].values() if isinstance(x, torch.Tensor))

    def write(self) -> None:
        """Write and flush this rank's file.

        Raises:
            OSError: the disk is full, or the like.
        """
        partial = self._path.with_name(f".{self._path.name}.partial")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                torch.save(self._content, file)
                file.flush()
                os.fsync(file.fileno())
            self._checksum = of_file(partial)
            partial.rename(self._path)
            sync(self._path.parent)
        except (OSError, RuntimeError) as error:  # torch's zip writer raises RuntimeError when a write fails
            raise OSError(f"{self._path}: {error.__context__ or error}") from error
        self._content = {"common": {}, "parts": {}}

    def finish(self) -> None:
        """List every rank's file in the iteration's folder.

        Raises:
            CheckpointError: on all ranks, if it could not be written.
        """
        groups = self._groups
        files = gather_to_first(groups, (str(self._path), self._path.stat().st_size, self._checksum))
        problem = None
        if groups.rank == 0:
            content: dict[str, Any] = self._own_layout | {
                "files": [file[:2] for file in files],
                KEY: [file[2] for file in files],
            }
            try:
                (self._folder / LOCAL).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
                (self._folder / "metadata.json").write_text(json.dumps(METADATA) + "\n", encoding="utf-8")
            except OSError as error:
                problem = f"{self._folder}: {error}"
        messages = agree(groups, problem)
        if messages:
            raise CheckpointError(problems("the checkpoint could not be written", messages), on_all_ranks=True)

    def published(self) -> None:
        """Delete this rank's older files, now that all ranks have this one."""
        own_file = re.compile(rf"\.?iter_\d+\..*\.rank_{self._groups.rank:05d}\.pt(\.partial)?")
        for path in self._path.parent.iterdir():
            if own_file.fullmatch(path.name) and path != self._path:
                try:
                    path.unlink()
                except OSError as error:  # not a reason to stop training
                    logger.warning("%s could not be deleted: %s", path, error)


_BEFORE = {"vision_data_parallel": False, "cp": 1, "ep": 1, "etp": 1}
"""Values that older versions had and did not write."""


def _layout(groups: Groups, vision_data_parallel: bool) -> dict[str, Any]:
    """Return the sizes that determine which tensors each rank has."""
    sizes = {"tp": groups.tp_size, "pp": groups.pp_size, "dp": groups.dp_size, "cp": groups.cp_size}
    sizes |= {"ep": groups.ep_size, "etp": groups.etp_size}
    return sizes | {"vision_data_parallel": vision_data_parallel}


def is_local(checkpoint: Path) -> bool:
    """Return whether a checkpoint's tensors are on the nodes' own disks."""
    return (checkpoint / LOCAL).is_file()


def unusable_here(
    checkpoint: Path, groups: Groups, *, verify: bool = True, vision_data_parallel: bool = False
) -> str | None:
    """Return why this rank cannot resume from a local checkpoint; None if it can.

    Args:
        verify: read the file and compare it with its checksum.
        vision_data_parallel: every rank has a whole tower in this run.
    """
    content = read_object(checkpoint / LOCAL, CheckpointError)
    now = _layout(groups, vision_data_parallel)
    saved = {key: content.get(key, _BEFORE.get(key)) for key in now}
    if saved != now:
        before, here = (", ".join(f"{key} {value}" for key, value in x.items()) for x in (saved, now))
        return f"{checkpoint}: its tensors are on the nodes' own disks for {before}; this run has {here}"
    name, size = content["files"][groups.rank]
    path = Path(name)
    if not path.is_file():
        return f"{checkpoint}: {path} is not on this node's disk"
    if path.stat().st_size != size:
        return f"{checkpoint}: {path} has {path.stat().st_size} bytes, {size} were written"
    if not verify or KEY not in content:  # written by a version without checksums
        return None
    wrong = damage(path, str(path), content[KEY][groups.rank])
    return None if wrong is None else f"{checkpoint}: {wrong}"


def load_local(state: ShardedStateDict, checkpoint: Path, rank: int) -> dict[str, Any]:
    """Load the tensors in `state` from this rank's file, as dist_checkpointing.load does from a shared folder.

    Raises:
        CheckpointError: the file is of another model.
    """
    name, _ = read_object(checkpoint / LOCAL, CheckpointError)["files"][rank]
    stored = load_tensors(Path(name), mmap=True)
    parts: Mapping[str, Any] = stored["parts"]
    expected, apart, factories = load_preprocess(without_absent_extra_state(state, parts))
    sharded, _ = extract_sharded_base(expected)

    def filled(value: ShardedTensor | ShardedObject) -> Any:
        if _name(value) not in parts:
            raise CheckpointError(f"{name} is a checkpoint of another model: it lacks {_name(value)}")
        data = parts[_name(value)]
        if isinstance(value, ShardedObject) or value.data is None:
            return data
        return value.data.detach().copy_(data)

    dict_list_map_inplace(filled, sharded)
    loaded: dict[str, Any] = stored["common"]
    merge(loaded, apart)
    merge(loaded, sharded)
    return apply_factory_merges(loaded, factories)


def load_local_weights(chunks: Sequence[MegatronModule], checkpoint: Path, rank: int) -> None:
    """Fill every parameter from this rank's file.

    Raises:
        CheckpointError: the file is of another model.
    """
    loaded = load_local(model_state(chunks, is_loading=True), checkpoint, rank)
    for i, chunk in enumerate(chunks):
        fill_model(chunk, loaded[f"model{i}"])


def _name(value: ShardedTensor | ShardedObject) -> str:
    """Return a name that is unique in this rank's state."""
    if isinstance(value, ShardedObject):
        return value.unique_key
    return f"{value.key} {tuple(value.global_offset)} {tuple(value.local_shape)}"


def _on_host(tensor: torch.Tensor, live: Container[int]) -> torch.Tensor:
    """Return a tensor in host memory, without the rest of its storage.

    Args:
        live: addresses of the storages that have to be copied.
    """
    x = tensor.detach()
    if x.device.type != "cpu":
        return x.to("cpu", non_blocking=True)
    storage = x.untyped_storage()
    return x.clone() if storage.data_ptr() in live or storage.nbytes() != x.nbytes else x
