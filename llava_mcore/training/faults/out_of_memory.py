"""A GPU that runs out of memory: what to change."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import TrainingError
from llava_mcore.parallel.groups import Groups


@contextlib.contextmanager
def explain_out_of_memory(run: RunConfig, groups: Groups, iteration: int) -> Iterator[None]:
    """Turn a GPU's out-of-memory error into a TrainingError that says which settings reduce memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        used = torch.cuda.max_memory_reserved() / 2**30
        title = f"rank {groups.rank}: out of GPU memory in iteration {iteration}, at {used:.1f} GiB; to reduce memory:"
        advice = [f"  - {line}" for line in _memory_advice(run, groups, str(error))]
        raise TrainingError("\n".join([title, *advice, str(error)])) from error


def _memory_advice(run: RunConfig, groups: Groups, message: str) -> Iterator[str]:
    """Yield other processes on the GPU, from torch's message, then the settings that would still reduce memory."""
    for process, amount in re.findall(r"Process (\d+) has ([\d.]+ \w+) memory in use", message):
        yield f"another process holds {amount} of this GPU (process {process}; nvidia-smi shows it): stop it"
    if run.training.micro_batch_size > 1:
        yield f"lower --micro-batch-size (now {run.training.micro_batch_size})"
    yield f"lower --seq-length (now {run.data.seq_length})"
    pipeline = "" if run.model.cuda_graphs else f" or --pp (now {groups.pp_size})"
    yield f"raise --tp (now {groups.tp_size}){pipeline}"
    if groups.tp_size > 1 and not run.parallel.sequence_parallel:
        yield "split norms and residuals over the tensor-parallel ranks as well: --sequence-parallel"
    if not run.parallel.use_distributed_optimizer and groups.dp_size > 1:
        yield "shard the optimizer over the data-parallel ranks: --dist-optim"
    if run.optimizer.exp_avg_dtype == "fp32":
        yield "keep AdamW's moments in bf16, with optimizer.use_precision_aware_optimizer (docs/parallel.md, Optimizer)"
    if run.model.cuda_graphs:
        flags = "--cuda-graphs-vision or --cuda-graphs" if run.model.cuda_graphs_vision else "--cuda-graphs"
        yield f"omit {flags}: nothing else can use the memory that graphs reserve (docs/parallel.md)"
    elif run.model.recompute != "full":
        yield f"recompute activations in the backward pass: --recompute full (now {run.model.recompute})"
