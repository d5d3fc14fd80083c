"""The collect stage: many sources -> one conversation file, without duplicates, split, and free of evaluation prompts.

    read, check, filter, drop equal prompts, mix     -> .work/rows.jsonl        (first pass, train/data/gather.py)
    drop near-duplicates, limit the held-out side                               (lines re-read by offset)
    drop training prompts that overlap evaluation's  -> conversations.jsonl     (second pass)

Held-out prompts are evaluation prompts too: a training conversation that shares a passage with one is dropped. Of a held-out
conversation the first turn is guarded, and later turns that are long enough for an n-gram; "thank you" is in many
conversations and says nothing about what was seen.

Texts of the training side are never held in memory, only about 120 bytes a conversation. Everything dropped is counted
under the source it came from; for every source `read` is `kept` plus all of `dropped`.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from eyas.train.data.contamination import PromptGuard, words
from eyas.train.data.conversations import (
    HELDOUT_SHARE,
    Conversation,
    OnBadLine,
    iterate_conversations,
    read_at,
    write_conversations,
    write_records,
)
from eyas.train.data.dedupe import Bands, bands_for, near_duplicate_mask
from eyas.train.data.filters import Filters
from eyas.train.data.gather import Gathered, UniqueIds, gather
from eyas.train.data.sources import Source, SourceReader

CONVERSATIONS_NAME = "conversations.jsonl"
EVALUATION_PROMPTS_NAME = "evaluation_prompts.jsonl"
LONG_TURN_WORDS = 13
OVERLAPS = "overlaps_"

# What is decided on a gathered conversation before the guard looks at it, and the word it is counted under.
KEPT, NEAR_DUPLICATE, HELDOUT_OVER_LIMIT = range(3)
FATES = (None, "near_duplicate", "heldout_over_limit")


def collect(
    out_dir: Path,
    *,
    sources: Sequence[Source],
    evaluation: Sequence[Source] = (),
    evaluation_prompts: Sequence[str] = (),
    guard: bool = True,
    guard_ngram: int | None = 13,
    near_duplicates: float | None = None,
    filters: Filters | None = None,
    when_exhausted: Literal["stop", "continue"] = "stop",
    max_conversations: int | None = None,
    heldout_share: float = HELDOUT_SHARE,
    max_heldout: int | None = None,
    on_bad_line: OnBadLine = "stop",
    seed: int = 0,
) -> dict[str, Any]:
    """Write `conversations.jsonl`, and `evaluation_prompts.jsonl` with the prompts that were guarded, into `out_dir`.

    Args:
        evaluation: sources of which only the user turns are read, to be kept out of training.
        evaluation_prompts: further prompts to be kept out of training.
        guard: False leaves overlapping prompts in, those of the held-out side too.
        guard_ngram: words in a row that count as overlap; None compares whole prompts only.
        near_duplicates: Jaccard similarity from which the later prompt is dropped; None drops equal prompts only.
        max_conversations: that many are taken from the mix; what is dropped later is not replaced.
        heldout_share: of prompts, by hash, where records do not say their split.
        max_heldout: held-out conversations at most; those with the lowest hashes stay, the others are dropped.
        seed: of the order of packaged prompts, and of the hash functions that look for near-duplicates.

    Returns:
        Counts: `sources` and `evaluation` by name, `dropped` by reason, `guard`, and totals.

    Raises:
        ValueError: a source cannot be read or has a bad row, settings contradict each other, or nothing is left.
    """
    _check_sources(sources, evaluation)
    bands = None if near_duplicates is None else bands_for(near_duplicates)
    readers = [SourceReader(source, on_bad_line=on_bad_line, seed=seed) for source in sources]
    guarded, evaluation_counts = _evaluation_prompts(evaluation, on_bad_line=on_bad_line, seed=seed)
    guarded += [(text, "evaluation_prompts") for text in evaluation_prompts]
    with _scratch(out_dir / ".work") as work:
        rows = work / "rows.jsonl"
        gathered = gather(
            rows,
            readers,
            filters=filters or Filters(),
            when_exhausted=when_exhausted,
            max_conversations=max_conversations,
            heldout_share=heldout_share,
        )
        fates = _fates(rows, gathered, bands=bands, max_heldout=max_heldout, seed=seed)
        heldout = list(_heldout_prompts(rows, gathered, fates)) if guard else []
        guards = {
            "evaluation": PromptGuard((text for text, _ in guarded), ngram=guard_ngram),
            "heldout": PromptGuard(heldout, ngram=guard_ngram),
        }
        kept: Counter[str] = Counter()
        chosen = _chosen(rows, gathered, fates, readers=readers, guards=guards if guard else {}, kept=kept)
        write_conversations(out_dir / CONVERSATIONS_NAME, chosen)
    guarded = [*guarded, *((text, "heldout") for text in heldout)] if guard else []
    write_records(out_dir / EVALUATION_PROMPTS_NAME, ({"text": text, "from": origin} for text, origin in guarded))
    counts = _counts(readers, kept, num_guarded=len(guarded)) | {"evaluation": evaluation_counts}
    if bands is not None:
        counts["near_duplicates"] = asdict(bands) | {"missed_at_threshold": bands.missed(bands.threshold)}
    return counts


def _check_sources(sources: Sequence[Source], evaluation: Sequence[Source]) -> None:
    if not sources:
        raise ValueError("data.sources: there are none; list at least one")
    for group in (sources, evaluation):
        names = Counter(source.name for source in group)
        key = "data.sources" if group is sources else "data.guard.sources"
        repeated = [name for name, number in names.items() if number > 1]
        if repeated:
            raise ValueError(f"{key}: several are called {repeated[0]!r}; give each a name of its own")
    weighted = [source.name for source in evaluation if source.weight is not None]
    if weighted:
        raise ValueError(f"data.guard.sources: {weighted[0]!r} has a weight, which means nothing there; remove it")


def _evaluation_prompts(
    evaluation: Sequence[Source], *, on_bad_line: OnBadLine, seed: int
) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """User turns of all evaluation sources with the source of each, and counts by source."""
    prompts: list[tuple[str, str]] = []
    counts: dict[str, Any] = {}
    for source in evaluation:
        reader = SourceReader(source, on_bad_line=on_bad_line, seed=seed)
        before = len(prompts)
        prompts += [(text, source.name) for text in reader.prompts()]
        reader.close()
        counts[source.name] = _tally(reader) | {"prompts": len(prompts) - before}
    return prompts, counts


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """A directory that is gone when the block ends; a killed run's is used again."""
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def _fates(rows: Path, gathered: Gathered, *, bands: Bands | None, max_heldout: int | None, seed: int) -> np.ndarray:
    """What becomes of each gathered conversation before the guard looks at it: uint8 [n], a number of `FATES`.

    Of the held-out side, the prompts with the highest hashes are dropped, whatever order they came in.
    """
    fates = np.full(len(gathered), KEPT, dtype=np.uint8)
    if bands is not None:
        scratch = rows.with_name("bands")
        near = near_duplicate_mask(rows, offsets=gathered.offsets, bands=bands, scratch=scratch, seed=seed)
        fates[near] = NEAR_DUPLICATE
    heldout = np.flatnonzero((np.array(gathered.heldout) == 1) & (fates == KEPT))
    if max_heldout is not None and len(heldout) > max_heldout:
        by_hash = np.argsort(np.array(gathered.prompts)[heldout], kind="stable")
        fates[heldout[by_hash[max_heldout:]]] = HELDOUT_OVER_LIMIT
    return fates


