"""The extract stage with transformers: one forward pass of the target over every token, states into the feature store.

Documents are taken shard by shard, sorted by length into batches of at most `batch_tokens` tokens, padding included, so
that padding stays small. A thread writes a finished shard while the next is computed. A killed stage goes on after the
shards that are there, and several processes may fill one store: each makes the shards that no other has claimed.

In memory are the states of three shards, however many documents there are.

Shapes: B sequences, T tokens, A captured layers, X = A*H, H hidden.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from eyas.heads.config import default_capture_layers, load_target_config
from eyas.heads.target import DTYPES, HiddenStateCapture, input_device, load_target_model, load_target_pieces
from eyas.heads.target_source import target_fingerprint
from eyas.train.data.prepare import SPLITS
from eyas.train.data.tokens import Tokens
from eyas.train.features.encoding import DocumentEncoder, EncodedDocument, StoreForm, bytes_per_token
from eyas.train.features.generated import GeneratedStates
from eyas.train.features.identity import StoreIdentity, open_index
from eyas.train.features.shards import (
    BackgroundWriter,
    ShardWriter,
    as_lengths,
    claim,
    shard_name,
    shard_path,
    shard_plan,
)
from eyas.train.features.store import FeatureStore

SHARD_BYTES = 1 << 28
BATCHES_PER_SHARD = 4
"""A shard holds at least so many batches: with fewer documents to sort, padding grows."""

Capture = Callable[[Tensor], tuple[Tensor, Tensor]]


def extract(
    out_dir: Path,
    *,
    tokens_dir: Path,
    target_dir: Path,
    capture_layers: Sequence[int] | None,
    dtype: str,
    form: StoreForm,
    batch_tokens: int,
    threads: int | None,
    device_map: str | None,
    trust_remote_code: bool,
    generated_states: Path | None,
) -> dict[str, int]:
    """Write the feature store of both splits into `out_dir`.

    Args:
        capture_layers: layer ids, ascending; None takes 2, L//2, L-3, and none at all stores no captured states.
        dtype: of the target's forward pass.
        batch_tokens: tokens of one forward pass, padding included.
        threads: CPU threads; None leaves torch's choice.
        device_map: None runs the target on one device, "auto" spreads it over all.
        generated_states: a store that generation left behind; documents that it holds are taken from there.

    Returns:
        Documents, tokens and bytes of the store; padding that this process computed; documents from generation.

    Raises:
        ValueError: the disk is too small, a layer does not exist, `out_dir` holds another store or a broken shard, or
            the target's states are not finite.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    identity = planned_identity(
        target_dir,
        tokens_dir=tokens_dir,
        capture_layers=capture_layers,
        dtype=dtype,
        form=form,
        trust_remote_code=trust_remote_code,
    )
    tokens = {split: Tokens(tokens_dir, split=split) for split in SPLITS}
    plans = open_store(out_dir, identity=identity, tokens=tokens, batch_tokens=batch_tokens)
    counts: Counter[str] = Counter(padding_tokens=0, from_generation=0)
    if any(plans.values()):
        generated = None if generated_states is None else GeneratedStates(generated_states, identity=identity)
        model = load_target_model(
            target_dir, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code, device_map=device_map
        )
        if device_map is None:
            model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        extraction = _Extraction(
            out_dir,
            identity=identity,
            model=model,
            target_dir=target_dir,
            batch_tokens=batch_tokens,
            generated=generated,
        )
        with tqdm(total=_planned_tokens(plans, tokens), unit="tok", desc="extract", disable=None) as progress:
            for split in SPLITS:
                counts.update(extraction.run(split, tokens[split], plans[split], progress=progress))
    return finished_counts(out_dir, tokens) | dict(counts)


