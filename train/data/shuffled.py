"""The rows of a conversation file in another order than the file's: a limit then takes a fair sample of the sources.

Only row numbers are shuffled; text is read row by row, so memory does not grow with the file.
"""

from __future__ import annotations

import random
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eyas.train.data.conversations import Conversation, OnBadLine, Split, parse_line, read_at, read_lines
from eyas.train.data.messages import BadConversation


@contextmanager
def plain_file(path: Path, *, beside: Path) -> Iterator[Path]:
    """`path`, or an unpacked copy of it in `beside`: lines of a compressed file cannot be read out of order."""
    if path.suffix != ".gz":
        yield path
        return
    for stale in beside.glob(".conversations-*.jsonl"):  # of a stage that was killed
        stale.unlink()
    with tempfile.NamedTemporaryFile(dir=beside, prefix=".conversations-", suffix=".jsonl") as stream:
        previous = 0
        for number, line in read_lines(path):
            stream.write(b"\n" * (number - previous - 1) + line)  # blank lines stay, and with them the line numbers
            previous = number
        stream.flush()
        yield Path(stream.name)


class ShuffledRows:
    """The usable rows of a plain conversation file, shuffled by seed: 25 bytes of memory each.

    Args:
        named: what the user calls the file.
        skipped: with `on_bad_line` "skip", the number of lines left out is added here by reason.

    Raises:
        ValueError: no such file, no usable row in it, or a bad line and `on_bad_line` is "stop".
    """

    def __init__(self, path: Path, *, named: Path, on_bad_line: OnBadLine, skipped: Counter[str], seed: int) -> None:
        self._path = path
        self._positions, self._numbers, self._heldout = array("q"), array("q"), bytearray()
        for number, position, line in _lines(path, named=named):
            try:
                split = parse_line(line, number=number).split
            except BadConversation as error:
                if on_bad_line == "stop":
                    raise ValueError(
                        f"{named}, line {number}: {error}; mend the line, or set data.on_bad_line=skip to leave it out"
                    ) from error
                skipped[error.reason] += 1
                continue
            self._positions.append(position)
            self._numbers.append(number)
            self._heldout.append(split == "heldout")
        if not len(self):
            raise ValueError(f"{named} holds no usable conversation ({skipped.total()} broken lines)")
        self._order = array("q", range(len(self)))
        random.Random(seed).shuffle(self._order)

    def __len__(self) -> int:
        return len(self._positions)

    def read(self, *, split: Split) -> Iterator[Conversation]:
        """Conversations of a split in their order."""
        with self._path.open("rb") as stream:
            for row in self._order:
                if bool(self._heldout[row]) == (split == "heldout"):
                    yield read_at(stream, self._positions[row], number=self._numbers[row])


def _lines(path: Path, *, named: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number, byte offset and bytes of every line that is not blank."""
    if not path.is_file():
        raise ValueError(
            f"data.conversations: {named} does not exist; give a .jsonl or .jsonl.gz file of conversations"
        )
    position = 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, position, line
            position += len(line)
