"""The state of a run for saving and resuming: weights, optimizer, schedule, random state, data position, counters."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from llava_mcore.checkpoint.complete import RUN_JSON
from llava_mcore.checkpoint.dist import load_state
from llava_mcore.checkpoint.flat_slices import flat_slices
from llava_mcore.checkpoint.layout import RUN_FILE
from llava_mcore.checkpoint.node_local import is_local, load_local
from llava_mcore.compat.megatron.fsdp import ShardedModel, own_shards
from llava_mcore.config.load import load_run_config
from llava_mcore.config.schema import RunConfig
from llava_mcore.config.sections.adapter import AdapterConfig
from llava_mcore.errors import CheckpointError, problems
from llava_mcore.files.regular import read_object
from llava_mcore.files.torch_files import load_tensors
from llava_mcore.parallel.cores import all_cores
from llava_mcore.parallel.groups import Groups
from llava_mcore.parallel.random import random_state, set_random_state
from llava_mcore.parallel.together import raise_together
from llava_mcore.training.logs.run_record import OF_EVERY_RANK, RANDOM_STATES
from llava_mcore.training.optimization.data_parallel import DataParallelModel
from llava_mcore.training.optimization.optimizer import follow_settings, own_rates, rate_change
from llava_mcore.training.optimization.optimizer_state import load_optimizer_state, optimizer_state
from llava_mcore.training.setup import Trainer, saved_state

logger = logging.getLogger(__name__)

LOADER_FOLDER = "loader"


@dataclass
class TrainingProgress:
    """Progress of a run. Skipped or failed updates count too: their samples are consumed."""

    iteration: int = 0
    consumed_samples: int = 0
    """Rows of all batches: samples or packs."""
    consumed_conversations: int = 0
    skipped_conversations: int = 0
    """Conversations that were skipped because they are broken or too long."""
    skipped_iterations: int = 0
    """Iterations whose batch was read but not trained on, because of `skip_train_iteration_range`."""
    failed_updates: int = 0
    """Iterations without an update, because loss or gradients were not finite or fp16's loss scaler skipped it."""

    @property
    def num_read(self) -> int:
        """Samples that were read: conversations, skipped ones too."""
        return self.consumed_conversations + self.skipped_conversations


def resume(trainer: Trainer) -> tuple[TrainingProgress, Sequence[Any] | None]:
    """Load what `save_checkpoint` wrote into a trainer that has begun with its weights; a collective call.

    Returns:
        The progress and, on ranks that load data, the loader states of all ranks that had saved one.

    Raises:
        CheckpointError: saved without an optimizer, or with settings that do not fit this run.
    """
    checkpoint = trainer.loaded_from
    assert checkpoint is not None
    before, random = raise_together(trainer.groups, lambda: _read_saved(trainer, checkpoint))
    loaded = raise_together(trainer.groups, lambda: _load(trainer, checkpoint, random))
    loader_states = raise_together(trainer.groups, lambda: _apply(trainer, checkpoint, loaded, before))
    if random is not None:
        set_random_state(loaded["random"])
    elif trainer.uses_dropout:
        logger.info("the layout differs from the checkpoint's: dropout will draw different random numbers")
    change = rate_change(before, trainer.run, trainer.scheduler)
    if change is not None:
        logger.info(change)
    counters = {field.name: loaded[field.name] for field in fields(TrainingProgress) if field.name in loaded}
    return TrainingProgress(**counters), loader_states  # older checkpoints lack newer counters


def _read_saved(trainer: Trainer, checkpoint: Path) -> tuple[RunConfig, ShardedObject | None]:
    """Return the run that saved a checkpoint, and the generators to load into (see `_random_state_of`)."""
    before = load_run_config(checkpoint / RUN_FILE, [], {})
    _check_resumable(trainer.run, before, checkpoint)
    return before, _random_state_of(checkpoint, before, trainer.groups)


def _load(trainer: Trainer, checkpoint: Path, random: ShardedObject | None) -> dict[str, Any]:
    """Load all but the weights; a collective call."""
    state = _state(trainer, TrainingProgress(), is_loading=True, random=random)
    with all_cores():
        if is_local(checkpoint):
            return load_local(state, checkpoint, trainer.groups.rank)
        return load_state(state, checkpoint, trainer.groups.data_parallel)


def _apply(trainer: Trainer, checkpoint: Path, loaded: dict[str, Any], before: RunConfig) -> Sequence[Any] | None:
    """Hand what was loaded to optimizer and schedule; return the loader states on ranks that load data."""
    with all_cores():
        follow_settings(loaded["optimizer"], before.optimizer, trainer.run.optimizer)
        load_optimizer_state(trainer.optimizer, loaded["optimizer"])
    trainer.scheduler.load_state_dict(loaded["scheduler"])
    if not trainer.groups.loads_data:
        return None
    return SavedLoaderStates(checkpoint)


