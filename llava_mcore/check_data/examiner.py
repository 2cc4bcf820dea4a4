"""Examines one sample: does everything that training does with it, and records the findings."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from megatron.energon import SkipSample
from megatron.energon.flavors.webdataset.sample_loader import RawSampleData

from llava_mcore.check_data.finding import Finding, as_one
from llava_mcore.config.sections.data import DataConfig
from llava_mcore.config.sections.training import TrainingConfig
from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.encode.encode import TooLongError, stored_tokens
from llava_mcore.data.encode.marks import LITERAL_REASON
from llava_mcore.data.encode.record_keys import PAIR, ROW, TURN
from llava_mcore.data.encode.tokens import DIGEST_KEY, TOKENS_KEY, is_by, is_of
from llava_mcore.data.loader.datasets import Dataset, open_datasets
from llava_mcore.data.loader.sample_problems import DATA_ERRORS, Skips
from llava_mcore.data.loader.task_encoder import ChatTaskEncoder
from llava_mcore.data.samples import Audio, ChatSample, EncodedSample, TokenConversation, TokenSample, Video
from llava_mcore.errors import DataError

SEED: int = TrainingConfig.model_fields["seed"].default
"""Seed for the prompts of data without questions, the default of training."""
BOUNDLESS = 2**40
READ_ERRORS = (OSError, ValueError, tarfile.TarError)
"""Errors of reading a shard, which end training: later samples would be wrong as well."""
_READ = ("messages", "question", "images", "videos", "audios")
"""Keys of a shard's json that are read, besides those of a row."""


class Examiner:
    """Examines samples of a data path by dataset and number."""

    def __init__(
        self,
        path: Path,
        assets: Assets,
        *,
        seq_length: int,
        max_media_tokens: int | None = None,
        sample_multiple: int = 1,
    ) -> None:
        """Open the datasets; nothing is read yet. DataError if energon cannot open them."""
        self.assets = assets
        self._skips = Skips(stop_if_too_long=False)
        # With packing, both single conversations and prepared packs are accepted.
        data = DataConfig(
            path=path,
            seq_length=seq_length,
            max_media_tokens=max_media_tokens,
            packing=True,
            sample_multiple=sample_multiple,
            max_sample_bytes=assets.limits.sample_bytes,
        )
        self._encoder = ChatTaskEncoder(data, assets, self._skips, seed=SEED)
        boundless = data.model_copy(update={"seq_length": BOUNDLESS, "max_media_tokens": None})
        self._measure = ChatTaskEncoder(boundless, assets, self._skips, seed=SEED)
        self._key = ""
        self.datasets: list[Dataset] = open_datasets(path, max_sample_bytes=data.max_sample_bytes)

    def examine(self, dataset: int, index: int) -> Finding:
        """Read, tokenize and decode one sample; does not raise errors that a sample can cause."""
        shard = self.datasets[dataset].shard_of(index)
        self._key = f"number {index - shard.first}"
        blank = Finding(dataset, index, shard.name, self._key)
        try:
            finding = self._follow(self.datasets[dataset], blank)
        except SkipSample:
            finding = replace(blank, status="left out")
        except DataError as error:  # an error that affects all samples
            finding = replace(blank, status="stop", reasons=(str(error),))
        except READ_ERRORS as error:
            finding = replace(
                blank, status="stop", reasons=(f"the shard cannot be read: {type(error).__name__}: {error}",)
            )
        skipped = tuple(skip.reason for skip in self._skips.take())
        if finding.status == "left out" and not skipped and not finding.reasons:
            return replace(finding, key=self._key, status="excluded")
        return replace(finding, key=self._key, reasons=finding.reasons + skipped)

    def conversations(self, finding: Finding) -> Sequence[TokenConversation]:
        """Return the conversations of a sample that was examined before and can be used."""
        data = self.datasets[finding.dataset]
        parts = data.raw(finding.index)
        assert parts is not None, "it was read before"
        sides = sides_of(data.decode(parts)).values()
        return [c for side in sides for c in self._encoder.preencode_sample(data.chat(side)).conversations]

    def _follow(self, data: Dataset, blank: Finding) -> Finding:
        parts = data.raw(blank.index)
        if parts is None:
            return replace(blank, status="left out")
        self._key = parts.data[0]["__key__"]
        try:
            sides = sides_of(data.decode(parts))
        except (*DATA_ERRORS, DataError) as error:
            self._skips(error, parts, None)
            return replace(blank, status="left out")
        findings: dict[str, Finding] = {}
        for name, side in sides.items():
            finding = self._trained_on(data, side, parts, blank)
            skipped = tuple(skip.reason for skip in self._skips.take())
            findings[name] = replace(finding, reasons=(*finding.reasons, *skipped))
        return as_one(findings)

    def _trained_on(self, data: Dataset, raw: Any, parts: RawSampleData, blank: Finding) -> Finding:
        # The steps of training. A sample that one of them refuses is left out there too.
        try:
            chat = data.chat(raw)
            tokens = self._encoder.preencode_sample(chat)
            blank = _sized(blank, tokens)
            encoded = self._encoder.postencode_sample(tokens)
            differing = _differing(chat, self.assets)
        except TooLongError as error:
            self._skips(error, parts, None)
            return replace(_sized(blank, self._measure.preencode_sample(chat)), status="left out")
        except (*DATA_ERRORS, DataError) as error:
            self._skips(error, parts, None)
            return replace(blank, status="left out")
        # What training would use, and what its author may not have meant.
        used = encoded.conversations
        return replace(
            blank,
            **_verdict(differing, encoded, self.assets),
            remarks=(
                *_stored(raw, tokens.num_tokens),
                *_remarks(chat, used, self.assets),
                *_typed(chat, self.assets),
                *_dropped(chat, self.assets),
                *_parts_twice(chat),
            ),
            unused=unused_keys(raw),
            num_conversations=len(chat.conversations),
            num_trained=sum(int(conversation.trained.sum()) for conversation in used),
            num_images=sum(isinstance(item.data, bytes) for conversation in used for item in conversation.media),
            num_audios=sum(isinstance(item.data, Audio) for conversation in used for item in conversation.media),
            num_without_fps=sum(c.num_without_fps for c in used) if self.assets.plan.timed else 0,
            num_frames=tuple(len(item.data.frames) for c in used for item in c.media if isinstance(item.data, Video)),
        )


