"""Rules for models whose decoder attends to images (Mllama): what is not computed for them."""

from __future__ import annotations

from collections.abc import Iterator

from llava_mcore.config.rules.dims import ModelDims
from llava_mcore.config.schema import RunConfig


def check_cross_stages(dims: ModelDims, pp: int, source: str) -> list[str]:
    """Return why such a model cannot have stages."""
    if pp == 1 or not dims.num_cross_layers:
        return []
    return [
        f"--pp {pp}: {dims.num_cross_layers} layers of {source} attend to the features of images, which only the first "
        "stage has: use --pp 1, and --tp for more processes"
    ]


def check_cross_attention(run: RunConfig, dims: ModelDims, source: str) -> Iterator[str]:
    """Yield what such a model cannot do."""
    if not dims.num_cross_layers:
        return
    parallel, model = run.parallel, run.model
    for flag, is_set in (
        (f"--fsdp {parallel.fsdp}", parallel.fsdp != "none"),
        ("--cuda-graphs", model.cuda_graphs),
        ("--cuda-graphs-vision", model.cuda_graphs_vision),
        ("--fp8", run.training.fp8),
        ("--train-expanded", model.train_expanded),
        ("optimizer.name=muon", run.optimizer.name == "muon"),
    ):
        if is_set:
            yield f"{flag} does not work with the layers of {source} that attend to images: omit it"
