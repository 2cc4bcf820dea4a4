"""Rules for the optimizer Muon."""

from __future__ import annotations

from collections.abc import Iterator

from llava_mcore.config.schema import RunConfig

MUON_MISSING = (
    "optimizer.name muon needs the package emerging-optimizers: pip install 'llava-mcore[muon]', or omit "
    "optimizer.name for AdamW"
)


def check_muon(run: RunConfig) -> Iterator[str]:
    """Yield what Muon cannot be combined with."""
    optimizer = run.optimizer
    if optimizer.name != "muon":
        return
    if run.adapter.is_on:
        yield (
            "optimizer.name muon orthogonalizes updates of whole matrices, and an adapter has two factors of each "
            "update: omit optimizer.name for AdamW, or the adapter"
        )
    if run.parallel.fsdp != "none":
        yield (
            f"--fsdp {run.parallel.fsdp} does not work with optimizer.name muon yet: use --dist-optim in place of "
            "--fsdp, or omit optimizer.name for AdamW"
        )
    if optimizer.use_precision_aware_optimizer:
        yield (
            "optimizer.use_precision_aware_optimizer stores AdamW's state only, so it does not work with "
            "optimizer.name muon, which keeps one value per weight of a matrix instead of two: omit one of them"
        )
