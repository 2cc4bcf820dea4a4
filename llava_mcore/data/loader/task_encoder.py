"""The steps from a conversation to a micro-batch, with the settings of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.energon import SkipSample
from megatron.energon.flavors.webdataset.structs import FilteredSample

from llava_mcore.config.sections.data import DataConfig
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.encode.augment import Augmentation
from llava_mcore.data.encode.conversation import with_prompt
from llava_mcore.data.encode.encode import TooLongError, expanded, fit, stored_text, tokenize
from llava_mcore.data.encode.prompts import POOL_KEY, choose_prompt
from llava_mcore.data.loader.collate import collate
from llava_mcore.data.loader.packing import round_up
from llava_mcore.data.loader.sample_problems import Skips
from llava_mcore.data.samples import (
    Batch,
    ChatSample,
    Conversation,
    EncodedSample,
    TokenConversation,
    TokenSample,
)
from llava_mcore.data.storage.stored_tokens import StoredTokens
from llava_mcore.errors import DataError


class ChatTaskEncoder:
    """Tokenizes samples, decodes their media and builds batches.

    A step's result depends on its arguments alone, so samples may be read in any order and again.
    """

    def __init__(
        self,
        data: DataConfig,
        assets: Assets,
        skips: Skips,
        *,
        seed: int = 0,
        pad_multiple: int = 8,
        augmentation: Augmentation | None = None,
        of_blend: bool = False,
    ) -> None:
        """Store what the steps need.

        Args:
            seed: chooses a sample's prompt if its dataset has a pool of them, and the draws of the augmentation.
            pad_multiple: see `collate`.
            augmentation: changes decoded images and frames.
            of_blend: see `collate`.
        """
        self.augmentation, self.of_blend = augmentation, of_blend
        self.data = data
        self.seed = seed
        self.pad_multiple = pad_multiple
        self.assets = assets
        self.skips = skips

    def preencode_sample(self, chat: ChatSample) -> TokenSample:
        """Tokenize one sample. DataError if it is broken or does not fit."""
        # A pack that `prepare` has written has several conversations; each gets a key.
        single = len(chat.conversations) == 1
        if not single and not self.data.packing:
            raise DataError("the sample was packed when it was written; train with --packing")
        keys = [chat.__key__ if single else f"{chat.__key__}#{i}" for i in range(len(chat.conversations))]
        conversations = [
            self._fitted(tokenize(self.prompted(chat, conversation, key), self.assets, key))
            for key, conversation in zip(keys, chat.conversations, strict=True)
        ]
        # Lengths are all that packing needs; media stay encoded until then.
        num_patches = sum(conversation.num_patches for conversation in conversations)
        tokens = TokenSample.derive_from(
            chat, conversations=conversations, num_tokens=sum(map(len, conversations)), num_patches=num_patches
        )
        # A written pack cannot be divided, so it must keep to the budgets as a whole.
        limit = self.data.max_media_tokens
        if limit is not None and num_patches > limit:  # each conversation has fewer
            raise TooLongError(
                f"a pack with {num_patches} {self.assets.plan.unit} was written, but data.max_media_tokens is {limit}; "
                "raise that, or prepare the data without --pack-to"
            )
        multiple = self.data.sample_multiple or 1
        rounded = sum(round_up(len(conversation), multiple) for conversation in conversations)
        if tokens.num_tokens <= self.data.seq_length < rounded:
            raise DataError(
                f"a pack of {tokens.num_tokens} tokens was written, which is {rounded} tokens with its samples rounded "
                f"up to multiples of {multiple} (--cp), but data.seq_length is {self.data.seq_length}; raise that, or "
                "prepare the data with a smaller --pack-to, or without it"
            )
        if tokens.num_tokens > self.data.seq_length:
            raise DataError(
                f"a pack of {tokens.num_tokens} tokens was written, but data.seq_length is {self.data.seq_length}; "
                "train with the sequence length (--pack-to) and the tokenizer that the data was prepared with"
            )
        return tokens

    def stored_sample(
        self, parts: FilteredSample, stored: StoredTokens, subflavors: Mapping[str, Any]
    ) -> TokenSample | None:
        """Return what `preencode_sample` would, from the tokens beside the shard; None if they do not belong to it.

        The json is not decoded: with the same bytes, it has the same text. DataError like `preencode_sample`.
        """
        text = stored_text(parts, stored, self.assets)
        if text is None:
            return None
        key = parts["__key__"]
        tokens = self._fitted(expanded(*text, self.assets, key))
        return TokenSample(
            __key__=key,
            __restore_key__=parts["__restore_key__"],
            __subflavors__=dict(subflavors),
            __sources__=parts["__sources__"],
            conversations=[tokens],
            num_tokens=len(tokens),
            num_patches=tokens.num_patches,
        )

    def _fitted(self, tokens: TokenConversation) -> TokenConversation:
        """Return a conversation, truncated if it must be and may be. TooLongError like `fit`."""
        return fit(
            tokens,
            self.data.seq_length,
            self.data.on_too_long == "truncate",
            most_patches=self.data.max_media_tokens,
            unit=self.assets.plan.unit,
        )

    def prompted(self, chat: ChatSample, conversation: Conversation, key: str) -> Conversation:
        """Return the conversation with a question from its dataset's prompt pool, if that has one."""
        pool = (chat.__subflavors__ or {}).get(POOL_KEY)
        if pool is None:
            return conversation
        prompt = choose_prompt(pool, self.assets.lang, key, self.seed)
        return replace(conversation, turns=with_prompt(conversation.turns, prompt))

    def postencode_sample(self, sample: TokenSample) -> EncodedSample:
        """Decode the media. In a pack, conversations with a broken one are skipped. DataError if none remains."""
        media = [item for conversation in sample.conversations for item in conversation.media]
        try:
            pixel_values = self.assets.images.tiles(media)
        except DataError:
            if len(sample.conversations) == 1:
                raise
            return self._without_broken(sample)
        return EncodedSample.derive_from(sample, conversations=sample.conversations, pixel_values=pixel_values)

    def _without_broken(self, sample: TokenSample) -> EncodedSample:
        usable: list[TokenConversation] = []
        pixels: list[torch.Tensor] = []
        for conversation in sample.conversations:
            try:
                pixels.append(self.assets.images.tiles(conversation.media))
                usable.append(conversation)
            except DataError as error:
                sources = [s for s in sample.__sources__ or () if _made_of(s.file_names, conversation.key)]
                self.skips.note(conversation.key, sources, error)
        if not usable:
            raise SkipSample
        return EncodedSample.derive_from(sample, conversations=usable, pixel_values=torch.cat(pixels))

    def batch(self, samples: list[EncodedSample]) -> Batch:
        """Make one micro-batch."""
        return collate(
            samples,
            seq_length=self.data.seq_length,
            pad_token_id=self.assets.pad_token_id,
            packed=self.data.packing,
            multiple=self.pad_multiple,
            sample_multiple=self.data.sample_multiple or 1,
            pixel_scale=self.assets.images.pixel_scale,
            fields=self.assets.plan.fields,
            num_axes=self.assets.plan.num_axes,
            of_blend=self.of_blend,
        )


def _made_of(file_names: tuple[str, ...], key: str) -> bool:
    return any(name.partition(".")[0] == key.partition("#")[0] for name in file_names)
