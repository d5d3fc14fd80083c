"""What a feature store is: the index that is written before any shard.

A head trained on one identity must not be fed another, and two runs must not fill one directory with different things.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eyas.heads.files import fingerprint, read_json, write_json
from eyas.train.features.encoding import StoreForm

INDEX_NAME = "index.json"
VERSION = 2


@dataclass(frozen=True, kw_only=True)
class StoreIdentity:
    """What a store's numbers are.

    Attributes:
        target_fingerprint: of the target's files, weights included. tokens_fingerprint: of the prepared tokens.
        dtype: of the target's forward pass.
    """

    target_fingerprint: str
    tokens_fingerprint: str
    hidden_size: int
    num_target_layers: int
    vocab_size: int
    capture_layers: tuple[int, ...]
    dtype: str
    form: StoreForm

    def as_json(self) -> dict[str, Any]:
        """As it lies in the index."""
        return asdict(self) | {"capture_layers": list(self.capture_layers), "form": self.form.as_json()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> StoreIdentity:
        """The identity that `as_json` gave."""
        changed = {"capture_layers": tuple(fields["capture_layers"]), "form": StoreForm(**fields["form"])}
        return cls(**(fields | changed))

    @cached_property
    def fingerprint(self) -> str:
        """What every shard of the store carries."""
        return fingerprint(self.as_json())


def open_index(store: Path, identity: StoreIdentity, *, documents: dict[str, int | None]) -> None:
    """Write the index of a new store, or check that the one there is the same.

    Args:
        documents: number of documents of each split; None where it is not known before the store is full.

    Raises:
        ValueError: the directory holds another store.
    """
    store.mkdir(parents=True, exist_ok=True)
    content = {"version": VERSION, "identity": identity.as_json(), "documents": documents}
    if (store / INDEX_NAME).is_file():
        there = _read_index(store)
        if there != content:
            differing = sorted(_differing(there, content))
            raise ValueError(
                f"{store} holds another feature store (differing in {', '.join(differing)}); delete it or set run_dir to "
                "another directory"
            )
        return
    if any(store.glob("*.safetensors")):
        raise ValueError(f"{store} holds shards without an {INDEX_NAME}; delete them and run the extract stage again")
    write_json(store / INDEX_NAME, content)


def _differing(there: dict[str, Any], content: dict[str, Any]) -> set[str]:
    if there["documents"] != content["documents"]:
        return {"documents"}
    old, new = there["identity"], content["identity"]
    return {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}


def read_identity(store: Path) -> StoreIdentity:
    """Identity of the store in a directory."""
    return StoreIdentity.from_json(_read_index(store)["identity"])


def read_num_documents(store: Path, *, split: str) -> int | None:
    """Documents that a split will have; None where the store does not say."""
    return _read_index(store)["documents"].get(split, 0)


def check_identity(store: Path, *, target_fingerprint: str, tokens_fingerprint: str | None = None) -> StoreIdentity:
    """Identity of a store, which must have been made from the given target, and of the given tokens unless None.

    Raises:
        ValueError: the store belongs to another target (or to the same one with other weights, template or tokenizer), or
            to other tokens.
    """
    identity = read_identity(store)
    if identity.target_fingerprint != target_fingerprint:
        raise ValueError(
            f"the feature store {store} was made from another target (or from other weights, template or tokenizer of "
            f"it): {identity.target_fingerprint[:12]}, not {target_fingerprint[:12]}; delete it and run the extract "
            "stage again"
        )
    if tokens_fingerprint is not None and identity.tokens_fingerprint != tokens_fingerprint:
        raise ValueError(
            f"the feature store {store} was made of other tokens: {identity.tokens_fingerprint[:12]}, not "
            f"{tokens_fingerprint[:12]}; delete it and run the extract stage again"
        )
    return identity


def _read_index(store: Path) -> dict[str, Any]:
    index = read_json(store / INDEX_NAME)
    if not isinstance(index, dict) or index.get("version") != VERSION:
        raise ValueError(
            f"{store} is a feature store of another version of eyas (version {index.get('version', 1)}, and this one "
            f"reads {VERSION}); delete it and run the extract stage again"
        )
    return index