def _check_resumable(run: RunConfig, before: RunConfig, checkpoint: Path) -> None:
    if not before.checkpoint.save_optim:
        raise CheckpointError(f"{checkpoint} was saved without --save-optim: it holds weights only, nothing to resume")
    pairs = {
        "--dist-optim": (before.parallel.divides_optimizer, run.parallel.divides_optimizer),
        "--precision": (before.training.precision, run.training.precision),
        "--global-batch-size": (before.training.global_batch_size, run.training.global_batch_size),
        "--rampup-batch-size": (before.training.rampup_batch_size, run.training.rampup_batch_size),
        "length in epochs": (before.training.train_epochs is not None, run.training.train_epochs is not None),
        "--lang": (before.data.lang, run.data.lang),
        "frozen parts": (before.model.frozen_parts(), run.model.frozen_parts()),
        "adapter": (_settings(before.adapter), _settings(run.adapter)),
        "parts with their own learning rate": (own_rates(before.optimizer), own_rates(run.optimizer)),
        "optimizer.name": (before.optimizer.name, run.optimizer.name),
        "optimizer.decay_norms_and_biases": (
            before.optimizer.decay_norms_and_biases,
            run.optimizer.decay_norms_and_biases,
        ),
    }
    mismatches = [f"{setting}: saved with {a}, now {b}" for setting, (a, b) in pairs.items() if a != b]
    if mismatches:
        if before.parallel.divides_optimizer and not run.parallel.divides_optimizer:
            mismatches[0] += "; --fsdp saves as --dist-optim does: add one of them"
        elif run.parallel.divides_optimizer and not before.parallel.divides_optimizer:
            mismatches[0] += "; --fsdp resumes as --dist-optim does: omit both"
        way_out = f"to start from its weights alone, give another --name and --megatron-load-dir {checkpoint}"
        title = f"{checkpoint} cannot be resumed like this (the layout may change, these may not; {way_out})"
        raise CheckpointError(problems(title, mismatches))


def _settings(adapter: AdapterConfig) -> str:
    """Return an adapter's settings, except the folders that it began with."""
    values = adapter.model_dump(exclude={"load", "frozen"}, exclude_defaults=True)
    return ", ".join(f"{key} {value}" for key, value in values.items()) or ("on" if adapter.is_on else "none")


def loader_file(dp_rank: int) -> str:
    """Return the name of the file with a data-parallel rank's position in the data."""
    return f"dp_{dp_rank:05d}.pt"


class SavedLoaderStates(Sequence[Any]):
    """The loader states of all data-parallel ranks that saved one, each read when it is asked for.

    If each of 1,024 ranks read them all, that would be a million files.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._folder = checkpoint / LOADER_FOLDER
        self._count = sum(1 for _ in self._folder.glob("dp_*.pt"))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, dp_rank: Any) -> Any:
        if not 0 <= dp_rank < self._count:
            raise IndexError(dp_rank)
        return load_tensors(self._folder / loader_file(dp_rank))


def state_to_save(trainer: Trainer, progress: TrainingProgress) -> dict[str, Any]:
    """Return everything that is saved except the position in the data; a collective call."""
    return _state(trainer, progress, is_loading=False, random=_sharded_random_state(trainer.groups))


def _state(
    trainer: Trainer, progress: TrainingProgress, *, is_loading: bool, random: ShardedObject | None
) -> dict[str, Any]:
    """Return everything that is saved, or what to load into: all but the weights, which the trainer has begun with."""
    run, groups = trainer.run, trainer.groups
    adapter_setup, model = trainer.adapter_setup, trainer.whole_state
    if model is None:
        model = weights = saved_state(trainer.models, adapter_setup, is_loading=is_loading)
    else:
        weights = {} if is_loading else own_weights(model, trainer.chunks)
    state: dict[str, Any] = asdict(progress) | ({} if is_loading else weights)
    if not run.checkpoint.save_optim and not is_loading:
        return state
    by_layer = adapter_setup is not None or bool(run.model.freeze or run.model.unfreeze or run.model.train_expanded)
    state["optimizer"] = optimizer_state(trainer.optimizer, model, groups, is_loading=is_loading, by_layer=by_layer)
    state["scheduler"] = trainer.scheduler.state_dict()
    if random is not None:
        state["random"] = random
    return state


def _sharded_random_state(groups: Groups, *, of_every_rank: bool = True) -> ShardedObject:
    """Return this rank's generators. Each data- and context-parallel rank draws as its tokens need."""
    shape, position = (groups.pp_size, groups.tp_size), (groups.pp_rank, groups.tp_rank)
    if not of_every_rank:
        return ShardedObject("random_state", random_state(), shape, position, replica_id=groups.data_parallel.rank())
    full_shape, local_position = (*shape, groups.data_parallel.size()), (*position, groups.data_parallel.rank())
    return ShardedObject("random_state", random_state(), full_shape, local_position, replica_id=0)


def _random_state_of(checkpoint: Path, before: RunConfig, groups: Groups) -> ShardedObject | None:
    """Return the generators to load into; None if the checkpoint is of another layout."""
    record = read_object(checkpoint / RUN_JSON, CheckpointError)
    of_every_rank = record.get(RANDOM_STATES) == OF_EVERY_RANK
    parallel = before.parallel
    saved = [parallel.tensor_model_parallel_size, parallel.context_parallel_size, parallel.pipeline_model_parallel_size]
    now = [groups.tp_size, groups.cp_size, groups.pp_size]
    if of_every_rank:
        saved.append(record["layout"]["data_parallel_size"])
        now.append(groups.dp_size)
    return _sharded_random_state(groups, of_every_rank=of_every_rank) if saved == now else None


def own_weights(whole_state: ShardedStateDict, chunks: Sequence[DataParallelModel]) -> ShardedStateDict:
    """Return the slices of a fully sharded model's weights that this rank holds, as slices of the whole tensors.

    Args:
        whole_state: of the models with whole parameters; what it does not have is not saved.
    """
    tensors = nested_values(extract_sharded_tensors_and_factories(whole_state)[0])
    sharded_by_parameter = {sharded.data: sharded for sharded in tensors}
    weights: dict[str, Any] = {}
    for index, chunk in enumerate(chunks):
        assert isinstance(chunk, ShardedModel)
        weights[f"model{index}"] = {
            shard.name: flat_slices(
                sharded_by_parameter[shard.parameter],
                shard.start,
                shard.stop,
                shard.weights,
                replica=chunk.replica_rank,
            )
            for shard in own_shards(chunk)
            if shard.parameter in sharded_by_parameter
        }
    return weights