def planned_identity(
    target_dir: Path,
    *,
    tokens_dir: Path,
    capture_layers: Sequence[int] | None,
    dtype: str,
    form: StoreForm,
    trust_remote_code: bool,
) -> StoreIdentity:
    """Identity of the store that an extraction with these settings makes, whatever the backend.

    Raises:
        ValueError: a layer does not exist.
    """
    config = load_target_config(target_dir, trust_remote_code=trust_remote_code)
    num_layers = config.num_hidden_layers
    layers = default_capture_layers(num_layers) if capture_layers is None else tuple(capture_layers)
    if not all(1 <= layer <= num_layers for layer in layers):
        raise ValueError(f"features.capture_layers={list(layers)} must lie between 1 and {num_layers}")
    return StoreIdentity(
        target_fingerprint=target_fingerprint(target_dir),
        tokens_fingerprint=Tokens(tokens_dir, split=SPLITS[0]).fingerprint,
        hidden_size=config.hidden_size,
        num_target_layers=num_layers,
        vocab_size=config.vocab_size,
        capture_layers=layers,
        dtype=dtype,
        form=form,
    )


def open_store(
    out_dir: Path, *, identity: StoreIdentity, tokens: dict[str, Tokens], batch_tokens: int
) -> dict[str, list[list[int]]]:
    """Write the index, and say which documents of each split go into which shard; shards that are there are left out.

    Raises:
        ValueError: another store or a broken shard is there, or the disk is too small for what is missing.
    """
    open_index(out_dir, identity, documents={split: len(tokens[split]) for split in tokens})
    size = _bytes_per_token(identity, tokens)
    shard_tokens = max(round(SHARD_BYTES / size), BATCHES_PER_SHARD * batch_tokens)
    plans: dict[str, list[list[int]]] = {}
    for split in tokens:
        store = FeatureStore(out_dir, split=split)
        ranges = shard_plan(as_lengths(tokens[split].lengths), shard_tokens=shard_tokens)
        plans[split] = [missing for documents in ranges if (missing := store.missing_among(documents))]
        store.close()
    needed = _planned_tokens(plans, tokens) * size
    free = shutil.disk_usage(out_dir).free
    if needed and free < needed * 1.05 + SHARD_BYTES:
        raise ValueError(
            f"the feature store needs {needed / 1e9:.1f} GB and {out_dir} has {free / 1e9:.1f} GB free; "
            "set features.storage=fp8, lower data.max_train_tokens, capture fewer layers, or set run_dir to another disk"
        )
    return plans


def finished_counts(out_dir: Path, tokens: dict[str, Tokens]) -> dict[str, int]:
    """Documents, tokens and bytes of a complete store."""
    for split in tokens:
        FeatureStore(out_dir, split=split).require_complete()
    return {
        "documents": sum(len(tokens[split]) for split in tokens),
        "tokens": sum(int(tokens[split].lengths.sum()) for split in tokens),
        "bytes": sum(path.stat().st_size for path in out_dir.glob("*.safetensors")),
    }


def _bytes_per_token(identity: StoreIdentity, tokens: dict[str, Tokens]) -> float:
    answers = sum(int(rows.answer_token_counts(vocab_size=identity.vocab_size).sum()) for rows in tokens.values())
    total = sum(int(rows.lengths.sum()) for rows in tokens.values())
    return bytes_per_token(
        identity.form,
        hidden_size=identity.hidden_size,
        num_layers=len(identity.capture_layers),
        answer_share=answers / max(total, 1),
    )


def _planned_tokens(plans: dict[str, list[list[int]]], tokens: dict[str, Tokens]) -> int:
    return sum(
        int(tokens[split].lengths[torch.tensor(documents)].sum()) for split in plans for documents in plans[split]
    )


