"""Working ahead in a thread: order, errors, bounds and ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from eyas.train.prefetch import Prefetcher

PATIENCE = 60
"""Seconds after which a wait that should be over at once is a failure."""


@pytest.mark.parametrize("depth", [0, 1, 3, 100])
def test_items_come_in_order_each_once(depth: int) -> None:
    with Prefetcher(lambda number: number * number, range(50), depth=depth) as squares:
        assert list(squares) == [number * number for number in range(50)]
        assert list(squares) == []
    assert not _threads()


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "eyas-prefetch"]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_thread_is_depth_items_ahead_and_no_further(depth: int) -> None:
    made: list[int] = []
    progress = threading.Condition()

    def produce(number: int) -> int:
        with progress:
            made.append(number)
            progress.notify_all()
        return number

    with Prefetcher(produce, range(20), depth=depth) as numbers:
        for number in range(10):
            assert next(numbers) == number
            with progress:
                # It gets that far by itself, and an item too far would already be wrong for the next one.
                assert progress.wait_for(lambda number=number: len(made) >= number + 1 + depth, PATIENCE)
                assert len(made) == number + 1 + depth
    assert len(made) <= 10 + depth, "closing begins nothing"
    assert not _threads()


def test_inline_makes_each_when_it_is_asked_for() -> None:
    threads: list[int] = []
    numbers = Prefetcher(lambda number: threads.append(threading.get_ident()) or number, range(3), depth=0)
    assert threads == []
    assert next(numbers) == 0
    assert threads == [threading.get_ident()]
    numbers.close()
    with pytest.raises(StopIteration):
        next(numbers)


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("where", ["produce", "items"])
def test_an_error_arrives_where_its_item_would_have(depth: int, where: str) -> None:
    def items() -> Iterator[int]:
        yield from range(3)
        if where == "items":
            raise ValueError("the fourth")
        yield from range(3, 10)

    def produce(number: int) -> int:
        if number == 3:
            raise ValueError("the fourth")
        return number

    with Prefetcher(produce, items(), depth=depth) as numbers:
        assert [next(numbers) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="the fourth"):
            next(numbers)
        with pytest.raises(StopIteration):
            next(numbers)


@pytest.mark.parametrize("depth", [0, 2])
def test_an_end_within_an_item_is_no_end_of_the_items(depth: int) -> None:
    """Else a source that has run dry would look like a run that is over."""
    empty: Iterator[int] = iter(())
    with Prefetcher(lambda _: next(empty), range(3), depth=depth) as numbers, pytest.raises(RuntimeError):
        next(numbers)


def test_closing_waits_for_the_item_in_work_and_begins_no_other() -> None:
    begun, go_on, made = threading.Event(), threading.Event(), []

    def produce(number: int) -> int:
        begun.set()
        assert go_on.wait(PATIENCE)
        made.append(number)
        return number

    numbers = Prefetcher(produce, range(10), depth=3)
    assert begun.wait(PATIENCE)
    closing = threading.Thread(target=numbers.close)
    closing.start()
    while not numbers._closed:
        pass
    go_on.set()
    closing.join(PATIENCE)
    assert not closing.is_alive() and not _threads()
    assert made == [0]
    numbers.close()
    with pytest.raises(StopIteration):
        next(numbers)


def test_ctrl_c_while_waiting_loses_nothing() -> None:
    asked, go_on = threading.Event(), threading.Event()

    def produce(number: int) -> int:
        if number == 1:
            assert asked.wait(PATIENCE)
            os.kill(os.getpid(), signal.SIGINT)  # arrives in the main thread, which waits for this item
            assert go_on.wait(PATIENCE)
        return number

    with Prefetcher(produce, range(3), depth=1) as numbers:
        assert next(numbers) == 0
        with pytest.raises(KeyboardInterrupt):
            asked.set()
            next(numbers)
        go_on.set()
        assert list(numbers) == [1, 2]
