"""Tokenizer, chat template and processors of a run."""

from __future__ import annotations

from pathlib import Path

from llava_mcore.config.schema import RunConfig
from llava_mcore.data.encode.assets import Assets, load_assets


def run_assets(run: RunConfig, checkpoint_hf_dir: Path) -> Assets:
    """Load what a run needs to read its data.

    Args:
        checkpoint_hf_dir: the Hugging Face files of the checkpoint to start from.

    Raises:
        DataError: lists everything that is missing or does not match.
    """
    data = run.data
    return load_assets(
        run.checkpoint.hf_dir or checkpoint_hf_dir,
        checkpoint_hf_dir=checkpoint_hf_dir,
        chat_template=data.chat_template,
        lang=data.lang,
        image_token_id=data.image_token_id,
        pad_token_id=data.pad_token_id,
        special_tokens_in_text=data.special_tokens_in_text,
        limits=data.limits,
        pixels=data.pixels,
        video_pixels=data.video_pixels,
    )
