"""Megatron checkpoints in megatron-core's torch_dist format, which loads at any layout."""

from __future__ import annotations

import llava_mcore.parallel  # noqa: F401  isort: skip  (prepares a machine without CUDA, before megatron.core)

import re
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.optimizer import Adam, CPUAdam
from megatron.core.transformer.module import MegatronModule
from torch.distributed.checkpoint import CheckpointException

from llava_mcore.checkpoint.checksums import of_files
from llava_mcore.checkpoint.fp8_scales import EXTRA_STATE, take_scales, with_plain_scales
from llava_mcore.checkpoint.parallel_reader import ParallelReader
from llava_mcore.checkpoint.save_plan import SaveAssignment
from llava_mcore.checkpoint.sharded import convert_data, sharded_tensors
from llava_mcore.checkpoint.torch_dist_metadata import require_plain
from llava_mcore.compat.megatron.checkpoints import LoadStrategy, keep_write_results_here, read_with
from llava_mcore.errors import CheckpointError, problems
from llava_mcore.files.torch_files import LOAD_ERRORS, load_tensors, why_refused, without_objects
from llava_mcore.parallel.together import raise_together_in_world

_OPTIMIZER_CLASSES = [Adam, CPUAdam]
"""Classes in the parameter groups of an optimizer on the host; creating one has no side effects."""
CHECKPOINT_VERSION = 3.0  # Megatron-LM's format number, read by its own loaders


class StateWrite:
    """Writes one checkpoint to a folder: `write` may run in a thread, all other methods are collective calls.

    `folder` must exist on every rank and be empty. megatron-core plans, writes and finishes the save. Its own callers
    write in a separate process: either forked while threads and CUDA are running, or spawned, which imports the whole
    program (8 s) and passes the tensors through shared memory. Threads are enough: torch releases the interpreter lock
    while bytes are written.
    """

    def __init__(
        self, state: ShardedStateDict, folder: Path, *, copy: bool = False, plan: SaveAssignment | None = None
    ) -> None:
        """Plan the save and copy the tensors to the host.

        Args:
            copy: copy every tensor, so that training can continue while `write` runs.
            plan: the plan of the run's earlier saves; None: plan this save alone, and let every tensor be written by
                its first replica.
        """
        # Storages are noted before the conversion, which leaves copies in host memory.
        plan = SaveAssignment() if plan is None else plan
        live = convert_data(sharded_tensors(state))
        is_new = plan.begin(state)
        # megatron-core checks and plans a new state, together on all ranks; a state of an earlier save keeps its plan.
        keep_write_results_here()
        self._request = dist_checkpointing.save(
            {"checkpoint_version": CHECKPOINT_VERSION, **state},
            str(folder),
            sharded_strategy=plan.strategy,
            validate_access_integrity=is_new,
            content_metadata={"llava_mcore": 1},
            async_sharded_save=True,
            async_strategy="mcore",
        )
        plan.done()
        # Copy this rank's share to host memory.
        self._files: list[Any] = []
        if self._request.async_fn is not None:  # otherwise this rank has nothing to write
            on_host = self._request.preload_fn()
            self._files = [_owned(file, live) for file in on_host] if copy else on_host
        self.checksums: dict[str, str] = {}
        """Checksums of the files that this rank has written, by name."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that this rank writes."""
        return sum(x.nbytes for _, _, (_, tensors) in self._files for _, x in tensors)

    def write(self) -> None:
        """Write and flush this rank's files, and compute their checksums. `finish` reports errors."""
        if self._request.async_fn is not None:
            rank, _, results = self._request.async_fn_args
            try:
                self._request.async_fn(rank, self._files, results)
            except AssertionError:  # of megatron-core 0.19.2, about any file but the last; the reason is in the log
                results.put(RuntimeError("a file could not be written"))
            # The files are still in the page cache: reading them takes a fraction of the time of writing them.
            self.checksums = of_files([path for file, _, _ in self._files if (path := Path(file)).is_file()])
        self._files = []

    def published(self) -> None:
        """Called when the checkpoint has its final name; there is nothing to do here."""

    def finish(self) -> None:
        """Write the metadata after all ranks have written; a collective call.

        Raises:
            CheckpointError: on all ranks, if any could not write.
        """
        try:
            for finalize in self._request.finalize_fns:
                finalize()
        except CheckpointException as error:
            reasons = dict.fromkeys(str(reason[0]) for reason in error.failures.values()) or ["see the other ranks"]
            # megatron-core does not pass the operating system's message on.
            message = problems("the checkpoint could not be written; is the disk full, or a quota reached?", reasons)
            raise CheckpointError(message, on_all_ranks=True) from error


