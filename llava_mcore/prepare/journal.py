"""Progress of a folder: the request that it was started with, and one line for every finished shard."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Self

from llava_mcore.data.storage.dataset_path import META, SCRATCH
from llava_mcore.data.storage.stored_tokens import tokens_file
from llava_mcore.errors import DataError, problems
from llava_mcore.files.atomic import move, write_synced
from llava_mcore.prepare.counts import ShardReport
from llava_mcore.prepare.output.shard_index import rows_name
from llava_mcore.prepare.streamed_shards import CUTS


class Journal:
    """The state of a folder of shards. As a context, it locks the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scratch = folder / SCRATCH
        self._request = self.scratch / "request.json"
        self._lines = self.scratch / "journal.jsonl"
        self._lock: IO[str] | None = None
        self._offsets: dict[int, int] = {}

    def __enter__(self) -> Self:
        """Lock the folder. DataError if it has other contents, or another process is using it."""
        if self.folder.exists() and not self.folder.is_dir():
            raise DataError(f"--out {self.folder} is a file, not a folder")
        if self.folder.is_dir() and not self.scratch.is_dir() and any(self.folder.iterdir()):
            raise DataError(f"--out {self.folder} is not empty, and no earlier `prepare` has written it")
        self.scratch.mkdir(parents=True, exist_ok=True)
        self._lock = (self.scratch / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise DataError(f"another `prepare` is writing to {self.folder}; wait for it, or stop it") from error
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._lock is not None
        self._lock.close()

    def begin(self, request: Mapping[str, Any], *, overwrite: bool) -> None:
        """Write the request into a new folder; in an existing one, check that it is the same.

        overwrite: delete what an earlier request has written. DataError lists the differences.
        """
        if overwrite:
            self._forget()
        if self._request.is_file():
            mismatches = _differences(json.loads(self._request.read_text(encoding="utf-8")), request)
            if mismatches:
                advice = "give another --out, or --overwrite to start again"
                raise DataError(
                    problems(f"{self.folder} was started with another source or options; {advice}", mismatches)
                )
        for leftover in self.scratch.glob("*.part"):
            leftover.unlink()
        write_whole(self._request, json.dumps(request, indent=1))
        self._read_offsets()

    def done(self) -> set[int]:
        """Return the numbers of the finished shards: those with a line and a complete file."""
        return {report.shard for report in self.reports() if self._is_there(report)}

    def add(self, report: ShardReport) -> None:
        """Record a finished shard."""
        with self._lines.open("ab") as file:
            self._offsets[report.shard] = file.tell()
            file.write(json.dumps(report.to_json()).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def report(self, shard: int) -> ShardReport:
        """Read the last line of a shard."""
        with self._lines.open("rb") as file:
            file.seek(self._offsets[shard])
            return ShardReport.from_json(json.loads(file.readline()))

    def reports(self) -> Iterator[ShardReport]:
        """Yield the reports by number."""
        for shard in sorted(self._offsets):
            yield self.report(shard)

    def _read_offsets(self) -> None:
        """Find the lines, and remove an incomplete last one."""
        self._lines.touch()
        end = 0
        with self._lines.open("r+b") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offsets[json.loads(line)["shard"]] = end
                end += len(line)
            file.truncate(end)

    def _is_there(self, report: ShardReport) -> bool:
        if report.name is None:
            return True
        path = self.folder / report.name
        return path.is_file() and path.stat().st_size == report.counts.bytes

    def _forget(self) -> None:
        """Delete what earlier runs have written here, and nothing else."""
        shutil.rmtree(self.folder / META, ignore_errors=True)
        self._read_offsets()
        for report in self.reports():
            if report.name is not None:
                (self.folder / report.name).unlink(missing_ok=True)
                (self.folder / f"{report.name}.idx").unlink(missing_ok=True)
                tokens_file(self.folder / report.name).unlink(missing_ok=True)
        for notes in (*self.scratch.glob(rows_name("*")), *self.scratch.glob("*.arrow"), *self.scratch.glob(CUTS)):
            notes.unlink()
        self._offsets = {}
        self._lines.unlink()
        self._request.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically."""
    temporary = path.with_name(f"{path.name}.part")
    write_synced(temporary, text.encode())
    move(temporary, path)


RENAMED_OPTIONS = {"--max-picture-pixels": "--max-image-pixels"}
"""Options of version 0.1.0 -> their names today: a dataset that it began can be continued."""


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the differences between two requests, for messages."""
    earlier = {RENAMED_OPTIONS.get(name, name): value for name, value in old["options"].items()}
    options = {name: (earlier.get(name), new["options"].get(name)) for name in earlier | new["options"]}
    mismatches = [f"{name}: started with {was}, now {now}" for name, (was, now) in options.items() if was != now]
    before, after = ({(s["file"], s["hash"]): s for s in request["sources"]} for request in (old, new))
    names = {name for name, _ in before} & {name for name, _ in after}
    for (name, _), source in before.items():
        if (name, source["hash"]) not in after:
            mismatches.append(f"{name} has changed" if name in names else f"{name} is no longer a source")
    mismatches += [f"{name} is a new source" for name, _ in after if name not in names]
    if not mismatches and old["sources"] != new["sources"]:
        mismatches.append("the sources are in another order")
    return mismatches
