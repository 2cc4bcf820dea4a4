"""A large JSON list, read element by element, so that only a few are in memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from llava_mcore.config.sections.data import LIMITS
from llava_mcore.errors import DataError
from llava_mcore.prepare.row_types import RowRange, SourceRow
from llava_mcore.prepare.sources.base import BLOCK, Cuts, Scan
from llava_mcore.prepare.sources.lines import BOM, decode_row, too_large

LARGEST_ELEMENT = 1 << 28
"""Maximum bytes of an element. A larger one is treated as an unclosed quotation mark."""
LONGEST_WORD = 16
"""Number of bytes at the end of a block that may truncate a number, an escape or a word such as `false`."""
SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class JsonArray:
    """A .json file that is one list of objects."""

    path: Path
    name: str
    folder: Path
    most_bytes: int = LIMITS.sample_bytes

    def scan(self, cuts: Cuts) -> Scan:
        """Find the bytes at which shards start. DataError if the file is not a list or is truncated."""
        sha, segments = hashlib.sha256(), []
        first = count = start = stop = 0
        cut = cuts.next_cut(0)
        with self.path.open("rb") as file:
            elements = _Elements(file, self.path, sha)
            elements.open_list()
            for count, (begin, end) in enumerate(elements, start=1):
                start, stop = (begin if count == first + 1 else start), end
                if count == cut:
                    segments.append(cuts.segment(first, cut - first, start, stop))
                    first, cut = cut, cuts.next_cut(cut)
            elements.close_list()
        if count > first:
            segments.append(cuts.segment(first, count - first, start, stop))
        return Scan(tuple(segments), count, sha.hexdigest())

    def read(self, segment: RowRange) -> Iterator[SourceRow]:
        """Yield one row per element."""
        with self.path.open("rb") as file:
            file.seek(segment.start)
            elements = _Elements(file, self.path, base=segment.start, stop=segment.stop)
            for index, (begin, end) in enumerate(elements, start=segment.index):
                is_large = end - begin > self.most_bytes
                large = too_large("an element", self.most_bytes)
                yield SourceRow(index, large if is_large else decode_row(elements.text_of(begin, end)))


@dataclass
class _Elements:
    """Byte ranges of the elements of a list in a file. Reads blocks, and frees those that were passed.

    The text is decoded as Latin-1, in which every byte is a character: JSON's syntax is ASCII and never part of a UTF-8
    sequence, so the structure is correct and offsets are bytes. Broken UTF-8 is handled when the row is decoded.
    """

    file: BinaryIO
    path: Path
    sha: hashlib._Hash | None = None
    base: int = 0
    """Offset of text[0] in the file."""
    stop: int | None = None
    text: str = ""
    position: int = 0
    """Position in text."""
    ended: bool = False
    decoder: json.JSONDecoder = field(default_factory=lambda: json.JSONDecoder(strict=False))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of elements until the end of the list, or until `stop`."""
        while self._peek() not in ("]", ""):
            begin = self.base + self.position
            self._pass_element()
            yield begin, self.base + self.position
            if self._peek() == ",":
                self.position += 1
                if self._peek() == "]":
                    raise self._broken("a value is missing after a comma")
            elif self._peek() not in ("]", ""):
                raise self._broken(f"',' or ']' is missing before {self._peek()!r}")

    def text_of(self, begin: int, end: int) -> bytes:
        """Return the bytes of the element that was just yielded."""
        return self.text[begin - self.base : end - self.base].encode("latin-1")

    def open_list(self) -> None:
        """Skip everything before the first element."""
        if self._peek() == BOM.decode("latin-1")[0]:
            self.position += len(BOM)
        if self._peek() != "[":
            raise self._broken("the list does not start with '['")
        self.position += 1

    def close_list(self) -> None:
        """Check that only the end of the list is left."""
        if self._peek() != "]":
            raise self._broken("the file ends within the list")
        self.position += 1
        if self._peek():
            raise self._broken("there is more after the list")

    def _peek(self) -> str:
        """Return the next character that is not white space; '' at the end."""
        while True:
            while self.position < len(self.text) and self.text[self.position] in SPACE:
                self.position += 1
            if self.position < len(self.text) or not self._more(BLOCK):
                return self.text[self.position : self.position + 1]

    def _pass_element(self) -> None:
        size = BLOCK
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.position)
                length = end - self.position
                # A number, unlike everything else, may continue after the end of the block.
                is_whole = isinstance(value, (dict, list, str)) or self.text[end : end + 1] in (*SPACE, ",", "]")
                if is_whole or not self._more(size):
                    self.position += length
                    return
            except RecursionError as error:
                raise self._broken("it is nested too deeply") from error
            except json.JSONDecodeError as error:
                offset = error.pos - self.position
                breaks_off = error.msg.startswith("Unterminated string") or len(self.text) - error.pos < LONGEST_WORD
                too_large = len(self.text) - self.position > LARGEST_ELEMENT
                if too_large or not breaks_off or not self._more(size):
                    self.position += offset
                    raise self._broken(error.msg) from error
            size = min(2 * size, LARGEST_ELEMENT)  # so that a large element is not parsed again for every block

    def _more(self, size: int) -> bool:
        """Read more and free what was passed. False at the end."""
        if self.stop is not None:
            size = min(size, self.stop - self.base - len(self.text))
        block = b"" if self.ended else self.file.read(size)
        self.ended = not block
        if self.sha is not None:
            self.sha.update(block)
        self.base += self.position
        self.text = self.text[self.position :] + block.decode("latin-1")
        self.position = 0
        return bool(block)

    def _broken(self, problem: str) -> DataError:
        return DataError(f"{self.path} is not a JSON list of objects: byte {self.base + self.position}: {problem}")
