"""Folders that cannot be read or written: one message that names the folder, exit code 2."""

from __future__ import annotations

import os
from pathlib import Path

from tests.helpers.rough import TRAIN, Outcome, Sandbox, Trial

ROW = "Ends: save folders"
SAVES = TRAIN + " --save-interval 2"
LONG = "n" * 300


def _read_only(sandbox: Sandbox) -> None:
    sandbox.read_only_disk(sandbox.root / "out")


def _full(size: str, leave: int) -> object:
    """Return what mounts a disk at the output folder on which `leave` bytes are free."""

    def arrange(sandbox: Sandbox) -> None:
        out = sandbox.root / "out"
        sandbox.tiny_disk(out, size)
        free = os.statvfs(out).f_bavail * os.statvfs(out).f_bsize
        with (out / "filler").open("wb") as file:
            file.write(bytes(max(0, free - leave)))

    return arrange


def _file_for_name(sandbox: Sandbox) -> None:
    (sandbox.root / "out" / "run").write_text("a file\n")


def _file_for_parent(sandbox: Sandbox) -> None:
    (sandbox.root / "out" / "file").write_text("a file\n")


def _closed(name: str) -> object:
    def arrange(sandbox: Sandbox) -> None:
        sandbox.own(name).chmod(0)

    return arrange


def _unwritable(sandbox: Sandbox) -> None:
    (sandbox.root / "out").chmod(0o555)


def _folder_at(*names: str) -> object:
    """Return what puts folders where a run writes files."""

    def arrange(sandbox: Sandbox) -> None:
        for name in names:
            (sandbox.root / "out" / "run" / name / "x").mkdir(parents=True)

    return arrange


def _file_at(name: str) -> object:
    def arrange(sandbox: Sandbox) -> None:
        path = sandbox.root / "out" / "run" / name
        path.parent.mkdir(parents=True)
        path.write_text("a file\n")

    return arrange


def _trained(iterations: int) -> object:
    """Return a check that a run has done all its iterations."""

    def check(sandbox: Sandbox, outcome: Outcome) -> str | None:
        metrics = Path(sandbox.root / "out" / "run" / "metrics.jsonl")
        number = len(metrics.read_text().splitlines()) if metrics.is_file() else 0
        return None if number == iterations else f"{number} iterations in metrics.jsonl, expected {iterations}"

    return check


GONE = "/the/name/../is/nowhere"
DELETES = (
    "({train} --save-interval 4) & pid=$!; "
    "while [ ! -s {out}/run/metrics.jsonl ]; do sleep 0.05; kill -0 $pid || break; done; rm -rf {out}/run; wait $pid"
)