def _sized(finding: Finding, tokens: TokenSample) -> Finding:
    return replace(finding, num_tokens=tokens.num_tokens, num_patches=tokens.num_patches)


def _differing(chat: ChatSample, assets: Assets) -> list[str]:
    """Tokenize stored tokens again and return the differences."""
    for conversation in chat.conversations:
        stored = stored_tokens(conversation, assets)
        if stored is None:
            continue
        computed = assets.chat.tokens(conversation.turns, conversation.num_media, conversation.tools)
        if not np.array_equal(stored.ids, computed.ids) or not np.array_equal(stored.trained, computed.trained):
            return [f"its {TOKENS_KEY} differ from the tokens of its text; prepare the data again"]
    return []


def _verdict(differing: list[str], encoded: EncodedSample, assets: Assets) -> dict[str, Any]:
    """Compare the inputs of the model; a difference would end training or silently spoil it."""
    reasons = [*differing]
    for conversation in encoded.conversations:
        is_placeholder = np.isin(conversation.input_ids, assets.plan.placeholders)
        names = [name for name, field in assets.plan.fields.items() if field.index_of == "tokens"]
        num_features = sum(len(item.tokens.values[name]) for item in conversation.media for name in names)
        if is_placeholder.sum() != num_features:
            reasons.append(
                f"{is_placeholder.sum()} placeholders, but {num_features} features of {len(conversation.media)} "
                "images, videos and audio clips"
            )
        if (conversation.trained & is_placeholder).any():
            reasons.append("the chat template trains the model on the placeholders of an image, video or audio clip")
        if not conversation.trained.any():
            reasons.append("the chat template trains on nothing in a conversation with an answer")
    num_rows = sum(conversation.num_rows for conversation in encoded.conversations)
    if len(encoded.pixel_values) != num_rows:
        reasons.append(f"{len(encoded.pixel_values)} rows of pixel_values from media that need {num_rows}")
    return {"status": "stop" if reasons else "used", "reasons": tuple(reasons)}


