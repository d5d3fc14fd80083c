"""The prepare stage: conversations -> token files with exact answer masks.

One safetensors file a split: `token_ids` and `answer_mask` of all conversations end to end, `offsets` of where each
begins, `prompt_lengths` of the first prompt. Training conversations are shuffled once here, by seed, so that a token
limit takes a fair sample of the sources.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save
from torch import Tensor

from eyas.heads.chat import TargetChat
from eyas.heads.files import write_bytes, write_json
from eyas.train.data.conversations import Conversation, read_conversations

SPLITS: tuple[Literal["train", "heldout"], ...] = ("train", "heldout")


def prepare(
    out_dir: Path,
    *,
    target_dir: Path,
    conversations: Path,
    max_length: int,
    max_train_tokens: int | None,
    on_bad_line: Literal["stop", "skip"],
    trust_remote_code: bool,
    seed: int,
) -> dict[str, int]:
    """Tokenise a conversation file for a target.

    Args:
        max_length: longer conversations are cut to this many tokens.
        max_train_tokens: stop filling the training split here; None takes all.

    Returns:
        Counts of conversations, tokens, answer tokens and everything left out.

    Raises:
        ValueError: bad input (see `read_conversations`), or a split ends up without a trainable answer token.
    """
    chat = TargetChat(target_dir, trust_remote_code=trust_remote_code)
    rows, counts = read_conversations(conversations, on_bad_line=on_bad_line)
    random.Random(seed).shuffle(rows)
    left_out: Counter[str] = Counter()
    documents = {
        split: _encode_split(
            [row for row in rows if row.split == split],
            chat=chat,
            max_length=max_length,
            max_tokens=max_train_tokens if split == "train" else None,
            on_bad_line=on_bad_line,
            left_out=left_out,
        )
        for split in SPLITS
    }
    for split in SPLITS:
        _require_documents(split, documents[split])
    for split in SPLITS:
        counts |= _write_split(out_dir, split, documents[split])
    write_json(out_dir / "stop_tokens.json", chat.stop_token_ids)
    return {**counts, **{f"conversations_{reason}": number for reason, number in sorted(left_out.items())}}


def _encode_split(
    rows: list[Conversation],
    *,
    chat: TargetChat,
    max_length: int,
    max_tokens: int | None,
    on_bad_line: Literal["stop", "skip"],
    left_out: Counter[str],
) -> list[tuple[Tensor, Tensor]]:
    documents: list[tuple[Tensor, Tensor]] = []
    total = 0
    for row in rows:
        try:
            encoded = chat.encode_conversation(row.messages, truncated=row.truncated)
        except ValueError as error:
            if on_bad_line == "stop":
                raise ValueError(
                    f"conversation {row.id!r}: {error}; set data.on_bad_line=skip to leave it out"
                ) from error
            left_out["unusable"] += 1
            continue
        mask_T = torch.tensor(encoded.answer_mask[:max_length], dtype=torch.bool)
        if int(mask_T.sum()) < 2:
            left_out["answer_too_short_or_cut"] += 1
            continue
        if max_tokens is not None and total + mask_T.shape[0] > max_tokens:
            left_out["over_token_limit"] += 1
            continue
        left_out["cut_at_max_length"] += len(encoded.token_ids) > max_length
        total += mask_T.shape[0]
        documents.append((torch.tensor(encoded.token_ids[:max_length], dtype=torch.int32), mask_T))
    return documents


def _require_documents(split: str, documents: list[tuple[Tensor, Tensor]]) -> None:
    if not documents:
        raise ValueError(
            f"the {split} split has no conversation with an answer of two tokens or more; add conversations, give some "
            f'of them "split": "{split}", or raise data.max_length'
        )


def _write_split(out_dir: Path, split: str, documents: list[tuple[Tensor, Tensor]]) -> dict[str, int]:
    lengths = torch.tensor([mask_T.shape[0] for _, mask_T in documents])
    offsets = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0)))
    mask = torch.cat([mask_T for _, mask_T in documents])
    tensors = {"token_ids": torch.cat([ids_T for ids_T, _ in documents]), "answer_mask": mask, "offsets": offsets}
    write_bytes(out_dir / f"{split}.safetensors", save(tensors))
    return {
        f"{split}_conversations": len(documents),
        f"{split}_tokens": int(offsets[-1]),
        f"{split}_answer_tokens": int(mask.sum()),
    }
