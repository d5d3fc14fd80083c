"""What a cell of the training benchmark is: shapes of a head, and packs of chat-like documents with random contents.

Only shapes matter for speed, so weights, tokens and states are random. What is realistic is the layout: several documents
end to end, each of them turns of a question and an answer, with the share of answer tokens that the cell asks for.

Shapes: n tokens of a document, X = captured layers times hidden size, H hidden, P teacher rows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

import torch

from eyas.heads.config import HeadConfig
from eyas.heads.slots import serving_slots, teacher_positions
from eyas.train.features.documents import Document
from eyas.train.features.teacher import HiddenTeacher

Precision = Literal["fp32", "bf16"]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PRESETS: dict[str, HeadConfig] = {
    "smollm2-135m": HeadConfig(
        hidden_size=576,
        target_hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=49152,
        draft_vocab_size=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        max_position_embeddings=32768,
        capture_layers=(2, 15, 27),
    ),
    "llama-3.1-8b": HeadConfig(
        hidden_size=4096,
        target_hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        draft_vocab_size=32000,
        rms_norm_eps=1e-5,
        rope_parameters=LLAMA3_ROPE,
        max_position_embeddings=131072,
        capture_layers=(2, 16, 29),
    ),
    "qwen3-32b": HeadConfig(
        hidden_size=5120,
        target_hidden_size=5120,
        intermediate_size=25600,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        draft_vocab_size=32000,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        max_position_embeddings=40960,
        capture_layers=(2, 32, 61),
    ),
    "tiny": HeadConfig(
        hidden_size=64,
        target_hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=512,
        draft_vocab_size=256,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=4096,
        capture_layers=(1, 2, 3),
    ),
}
"""Heads for published targets by the sizes in their config.json; `tiny` is for trying the script."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row of the table.

    Attributes:
        tokens: T, of the one pack that a step trains on.
        document_tokens: mean length of its documents.
        train_readout: train lm_head too; the peer freezes it.
    """

    preset: str
    tokens: int
    ttt_steps: int
    answer_share: float
    precision: Precision
    document_tokens: int = 1024
    train_readout: bool = False
    seed: int = 0

    @property
    def config(self) -> HeadConfig:
        """Shapes of the head."""
        return PRESETS[self.preset]


@dataclass(frozen=True)
class Work:
    """What a step of a cell has to do, whoever does it; rows and pairs per TTT step.

    Attributes:
        num_slots: slots of all documents; a document of n tokens has n-1.
        rows_K: slots that a server drafts from at each step. attended_K: keys that they attend to.
    """

    documents: int
    tokens: int
    answer_tokens: int
    num_slots: int
    rows_K: tuple[int, ...]
    attended_K: tuple[int, ...]
    num_teacher_rows: int

    @property
    def rows(self) -> int:
        """Trained rows: pairs of a slot and a step."""
        return sum(self.rows_K)


def document_lengths(tokens: int, *, mean: int, rng: random.Random) -> list[int]:
    """Lengths around `mean`, from a quarter of it to about three times, that add up to `tokens`."""
    lengths: list[int] = []
    left = tokens
    while left > 0:
        length = min(left, max(mean // 4, 8, round(rng.lognormvariate(-0.12, 0.5) * mean)))
        if left - length < max(mean // 4, 8):
            length = left
        lengths.append(length)
        left -= length
    return lengths


def answer_mask(length: int, *, share: float, rng: random.Random) -> list[bool]:
    """Turns of 48 to 512 tokens, each a question and then an answer; rounding is carried on from turn to turn."""
    mask: list[bool] = []
    owed = 0.0
    while len(mask) < length:
        turn = min(rng.randint(48, 512), length - len(mask))
        owed += share * turn
        answer = min(round(owed), turn)
        owed -= answer
        mask += [False] * (turn - answer) + [True] * answer
    return mask


def chat_documents(cell: Cell) -> list[Document]:
    """The documents of a cell's pack, the same for everyone who trains on it."""
    config, rng = cell.config, random.Random(cell.seed)
    generator = torch.Generator().manual_seed(cell.seed)
    documents = []
    for length in document_lengths(cell.tokens, mean=cell.document_tokens, rng=rng):
        mask_T = torch.tensor(answer_mask(length, share=cell.answer_share, rng=rng))
        width = config.num_captured * config.target_hidden_size
        rows = teacher_positions(mask_T).shape[0]
        documents.append(
            Document(
                token_ids_T=torch.randint(config.vocab_size, (length,), generator=generator),
                answer_mask_T=mask_T,
                captured_TX=torch.randn(length, width, generator=generator).bfloat16(),
                last_TH=None,
                teacher=HiddenTeacher(
                    torch.randn(rows, config.target_hidden_size, generator=generator).bfloat16(),
                ),
            )
        )
    return documents


def count_work(documents: list[Document], *, ttt_steps: int) -> Work:
    """Count what a step has to do, from the masks alone.

    Step i at slot t attends to the keys of slots 0..t and to its own keys of steps 1..i.
    """
    rows, attended = [0] * ttt_steps, [0] * ttt_steps
    for document in documents:
        for step, slots_S in enumerate(serving_slots(document.answer_mask_T, num_steps=ttt_steps)):
            rows[step] += slots_S.shape[0]
            attended[step] += int((slots_S + 1 + step).sum())
    return Work(
        documents=len(documents),
        tokens=sum(document.token_ids_T.shape[0] for document in documents),
        answer_tokens=sum(int(document.answer_mask_T.sum()) for document in documents),
        num_slots=sum(document.token_ids_T.shape[0] - 1 for document in documents),
        rows_K=tuple(rows),
        attended_K=tuple(attended),
        num_teacher_rows=sum(len(document.teacher) for document in documents),
    )


def random_weights(shape: tuple[int, ...], *, seed: int, dtype: torch.dtype, std: float = 0.02) -> torch.Tensor:
    """A normal matrix, made in pieces so that no float32 copy of a large one is needed."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.empty(shape, dtype=dtype)
    for piece in weights.split(8192):
        piece.copy_(torch.randn(piece.shape, generator=generator) * std)
    return weights
