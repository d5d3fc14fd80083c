"""What a run trains on: states that were extracted to disk before, or the target at work beside the head."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator
from torch import Tensor

from eyas.heads.target_source import target_fingerprint
from eyas.train.data.tokens import SPLITS, Tokens
from eyas.train.features.cache import CACHE_NAME, CachedDocuments, first_meetings, open_cache
from eyas.train.features.documents import Document, Documents
from eyas.train.features.encoding import StoreForm
from eyas.train.features.extract import planned_identity
from eyas.train.features.identity import StoreIdentity, check_identity
from eyas.train.features.online import WINDOW_FORWARDS, OnlineDocuments, StateSource, TargetSettings, TargetStates
from eyas.train.features.store import FeatureStore, Verify
from eyas.train.features.target_process import TargetProcess
from eyas.train.order import OrderSettings, RunOrder

PREFETCH = 2
"""Packs made ready ahead: one while another trains, and one more for uneven reading."""


@dataclass(frozen=True, kw_only=True)
class Offline:
    """A feature store. `verify` says when its checksums are looked at: all on opening, or each document's on reading."""

    features_dir: Path
    verify: Verify = "read"


@dataclass(frozen=True, kw_only=True)
class Online:
    """The target beside the head.

    Attributes:
        capture_layers: layer ids, ascending; None is the default of the target's depth, and an EAGLE head needs none.
        dtype: of the target's forward. form: what a store would keep of it; a head is fed exactly that.
        batch_tokens: tokens of one forward, padding included.
        where: "inline" in the training process, or "process": in its own, which works ahead.
        device: of the target; None is the head's, and for a process of its own a GPU that no head uses, if there is one.
        cache: "first-epoch" keeps on disk what the first epoch computes, until training ends well.
        threads: CPU threads of a process of its own; None leaves torch's choice.
    """

    capture_layers: Sequence[int] | None
    dtype: str
    form: StoreForm
    batch_tokens: int
    where: Literal["inline", "process"] = "inline"
    device: str | None = None
    cache: Literal["none", "first-epoch"] = "none"
    threads: int | None = None


@dataclass(frozen=True, kw_only=True)
class TrainedInputs:
    """Where the train stage finds what it is made from."""

    target_dir: Path
    tokens_dir: Path
    features: Offline | Online


@dataclass(frozen=True, kw_only=True)
class OpenInputs:
    """Both splits, ready to be read.

    Attributes:
        order: which training documents each step reads.
        prefetch: packs to load ahead of their use in a thread; 0 where the target runs in this process, since a thread
            would only take turns with the head on the same device.
        identity: what their documents hold.
        online: whether a document is computed when it is loaded.
    """

    train: Documents
    heldout: Documents
    order: RunOrder
    prefetch: int
    identity: StoreIdentity
    online: bool

    def heldout_share(self, count: int, *, rank: int, world_size: int, say: Callable[[str], None]) -> list[Document]:
        """One process's share of the first `count` held-out documents, for evaluations while training; `say` takes how
        large they are online."""
        documents = list(in_order(self.heldout, range(rank, min(count, len(self.heldout)), world_size)))
        if self.online:
            size = sum(tensor.nbytes for document in documents for tensor in _states(document))
            say(f"online: states of {len(documents)} held-out conversations stay in memory, {size / 2**20:.1f} MiB")
        return documents

    def close(self) -> None:
        """Let go of files and processes."""
        self.train.close()
        self.heldout.close()


def in_order(documents: Documents, indices: Iterable[int] | None = None) -> Iterator[Document]:
    """Some documents, or all, one at a time."""
    batches = [[index] for index in (range(len(documents)) if indices is None else indices)]
    documents.start(batches)
    for batch in batches:
        yield from documents.load(batch)


def _states(document: Document) -> list[Tensor]:
    tensors = [document.captured_TX, document.last_TH, *vars(document.teacher).values()]
    return [tensor for tensor in tensors if tensor is not None]


