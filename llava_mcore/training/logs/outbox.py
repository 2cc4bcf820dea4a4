"""A queue in front of a server: putting something into it takes no time, whatever the server does."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

LIMIT = 2000
"""Letters that wait at most; the oldest are lost if there are more. One iteration's metrics take some kilobytes."""
AT_ONCE = 100
"""Letters that are offered to be sent at once."""
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0)
"""Seconds between attempts that fail, one after the other. The one after the last pause is the last."""


class Failed(Exception):
    """Sending has failed; it is tried again."""


class Refused(Failed):
    """The server does not accept the first of the letters: it is dropped."""


class Outbox[Letter]:
    """Sends letters one after the other in a thread of its own. Nothing that goes wrong there is raised."""

    def __init__(
        self,
        name: str,
        send: Callable[[Sequence[Letter]], int],
        *,
        pauses: Sequence[float] = PAUSES,
        limit: int = LIMIT,
    ) -> None:
        """Open it.

        Args:
            name: what messages call the server.
            send: sends the first letters of what it is given and returns how many, at least one; raises Failed.
        """
        self.name, self._send, self._pauses, self._limit = name, send, pauses, limit
        self._letters: deque[Letter] = deque()
        self._changed = threading.Condition()
        self._closing = self._given_up = False
        self._num_lost = self._num_in_hand = 0
        self._last: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, letter: Letter) -> None:
        """Have a letter sent."""
        with self._changed:
            if self._given_up:
                self._num_lost += 1
                return
            self._letters.append(letter)
            self._drop_oldest()
            self._changed.notify()

    def close(self, seconds: float, last: Callable[[], None]) -> None:
        """Send what is left, then do `last`, which may raise Failed. What is not done in time is left undone.

        Args:
            seconds: how long to wait.
        """
        with self._changed:
            self._closing, self._last = True, last
            self._changed.notify()
        self._thread.join(seconds)
        with self._changed:
            lost = self._num_lost + self._num_in_hand + len(self._letters)
            late = self._thread.is_alive()
            self._given_up = True
        if lost or late:
            within = f" within {seconds:g} s" if late else ""
            logger.warning("%s did not take %d records%s; metrics.jsonl has all of them", self.name, lost, within)

    def _run(self) -> None:
        failures = 0
        while letters := self._next():
            sent, failure = 0, None
            try:
                sent = self._send(letters)
                failures = 0
            except Failed as error:
                failure, failures = error, failures + 1
            with self._changed:
                if self._given_up:  # whoever closed it has not waited
                    return
                if isinstance(failure, Refused):
                    logger.warning("%s refused a record: %s", self.name, failure)
                    sent, self._num_lost = 1, self._num_lost + 1
                self._num_in_hand = 0
                self._letters.extendleft(reversed(letters[sent:]))
                self._drop_oldest()
                if failures > len(self._pauses):
                    self._give_up(failures, failure)
                    return
                if failures:  # who closes the run does not wait for a pause
                    self._changed.wait_for(lambda: self._closing, self._pauses[failures - 1])
        if self._last is not None:
            try:
                self._last()
            except Failed as error:
                logger.warning("%s: %s", self.name, error)

    def _next(self) -> list[Letter]:
        """Take the next letters out; none when the box is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._letters or self._closing)
            letters = list(itertools.islice(self._letters, AT_ONCE))
            for _ in letters:
                self._letters.popleft()
            self._num_in_hand = len(letters)
            return letters

    def _drop_oldest(self) -> None:
        while len(self._letters) > self._limit:
            self._letters.popleft()
            self._num_lost += 1

    def _give_up(self, failures: int, failure: Failed | None) -> None:
        self._given_up = True
        self._num_lost += len(self._letters)
        self._letters.clear()
        said = " ".join(str(failure).split())
        logger.warning("%s gets no more of this run, %d attempts in a row failed: %s", self.name, failures, said)
