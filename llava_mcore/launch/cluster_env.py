"""This machine's place among those of a run, from the environment that Kubernetes, Kubeflow or Vertex AI sets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_mcore.errors import ConfigError


@dataclass(frozen=True)
class ClusterNode:
    """This machine's place in a cluster, from the environment. For fields that are None, flags decide.

    Attributes:
        source: the variable that it was read from, for messages.
        count: machines of the job.
        rank: this machine's number among them.
        master_addr: name or address of the first one.
        port: rendezvous port there.
    """

    source: str
    count: int | None
    rank: int
    master_addr: str | None = None
    port: int | None = None


def read_cluster(environ: Mapping[str, str]) -> ClusterNode | None:
    """Return this machine's place; None if the environment says nothing about it.

    torchrun's own variables (PET_…) come from Kubeflow's PyTorchJob and TrainJob, JOB_COMPLETION_INDEX from any
    indexed Job of Kubernetes, those of a JobSet included, and CLUSTER_SPEC from Vertex AI.

    Raises:
        ConfigError: a variable has a value that none of these would set.
    """
    if "PET_NODE_RANK" in environ:
        return ClusterNode(
            "PET_NODE_RANK",
            # Elastic jobs have a range such as 1:4 there.
            int(environ["PET_NNODES"]) if environ.get("PET_NNODES", "").isdecimal() else None,
            _index_in(environ, "PET_NODE_RANK"),
            environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR"),
            _index_in(environ, "PET_MASTER_PORT") if "PET_MASTER_PORT" in environ else None,
        )
    if "CLUSTER_SPEC" in environ:
        return _of_vertex(environ["CLUSTER_SPEC"])
    if "JOB_COMPLETION_INDEX" in environ:
        return ClusterNode("JOB_COMPLETION_INDEX", None, _index_in(environ, "JOB_COMPLETION_INDEX"))
    return None


def _of_vertex(text: str) -> ClusterNode:
    """Return this machine's place from Vertex AI's description of its worker pools: the only machine of pool 0 is the
    first."""
    try:
        described: Any = json.loads(text)
        pools, task = described["cluster"], described["task"]
        machines = [name for pool in sorted(pools) for name in pools[pool]]
        before = [name for pool in sorted(pools) if pool < task["type"] for name in pools[pool]]
        address, _, port = machines[0].rpartition(":")
        return ClusterNode("CLUSTER_SPEC", len(machines), len(before) + int(task["index"]), address, int(port))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"CLUSTER_SPEC: expected Vertex AI's JSON with cluster and task, found {text[:200]!r}"
        ) from error


def _index_in(environ: Mapping[str, str], name: str) -> int:
    if not environ[name].isdecimal():
        raise ConfigError(f"{name}: expected a number from 0, found {environ[name]!r}")
    return int(environ[name])


def checkpoint_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder in which Vertex AI wants checkpoints (AIP_CHECKPOINT_DIR), where it mounts the bucket."""
    url = environ.get("AIP_CHECKPOINT_DIR", "")
    return Path("/gcs", url.removeprefix("gs://")) if url.startswith("gs://") else None
