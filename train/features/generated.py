"""States that generation left behind, looked up by the tokens they belong to.

When answers are written by the engine, the same pass can keep its hidden states (states.py). They are kept before anyone
knows which documents will be made of them. So a document is looked up by its tokens: a stored one fits if it begins with
the document's tokens up to the last position that a loss points at. What lies behind that position is read by nothing;
where the stored one ends earlier, such as before the token that ended the answer, its rows are zero.

The search key is the hash of a prefix whose length is a power of two, of every such length that a stored document has.

Shapes: T tokens of a document, N tokens of a stored one, P teacher positions.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from eyas.heads.slots import teacher_positions
from eyas.train.features.encoding import EncodedDocument, StoreForm, has_teacher_rows
from eyas.train.features.identity import StoreIdentity
from eyas.train.features.store import FeatureStore

SPLIT = "generated"


class GeneratedStates:
    """The states of a generation, for the extraction of a store with some identity."""

    def __init__(self, store: Path, *, identity: StoreIdentity) -> None:
        """
        Args:
            store: directory of a feature store with the split "generated".
            identity: of the store that is being made.

        Raises:
            ValueError: the states were made by another target, or in a form that the new store cannot take them from.
        """
        self._store = FeatureStore(store, split=SPLIT)
        self._form = identity.form
        _require_takeable(store, self._store.identity, identity)
        hashes, places = array_of_prefixes(self._store)
        self._hashes, order = torch.sort(hashes, stable=True)
        self._places = places[order]

    def find(self, token_ids_T: Tensor, answer_mask_T: Tensor) -> EncodedDocument | None:
        """A document out of stored states; None when no stored one fits."""
        needed = _needed_tokens(answer_mask_T)
        key = prefix_hash(token_ids_T.int(), 1 << (needed.bit_length() - 1))
        begin, end = torch.searchsorted(self._hashes, torch.tensor([key, key + 1])).tolist()
        for place in self._places[begin:end].tolist():
            stored = self._store.load_encoded(place)
            document = fitted(stored, token_ids_T=token_ids_T, answer_mask_T=answer_mask_T, form=self._form)
            if document is not None:
                return document
        return None


def array_of_prefixes(store: FeatureStore) -> tuple[Tensor, Tensor]:
    """Hashes of the prefixes of all documents that are there, and the document of each."""
    hashes, places = array("q"), array("i")
    for index in range(len(store)):
        if not store.missing_among([index]):
            keys = list(_prefix_hashes(store.token_ids(index)))
            hashes.extend(keys)
            places.extend([index] * len(keys))
    return torch.tensor(hashes, dtype=torch.int64), torch.tensor(places, dtype=torch.int32)


def _prefix_hashes(token_ids_N: Tensor) -> Iterator[int]:
    length = 1
    while length <= token_ids_N.shape[0]:
        yield prefix_hash(token_ids_N, length)
        length *= 2


def prefix_hash(token_ids_N: Tensor, length: int) -> int:
    """63 bits of a hash of the first tokens."""
    digest = hashlib.blake2b(token_ids_N[:length].contiguous().numpy().tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _needed_tokens(answer_mask_T: Tensor) -> int:
    positions_P = teacher_positions(answer_mask_T)
    return int(positions_P[-1]) + 1 if positions_P.numel() else answer_mask_T.shape[0]


def fitted(
    stored: EncodedDocument, *, token_ids_T: Tensor, answer_mask_T: Tensor, form: StoreForm
) -> EncodedDocument | None:
    """A stored document cut or filled up to the tokens of another; None when it does not hold what is needed."""
    length = token_ids_T.shape[0]
    shared = min(length, stored.num_tokens)
    if shared < _needed_tokens(answer_mask_T) or not torch.equal(
        stored.tensors["token_ids"][:shared], token_ids_T[:shared].int()
    ):
        return None
    tensors = {"token_ids": token_ids_T.int(), "answer_mask": answer_mask_T.bool()}
    for name, tensor in stored.tensors.items():
        if name not in tensors and not has_teacher_rows(name) and (form.last_everywhere or not name.startswith("last")):
            tensors[name] = torch.cat(
                (tensor[:shared], torch.zeros_like(tensor[:1]).expand(length - shared, *tensor.shape[1:]))
            )
    if form.last_everywhere:
        return EncodedDocument(tensors)
    teacher = _teacher_rows(stored, positions_P=teacher_positions(answer_mask_T))
    return None if teacher is None else EncodedDocument(tensors | teacher)


def _teacher_rows(stored: EncodedDocument, *, positions_P: Tensor) -> dict[str, Tensor] | None:
    if "last" in stored.tensors:
        return {
            name.replace("last", "teacher"): stored.tensors[name][positions_P]
            for name in ("last", "last_scales")
            if name in stored.tensors
        }
    held = teacher_positions(stored.tensors["answer_mask"])
    rows_P = torch.searchsorted(held, positions_P)
    if held.numel() == 0 or not torch.equal(held[rows_P.clamp_max(held.shape[0] - 1)], positions_P):
        return None
    return {name: tensor[rows_P] for name, tensor in stored.tensors.items() if has_teacher_rows(name)}


def _require_takeable(store: Path, there: StoreIdentity, wanted: StoreIdentity) -> None:
    same = ("target_fingerprint", "hidden_size", "num_target_layers", "vocab_size", "capture_layers", "dtype")
    differing = [name for name in same if getattr(there, name) != getattr(wanted, name)]
    stored, form = there.form, wanted.form
    if stored.storage != form.storage:
        differing.append("storage")
    from_last = stored.last_everywhere and form.teacher == "hidden"
    if not from_last and stored.as_json() != form.as_json():
        differing.append("teacher")
    if differing:
        raise ValueError(
            f"the states of the generation in {store} differ from what is to be extracted in {', '.join(differing)}; "
            "set data.generation.keep_states=false to compute them anew, or undo the change"
        )
