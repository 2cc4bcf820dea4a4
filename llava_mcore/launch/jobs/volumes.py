"""Volumes of a container: `--volume SOURCE:/path[:ro]`, where SOURCE is a claim, a folder of the machine or NFS."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from llava_mcore.config.schema import RunConfig
from llava_mcore.config.sections.launch import Volume, parse_volume

SHARED_MEMORY = "/dev/shm"
NFS_ON_VERTEX = PurePosixPath("/mnt/nfs")
"""Folder below which Vertex AI mounts NFS shares."""


def volumes_of(texts: Sequence[str]) -> tuple[Volume, ...]:
    """Return the volumes of `--volume`."""
    return tuple(parse_volume(text) for text in texts)


def pod_volumes(volumes: Sequence[Volume]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return `volumes` and `volumeMounts` of a pod: the user's, and shared memory for its processes.

    The /dev/shm of a pod has 64 MiB by default, too little for loader processes and NCCL. The one here is a volume in
    memory, which counts toward the container's limit.
    """
    sources: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    mounts: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": SHARED_MEMORY}]
    for index, volume in enumerate(volumes):
        name = f"volume-{index}"
        if volume.server is not None:
            source: dict[str, Any] = {"nfs": {"server": volume.server, "path": volume.source}}
        elif volume.source.startswith("/"):
            source = {"hostPath": {"path": volume.source, "type": "Directory"}}
        else:
            source = {"persistentVolumeClaim": {"claimName": volume.source}}
        sources.append({"name": name} | source)
        mounts.append({"name": name, "mountPath": volume.path} | ({"readOnly": True} if volume.read_only else {}))
    return sources, mounts


def outside_of_volumes(run: RunConfig, mounted: Sequence[str]) -> list[str]:
    """Return messages about paths of a run that are in no volume of its container.

    Args:
        mounted: folders of the container where volumes are mounted.
    """
    checkpoint = run.checkpoint
    named: list[tuple[str, Any]] = [
        ("--megatron-load-dir", checkpoint.load),
        ("--tokenizer-load-dir", checkpoint.hf_dir),
        ("--save-dir", checkpoint.save_dir),
        ("--non-persistent-ckpt-dir", checkpoint.non_persistent_dir),
        ("--non-persistent-local-ckpt-dir", checkpoint.non_persistent_local_dir),
        ("--data-path", run.data.path),
        ("adapter.load", run.adapter.load),
        *(("adapter.frozen", folder) for folder in run.adapter.frozen),
    ]
    errors = []
    for flag, path in named:
        if not isinstance(path, Path):  # not given, or a URL
            continue
        if not path.is_absolute():
            errors.append(f"{flag} {path}: give the absolute path in the container, in a volume (--volume)")
        elif not any(path.is_relative_to(folder) for folder in mounted):
            there = ", ".join(mounted) or "none"
            errors.append(f"{flag} {path}: in no volume of the container, of which it has {there}: add --volume")
    return errors
