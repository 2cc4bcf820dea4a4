"""A question as the model reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.encode.encode import check_length, check_media, expanded
from llava_mcore.data.loader.collate import collate
from llava_mcore.data.samples import Batch, Conversation, EncodedSample
from llava_mcore.media.media import position_ids


@dataclass(frozen=True)
class Prompt:
    """One prompt on the host. `batch`: it alone, padded on the right. `length`: its tokens without padding, media
    included. `next_position`: of the first token of the answer. `draw_index`: chooses the random numbers of its answer;
    None: its place among the prompts of its replica."""

    batch: Batch
    length: int
    next_position: int
    draw_index: int | None = None


def encode_prompt(conversation: Conversation, assets: Assets, key: str, *, multiple: int = 1) -> Prompt:
    """Return the prompt of a conversation that ends with a question, its images decoded as for training.

    Args:
        multiple: its length is padded to a multiple of this.

    Raises:
        DataError: an image cannot be read, a limit is exceeded, or the template cannot render the turns.
    """
    check_length(conversation.turns, assets.limits)
    check_media(conversation, assets)
    text = assets.chat.prompt_tokens(conversation.turns, conversation.num_media, conversation.tools)
    tokens = expanded(text, conversation, assets, key)
    pixels = assets.images.tiles(tokens.media)
    sample = EncodedSample(__key__=key, __restore_key__=(), conversations=[tokens], pixel_values=pixels)
    length, plan = len(tokens), assets.plan
    batch = collate(
        [sample],
        seq_length=length + multiple,
        pad_token_id=assets.pad_token_id,
        packed=False,
        multiple=multiple,
        pixel_scale=assets.images.pixel_scale,
        fields=plan.fields,
        num_axes=plan.num_axes,
    )
    media = [item.tokens for item in tokens.media]
    after = position_ids(length + 1, media, [item.start for item in tokens.media], plan.num_axes)
    return Prompt(batch, length, int(after[0, -1]))


def decoded(assets: Assets, tokens: Sequence[int]) -> str:
    """Return the text of an answer without special tokens and surrounding white space."""
    text = assets.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text).strip()