class _Extraction:
    """The target at work on the shards of a store."""

    def __init__(
        self,
        store: Path,
        *,
        identity: StoreIdentity,
        model: Any,
        target_dir: Path,
        batch_tokens: int,
        generated: GeneratedStates | None,
    ) -> None:
        self.store, self.identity, self.generated = store, identity, generated
        self.batch_tokens, self.device = batch_tokens, input_device(model)
        self.capture: Capture = HiddenStateCapture(model, capture_layers=identity.capture_layers)
        readout_VH = None
        if identity.form.teacher == "top-k":
            readout_VH = load_target_pieces(target_dir).readout_VH.to(self.device)
        self.encoder = DocumentEncoder(identity.form, num_layers=len(identity.capture_layers), readout_VH=readout_VH)

    def run(self, split: str, tokens: Tokens, plan: list[list[int]], *, progress: tqdm) -> Counter[str]:
        """Make the shards of one split; those that others hold are looked at again at the end."""
        work = _Split(split, tokens, progress)
        writer = ShardWriter(self.store, identity=self.identity, split=split)
        with BackgroundWriter(writer) as background:
            skipped = [documents for documents in plan if not self._shard(work, documents, background, wait=False)]
            for documents in skipped:
                self._shard(work, documents, background, wait=True)
        return work.counts

    def _shard(self, work: _Split, documents: list[int], background: BackgroundWriter, *, wait: bool) -> bool:
        """Make one shard unless it is there; False when another process is at it."""
        name = shard_name(documents)
        with ExitStack() as held:
            if not held.enter_context(claim(self.store, split=work.split, name=name, wait=wait)):
                return False
            if shard_path(self.store, split=work.split, name=name).is_file():
                work.progress.update(int(work.tokens.lengths[torch.tensor(documents)].sum()))
                return True
            encoded = self._encode(work, documents)
            background.submit(name, encoded, held=held.pop_all())
        return True

    def _encode(self, work: _Split, documents: list[int]) -> list[tuple[int, EncodedDocument]]:
        rows = {index: work.tokens[index] for index in documents}
        encoded: dict[int, EncodedDocument] = {}
        if self.generated is not None:
            for index, (token_ids_T, answer_mask_T) in rows.items():
                found = self.generated.find(token_ids_T, answer_mask_T)
                if found is not None:
                    encoded[index] = found
                    work.counts["from_generation"] += 1
                    work.progress.update(token_ids_T.shape[0])
        left = [index for index in documents if index not in encoded]
        for batch in length_batches([rows[index][0].shape[0] for index in left], batch_tokens=self.batch_tokens):
            encoded |= self._forward(work, {left[place]: rows[left[place]] for place in batch})
        return [(index, encoded[index]) for index in documents]

    def _forward(self, work: _Split, batch: dict[int, tuple[Tensor, Tensor]]) -> dict[int, EncodedDocument]:
        token_ids_BT = padded([token_ids_T for token_ids_T, _ in batch.values()])
        captured_BTX, last_BTH = self.capture(token_ids_BT.to(self.device))
        encoded: dict[int, EncodedDocument] = {}
        for row, (index, (token_ids_T, answer_mask_T)) in enumerate(batch.items()):
            length = token_ids_T.shape[0]
            encoded[index] = self.encoder.encode(
                token_ids_T,
                answer_mask_T=answer_mask_T,
                captured_TX=captured_BTX[row, :length],
                last_TH=last_BTH[row, :length],
                name=work.tokens.ids(index),
            )
            work.counts["padding_tokens"] += token_ids_BT.shape[1] - length
            work.progress.update(length)
        return encoded


@dataclass
class _Split:
    split: str
    tokens: Tokens
    progress: tqdm
    counts: Counter[str] = field(default_factory=Counter)


def padded(documents: Sequence[Tensor]) -> Tensor:
    """Documents as one tensor [B, T], zeros at the right."""
    return torch.nn.utils.rnn.pad_sequence(list(documents), batch_first=True)


def length_batches(lengths: Sequence[int], *, batch_tokens: int) -> list[list[int]]:
    """Indices grouped by similar length; a group's size times its longest member stays within `batch_tokens`.

    A single document longer than that is a batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    for index in order:
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