def _stored(raw: Any, num_tokens: int) -> list[str]:
    """Compare with the count that was written when the data was prepared."""
    about = raw.get("json") if isinstance(raw, dict) else None
    if not isinstance(about, dict):
        return []
    members = about.get("pack", [about])
    counts = [member["num_tokens"] for member in members if isinstance(member.get("num_tokens"), int)]
    if len(counts) < len(members) or sum(counts) == num_tokens:
        return []
    return [
        f"another token count than when it was prepared ({num_tokens}, not {sum(counts)}): other --max-pixels, "
        "tokenizer or chat template? (training counts again)"
    ]


def _remarks(chat: ChatSample, used: list[TokenConversation], assets: Assets) -> list[str]:
    """Compare the mask with the answers, if no conversation of a pack was skipped."""
    if len(used) != len(chat.conversations):
        return []
    remarks = []
    for conversation, tokens in zip(chat.conversations, used, strict=True):
        num_answers = sum(turn.role == "assistant" and turn.trained for turn in conversation.turns)
        begins = tokens.trained & ~np.concatenate([[False], tokens.trained[:-1]])
        num_ends = int((tokens.input_ids[tokens.trained] == assets.eos_token_id).sum())
        if int(begins.sum()) != num_answers or num_ends < num_answers:
            remarks.append(f"{num_answers} answers, but {int(begins.sum())} trained spans with {num_ends} EOS")
    return remarks


def _typed(chat: ChatSample, assets: Assets) -> list[str]:
    """Return a remark for each special token in the text, and each mark that is text."""
    tokens = sorted({token for c in chat.conversations for token in assets.chat.typed_in(c.turns, c.tools)})
    is_text = assets.chat.special_tokens_in_text == "text"
    reading = "read as plain text" if is_text else "read as the token"
    advice = {token: f"; {text}" for token, text in assets.chat.mark_advice.items()}
    return [
        f"its text has {token}, read as plain text: {LITERAL_REASON}"
        if token in assets.chat.literal_marks
        else f"its text has the special token {token}, {reading} (--special-tokens-in-text){advice.get(token, '')}"
        for token in tokens
    ]


def _dropped(chat: ChatSample, assets: Assets) -> list[str]:
    """Return remarks about what the template drops, and about stored tokens of another text."""
    remarks = []
    if any(assets.chat.features.loses_reasoning(c.turns) for c in chat.conversations):
        remarks.append("the chat template does not render the reasoning of its answers")
    stored = [c for c in chat.conversations if is_by(c.tokens, assets.chat.fingerprint)]
    if any(DIGEST_KEY in c.tokens and not is_of(c.tokens, c.turns, c.tools) for c in stored):
        remarks.append(f"its text was changed after its {TOKENS_KEY} were made; training tokenizes it again")
    return remarks


def _parts_twice(chat: ChatSample) -> list[str]:
    names = [name for source in chat.__sources__ or () for name in source.file_names]
    twice = sorted({name for name in names if names.count(name) > 1})
    return [f"the shard contains {', '.join(twice)} more than once; the last one is used"] if twice else []


def sides_of(raw: Any) -> dict[str, Any]:
    """Return the sample for each of its answers, by its name; a sample that is not a pair by the name "".

    Each answer is checked as a conversation of its own, about the same images, videos and audio clips.
    """
    about = raw.get("json") if isinstance(raw, dict) else None
    if not isinstance(about, dict) or not all(isinstance(about.get(key), dict) for key in PAIR):
        return {"": raw}
    shared = {key: value for key, value in about.items() if key not in PAIR}
    return {key: {**raw, "json": {**shared, **about[key]}} for key in PAIR}


def unused_keys(raw: Any) -> tuple[str, ...]:
    """Return the keys of a raw sample's json that nothing reads, each once, as `prepare` reports them."""
    about = raw.get("json") if isinstance(raw, dict) else None
    if not isinstance(about, dict):
        return ()
    pack = about.get("pack")
    names: dict[str, None] = {}
    for member in [about, *(pack if isinstance(pack, list) else ())]:
        names |= dict.fromkeys(ROW.unused(member, _READ))
        messages = member.get("messages")
        for message in messages if isinstance(messages, list) else ():
            names |= dict.fromkeys(TURN.unused(message))
    return tuple(names)