TRIALS = [
    Trial("folders/read-only", ROW, SAVES, says=("out", "Read-only file system"), arrange=_read_only, quick=True),
    Trial(
        "folders/no-permission", ROW, SAVES, says=("out", "Permission denied"), arrange=_unwritable, permissions=True
    ),
    Trial("folders/full-at-the-start", ROW, SAVES, says=("out", "No space left"), arrange=_full("64K", 0)),
    Trial("folders/full-for-stacks", ROW, SAVES, says=("out", "No space left"), arrange=_full("64K", 4096)),
    Trial(
        "folders/full-in-metrics",
        ROW,
        TRAIN.replace("iters 4", "iters 60"),
        says=("out/run/metrics.jsonl", "No space left"),
        arrange=_full("64K", 16 << 10),
    ),
    Trial("folders/full-in-a-save", ROW, SAVES, says=("out/run", "disk full"), arrange=_full("4M", 1 << 20)),
    Trial(
        "folders/full-in-a-background-save",
        ROW,
        SAVES + " --async-save",
        says=("out/run", "disk full"),
        arrange=_full("4M", 1 << 20),
    ),
    Trial(
        "folders/full-in-a-save-of-two-ranks",
        ROW,
        SAVES.replace("-g 1", "-g 2") + " --async-save",
        says=("out/run", "disk full"),
        arrange=_full("4M", 1 << 20),
    ),
    Trial("folders/file-for-the-name", ROW, SAVES, says=("out/run",), arrange=_file_for_name),
    Trial(
        "folders/parent-is-a-file",
        ROW,
        TRAIN.replace("{out}", "{out}/file/x"),
        says=("out/file",),
        arrange=_file_for_parent,
    ),
    Trial("folders/long-name", ROW, SAVES + f" --name {LONG}", says=("name", "at most 200 bytes"), quick=True),
    Trial("folders/slash-in-name", ROW, SAVES + " --name a/b", says=("name",)),
    Trial("folders/dots-for-name", ROW, SAVES + " --name ..", says=("name",)),
    Trial("folders/dash-in-name", ROW, SAVES + " --name=-rf", says=("name",)),
    Trial("folders/newline-in-name", ROW, SAVES + " --name $'a\\nb'", says=("name",)),
    Trial("folders/control-character-in-name", ROW, SAVES + " --name $'a\\eb'", says=("name",)),
    Trial("folders/load-is-a-file", ROW, TRAIN.replace("{megatron}", "{hf}/config.json"), says=("config.json",)),
    Trial(
        "folders/load-is-closed",
        ROW,
        TRAIN,
        says=("megatron", "Permission denied"),
        arrange=_closed("megatron"),
        permissions=True,
    ),
    Trial("folders/hf-is-closed", ROW, TRAIN, says=("/hf",), arrange=_closed("hf"), permissions=True),
    Trial("folders/data-is-closed", ROW, TRAIN, says=("/data",), arrange=_closed("data"), permissions=True),
    Trial("folders/load-is-nowhere", ROW, TRAIN.replace("{megatron}", GONE), says=(GONE,)),
    Trial(
        "folders/deleted-in-the-run",
        ROW,
        DELETES.replace("{train}", TRAIN.replace("iters 4", "iters 60")),
        says=("out/run",),
    ),
    Trial("folders/stacks-is-a-file", ROW, SAVES, says=("out/run/stacks",), arrange=_file_at("stacks")),
    Trial("folders/metrics-is-a-folder", ROW, SAVES, says=("metrics.jsonl",), arrange=_folder_at("metrics.jsonl")),
    Trial("folders/hf-copy-is-a-file", ROW, SAVES, says=("out/run/hf",), arrange=_file_at("hf")),
    Trial(
        "folders/saves-log-is-a-folder", ROW, SAVES, code=0, says=("saves.jsonl",), arrange=_folder_at("saves.jsonl")
    ),
    Trial(
        "folders/plot-is-a-folder",
        ROW,
        TRAIN,
        code=0,
        says=("loss.png",),
        arrange=_folder_at("loss.png"),
        check=_trained(4),
    ),
    Trial(
        "folders/profile-is-a-file",
        ROW,
        TRAIN + " --profile 2:3",
        code=0,
        says=("profile",),
        arrange=_file_at("profile"),
        check=_trained(4),
    ),
    Trial(
        "folders/faults-is-a-file",
        ROW,
        TRAIN + " --lr 1e30",
        code=3,
        says=("faults", "not finite"),
        arrange=_file_at("faults"),
    ),
    Trial(
        "folders/tensorboard-is-a-file",
        ROW,
        TRAIN + " --tensorboard",
        says=("tensorboard",),
        arrange=_file_at("tensorboard"),
    ),
    Trial(
        "folders/import-to-read-only",
        ROW,
        "llava-mcore import-hf --hf-dir {hf} --megatron-dir {out}/m",
        says=("out", "Read-only"),
        arrange=_read_only,
    ),
    Trial(
        "folders/import-to-full",
        ROW,
        "llava-mcore import-hf --hf-dir {hf} --megatron-dir {out}/m",
        says=("out",),
        arrange=_full("64K", 0),
    ),
    Trial(
        "folders/import-to-long-name",
        ROW,
        "llava-mcore import-hf --hf-dir {hf} --megatron-dir {out}/" + LONG,
        says=("File name too long",),
    ),
    Trial(
        "folders/import-below-a-file",
        ROW,
        "llava-mcore import-hf --hf-dir {hf} --megatron-dir {out}/file/m",
        says=("out/file",),
        arrange=_file_for_parent,
    ),
    Trial(
        "folders/import-from-closed",
        ROW,
        "llava-mcore import-hf --hf-dir {hf} --megatron-dir {out}/m",
        says=("/hf",),
        arrange=_closed("hf"),
        permissions=True,
    ),
    Trial(
        "folders/export-to-read-only",
        ROW,
        "llava-mcore export-hf --megatron-dir {megatron} --hf-dir {out}/hf",
        says=("out", "Read-only"),
        arrange=_read_only,
    ),
    Trial(
        "folders/export-from-closed",
        ROW,
        "llava-mcore export-hf --megatron-dir {megatron} --hf-dir {out}/hf",
        says=("/megatron",),
        arrange=_closed("megatron"),
        permissions=True,
    ),
    Trial(
        "folders/inspect-closed",
        ROW,
        "llava-mcore inspect {hf}",
        says=("/hf",),
        arrange=_closed("hf"),
        permissions=True,
    ),
    Trial("folders/inspect-long-name", ROW, "llava-mcore inspect /" + LONG, says=("File name too long",), quick=True),
    Trial(
        "folders/check-closed",
        ROW,
        "llava-mcore check --hf-dir {hf}",
        says=("/hf",),
        arrange=_closed("hf"),
        permissions=True,
    ),
    Trial(
        "folders/check-data-closed",
        ROW,
        "llava-mcore check --data-path {data} --tokenizer-load-dir {hf}",
        says=("/data",),
        arrange=_closed("data"),
        permissions=True,
        one_message=False,
    ),
    Trial(
        "folders/prepare-to-read-only",
        ROW,
        "llava-mcore prepare {data} --format vqa --out {out}/d --num-workers 1",
        says=("out", "Read-only"),
        arrange=_read_only,
    ),
    Trial(
        "folders/prepare-to-full",
        ROW,
        "llava-mcore prepare {data} --format vqa --out {out}/d --num-workers 1",
        says=("No space left",),
        arrange=_full("64K", 16 << 10),
    ),
    Trial("folders/show-config-closed", ROW, "llava-mcore show-config --config {hf}", says=("/hf",), quick=True),
    Trial("folders/submit-to-read-only", ROW, TRAIN + " --submit", says=("out", "Read-only"), arrange=_read_only),
]
