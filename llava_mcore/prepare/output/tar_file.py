"""Conversations -> one tar file, written atomically; the same conversations give the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import zlib
from base64 import b64decode
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Self

import numpy as np

from llava_mcore.data.encode.messages import message_of
from llava_mcore.data.encode.record_keys import CHOSEN, REJECTED
from llava_mcore.data.encode.sample_media import AUDIOS_KEY, FPS_KEY, FRAMES_KEY, VIDEOS_KEY
from llava_mcore.data.encode.tokens import TOKENS_KEY
from llava_mcore.data.storage.stored_tokens import StoredTokens, as_file, tokens_file
from llava_mcore.files.atomic import move, write_synced
from llava_mcore.prepare.output.shard_index import PartOffset, ShardIndex, rows_name
from llava_mcore.prepare.row_types import AudioFile, CheckedConversation, ImageFile, OtherAnswer


class ShardWriter:
    """Writes to a temporary file; `finish` renames it, and replaces an existing file. Its index is written with it."""

    def __init__(self, temporary: Path, final: Path) -> None:
        """temporary: in the folder's scratch, where the rows of its index are written too (`shard_index`)."""
        self._temporary, self._final = temporary, final
        self._file = temporary.open("wb")
        self._sha = hashlib.sha256()
        self._tar = tarfile.TarFile(fileobj=self, mode="w", format=tarfile.USTAR_FORMAT)  # type: ignore[arg-type]
        self._index = ShardIndex()
        self._tokens: list[bytes] = []
        self._fingerprint: str | None = None
        self.num_entries = 0
        self.num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def add(self, conversation: CheckedConversation) -> None:
        """Write one conversation as a sample; its number is its key."""
        self._add_entry(conversation.row, about(conversation), [conversation])

    def add_pack(self, conversations: Sequence[CheckedConversation]) -> None:
        """Write several as one sample, with the key of the first."""
        self._add_entry(conversations[0].row, {"pack": [about(c) for c in conversations]}, conversations)

    def finish(self) -> str:
        """Close the file, flush it to disk, write its index and rename it. Returns its SHA-256."""
        self._tar.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        # The index comes first, since a shard with its name is finished.
        name = self._final.name
        partial = self._temporary.with_name(f"{name}.idx.{os.getpid()}.part")
        self._index.write(partial, self._final.with_name(f"{name}.idx"), partial.with_name(rows_name(name)))
        self._write_tokens(partial.with_name(f"{name}.tokens.{os.getpid()}.part"))
        move(self._temporary, self._final)
        return self._sha.hexdigest()

    def _write_tokens(self, partial: Path) -> None:
        """Write the file of tokens beside the shard; an earlier shard's is removed."""
        final = tokens_file(self._final)
        if self._fingerprint is None:
            final.unlink(missing_ok=True)
            return
        write_synced(partial, as_file(self._tokens, self._fingerprint, self.num_bytes))
        move(partial, final)

    # -- a file for tarfile, which records what is written --------------------------------------------------------

    def write(self, data: bytes) -> int:
        """Write to the file, count and hash."""
        self._sha.update(data)
        self.num_bytes += len(data)
        return self._file.write(data)

    def tell(self) -> int:
        """Return the offset in the file."""
        return self._file.tell()

    def _add_entry(self, row: int, content: dict[str, Any], conversations: Sequence[CheckedConversation]) -> None:
        """Write the json, the images, the frames numbered after them, and the audio clips numbered by themselves."""
        key = f"{row:09d}"
        images = [image for conversation in conversations for image in conversation.images]
        videos = list[dict[str, Any]]()
        for video in (video for conversation in conversations for video in conversation.videos):
            names = [_part(index, frame) for index, frame in enumerate(video.frames, start=len(images))]
            videos.append({FRAMES_KEY: names} | ({} if video.fps is None else {FPS_KEY: video.fps}))
            images += video.frames
        if videos:
            content = content | {VIDEOS_KEY: videos}
        audios = [audio for conversation in conversations for audio in conversation.audios]
        if audios:
            content = content | {AUDIOS_KEY: [_part(index, audio) for index, audio in enumerate(audios)]}
        self._index.begin_sample(key, self.num_bytes)
        data = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
        self._add_part(key, "json", data)
        self._add_tokens(data, conversations)
        for index, image in enumerate(images):
            self._add_part(key, _part(index, image), image.data)
        for index, audio in enumerate(audios):
            self._add_part(key, _part(index, audio), audio.data)
        self.num_entries += 1

    def _add_tokens(self, content: bytes, conversations: Sequence[CheckedConversation]) -> None:
        """Take a sample's tokens for the file beside the shard, if it is one conversation of text and images."""
        one = conversations[0]
        if len(conversations) > 1 or one.tokens is None or one.videos or one.audios or one.rejected is not None:
            self._tokens.append(b"")
            return
        self._fingerprint = str(one.tokens["by"])
        ids = np.frombuffer(b64decode(one.tokens["ids"]), "<u4")
        num_chars = sum(len(turn.text) for turn in one.turns)
        spans = np.array(one.tokens["trained"], dtype=np.uint32)
        stored = StoredTokens(zlib.crc32(content), num_chars, len(one.images), ids, spans)
        self._tokens.append(stored.to_bytes())

    def _add_part(self, key: str, part: str, data: bytes) -> None:
        member = tarfile.TarInfo(f"{key}.{part}")  # owner 0, time 0: independent of machine and date
        member.size, member.mode = len(data), 0o444
        self._tar.addfile(member, BytesIO(data))
        # Contents are padded to whole blocks.
        start = self.num_bytes - -(-len(data) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        self._index.add_part(PartOffset(part, start, len(data)), self.num_bytes)


def _part(index: int, item: ImageFile | AudioFile) -> str:
    """Return the name of a part."""
    return f"{index}.{item.extension}"


def about(conversation: CheckedConversation) -> dict[str, Any]:
    """Return the json part of a conversation, except for its entries about videos and audio clips."""
    content = _answered(conversation, conversation.tools)
    if conversation.rejected is not None:
        content = {CHOSEN: content, REJECTED: _answered(conversation.rejected, conversation.tools)}
    content["image_sizes"] = [list(image.size) for image in conversation.images]
    if conversation.audios:
        content["audio_seconds"] = [round(audio.seconds, 3) for audio in conversation.audios]
    content["source"] = dict(conversation.source)
    return content


def _answered(answer: CheckedConversation | OtherAnswer, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the turns of a conversation, and their tokens."""
    content: dict[str, Any] = {"messages": [message_of(turn) for turn in answer.turns]}
    if tools:
        content["tools"] = [dict(tool) for tool in tools]
    if answer.num_tokens is not None:
        content["num_tokens"] = answer.num_tokens
        content[TOKENS_KEY] = answer.tokens
    return content
