"""Saving a run, in the foreground or in the background.

A checkpoint is written next to its final path, flushed to disk and renamed, and the tracker is updated last: a save
that is killed at any moment leaves the newest complete checkpoint as it was.
"""

from __future__ import annotations

import io
import logging
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from llava_mcore.checkpoint import layout
from llava_mcore.checkpoint.checksums import KEY, of_bytes, of_folder
from llava_mcore.checkpoint.complete import (
    all_but,
    delete_in_background,
    discard,
    outdated,
    put_aside,
    remove_leftovers,
    write_run_json,
)
from llava_mcore.checkpoint.dist import StateWrite
from llava_mcore.checkpoint.node_local import LocalWrite
from llava_mcore.checkpoint.save_plan import SaveAssignment
from llava_mcore.checkpoint.sharded import num_bytes
from llava_mcore.errors import CheckpointError, problems
from llava_mcore.files.atomic import move, sync_tree, write_synced
from llava_mcore.parallel.collectives import differing
from llava_mcore.parallel.cores import all_cores
from llava_mcore.parallel.groups import gather_to_first, sum_over_ranks
from llava_mcore.parallel.together import raise_listed
from llava_mcore.training.logs.run_record import run_record
from llava_mcore.training.optimization.data_parallel import alike_here, gathers_ahead
from llava_mcore.training.saving.hf_files import write_description
from llava_mcore.training.saving.pending import SAVES, Pending, Saved, Writing, allocate_in_background
from llava_mcore.training.saving.state import LOADER_FOLDER, TrainingProgress, loader_file, state_to_save
from llava_mcore.training.setup import Trainer

logger = logging.getLogger(__name__)

NOT_WRITTEN = "the checkpoint could not be written"