def open_inputs(
    inputs: TrainedInputs,
    *,
    out_dir: Path,
    accelerator: Accelerator,
    order: OrderSettings,
    ttt_steps: int,
    prefetch: int = PREFETCH,
    trust_remote_code: bool,
    say: Callable[[str], None],
) -> OpenInputs:
    """Open what a run trains on, in every process.

    Args:
        out_dir: of the run; a cache lies in it.
        ttt_steps: deepest training-time test of the run, by which rows are counted.
        prefetch: packs to load ahead where that gains time; the same in every process.
        say: takes a line that the user should read.

    Raises:
        ValueError: the states belong to another target or other tokens, the target cannot run as asked, or no training
            document has anything to train on.
    """
    if isinstance(inputs.features, Online):
        return _open_online(
            inputs,
            inputs.features,
            out_dir=out_dir,
            accelerator=accelerator,
            order=order,
            ttt_steps=ttt_steps,
            prefetch=prefetch if inputs.features.where == "process" else 0,
            trust_remote_code=trust_remote_code,
            say=say,
        )
    features = inputs.features
    identity = check_identity(
        features.features_dir,
        target_fingerprint=target_fingerprint(inputs.target_dir),
        tokens_fingerprint=Tokens(inputs.tokens_dir, split="train").fingerprint,
    )
    stores = [FeatureStore(features.features_dir, split=split, verify=features.verify) for split in SPLITS]
    for store in stores:
        store.require_complete()
    train, heldout = stores
    return OpenInputs(
        train=train,
        heldout=heldout,
        order=RunOrder(train.lengths, train.trained_rows(num_steps=ttt_steps), settings=order),
        prefetch=prefetch,
        identity=identity,
        online=False,
    )


def _open_online(
    inputs: TrainedInputs,
    online: Online,
    *,
    out_dir: Path,
    accelerator: Accelerator,
    order: OrderSettings,
    ttt_steps: int,
    prefetch: int,
    trust_remote_code: bool,
    say: Callable[[str], None],
) -> OpenInputs:
    identity = planned_identity(
        inputs.target_dir,
        tokens_dir=inputs.tokens_dir,
        capture_layers=online.capture_layers,
        dtype=online.dtype,
        form=online.form,
        trust_remote_code=trust_remote_code,
    )
    train, heldout = (Tokens(inputs.tokens_dir, split=split) for split in SPLITS)
    run_order = RunOrder(train.lengths.tolist(), train.trained_rows(num_steps=ttt_steps), settings=order)
    settings = TargetSettings(
        target_dir=inputs.target_dir,
        tokens_dir=inputs.tokens_dir,
        identity=identity,
        batch_tokens=online.batch_tokens,
        device=target_device(online, accelerator=accelerator),
        threads=online.threads,
        trust_remote_code=trust_remote_code,
    )
    if online.cache == "first-epoch":
        open_cache(out_dir / CACHE_NAME, identity, tokens=train)
        # Another number of processes or size of forwards makes other windows, which must not replace these.
        prefix = f"{accelerator.process_index}of{accelerator.num_processes}-{online.batch_tokens}-"
        settings = replace(settings, cache=out_dir / CACHE_NAME, shard_prefix=prefix)
    source: StateSource = TargetProcess(settings) if online.where == "process" else TargetStates(settings)
    place = "in a process of its own on" if online.where == "process" else "beside the head on"
    say(f"online: the target runs {place} {settings.device}")
    window_tokens = WINDOW_FORWARDS * online.batch_tokens
    documents: Documents = OnlineDocuments(train, split="train", source=source, window_tokens=window_tokens)
    if settings.cache is not None:
        documents = CachedDocuments(
            settings.cache,
            tokens=train,
            source=source,
            first_met=first_meetings(
                run_order, rank=accelerator.process_index, world_size=accelerator.num_processes, ahead=prefetch
            ),
            window_tokens=window_tokens,
        )
    return OpenInputs(
        train=documents,
        heldout=OnlineDocuments(heldout, split="heldout", source=source, window_tokens=window_tokens),
        order=run_order,
        prefetch=prefetch,
        identity=identity,
        online=True,
    )


def target_device(online: Online, *, accelerator: Accelerator) -> str:
    """Device of this process's target.

    Raises:
        ValueError: there is no such device here, or all processes would put their targets on one GPU.
    """
    if online.device is None:
        own = accelerator.local_process_index + int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if online.where == "process" and accelerator.device.type == "cuda" and own < torch.cuda.device_count():
            return f"cuda:{own}"
        return str(accelerator.device)
    try:
        device = torch.device(online.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"features.device={online.device} cannot be used here ({reason}); name a device such as cuda:1 or cpu, or "
            "remove the setting"
        ) from error
    if device.index is not None and accelerator.num_processes > 1:
        raise ValueError(
            f"features.device={online.device} would put the targets of all {accelerator.num_processes} processes on one "
            "device; remove it, and each process takes its own"
        )
    return online.device
