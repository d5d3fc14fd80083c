"""The extract stage: one forward pass of the target over every token, hidden states into the feature store.

Documents are sorted by length into batches of at most `batch_tokens` tokens, padding included, so that padding stays
small; shards are written as they fill, and a killed stage goes on after its last complete shard.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from eyas.heads.config import default_capture_layers, load_target_config
from eyas.heads.target import DTYPES, HiddenStateCapture, load_target_model
from eyas.heads.target_source import target_fingerprint
from eyas.train.data.prepare import SPLITS
from eyas.train.features.store import StoreIdentity, shard_path, write_index, write_shard

SHARD_BYTES = 1 << 28

Capture = Callable[[Tensor], tuple[Tensor, Tensor]]


def extract(
    out_dir: Path,
    *,
    tokens_dir: Path,
    target_dir: Path,
    capture_layers: Sequence[int] | None,
    dtype: str,
    batch_tokens: int,
    threads: int | None,
    trust_remote_code: bool,
) -> dict[str, int]:
    """Write the feature store of both splits into `out_dir`.

    Args:
        capture_layers: layer ids, ascending; None takes 2, L//2, L-3, and none at all stores the last state only.
        dtype: of the target's forward pass and of the stored states.
        batch_tokens: tokens of one forward pass, padding included.
        threads: CPU threads; None leaves torch's choice.

    Returns:
        Tokens, padding and bytes.

    Raises:
        ValueError: the disk is too small, or a layer does not exist.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    config = load_target_config(target_dir, trust_remote_code=trust_remote_code)
    layers = default_capture_layers(config.num_hidden_layers) if capture_layers is None else tuple(capture_layers)
    if not all(1 <= layer <= config.num_hidden_layers for layer in layers):
        raise ValueError(f"features.capture_layers={list(layers)} must lie between 1 and {config.num_hidden_layers}")
    out_dir.mkdir(parents=True, exist_ok=True)
    splits = {split: load_file(tokens_dir / f"{split}.safetensors") for split in SPLITS}
    num_tokens = sum(int(tensors["offsets"][-1]) for tensors in splits.values())
    bytes_per_token = (len(layers) + 1) * config.hidden_size * DTYPES[dtype].itemsize
    _require_space(out_dir, num_tokens * bytes_per_token)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_target_model(target_dir, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code).to(device)
    capture = HiddenStateCapture(model, capture_layers=layers)
    shards: dict[str, int] = {}
    padding = 0
    with tqdm(total=num_tokens, unit="tok", desc="extract", disable=None) as progress:
        for split, tensors in splits.items():
            shards[split], padded = _extract_split(
                out_dir,
                split,
                tensors,
                shard_tokens=SHARD_BYTES // bytes_per_token,
                capture=capture,
                batch_tokens=batch_tokens,
                device=device,
                progress=progress,
            )
            padding += padded
    identity = StoreIdentity(
        target_fingerprint=target_fingerprint(target_dir),
        hidden_size=config.hidden_size,
        num_target_layers=config.num_hidden_layers,
        capture_layers=list(layers),
        dtype=dtype,
    )
    write_index(out_dir, identity, shards=shards)
    return {"tokens": num_tokens, "padding_tokens": padding, "bytes": num_tokens * bytes_per_token}


def _extract_split(
    out_dir: Path,
    split: str,
    tensors: dict[str, Tensor],
    *,
    shard_tokens: int,
    capture: Capture,
    batch_tokens: int,
    device: torch.device,
    progress: tqdm,
) -> tuple[int, int]:
    offsets = tensors["offsets"].tolist()
    padding = 0
    bounds = shard_bounds(offsets, shard_tokens=shard_tokens)
    for number, (first, last) in enumerate(bounds):
        begin, end = offsets[first], offsets[last]
        if not shard_path(out_dir, split=split, number=number).is_file():
            documents = [tensors["token_ids"][offsets[i] : offsets[i + 1]].long() for i in range(first, last)]
            captured, hidden, padded = _forward_all(
                documents, capture=capture, batch_tokens=batch_tokens, device=device, progress=progress
            )
            padding += padded
            write_shard(
                out_dir,
                split=split,
                number=number,
                token_ids_N=tensors["token_ids"][begin:end],
                answer_mask_N=tensors["answer_mask"][begin:end],
                offsets=tensors["offsets"][first : last + 1] - begin,
                captured_NX=torch.cat(captured),
                last_NH=torch.cat(hidden),
            )
        else:
            progress.update(end - begin)
    return len(bounds), padding


def shard_bounds(offsets: Sequence[int], *, shard_tokens: int) -> list[tuple[int, int]]:
    """Ranges of documents [first, last) whose tokens stay within `shard_tokens`; a longer document is alone."""
    bounds: list[tuple[int, int]] = []
    first = 0
    for last in range(1, len(offsets)):
        if last == len(offsets) - 1 or offsets[last + 1] - offsets[first] > shard_tokens:
            bounds.append((first, last))
            first = last
    return bounds


def _forward_all(
    documents: list[Tensor],
    *,
    capture: Capture,
    batch_tokens: int,
    device: torch.device,
    progress: tqdm,
) -> tuple[list[Tensor], list[Tensor], int]:
    """States of each document in the given order, and how many padded positions were computed."""
    captured: list[Tensor] = [torch.empty(0)] * len(documents)
    hidden: list[Tensor] = [torch.empty(0)] * len(documents)
    padding = 0
    for batch in length_batches([document.shape[0] for document in documents], batch_tokens=batch_tokens):
        width = max(documents[index].shape[0] for index in batch)
        token_ids_BT = torch.zeros((len(batch), width), dtype=torch.long)
        for row, index in enumerate(batch):
            token_ids_BT[row, : documents[index].shape[0]] = documents[index]
        captured_BTX, last_BTH = capture(token_ids_BT.to(device))
        for row, index in enumerate(batch):
            length = documents[index].shape[0]
            captured[index] = captured_BTX[row, :length].cpu()
            hidden[index] = last_BTH[row, :length].cpu()
            padding += width - length
            progress.update(length)
    return captured, hidden, padding


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


def _require_space(out_dir: Path, needed: int) -> None:
    free = shutil.disk_usage(out_dir).free
    if free < needed * 1.05 + (1 << 28):
        raise ValueError(
            f"the feature store needs {needed / 1e9:.1f} GB and {out_dir} has {free / 1e9:.1f} GB free; "
            "lower data.max_train_tokens, capture fewer layers, or set run_dir to another disk"
        )
