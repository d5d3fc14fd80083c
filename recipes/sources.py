"""From the sources a recipe lists to what the collect stage reads: presets filled in, places found, identities taken."""

from __future__ import annotations

import difflib
import importlib.metadata
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from eyas.heads.files import fingerprint, fingerprint_file
from eyas.recipes.load import BUILTIN_SCHEME, package_folder, resolve_builtin
from eyas.recipes.schema_data import Source
from eyas.train.data.sources import PACKAGE_SCHEME, URL_SCHEMES, matching_files

if TYPE_CHECKING:
    from eyas.train.data.sources import Source as Place


_DEFAULTS = {name: field.get_default(call_default_factory=True) for name, field in Source.model_fields.items()}


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Shipped presets by name: `kind` (training or evaluation), `about`, and `sources`."""
    return yaml.safe_load((package_folder() / "data" / "presets.yaml").read_text(encoding="utf-8"))


def find_preset(name: str) -> dict[str, Any]:
    """One preset.

    Raises:
        ValueError: no such preset; names the nearest.
    """
    known = presets()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else "`eyas presets` lists them"
        raise ValueError(f"no preset {name!r}; {hint}")
    return known[name]


def expand(source: Source) -> list[Source]:
    """The sources that one entry of a recipe means: itself, or its preset's with the entry's own settings on top.

    Raises:
        ValueError: no such preset, or settings that a preset of several sources cannot take.
    """
    if source.preset is None:
        return [source]
    entries = find_preset(source.preset)["sources"]
    # Not what was written but what differs: a recipe that was dumped writes every field.
    own = {name: value for name, value in source.model_dump(exclude={"preset"}).items() if value != _DEFAULTS[name]}
    if len(entries) == 1:
        return [Source.model_validate({"name": source.preset} | entries[0] | own)]
    if own.keys() - {"weight"}:
        raise ValueError(
            f"data.sources: the preset {source.preset!r} is a mix of {len(entries)} sources, which takes a weight and no "
            f"{' and no '.join(sorted(own.keys() - {'weight'}))}; list its parts one by one (`eyas presets {source.preset}`)"
        )
    total = sum(entry.get("weight", 1.0) for entry in entries)
    scale = {} if source.weight is None else {"weight": source.weight / total}
    return [
        Source.model_validate(entry | ({"weight": entry.get("weight", 1.0) * scale["weight"]} if scale else {}))
        for entry in entries
    ]


def place_of(source: Source) -> Place:
    """What the collect stage reads for a source without a preset."""
    from eyas.train.data.sources import Source as Place

    assert source.path is not None, "the schema wants a path, or a preset that has one"
    path = source.path
    if path.startswith(BUILTIN_SCHEME):
        path = str(resolve_builtin(path))
    return Place(
        name=source.name or Path(source.path).name or source.path,
        path=path,
        config=source.config,
        split=source.split,
        revision=source.revision,
        data_files=source.data_files,
        streaming=source.streaming,
        schema=source.format,
        columns=source.columns,
        weight=source.weight,
        limit=source.limit,
    )


def local_files(source: Source) -> list[Path]:
    """Files that a source means on this machine; none for hub datasets and packages.

    Raises:
        ValueError: the source is written as a path, and nothing is there.
    """
    assert source.path is not None
    if source.path.startswith(BUILTIN_SCHEME):
        return [resolve_builtin(source.path)]
    if source.path.startswith((PACKAGE_SCHEME, *URL_SCHEMES)):
        return []
    path = Path(source.path).expanduser()
    found = (
        [each for each in sorted(path.rglob("*")) if each.is_file()] if path.is_dir() else matching_files(source.path)
    )
    looks_like_file = source.path.startswith((".", "/", "~")) or path.suffix or source.path.count("/") != 1
    if not found and looks_like_file:
        raise ValueError(
            f"data.sources: no file {path}; name a .jsonl, .jsonl.gz, .json, .parquet or .arrow file, a hub dataset "
            "(org/name) or package:NAME"
        )
    return found


def source_identity(source: Source) -> str:
    """Fingerprint of what a source holds: its files, its package's version, or its hub name and revision.

    A hub dataset without a revision is taken to stay what it is; pin `revision` where that matters.
    """
    assert source.path is not None
    settings = source.model_dump(mode="json")
    if source.path.startswith(PACKAGE_SCHEME):
        name = source.path.removeprefix(PACKAGE_SCHEME)
        try:
            return fingerprint([settings, importlib.metadata.version(name)])
        except importlib.metadata.PackageNotFoundError as error:
            raise ValueError(
                f"data.sources: the package {name!r} is not installed; `pip install --no-deps {name}`, or remove the source"
            ) from error
    return fingerprint([settings, [fingerprint_file(path) for path in local_files(source)]])
