"""Small feature stores of random numbers for tests, without a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.train.features.encoding import DocumentEncoder, EncodedDocument, StoreForm
from eyas.train.features.identity import StoreIdentity, open_index
from eyas.train.features.shards import ShardWriter, shard_name

V, H, NUM_LAYERS = 50, 32, 3
FORMS = {
    f"{storage} {kind}": {"storage": storage, "teacher": teacher, "last_everywhere": everywhere}
    for storage in ("float32", "bfloat16", "float16", "fp8")
    for kind, teacher, everywhere in (
        ("answers", "hidden", False),
        ("everywhere", "hidden", True),
        ("top-k", "top-k", False),
    )
}
"""Changes to `form` of every kind of store."""


def form(**changes: Any) -> StoreForm:
    """float32 with hidden teachers at answers, with some fields changed."""
    fields = {"storage": "float32", "teacher": "hidden", "teacher_k": 8, "last_everywhere": False}
    return StoreForm(**{**fields, **changes})


def identity(store_form: StoreForm, **changes: Any) -> StoreIdentity:
    """Identity of a store of random numbers."""
    fields = {
        "target_fingerprint": "target",
        "tokens_fingerprint": "tokens",
        "hidden_size": H,
        "num_target_layers": 4,
        "vocab_size": V,
        "capture_layers": tuple(range(1, NUM_LAYERS + 1)),
        "dtype": "float32",
        "form": store_form,
    }
    return StoreIdentity(**{**fields, **changes})


def states(length: int, *, seed: int = 0) -> dict[str, Tensor]:
    """Tokens, mask (answers at 4..8 and from 12 on) and states of a document, as `DocumentEncoder.encode` takes them."""
    generator = torch.Generator().manual_seed(seed)
    mask_T = torch.zeros(length, dtype=torch.bool)
    mask_T[4:9] = True
    mask_T[12:] = True
    return {
        "token_ids_T": torch.randint(0, V, (length,), generator=generator),
        "answer_mask_T": mask_T,
        "captured_TX": 3 * torch.randn(length, NUM_LAYERS * H, generator=generator),
        "last_TH": torch.randn(length, H, generator=generator),
    }


def readout() -> Tensor:
    """A target's readout [V, H]."""
    return torch.randn(V, H, generator=torch.Generator().manual_seed(9))


def encoded(store_form: StoreForm, length: int, *, seed: int = 0) -> EncodedDocument:
    """A document of random states in a form."""
    encoder = DocumentEncoder(store_form, num_layers=NUM_LAYERS, readout_VH=readout())
    fields = states(length, seed=seed)
    return encoder.encode(fields.pop("token_ids_T"), name=f"number {seed}", **fields)


def write_store(store: Path, store_form: StoreForm, *, lengths: list[int], per_shard: int = 2) -> StoreIdentity:
    """A complete store with one split, "train"."""
    made = identity(store_form)
    open_index(store, made, documents={"train": len(lengths)})
    writer = ShardWriter(store, identity=made, split="train")
    for first in range(0, len(lengths), per_shard):
        chosen = range(first, min(first + per_shard, len(lengths)))
        writer.write(shard_name(chosen), [(i, encoded(store_form, lengths[i], seed=i)) for i in chosen])
    return made
