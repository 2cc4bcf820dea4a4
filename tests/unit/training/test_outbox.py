"""A server that is slow, refuses or does not answer costs training no time and little memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from llava_mcore.training.logs.outbox import Failed, Outbox, RefusedRecord

NOTHING = (0.0,) * 9


class Server:
    """Takes records after the given failures."""

    def __init__(self, failures: Sequence[Failed] = ()) -> None:
        self.failures = list(failures)
        self.got: list[int] = []
        self.open = threading.Event()
        self.open.set()

    def take(self, records: Sequence[int]) -> int:
        self.open.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.got += records[:3]
        return len(records[:3])


def test_everything_arrives_in_order_although_some_calls_fail(caplog: pytest.LogCaptureFixture) -> None:
    server = Server([Failed("busy")] * 9)
    box = Outbox("server", server.take, pauses=NOTHING)
    for number in range(50):
        box.put(number)
    last: list[int] = []
    box.close(10, last=lambda: last.extend(server.got))
    assert server.got == last == list(range(50))
    assert not caplog.records


def test_a_server_that_hangs_delays_nobody(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    server.open.clear()
    box = Outbox("server", server.take, limit=100)
    start = time.monotonic()
    for number in range(10_000):
        box.put(number)
    assert time.monotonic() - start < 1
    assert len(box._records) <= 100, "bounded memory"
    box.close(0.2, last=lambda: pytest.fail("the last call is not reached"))
    assert time.monotonic() - start < 2
    assert [r.getMessage() for r in caplog.records] == [
        "server did not take 10000 records within 0.2 s; metrics.jsonl has all of them"
    ]
    server.failures = [Failed("too late")] * 100
    server.open.set()


def test_it_gives_up_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    server = Server([Failed("no\nroute")] * 100)
    box = Outbox("server", server.take, pauses=NOTHING)
    box.put(1)
    box._thread.join(5)
    box.put(2)
    assert len(server.failures) == 90
    assert [r.getMessage() for r in caplog.records] == [
        "no more metrics of this run go to server: 10 attempts in a row failed: no route"
    ]
    box.close(5, last=lambda: None)
    assert caplog.records[-1].getMessage() == "server did not take 2 records; metrics.jsonl has all of them"


def test_only_the_refused_record_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    server = Server([RefusedRecord("too long a name")])
    server.open.clear()
    box = Outbox("server", server.take, pauses=NOTHING)
    for number in range(4):
        box.put(number)
    server.open.set()
    box.close(5, last=lambda: None)
    assert server.got == [1, 2, 3]
    assert "server refused a record: too long a name" in caplog.text
    assert "did not take 1 records" in caplog.text
