"""The loop by itself: who reads, who is woken, and the poller without epoll."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from onehop._runtime import poller
from onehop._runtime.loop import Loop


@pytest.fixture(params=["epoll", "poll"])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    if request.param == "poll":
        monkeypatch.setenv("ONEHOP_DISABLE", "epoll")
    made = Loop("test")
    assert isinstance(made._poller, poller.PortablePoller) == (request.param == "poll")
    made.start()
    yield made
    made.close()


def test_the_waiting_thread_reads(loop: Loop) -> None:
    read, write = poller.wake_pipe()
    readers: list[int] = []

    def on_readable(_events: int) -> None:
        os.read(read, 1)
        readers.append(threading.get_ident())

    loop.watch(read, on_readable)
    try:
        for _ in range(5):
            timer = threading.Timer(0.05, os.write, (write, b"x"))
            timer.start()
            before = len(readers)
            assert loop.wait(lambda before=before: len(readers) > before, 10.0)  # type: ignore[misc]
            timer.join()
        # the standby thread may have had the role when one of them came
        assert readers.count(threading.get_ident()) >= 1
    finally:
        loop.forget(read)
        os.close(read)
        os.close(write)


def test_standby_reads_when_nobody_waits(loop: Loop) -> None:
    read, write = poller.wake_pipe()
    seen = threading.Event()

    def on_readable(_events: int) -> None:
        os.read(read, 1)
        seen.set()

    loop.watch(read, on_readable)
    try:
        os.write(write, b"x")
        assert seen.wait(10.0)
    finally:
        loop.forget(read)
        os.close(read)
        os.close(write)


def test_many_waiters_and_no_one_is_forgotten(loop: Loop) -> None:
    read, write = poller.wake_pipe()
    count = 0

    def on_readable(_events: int) -> None:
        nonlocal count
        count += len(os.read(read, 100))

    loop.watch(read, on_readable)
    done: list[int] = []

    def wait_for(number: int) -> None:
        assert loop.wait(lambda: count >= number, 20.0)
        done.append(number)

    threads = [threading.Thread(target=wait_for, args=(n,)) for n in range(1, 9)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(8):
            os.write(write, b"x")
            time.sleep(0.003)
        for thread in threads:
            thread.join(20.0)
        assert sorted(done) == list(range(1, 9))
    finally:
        loop.forget(read)
        os.close(read)
        os.close(write)


def test_a_timeout_ends_the_wait(loop: Loop) -> None:
    start = time.monotonic()
    assert not loop.wait(lambda: False, 0.05)
    assert time.monotonic() - start >= 0.05


def test_timers_run_in_order_and_can_be_dropped(loop: Loop) -> None:
    ran: list[str] = []
    loop.after(0.02, lambda: ran.append("late"))
    loop.after(0.01, lambda: ran.append("early"))
    dropped = loop.after(0.015, lambda: ran.append("dropped"))
    loop.drop_timer(dropped)
    assert loop.wait(lambda: len(ran) == 2, 10.0)
    assert ran == ["early", "late"]


def test_an_interrupt_waits_for_the_handlers(loop: Loop) -> None:
    read, write = poller.wake_pipe()
    order: list[str] = []

    def on_readable(_events: int) -> None:
        os.read(read, 1)

        def interrupt() -> None:
            order.append("interrupt")

        assert loop.hold_back(interrupt), "handlers were running"
        order.append("handled")

    loop.watch(read, on_readable)
    try:
        os.write(write, b"x")
        assert loop.wait(lambda: len(order) == 2, 10.0)
        assert order == ["handled", "interrupt"]
        assert not loop.hold_back(lambda: None)
    finally:
        loop.forget(read)
        os.close(read)
        os.close(write)
