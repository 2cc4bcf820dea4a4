"""A queue in front of a server: putting a record into it returns at once, whatever the server does."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

LIMIT = 2000
"""Maximum number of waiting records; beyond it the oldest are dropped. One iteration's metrics take a few kilobytes."""
AT_ONCE = 100
"""Maximum number of records passed to one call of `send`."""
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0)
"""Seconds between failed attempts. After the last pause there is one more attempt."""


class Failed(Exception):
    """Sending has failed and will be retried."""


class RefusedRecord(Failed):
    """The server does not accept the first record, which is dropped."""


class Outbox[Record]:
    """Sends records in order, from its own thread, which never raises."""

    def __init__(
        self,
        name: str,
        send: Callable[[Sequence[Record]], int],
        *,
        pauses: Sequence[float] = PAUSES,
        limit: int = LIMIT,
    ) -> None:
        """Start the thread.

        Args:
            name: what messages call the server.
            send: sends the first of the given records and returns how many, at least one; raises Failed.
        """
        self.name, self._send, self._pauses, self._limit = name, send, pauses, limit
        self._records: deque[Record] = deque()
        self._changed = threading.Condition()
        self._closing = self._given_up = False
        self._num_lost = self._num_in_hand = 0
        self._last: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Queue a record."""
        with self._changed:
            if self._given_up:
                self._num_lost += 1
                return
            self._records.append(record)
            self._drop_oldest()
            self._changed.notify()

    def close(self, seconds: float, last: Callable[[], None]) -> None:
        """Send what is left, then call `last`, which may raise Failed. Give up when the time is over.

        Args:
            seconds: how long to wait.
        """
        with self._changed:
            self._closing, self._last = True, last
            self._changed.notify()
        self._thread.join(seconds)
        with self._changed:
            lost = self._num_lost + self._num_in_hand + len(self._records)
            late = self._thread.is_alive()
            self._given_up = True
        if lost or late:
            within = f" within {seconds:g} s" if late else ""
            logger.warning("%s did not take %d records%s; metrics.jsonl has all of them", self.name, lost, within)

    def _run(self) -> None:
        failures = 0
        while records := self._next():
            sent, failure = 0, None
            try:
                sent = self._send(records)
                failures = 0
            except Failed as error:
                failure, failures = error, failures + 1
            with self._changed:
                if self._given_up:  # `close` no longer waits
                    return
                if isinstance(failure, RefusedRecord):
                    logger.warning("%s refused a record: %s", self.name, failure)
                    sent, self._num_lost = 1, self._num_lost + 1
                self._num_in_hand = 0
                self._records.extendleft(reversed(records[sent:]))
                self._drop_oldest()
                if failures > len(self._pauses):
                    self._give_up(failures, failure)
                    return
                if failures:  # `close` does not wait for a pause
                    self._changed.wait_for(lambda: self._closing, self._pauses[failures - 1])
        if self._last is not None:
            try:
                self._last()
            except Failed as error:
                logger.warning("%s: %s", self.name, error)

    def _next(self) -> list[Record]:
        """Take the next records out of the queue; none if it is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._records or self._closing)
            records = list(itertools.islice(self._records, AT_ONCE))
            for _ in records:
                self._records.popleft()
            self._num_in_hand = len(records)
            return records

    def _drop_oldest(self) -> None:
        while len(self._records) > self._limit:
            self._records.popleft()
            self._num_lost += 1

    def _give_up(self, failures: int, failure: Failed | None) -> None:
        self._given_up = True
        self._num_lost += len(self._records)
        self._records.clear()
        said = " ".join(str(failure).split())
        logger.warning(
            "no more metrics of this run go to %s: %d attempts in a row failed: %s", self.name, failures, said
        )
