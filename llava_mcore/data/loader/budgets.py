"""Compares the budgets of a pack, tokens and patches, with the smallest and the largest image or audio clip."""

from __future__ import annotations

from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import Assets
from llava_mcore.errors import ConfigError, problems, with_article
from llava_mcore.media.media import MediaBudget
from llava_mcore.models.vision.patch_plan import PatchPlan

HAPPENS = {
    "drop": "samples with larger ones are skipped",
    "truncate": "samples are truncated before larger ones",
    "error": "a sample with a larger one ends the run",
}
"""By data.on_too_long."""


def check_budgets(data: DataConfig, assets: Assets) -> None:
    """Raise ConfigError if not even the smallest image (or audio clip) fits into a sample."""
    smallest, _ = media_budgets(assets)
    errors, plan = [], assets.plan
    if data.seq_length <= smallest.tokens:
        lower = "" if assets.pixels.smallest is None else f", or lower --min-pixels ({assets.pixels.smallest})"
        errors.append(
            f"data.seq_length is {data.seq_length}, but {with_article(_name(assets))} alone has at least "
            f"{smallest.tokens} tokens: "
            f"set --seq-length to more than that and the text{lower}"
        )
    if data.max_media_tokens is not None and data.max_media_tokens < smallest.patches:
        errors.append(
            f"data.max_media_tokens is {data.max_media_tokens}, but the smallest {_name(assets)} has "
            f"{smallest.patches} {plan.unit}: raise or omit it"
        )
    if errors:
        raise ConfigError(problems("no sample with media would fit", errors))


def warnings_of_large_media(data: DataConfig, assets: Assets) -> list[str]:
    """Return a warning if images or audio clips that the class takes do not fit into a sample."""
    _, largest = media_budgets(assets)
    if largest is None:
        return []
    over = []
    if data.seq_length <= largest.tokens:
        over.append(f"{largest.tokens} tokens, but data.seq_length is {data.seq_length}")
    if data.max_media_tokens is not None and data.max_media_tokens < largest.patches:
        over.append(f"{largest.patches} {assets.plan.unit}, but data.max_media_tokens is {data.max_media_tokens}")
    if not over:
        return []
    limit = "" if assets.pixels.largest is None else f"with --max-pixels {assets.pixels.largest} "
    return [
        f"{limit}{_name(assets)}s may have up to {'; and '.join(over)}: {HAPPENS[data.on_too_long]}; "
        f"{_advice(data, assets)}"
    ]


def media_budgets(assets: Assets) -> tuple[MediaBudget, MediaBudget | None]:
    """Return the tokens and patches of the smallest and the largest image or audio clip. Videos are not considered."""
    plan, pixels = assets.plan, assets.pixels
    if not isinstance(plan, PatchPlan) or pixels.smallest is None or pixels.largest is None:
        return plan.smallest, plan.largest
    # Sides are rounded to whole tokens so that the area stays within the range, unless an image is very long.
    area = _pixels_of_token(plan)
    fewest, most_tokens = max(1, -(-pixels.smallest // area)), max(1, pixels.largest // area)
    return MediaBudget(fewest, fewest * plan.merged), MediaBudget(most_tokens, most_tokens * plan.merged)


def _advice(data: DataConfig, assets: Assets) -> str:
    plan = assets.plan
    budget = data.max_media_tokens
    raised = "raise --seq-length" if budget is None else "raise --seq-length or data.max_media_tokens"
    if not isinstance(plan, PatchPlan):
        return f"to keep them, {raised}"
    fitting = data.seq_length - 1 if budget is None else min(data.seq_length - 1, budget // plan.merged)
    return f"set --max-pixels to at most {fitting * _pixels_of_token(plan)}, or {raised}"


def _pixels_of_token(plan: PatchPlan) -> int:
    images = plan.processing.image_processor
    return int(images.patch_size * images.merge_size) ** 2


def _name(assets: Assets) -> str:
    return "image" if assets.plan.image_token_id is not None else "audio clip"
