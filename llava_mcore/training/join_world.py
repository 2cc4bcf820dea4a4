"""The process groups and random generators of a run."""

from __future__ import annotations

from llava_mcore.config.schema import RunConfig
from llava_mcore.parallel.groups import Groups, initialize
from llava_mcore.parallel.random import make_deterministic, seed_everything


def join_world(run: RunConfig) -> Groups:
    """Connect to the other ranks and seed the random generators."""
    if run.training.deterministic:
        make_deterministic()
    parallel = run.parallel
    assert parallel.backend is not None, "the launcher resolves the backend"
    groups = initialize(
        backend=parallel.backend,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        cp_a2a_size=parallel.cp_a2a_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        sharding_replicas=parallel.hsdp_replicas,
        timeout_seconds=run.faults.timeout,
    )
    seed_everything(run.training.seed)
    return groups
