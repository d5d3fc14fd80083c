"""Making the next items ready in a background thread while the current one is in use."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Self, TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")

LOOK_UP_SECONDS = 0.5
"""A signal that arrives just before a thread begins to wait does not wake it, so Ctrl-C is looked for now and then."""


class Prefetcher(Generic[Item, Made]):
    """Iterates `produce(item)` of items in their order, up to `depth` of them ready ahead of their use.

    One thread reads the items and makes them, so neither has to be safe against itself. While an item is in use, the
    thread is at most `depth` items further. With depth 0 each is made when it is asked for, in the caller's thread.

    What `produce` or `items` raise arrives where that item would have, and ends the iteration.
    """

    def __init__(self, produce: Callable[[Item], Made], items: Iterable[Item], *, depth: int) -> None:
        assert depth >= 0
        self._depth = depth
        self._made = (produce(item) for item in items)
        self._ready: deque[Made] = deque()
        self._error: BaseException | None = None
        self._ended = self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if depth > 0:
            self._thread = threading.Thread(target=self._work, name="eyas-prefetch", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[Made]:
        return self

    def __next__(self) -> Made:
        if self._closed:
            raise StopIteration
        if self._thread is None:
            return next(self._made)
        with self._changed:
            while not self._ready and not self._ended:
                self._changed.wait(LOOK_UP_SECONDS)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """End the thread and drop what is ready; an item that is being made is waited for, and no further one is begun."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_reason: object) -> None:
        self.close()

    def _work(self) -> None:
        """Body of the thread."""
        error: BaseException | None = None
        try:
            while self._has_room():
                made = next(self._made)
                with self._changed:
                    if not self._closed:
                        self._ready.append(made)
                    self._changed.notify_all()
                del made
        except StopIteration:
            pass
        except BaseException as caught:
            error = caught
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until another item may be made; false when none is wanted any more."""
        with self._changed:
            while len(self._ready) >= self._depth and not self._closed:
                self._changed.wait()
            return not self._closed
