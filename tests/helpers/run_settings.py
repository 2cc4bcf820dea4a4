"""Settings of a run without problems, and sizes of a model, for tests of rules."""

from __future__ import annotations

from pathlib import Path

from llava_mcore.config.rules.dims import ModelDims

DIMS = ModelDims(
    num_layers=8,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=8,
    num_query_groups=4,
    vocab_size=100,
    vision_num_layers=3,
    vision_hidden_size=32,
    vision_ffn_hidden_size=64,
    vision_num_attention_heads=4,
    max_position_embeddings=4096,
    sliding_window=None,
)


def smallest_run(folder: Path, *more: str) -> list[str]:
    """Return the overrides that every run needs, then `more`. `folder`: has the checkpoint, and gets the results."""
    return ["training.train_iters=10", f"checkpoint.save_dir={folder / 'out'}", f"checkpoint.load={folder}", *more]
