"""A conversation in a terminal: questions and commands line by line, answers as they are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from llava_mcore.data.encode.marks import escape
from llava_mcore.data.samples import AUDIO_MARK, IMAGE_MARK, VIDEO_MARK, Audio, Conversation, Turn, Video
from llava_mcore.errors import DataError, LlavaMcoreError
from llava_mcore.inference.answering.hf_model import HfModel
from llava_mcore.inference.answering.user_files import asked_turn, read_audio, read_image, read_video
from llava_mcore.inference.generation.settings import Settings
from llava_mcore.prepare.sampling import Sampling

HELP = """\
/image FILE   show an image with the next question; may be repeated
/video FILE   show a video with it
/audio FILE   play an audio clip with it
/clear        begin a new conversation
/help         show this
/quit         end (or Ctrl-D); Ctrl-C stops an answer\
"""
NEED_A_FILE = ("/image", "/video", "/audio")


class Chat:
    """The turns so far, with their images, videos and audio clips, and those of the next question."""

    def __init__(self, model: HfModel, settings: Settings, sampling: Sampling, say: Callable[[str], None]) -> None:
        """say: prints text as it is, without a line break."""
        self.model, self.settings, self.sampling, self.say = model, settings, sampling, say
        self._commands: dict[str, Callable[[str], None]] = {
            "/image": self.add_image,
            "/video": self.add_video,
            "/audio": self.add_audio,
            "/clear": lambda _: self.clear(),
            "/help": lambda _: self.say(f"{HELP}\n"),
        }
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.turns: list[Turn] = []
        self.images: list[bytes] = []
        self.videos: list[Video] = []
        self.audios: list[Audio] = []
        self._forget_new()

    def _forget_new(self) -> None:
        self.new_images: list[bytes] = []
        self.new_videos: list[Video] = []
        self.new_audios: list[Audio] = []

    def add_image(self, name: str) -> None:
        """Add an image to the next question. DataError if it cannot be read or the model takes none."""
        self._require(IMAGE_MARK)
        self.new_images.append(read_image(Path(name).expanduser(), self.model.assets.limits))

    def add_video(self, name: str) -> None:
        """Add a video to the next question. DataError if it cannot be read or the model takes none."""
        self._require(VIDEO_MARK)
        self.new_videos.append(read_video(Path(name).expanduser(), self.model.assets.limits, self.sampling))

    def add_audio(self, name: str) -> None:
        """Add an audio clip to the next question. DataError if it cannot be read or the model takes none."""
        self._require(AUDIO_MARK)
        self.new_audios.append(read_audio(Path(name).expanduser(), self.model.assets.limits))

    def _require(self, mark: str) -> None:
        if mark in self.model.assets.refused:
            raise DataError(self.model.assets.refused[mark])

    def ask(self, question: str) -> Iterator[str]:
        """Yield the answer; question and answer are remembered at its end.

        Raises:
            DataError: the question is empty, or the template cannot render it.
        """
        if self.turns and self.model.assets.chat.several_turns is not None:
            raise DataError(f"only one question can be asked, because {self.model.assets.chat.several_turns}; /clear")
        counts = len(self.new_images), len(self.new_videos), len(self.new_audios)
        turns = [*self.turns, asked_turn(question, *counts)]
        images, videos = [*self.images, *self.new_images], [*self.videos, *self.new_videos]
        audios = [*self.audios, *self.new_audios]
        asked = Conversation(tuple(turns), tuple(images), videos=tuple(videos), audios=tuple(audios))
        pieces = []
        for piece in self.model.stream(asked, self.settings):
            pieces.append(piece)
            yield piece
        self.turns = [*turns, Turn("assistant", escape("".join(pieces).strip()) or "-")]
        self.images, self.videos, self.audios = images, videos, audios
        self._forget_new()

    def run(self, lines: Iterator[str]) -> None:
        """Answer lines until there are no more, or /quit; errors are printed, and the chat continues."""
        for line in lines:
            command, _, rest = line.strip().partition(" ")
            if command == "/quit":
                return
            try:
                if command.startswith("/"):
                    self._obey(command, rest.strip())
                else:
                    for piece in self.ask(line):
                        self.say(piece)
                    self.say("\n")
            except LlavaMcoreError as error:
                self.say(f"error: {error}\n")
            except torch.OutOfMemoryError as error:
                self.say(f"error: out of memory ({error}); /clear begins a shorter conversation\n")
            except KeyboardInterrupt:
                self.say("\n(stopped: the question is forgotten)\n")

    def _obey(self, command: str, argument: str) -> None:
        if command not in self._commands:
            raise DataError(f"{command}: no such command\n{HELP}")
        if command in NEED_A_FILE and not argument:
            raise DataError(f"{command} needs the name of a file")
        self._commands[command](argument)
