"""Rows through the `datasets` library, and its errors in the words of a recipe.

The library is imported when the first such source is read. Code that comes with a dataset is never run: `datasets` 5
cannot, and nothing here asks for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

DATA_SUFFIXES = (".parquet", ".arrow", ".json", ".jsonl", ".gz", ".csv", ".zst")


def hub_rows(
    path: str,
    *,
    config: str | None,
    split: str,
    revision: str | None,
    data_files: str | None,
    streaming: bool,
) -> Iterator[dict[str, Any]]:
    """Rows of a hub dataset, or of a local directory laid out like one.

    Raises:
        ValueError: it is not there, not reachable or not allowed, or has no such configuration or split.
    """
    datasets = _library()
    try:
        data = datasets.load_dataset(
            path, name=config, split=split, revision=revision, data_files=data_files, streaming=streaming
        )
    except Exception as error:  # the library, the hub client and the network raise each their own
        raise ValueError(_explain(error, path=path, split=split)) from error
    return _rows(data, path=path, split=split)


def file_rows(builder: str, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows of files or URLs that `datasets` has a builder for (json, parquet, arrow), without a copy in its cache.

    Raises:
        ValueError: a file is broken, or not of that kind.
    """
    datasets = _library()
    try:
        data = datasets.load_dataset(builder, data_files=list(names), split="train", streaming=True)
    except Exception as error:
        raise ValueError(_explain(error, path=", ".join(names), split="train")) from error
    return _rows(data, path=", ".join(names), split="train")


def is_dataset_directory(directory: Path) -> bool:
    """Whether a directory holds files that `datasets` reads by itself."""
    return any(path.suffix in DATA_SUFFIXES for path in directory.rglob("*"))


def plain_value(value: Any) -> Any:
    """A column's value as it was before the library gave all rows one type.

    Turns of different fields come as JSON text when a .json file streams (datasets 5.2), and are unpacked; nulls that
    stand for fields an object does not have are dropped.
    """
    if isinstance(value, list) and value and all(isinstance(part, str) and part.startswith("{") for part in value):
        try:
            turns = [json.loads(part) for part in value]
        except (ValueError, RecursionError):
            return value  # texts that begin with a brace
        if all("role" in turn or "from" in turn for turn in turns):
            value = turns
    return drop_nulls(value)


def drop_nulls(value: Any) -> Any:
    """A value without the nulls of its objects: Arrow gives every object of a column the fields of all of them."""
    if isinstance(value, dict):
        return {name: drop_nulls(part) for name, part in value.items() if part is not None}
    return [drop_nulls(part) for part in value] if isinstance(value, list) else value


def _rows(data: Iterable[dict[str, Any]], *, path: str, split: str) -> Iterator[dict[str, Any]]:
    rows = iter(data)
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:
            raise ValueError(_explain(error, path=path, split=split)) from error
        yield {name: plain_value(value) for name, value in row.items()}


def _library() -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            "hub datasets, .json, .parquet and .arrow files need the library `datasets`; `pip install 'datasets>=5.0'`, "
            "or give .jsonl files"
        ) from error
    return datasets


def _explain(error: Exception, *, path: str, split: str) -> str:
    """What went wrong and the mend, by what the error says; the library has no error classes for most of it."""
    text = f"{type(error).__name__}: {error}".lower()
    if "gated" in text or "401" in text or "403" in text or "authenticat" in text:
        mend = (
            f"it may be private or gated: accept its terms at https://huggingface.co/datasets/{path} and log in with "
            "`hf auth login` or set HF_TOKEN"
        )
    elif (
        "offline" in text
        or "connection" in text
        or "couldn't reach" in text
        or "timeout" in text
        or "timed out" in text
    ):
        mend = (
            "the hub cannot be reached: unset HF_HUB_OFFLINE if it is set, try again with a connection, or download the "
            "files elsewhere and give them as path"
        )
    elif "load_from_disk" in text:
        mend = f"it was written by save_to_disk; give its files as path: {path}/*.arrow"
    elif "builderconfig" in text or "config name" in text:
        mend = "set the source's config to one it has"
    elif "unknown split" in text or "bad split" in text:
        mend = f"it has no split {split!r}; set the source's split to one it has"
    elif "notfound" in text or "doesn't exist" in text:
        mend = "check the source's path and revision"
    elif "script" in text:
        mend = "it comes as code, which is never run; look for a copy of it in Parquet"
    else:
        mend = "the files may be broken or mixed; convert them to .jsonl, which is read line by line"
    return f"{path} cannot be read ({_first_line(error)}); {mend}"


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