class Saver:
    """Writes the checkpoints of a run, one at a time. All methods except `busy` are collective calls."""

    def __init__(self, trainer: Trainer, hf_source: Path) -> None:
        """`hf_source`: folder with config, tokenizer and processor files (and ours) to copy into checkpoints."""
        self.trainer, self.hf_source = trainer, hf_source
        self._pending: Pending | None = None
        self._deletion: threading.Thread | None = None
        self._allocation: threading.Thread | None = None
        self._plan = SaveAssignment(trainer.groups)

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing in the background."""
        return self._pending is not None and not self._pending.is_written

    @property
    def pending(self) -> bool:
        """Whether a save has to be finished; the same on all ranks."""
        return self._pending is not None

    def prepare(self, progress: TrainingProgress) -> None:
        """Begin to allocate the host memory that saves in the background copy tensors to, unless there has been a save;
        a collective call."""
        device = self.trainer.groups.device
        if not self._plan.is_planned:
            written = self._plan.divide(state_to_save(self.trainer, progress))
            sizes = [num_bytes(x) for x in written if x.data is not None and x.data.is_cuda]
            self._allocation = allocate_in_background(sizes, device) if sizes else None

    def save(
        self, progress: TrainingProgress, loader_state: Any | None, *, background: bool = False, persistent: bool = True
    ) -> None:
        """Save; with `background`, return as soon as the tensors have been copied.

        Args:
            loader_state: the data loader's state on ranks that load data, else None.
            persistent: keep the checkpoint, as the run says; otherwise the next non-persistent one replaces it.

        Raises:
            CheckpointError: on all ranks, if any could not write this checkpoint or the previous one.
        """
        self.finish(progress.iteration)
        self._pending = pending = self._start(progress, self._root(persistent), copy=background)
        carried = self._carried(loader_state)

        def write() -> None:
            pending.checksums = self._write_files(pending.partial, carried)
            pending.write.write()
            pending.checksums |= pending.write.checksums

        pending.writing = Writing(write, pending.partial)
        pending.writing.start()
        if not background:
            pending.writing.join()
        pending.waited = time.perf_counter() - pending.started
        if not background:
            self.finish(progress.iteration)

    def finish(self, iteration: int) -> None:
        """Wait until the save in progress is complete, and point the tracker to it. Without one, do nothing.

        Args:
            iteration: the one that has just been trained, for saves.jsonl.
        """
        pending, groups = self._pending, self.trainer.groups
        if pending is None:
            return
        # The files of this rank, then the checkpoint of all ranks.
        start = time.perf_counter()
        problem = None if pending.writing is None else pending.writing.problem()
        self._pending = None
        try:
            self._complete(pending, problem)
        except CheckpointError:
            if groups.rank == 0:  # otherwise it would fill the disk until the next save, which may need the space
                shutil.rmtree(pending.partial, ignore_errors=True)
            raise
        pending.write.published()
        # How long that took, and how much of it training has waited.
        end = time.perf_counter()
        done = Saved(
            iteration=pending.iteration,
            background=pending.background,
            finished_after_iteration=iteration,
            gigabytes=pending.num_bytes / 1e9,
            seconds=end - pending.started,
            start_waited_seconds=pending.waited,
            finish_waited_seconds=end - start,
        )
        logger.info("saved %s: %s", pending.final, done)
        if groups.rank == 0:
            done.append_to(self.trainer.run.run_dir / SAVES)

    def _complete(self, pending: Pending, problem: str | None) -> None:
        """Turn what all ranks have written into a checkpoint. CheckpointError on all ranks if any could not write.

        Args:
            problem: why this rank could not.
        """
        groups = self.trainer.groups
        raise_listed(groups, problem, CheckpointError, NOT_WRITTEN)
        try:
            pending.write.finish()
        except CheckpointError as error:
            raise CheckpointError(f"{pending.partial}: {error}", on_all_ranks=True) from error
        checksums = gather_to_first(groups, pending.checksums)
        problem = None
        if groups.rank == 0:
            try:
                known = {name: text for part in checksums for name, text in part.items()}
                self._publish(pending, known)
            except OSError as error:
                problem = f"{pending.final}: {error}"
        raise_listed(groups, problem, CheckpointError, NOT_WRITTEN)

    def _warn_of_drift(self, iteration: int) -> None:
        """Log trained parameters that differ between tensor-parallel ranks although they should not; a collective
        call."""
        groups = self.trainer.groups
        pairs = zip(self.trainer.models, self.trainer.chunks, strict=True)
        drifted = [name for pair in pairs for name in differing(alike_here(*pair), groups.tensor_parallel)]
        if drifted and groups.tp_rank == 0:
            title = (
                f"iteration {iteration}: parameters that all tensor-parallel ranks should have alike differ, since "
                "their gradients are not computed in a fixed order here; the first rank's are saved. "
                "--deterministic prevents this"
            )
            logger.warning(problems(title, drifted))

    def _root(self, persistent: bool) -> Path:
        run = self.trainer.run
        return run.run_dir if persistent else run.non_persistent_dir

    def _start(self, progress: TrainingProgress, root: Path, *, copy: bool) -> Pending:
        """Create the folder, plan the save and copy the tensors to the host."""
        start = time.perf_counter()
        run, groups = self.trainer.run, self.trainer.groups
        # Wait for background work first: the allocation of host memory, and the gathering of updated weights.
        if self._allocation is not None:
            self._allocation.join()
        for chunk in self.trainer.chunks:
            if gathers_ahead(chunk):
                chunk.start_param_sync(force_sync=True)  # the update's weights are gathered in the next forward pass
        # Rank 0 makes the folder that all ranks write to.
        final = layout.iteration_folder(root, progress.iteration)
        record: dict[str, Any] = {}
        problem = None
        if groups.rank == 0:
            try:
                record = run_record(run, groups, asdict(progress))
                if self._deletion is not None:
                    self._deletion.join()  # it deletes the kind of folder that a killed save leaves
                _prepare_folder(final)
            except OSError as error:
                problem = f"{final}: {error}"
        raise_listed(groups, problem, CheckpointError, NOT_WRITTEN)  # also the barrier after which the folder exists
        # Plan who writes what. With `copy` the tensors are copied to the host, so that training may change them.
        self._warn_of_drift(progress.iteration)
        with all_cores():
            state = state_to_save(self.trainer, progress)
            partial = final.parent / f".{final.name}.partial"
            local = None if root == self._root(persistent=True) else run.checkpoint.non_persistent_local_dir
            write: StateWrite | LocalWrite
            if local is None:
                write = StateWrite(state, partial, copy=copy, plan=self._plan)
            else:
                write = LocalWrite(
                    state,
                    partial,
                    local / run.name,
                    groups,
                    copy=copy,
                    vision_data_parallel=run.parallel.whole_towers,
                )
        (num_bytes,) = sum_over_ranks(groups, [write.num_bytes])
        return Pending(final, record, progress.iteration, write, num_bytes, copy, start, 0.0)

    def _carried(self, loader_state: Any | None) -> bytes | None:
        """Return this rank's position in the data as the bytes of a file, or None if it has none."""
        if not self.trainer.run.checkpoint.save_optim or not self.trainer.groups.loads_data:
            return None
        buffer = io.BytesIO()
        torch.save(loader_state, buffer)
        return buffer.getvalue()

    def _write_files(self, partial: Path, loader_state: bytes | None) -> dict[str, str]:
        """Write everything except tensors: rank 0 the Hugging Face files, loading ranks their position in the data.

        Returns:
            Their checksums, by path relative to `partial`.
        """
        groups, checksums = self.trainer.groups, {}
        if groups.rank == 0:
            checksums = write_description(self.trainer, partial, self.hf_source)
        if loader_state is not None:
            name = f"{LOADER_FOLDER}/{loader_file(groups.dp_rank)}"
            write_synced(partial / name, loader_state)
            checksums[name] = of_bytes(loader_state)
        return checksums

    def _publish(self, pending: Pending, checksums: Mapping[str, str]) -> None:
        """List every file, flush everything, rename the folder, update the tracker, delete old checkpoints."""
        checkpoint, root = self.trainer.run.checkpoint, pending.final.parent
        write_run_json(pending.partial, {**pending.record, KEY: of_folder(pending.partial, checksums)})
        sync_tree(pending.partial, already=".distcp")
        move(pending.partial, pending.final)
        layout.write_tracker(root, pending.iteration)
        if root != self._root(persistent=True):
            old = all_but(pending.final)
        else:
            old = outdated(
                root, newest=pending.iteration, keep_last=checkpoint.keep_last, keep_every=checkpoint.keep_every
            )
        aside = [put_aside(folder) for folder in old]
        if not aside:
            return
        logger.info("deleted %s", ", ".join(map(str, old)))
        self._deletion = delete_in_background(aside)  # it can take as long as writing
        if not pending.background:
            self._deletion.join()


def save_checkpoint(trainer: Trainer, progress: TrainingProgress, hf_source: Path, loader_state: Any | None) -> Path:
    """Write SAVE_DIR/NAME/iter_XXXXXXX, point the tracker to it and return it; a collective call (see `Saver`)."""
    Saver(trainer, hf_source).save(progress, loader_state)
    return layout.iteration_folder(trainer.run.run_dir, progress.iteration)


def _prepare_folder(final: Path) -> None:
    """Create the empty folder of a save; delete what killed saves have left and what is at the final path.

    That is an earlier save of this iteration, which the run has reached again after resuming from an older checkpoint.
    """
    remove_leftovers(final.parent)
    if final.exists():
        discard(final)
    (final.parent / f".{final.name}.partial" / LOADER_FOLDER).mkdir(parents=True)
