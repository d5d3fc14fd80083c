"""Near-duplicates against an all-pairs reference on texts, and the rate at which pairs are overlooked."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.train.data import dedupe
from eyas.train.data.conversations import Conversation, write_conversations
from eyas.train.data.dedupe import Bands, band_hashes, bands_for, exact_key, near_duplicate_mask, shingles, similarity

WORDS = [f"{a}{b}{c}" for a in "btkmnr" for b in "aeiou" for c in ("sh", "ll", "nd", "rt")]


def ask(*turns: str, system: str | None = None, tools: list[dict[str, Any]] | None = None) -> Conversation:
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    for turn in turns:
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": "yes"}]
    return Conversation("x", "train", "s", False, messages, tools)


def pieces(row: Conversation) -> set[tuple[str, str]]:
    """The shingles of a prompt as texts."""
    system = "".join(m["content"] for m in row.messages if m["role"] == "system")
    text = "\n".join(" ".join(m["content"].lower().split()) for m in row.messages if m["role"] == "user").ljust(8)
    return {(system, text[start : start + 8]) for start in range(len(text) - 7)}


def jaccard(first: set[Any], second: set[Any]) -> float:
    return len(first & second) / len(first | second)


def reference(rows: list[Conversation], threshold: float) -> list[bool]:
    """All pairs, on texts."""
    kept: list[set[Any]] = []
    dropped = []
    for row in rows:
        own = pieces(row)
        dropped.append(any(jaccard(own, other) >= threshold for other in kept))
        if not dropped[-1]:
            kept.append(own)
    return dropped


def mask(folder: Path, rows: list[Conversation], threshold: float, *, seed: int = 0) -> list[bool]:
    write_conversations(folder / "c.jsonl", rows)
    lines = (folder / "c.jsonl").read_bytes().splitlines(keepends=True)
    offsets = [sum(map(len, lines[:number])) for number in range(len(lines))]
    bands = bands_for(threshold)
    return near_duplicate_mask(
        folder / "c.jsonl", offsets=offsets, bands=bands, scratch=folder / "bands", seed=seed
    ).tolist()


def corpus(number: int, *, seed: int) -> list[Conversation]:
    """Prompts of which about half are edited copies of earlier ones, a little or a lot."""
    generator = random.Random(seed)
    rows: list[Conversation] = []
    for _ in range(number):
        if rows and generator.random() < 0.5:
            base = generator.choice(rows)
            text = base.messages[-2]["content"].split()
            for _ in range(generator.choice([0, 1, 2, 4, 8])):
                text[generator.randrange(len(text))] = generator.choice(WORDS)
        else:
            text = generator.choices(WORDS, k=generator.randint(8, 40))
        rows.append(ask(" ".join(text), system=generator.choice([None, None, "Be short."])))
    return rows


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9, 1.0])
def test_what_is_dropped_is_what_all_pairs_drop(tmp_path: Path, threshold: float) -> None:
    rows = corpus(300, seed=1)
    expected = reference(rows, threshold)
    assert 10 < sum(expected) < 200
    assert mask(tmp_path, rows, threshold) == expected


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.text(alphabet="ab ", min_size=1, max_size=30) | st.text(min_size=1, max_size=12), max_size=12),
    threshold=st.floats(0.5, 1.0),
    seed=st.integers(0, 5),
)
def test_nothing_is_dropped_that_is_not_like_a_kept_one_before(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], threshold: float, seed: int
) -> None:
    rows = [ask(text) for text in texts]
    dropped = mask(tmp_path_factory.mktemp("near"), rows, threshold, seed=seed)
    kept = [pieces(row) for row, drop in zip(rows, dropped, strict=True) if not drop]
    for index, (row, drop) in enumerate(zip(rows, dropped, strict=True)):
        if drop:
            before = [pieces(other) for other, gone in zip(rows[:index], dropped[:index], strict=True) if not gone]
            assert any(jaccard(pieces(row), other) >= threshold for other in before)
    assert len({frozenset(own) for own in kept}) == len(kept)  # equal sets agree in every band


def test_a_chain_of_small_edits_is_compared_with_the_kept_ones_only(tmp_path: Path) -> None:
    text = random.Random(0).choices(WORDS, k=40)
    rows = []
    for step in range(0, 40, 2):
        text[step] = "changed"
        rows.append(ask(" ".join(text)))
    expected = reference(rows, 0.8)
    assert mask(tmp_path, rows, 0.8) == expected
    assert 1 < expected.count(False) < 10


def test_many_copies_are_one(tmp_path: Path) -> None:
    rows = [ask("What is the capital of France? " + "x" * (number % 3)) for number in range(400)]
    assert mask(tmp_path, rows, 0.8).count(False) == 1


def test_fast_pieces_are_the_slow_ones() -> None:
    first, second = ask("What is the capital of France?"), ask("what is  the capital of Françe, then?", "And Spain?")
    assert similarity(shingles(first), shingles(second)) == jaccard(pieces(first), pieces(second))
    assert len(shingles(first)) == len(pieces(first))
    assert len(shingles(ask("hi"))) == 1
    assert similarity(shingles(ask("😀😀")), shingles(ask("😀"))) == 0.0


def test_another_instruction_is_another_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    plain, system, tool = ask("Yes?"), ask("Yes?", system="Sing."), ask("Yes?", tools=tools)
    assert len({exact_key(row) for row in (plain, system, tool, ask("Yes?", "No?"))}) == 4
    assert exact_key(plain) == exact_key(ask("  yes? "))
    assert exact_key(ask("3+4")) != exact_key(ask("3-4"))
    assert similarity(shingles(plain), shingles(system)) == similarity(shingles(plain), shingles(tool)) == 0.0
    assert similarity(shingles(system), shingles(ask("yes?", system="sing."))) == 1.0


@pytest.mark.parametrize("common", [0.6, 0.7, 0.8])
def test_pairs_are_overlooked_as_often_as_is_said(common: float) -> None:
    """`Bands.missed` against 600 pairs of sets of a known similarity."""
    bands = Bands(0.8, rows=7)
    generator = np.random.default_rng(0)
    shared = 120
    alone = round(shared * (1 - common) / common / 2)
    missed, trials = 0, 600
    for trial in range(trials):
        numbers = generator.integers(0, 1 << 64, size=shared + 2 * alone, dtype=np.uint64)
        first = band_hashes(numbers[: shared + alone], bands=bands, seed=trial)
        second = band_hashes(np.concatenate((numbers[:shared], numbers[shared + alone :])), bands=bands, seed=trial)
        missed += not (first == second).any()
    expected = bands.missed(shared / (shared + 2 * alone))
    assert abs(missed / trials - expected) < 4 * math.sqrt(expected * (1 - expected) / trials) + 1 / trials


def test_long_prompts_are_hashed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.random.default_rng(0).integers(0, 1 << 64, size=1000, dtype=np.uint64)
    whole = band_hashes(numbers, bands=bands_for(0.8), seed=3)
    monkeypatch.setattr(dedupe, "_BLOCK", 7)
    assert (band_hashes(numbers, bands=bands_for(0.8), seed=3) == whole).all()


def test_bands_keep_the_promised_rate() -> None:
    rows = []
    for threshold in (0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 1.0):
        bands = bands_for(threshold)
        rows.append(bands.rows)
        assert bands.missed(threshold) <= 0.01
        assert bands.rows == dedupe.MAX_ROWS or Bands(threshold, bands.rows + 1).missed(threshold) > 0.01
    assert rows == sorted(rows)
    for wrong in (0.0, 0.49, 1.01, math.nan):
        with pytest.raises(ValueError, match=r"data\.near_duplicates"):
            bands_for(wrong)
