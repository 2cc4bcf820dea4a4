"""The locks on a run's folders."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import ConfigError
from llava_mcore.files.folder_lock import FolderLock
from llava_mcore.files.regular import naming
from llava_mcore.launch.jobs.slurm import job_has_ended
from llava_mcore.launch.nodes import Nodes

LOCK_FILE = ".lock"


class RunLock:
    """The locks on a run's folders: two runs with the same name would overwrite each other's checkpoints and metrics.

    The first node's launcher holds them; each node's holds those on its own disk.

    The other nodes check whether the first node's run may start, and end with the same message if not.
    """

    def __init__(self, run: RunConfig, nodes: Nodes) -> None:
        """The locks are acquired in `hold`."""
        self._lost: list[str] = []
        restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
        self._group = f"{nodes.run_id} {restarts} {nodes.master_addr}:{nodes.port}" if nodes.count > 1 else None
        shared = [run.run_dir]
        if run.checkpoint.non_persistent_dir is not None:
            shared.append(run.non_persistent_dir)
        own_files = [self._of(folder / LOCK_FILE) for folder in shared]
        self._looked_at, self._held = ([], own_files) if nodes.rank == 0 else (own_files, [])
        if run.checkpoint.non_persistent_local_dir is not None:
            folder = run.checkpoint.non_persistent_local_dir / run.name
            self._held.append(self._of(folder / f"{LOCK_FILE}-node{nodes.rank}"))

    def _of(self, path: Path) -> FolderLock:
        return FolderLock(
            path,
            activity=str(path.parent),
            advice="wait for it or stop it, or give this run another --name",
            group=self._group,
            say=lambda line: print(line, flush=True),
            lost=self._end,
            job_has_ended=job_has_ended,
        )

    def _end(self, line: str) -> None:
        self._lost.append(line)
        os.kill(os.getpid(), signal.SIGQUIT)  # forwarded to torchrun, which ends all ranks

    def require_free(self) -> None:
        """Return if no other run is in the folders; raise FolderInUse otherwise."""
        for lock in (*self._looked_at, *self._held):
            lock.require_free()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the locks.

        Raises:
            FolderInUse: another run is in one of the folders.
            ConfigError: a folder cannot be written to; or, at the end, another run has taken a lock over.
        """
        with contextlib.ExitStack() as stack:
            try:
                for lock in self._looked_at:
                    with naming(lock.path):
                        lock.require_free()
                for lock in self._held:
                    with naming(lock.path):
                        stack.enter_context(lock)
            except OSError as error:
                raise ConfigError(f"the run's folder cannot be written to: {error}") from error
            if self._held:
                _require_renames(self._held[0].path.parent)
            yield
        if self._lost:
            raise ConfigError(f"{self._lost[0]}; this run was stopped")


def _require_renames(folder: Path) -> None:
    """Raise ConfigError if a folder with a file cannot be renamed there: that is how a checkpoint becomes complete.

    Buckets that are mounted as file systems may refuse it.
    """
    before = Path(tempfile.mkdtemp(prefix=".rename-", dir=folder))
    after = before.with_name(f"{before.name}-done")
    try:
        (before / "file").touch()
        before.rename(after)
    except OSError as error:
        raise ConfigError(
            f"{folder}: a folder cannot be renamed there ({error.strerror}), which every save needs: use another file "
            "system, or a bucket with a hierarchical namespace"
        ) from error
    finally:
        shutil.rmtree(before, ignore_errors=True)
        shutil.rmtree(after, ignore_errors=True)
