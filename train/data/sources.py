"""Where conversations come from: hub datasets, local files, Python packages; each read one row at a time.

    org/name                      a hub dataset, or a local directory laid out like one, through the `datasets` library
    *.jsonl, *.jsonl.gz           read line by line here, so that every bad line is counted on its own
    *.json, *.parquet, *.arrow    through `datasets`
    http://..., https://...       one such file or .jsonl elsewhere, through `datasets`
    package:NAME                  see train/data/packages.py

A row becomes a record (train/data/schemas.py), and a record that passes the check becomes a conversation. Everything
left out on the way is counted by reason in a `Tally`. In .jsonl files with `messages`, the fields `split`, `source` and
`truncated` mean what they mean in a conversation file; elsewhere they are columns like others and are not read.
"""

from __future__ import annotations

import glob
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.train.data.conversations import Conversation, OnBadLine, conversation_of, parse_json, read_lines
from eyas.train.data.hub import file_rows, hub_rows, is_dataset_directory
from eyas.train.data.messages import BadConversation
from eyas.train.data.packages import package_records
from eyas.train.data.schemas import Schema, SchemaSetting, detect_schema, to_record, user_texts

PACKAGE_SCHEME = "package:"
URL_SCHEMES = ("http://", "https://")
JSON_LINES = (".jsonl", ".jsonl.gz")
BUILDERS = {".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
ROWS_TO_DETECT_FROM = 50
OWN_FIELDS = ("split", "source", "truncated")

RawRow = tuple[int, bytes | Mapping[str, Any]]
"""Number of the row or line, from 1, and what stands there."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One place to read from.

    Attributes:
        name: label in counts and of the conversations.
        path: hub id, local file or glob, directory, or package:NAME.
        config, split, revision, data_files, streaming: which part of a hub dataset, and whether it is read as it
            arrives; files and packages have none of these.
        schema: how rows hold a conversation; "auto" finds out.
        columns: columns by their role, where they have unusual names (`schemas.COLUMN_ROLES`).
        weight: share in the mix; None takes all.
        limit: conversations taken at most.
    """

    name: str
    path: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    data_files: str | None = None
    streaming: bool = True
    schema: SchemaSetting = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    weight: float | None = None
    limit: int | None = None


@dataclass
class Tally:
    """What became of the rows of a source: `read` is `kept` and all of `dropped`."""

    schema: str = ""
    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    not_needed: int | None = 0
    """Rows that nobody asked for; None where counting them would mean fetching them."""


@dataclass(frozen=True)
class _Opened:
    """Rows as they come, whether going through the rest of them is cheap, and whether they may be in our own form."""

    rows: Iterator[RawRow]
    countable: bool
    json_lines: bool = False


class SourceReader:
    """An opened source. Rows that are no conversation stop it or are counted, as `on_bad_line` says."""

    def __init__(self, source: Source, *, on_bad_line: OnBadLine, seed: int) -> None:
        """Open a source and find its schema.

        Raises:
            ValueError: it is not there, cannot be reached, or its rows have no schema that is known.
        """
        self.source, self.on_bad_line = source, on_bad_line
        self.tally = Tally()
        try:
            opened = _open(source, seed=seed)
            head = list(itertools.islice(opened.rows, ROWS_TO_DETECT_FROM))
            self.schema = _schema(head, source)
        except ValueError as error:
            raise ValueError(f"data source {source.name!r}: {error}") from error
        self.tally.schema = str(self.schema)
        self._rows = itertools.chain(head, opened.rows)
        self._countable, self._ended = opened.countable, False
        self._own_form = opened.json_lines and self.schema.form == "messages"

    def conversations(self, *, heldout_share: float) -> Iterator[Conversation]:
        """Usable conversations in order; `heldout_share` of those without a split of their own are held out.

        Raises:
            ValueError: a row is no usable conversation and `on_bad_line` is "stop".
        """
        for number, record in self._records():
            try:
                conversation = conversation_of(
                    record,
                    default_id=str(number) if self._own_form else f"{self.source.name}-{number:06d}",
                    default_source=self.source.name,
                    heldout_share=heldout_share,
                )
            except BadConversation as error:
                self._drop(number, error)
                continue
            yield conversation

    def prompts(self) -> Iterator[str]:
        """Texts of all user turns, as an evaluation set has them; rows with none are bad."""
        for number, record in self._records():
            texts = user_texts(record)
            if not texts:
                self._drop(number, BadConversation("no_user_turn", "there is no user turn"))
                continue
            self.tally.kept += 1
            yield from texts
            if self.tally.kept == self.source.limit:
                return

    def close(self) -> None:
        """Count the rows that were not asked for, where that costs no download."""
        if not self._ended:
            self.tally.not_needed = sum(1 for _ in self._rows) if self._countable else None

    def _records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, raw in self._rows:
            self.tally.read += 1
            try:
                row = parse_json(raw) if isinstance(raw, bytes) else raw
                record = to_record(row, self.schema)
            except BadConversation as error:
                self._drop(number, error)
                continue
            if self._own_form:
                record |= {name: row[name] for name in OWN_FIELDS if row.get(name) is not None}
            yield number, record
        self._ended = True

    def _drop(self, number: int, error: BadConversation) -> None:
        if self.on_bad_line == "stop":
            raise ValueError(
                f"data source {self.source.name!r}, row {number} of {self.source.path}: {error}; mend the row, or set "
                "data.on_bad_line=skip to leave such rows out and count them"
            ) from error
        self.tally.dropped[error.reason] += 1


def _schema(head: list[RawRow], source: Source) -> Schema:
    rows: list[Mapping[str, Any]] = []
    for _, raw in head:
        try:
            rows.append(parse_json(raw) if isinstance(raw, bytes) else raw)
        except BadConversation:
            continue  # counted, or an error, when its turn comes
    if not rows:
        what = "none of the first rows is a JSON object" if head else "there are no rows"
        raise ValueError(f"{source.path}: {what}; check the path, and that each line is one JSON object")
    return detect_schema(rows, form=source.schema, columns=source.columns)


def _open(source: Source, *, seed: int) -> _Opened:
    path = Path(source.path).expanduser()
    if source.path.startswith(PACKAGE_SCHEME):
        _refuse_hub_settings(source)
        records = package_records(source.path.removeprefix(PACKAGE_SCHEME), seed=seed)
        return _Opened(iter(enumerate(records, start=1)), countable=True)
    if source.path.startswith(URL_SCHEMES):
        return _Opened(enumerate(_url_rows(source), start=1), countable=False)
    if path.is_dir():
        if not is_dataset_directory(path):
            raise ValueError(f"path: {path} holds no data files; name a file, or a glob such as {path}/*.jsonl")
        return _Opened(enumerate(_hub(source, path=str(path)), start=1), countable=False)
    files = matching_files(source.path)
    if files:
        _refuse_hub_settings(source)
        return _open_files(files, source)
    named_as_file = source.path.startswith((".", "~", "/")) or source.path.endswith((*JSON_LINES, *BUILDERS))
    if named_as_file or source.path.count("/") != 1:
        raise ValueError(
            f"path: no file {source.path}, and it is no hub dataset (org/name) and no package:NAME; check the path"
        )
    return _Opened(enumerate(_hub(source, path=source.path), start=1), countable=False)


def matching_files(path: str) -> list[Path]:
    """Files that a path or glob (`**` for any depth) means, sorted; none for a directory or for what is not there."""
    written = Path(path).expanduser()
    if written.is_file():
        return [written]
    return sorted(Path(name) for name in glob.glob(str(written), recursive=True) if Path(name).is_file())  # noqa: PTH207


def _hub(source: Source, *, path: str) -> Iterator[dict[str, Any]]:
    return hub_rows(
        path,
        config=source.config,
        split=source.split,
        revision=source.revision,
        data_files=source.data_files,
        streaming=source.streaming,
    )


def _url_rows(source: Source) -> Iterator[dict[str, Any]]:
    _refuse_hub_settings(source)
    builder = next((name for suffix, name in BUILDERS.items() if source.path.endswith((suffix, f"{suffix}l"))), None)
    if builder is None:
        raise ValueError(f"path: {source.path} must end in .jsonl, {', '.join(BUILDERS)}; download it and unpack it")
    return file_rows(builder, [source.path])


def _open_files(files: list[Path], source: Source) -> _Opened:
    known = (*JSON_LINES, *BUILDERS)
    suffixes = {next((end for end in known if file.name.endswith(end)), file.suffix) for file in files}
    if suffixes <= set(JSON_LINES):
        lines = itertools.chain.from_iterable(map(read_lines, files))
        renumbered = enumerate((line for _, line in lines), start=1)
        return _Opened(lines if len(files) == 1 else renumbered, countable=True, json_lines=True)
    if len(suffixes) > 1 or not suffixes <= set(BUILDERS):
        ends = ", ".join(sorted(suffixes)) or "nothing"
        raise ValueError(f"path: {source.path} ends in {ends}; name files of one kind: {', '.join(known)}")
    rows = file_rows(BUILDERS[suffixes.pop()], [str(file) for file in files])
    return _Opened(enumerate(rows, start=1), countable=True)


def _refuse_hub_settings(source: Source) -> None:
    hub_only = {"config": source.config, "revision": source.revision, "data_files": source.data_files}
    given = [name for name, value in hub_only.items() if value is not None]
    given += ["split"] if source.split != "train" else []
    given += [] if source.streaming else ["streaming"]
    if given:
        raise ValueError(f"{', '.join(given)}: only hub datasets have it, and {source.path} is none; remove it")