def _owned(file: Any, live: Container[int]) -> Any:
    """Return the plan of one file with copies of the tensors that training will change.

    Args:
        live: addresses of the storages to save. Tensors from a GPU, and parts of larger tensors, are copies
            already.
    """
    path, key, (objects, tensors) = file
    owned = [(item, x.clone() if x.untyped_storage().data_ptr() in live else x) for item, x in tensors]
    return path, key, (objects, owned)


def save_state(state: ShardedStateDict, folder: Path) -> None:
    """Write one checkpoint folder; a collective call. `folder` must exist on every rank and be empty.

    Raises:
        CheckpointError: on all ranks, if any could not write.
    """
    write = StateWrite(state, folder)
    write.write()
    dist.barrier()
    write.finish()


def load_state(state: ShardedStateDict, folder: Path, replicas: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Load the tensors in `state`, however they were split when they were saved; a collective call.

    Args:
        replicas: ranks that load the same tensors: each is read by one of them and sent to the others.

    Raises:
        CheckpointError: on all ranks, if the folder does not fit the model on any of them, or is damaged.
    """
    stored = raise_together_in_world(lambda: _checked_contents(state, folder))
    read_with(ParallelReader)
    try:
        divided = replicas is not None and replicas.size() > 1
        strategy = FullyParallelLoadStrategyWrapper(LoadStrategy(), replicas) if divided else LoadStrategy()
        with without_objects(), torch.serialization.safe_globals(_OPTIMIZER_CLASSES):
            return dist_checkpointing.load(without_absent_extra_state(state, stored), str(folder), strategy)
    except CheckpointingException as error:
        raise CheckpointError(f"{folder}: dist_checkpointing cannot load it: {error}") from error
    except CheckpointException as error:  # torch's wrapper around this rank's error
        for cause, _ in error.failures.values():
            if isinstance(cause, torch.OutOfMemoryError) or not isinstance(cause, LOAD_ERRORS):
                raise cause from error
            raise CheckpointError(f"{folder}: {why_refused(cause)}") from error
        raise


def _checked_contents(state: ShardedStateDict, folder: Path) -> ShardedStateDict:
    """Return what a checkpoint contains, by unique key, once it is known to fit; CheckpointError otherwise."""
    check_model(state, folder)
    if (folder / COMMON_STATE_FNAME).exists():  # older versions of megatron-core wrote it
        load_tensors(folder / COMMON_STATE_FNAME)
    try:
        return load_sharded_metadata(str(folder), LoadStrategy())
    except CheckpointingException as error:
        raise CheckpointError(f"{folder}: dist_checkpointing cannot load it: {error}") from error


def without_absent_extra_state(state: Any, stored: Container[str]) -> Any:
    """Remove FP8 scales that the checkpoint does not have: those of imported weights, or trained without FP8."""
    if not isinstance(state, dict):
        return state

    def is_absent(value: Any) -> bool:
        return isinstance(value, ShardedObject) and value.key.endswith(EXTRA_STATE) and value.unique_key not in stored

    return {k: without_absent_extra_state(v, stored) for k, v in state.items() if not is_absent(v)}


def fill_model(model: MegatronModule, loaded: dict[str, Any], *, partial: bool = False) -> None:
    """Load a state into a model. CheckpointError if anything except extra state of layers is missing.

    Args:
        partial: the state is meant to cover only a part of the model.
    """
    missing, unexpected = model.load_state_dict(take_scales(model, loaded), strict=False)
    wrong = [name for name in (*([] if partial else missing), *unexpected) if not name.endswith(EXTRA_STATE)]
    if wrong:
        raise CheckpointError(problems("the loaded state does not fit the model", wrong))


def stored_tensors(folder: Path) -> dict[str, ShardedTensor]:
    """Return key, global shape and dtype of every tensor in a checkpoint, without reading data.

    Raises:
        CheckpointError: it is not a readable torch_dist checkpoint.
    """
    require_plain(folder)
    try:
        return dist_checkpointing.load_tensors_metadata(str(folder), LoadStrategy())
    except (CheckpointingException, OSError, EOFError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: not a readable torch_dist checkpoint: {error}") from error


def check_model(state: ShardedStateDict, folder: Path) -> None:
    """Compare the tensors of a model with those of a checkpoint before anything is read.

    Raises:
        CheckpointError: lists every tensor that is missing or has another shape, and tensors of a layer that exist only
            in the checkpoint: a layer without its norm would load, but compute something else.
    """
    stored = stored_tensors(folder)
    wanted_tensors = list(sharded_tensors(state))
    mismatches = [f"not in the model: {name}" for name in _absent_from_layers((x.key for x in wanted_tensors), stored)]
    for expected in wanted_tensors:
        have = stored.get(expected.key)
        if have is None:
            mismatches.append(f"missing: {expected.key} {expected.global_shape}")
        elif (have.global_shape != expected.global_shape and not expected.allow_shape_mismatch) or have.global_shape[
            1:
        ] != expected.global_shape[1:]:
            mismatches.append(
                f"different shape: {expected.key} is {have.global_shape}, the model needs {expected.global_shape}"
            )
    if mismatches:
        unique = sorted(set(mismatches))
        remedy = "import the model again, or export the checkpoint with the version that wrote it"
        title = f"{folder} is a checkpoint of another model, or by another version of llava_mcore ({remedy})"
        raise CheckpointError(problems(title, unique))


def _absent_from_layers(keys: Iterable[str], stored: Iterable[str]) -> list[str]:
    """Return stored weights, without FP8 scales, of layers of which `keys` has others."""
    layer_of = re.compile(r"(?!optimizer)(?!.*_extra_state).*?\blayers\.(\d+\.)?")
    model_keys = set(keys)
    layers = {match.group() for key in model_keys if (match := layer_of.match(key))}
    return sorted(x for x in stored if x not in model_keys and (match := layer_of.match(x)) and match.group() in layers)


def model_state(chunks: Sequence[MegatronModule], *, is_loading: bool) -> ShardedStateDict:
    """Return the sharded state of a rank's model chunks, to save it or to load it."""
    states = [with_plain_scales(chunk, chunk.sharded_state_dict(), is_loading=is_loading) for chunk in chunks]
    return {f"model{i}": state for i, state in enumerate(states)}


def load_weights(chunks: Sequence[MegatronModule], folder: Path, replicas: dist.ProcessGroup | None = None) -> None:
    """Fill every parameter from a checkpoint; a collective call.

    Every value is first set to NaN, so that no value can keep its old content: rows that pad the vocabulary are set to
    zero, everything else must have been read.

    Args:
        replicas: see `load_state`.

    Raises:
        CheckpointError: it is another model; or, on the ranks concerned, a parameter was not filled completely.
    """
    named = [(name, p) for chunk in chunks for name, p in chunk.named_parameters()]
    with torch.no_grad():
        for _, p in named:
            p.fill_(torch.nan)
    state = model_state(chunks, is_loading=True)
    padding = [x for x in sharded_tensors(state) if x.allow_shape_mismatch]
    loaded = load_state(state, folder, replicas)
    for i, chunk in enumerate(chunks):
        fill_model(chunk, loaded[f"model{i}"])
    _zero_padding(padding, stored_tensors(folder))
    unfilled = [name for name, p in named if p.isnan().any()]
    if unfilled:
        raise CheckpointError(problems(f"{folder} did not fill the model, or holds NaN", unfilled))


def _zero_padding(tensors: Sequence[ShardedTensor], stored: dict[str, ShardedTensor]) -> None:
    """Zero the rows beyond the stored vocabulary: another tensor-parallel size pads to another multiple."""
    for x in tensors:
        if x.key in stored and x.data is not None:
            rows = stored[x.key].global_shape[0] - x.global_offset[0]
            x.data.detach()[max(rows, 0) :].zero_()