def _heldout_prompts(rows: Path, gathered: Gathered, fates: np.ndarray) -> Iterator[str]:
    """First user turns of the held-out side, and its later ones that are long enough to be told by an n-gram."""
    with rows.open("rb") as stream:
        for index in np.flatnonzero((np.array(gathered.heldout) == 1) & (fates == KEPT)):
            first, *later = _user_turns(read_at(stream, gathered.offsets[index]))
            yield first
            yield from (text for text in later if len(words(text)) >= LONG_TURN_WORDS)


def _chosen(
    rows: Path,
    gathered: Gathered,
    fates: np.ndarray,
    *,
    readers: Sequence[SourceReader],
    guards: Mapping[str, PromptGuard],
    kept: Counter[str],
) -> Iterator[Conversation]:
    """The second pass: conversations that stay, with ids that occur once; all others are counted."""
    ids = UniqueIds(gathered.ids)
    conversations = iterate_conversations(rows, on_bad_line="stop")
    for index, conversation in enumerate(tqdm(conversations, desc="guard", total=len(gathered), disable=None)):
        tally = readers[gathered.sources[index]].tally
        reason = FATES[fates[index]]
        if reason is None and conversation.split == "train":
            reason = _overlap(conversation, guards)
        if reason is not None:
            tally.dropped[reason] += 1
            continue
        tally.kept += 1
        kept[conversation.split] += 1
        yield replace(conversation, id=ids.unique(conversation.id))


def _overlap(conversation: Conversation, guards: Mapping[str, PromptGuard]) -> str | None:
    """The word under which a training conversation that overlaps a guarded prompt is counted."""
    for name, guard in guards.items():
        found = {guard.overlap(text) for text in _user_turns(conversation)}
        kind = "exact" if "exact" in found else "ngram" if "ngram" in found else None
        if kind is not None:
            return f"{OVERLAPS}{name}_{kind}"
    return None


def _counts(readers: Sequence[SourceReader], kept: Counter[str], *, num_guarded: int) -> dict[str, Any]:
    dropped: Counter[str] = Counter()
    for reader in readers:
        dropped += reader.tally.dropped
    if not kept["train"]:
        raise ValueError(
            f"no training conversation is left of all sources; dropped: {dict(dropped) or 'none'}, held out: "
            f"{kept['heldout']}; relax data.filters or data.guard, or add sources"
        )
    overlaps = {
        kind: sum(n for reason, n in dropped.items() if reason.startswith(OVERLAPS) and reason.endswith(kind))
        for kind in ("exact", "ngram")
    }
    return {
        "conversations": kept.total(),
        "train_conversations": kept["train"],
        "heldout_conversations": kept["heldout"],
        "sources": {reader.source.name: _tally(reader) for reader in readers},
        "dropped": dict(sorted(dropped.items())),
        "guard": overlaps | {"evaluation_prompts": num_guarded},
    }


def _tally(reader: SourceReader) -> dict[str, Any]:
    tally = reader.tally
    assert tally.read == tally.kept + tally.dropped.total(), "a row was lost"
    return vars(tally) | {"dropped": dict(sorted(tally.dropped.items()))}


def _user_turns(conversation: Conversation) -> list[str]:
    return [message["content"] for message in conversation.messages if message["role"] == "user"]
