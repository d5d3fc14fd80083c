"""How many tokens a recipe's conversations have, and how many of them are answers: counted, sampled or bounded."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eyas.recipes.data_stages import training_sources
from eyas.recipes.estimate import Tokens
from eyas.recipes.generation import target_chat
from eyas.recipes.run import Run
from eyas.recipes.sources import local_files
from eyas.recipes.stage import MANIFEST, read_manifest

SAMPLED_CONVERSATIONS = 200
JSON_LINES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True, kw_only=True)
class TokenEstimate:
    """Tokens, conversations, and how they are known; `upper` when it is a bound and no estimate."""

    tokens: Tokens
    conversations: int
    how: str
    upper: bool = False

    @property
    def mean_length(self) -> float:
        return self.tokens.total / max(self.conversations, 1)


def estimate_tokens(run: Run, *, tokens: int | None, answer_share: float | None) -> TokenEstimate | None:
    """Tokens of a run's conversations, both splits; None when nothing on this machine tells them.

    Args:
        tokens, answer_share: what the user says they are; both, or the first alone with a sampled share.

    Raises:
        ValueError: a share outside 0 to 1, or one that cannot be known for `tokens`.
    """
    if answer_share is not None and not 0 < answer_share <= 1:
        raise ValueError(f"--answer-share {answer_share:g}: must be above 0 and at most 1")
    if tokens is not None and tokens < 1:
        raise ValueError(f"--tokens {tokens}: must be at least 1")
    known = _prepared(run) or _sampled(run)
    if tokens is not None:
        share = answer_share if answer_share is not None else (known.tokens.answer_share if known else None)
        if share is None:
            raise ValueError("--tokens: the share of answers is not known either; give --answer-share as well")
        mean = known.mean_length if known else run.recipe.data.max_length
        told = Tokens(total=tokens, answers=round(tokens * share))
        return TokenEstimate(tokens=told, conversations=max(1, round(tokens / mean)), how="as told")
    return known


def _prepared(run: Run) -> TokenEstimate | None:
    """Exact counts, once the prepare stage stands."""
    directory = run.directory("prepare")
    if not (directory / MANIFEST).is_file():
        return None
    counts = read_manifest(directory)["counts"]
    total, answers, conversations = (
        sum(counts[f"{split}_{what}"] for split in ("train", "heldout"))
        for what in ("tokens", "answer_tokens", "documents")
    )
    return TokenEstimate(
        tokens=Tokens(total=total, answers=answers), conversations=conversations, how="counted by the prepare stage"
    )


def _sampled(run: Run) -> TokenEstimate | None:
    """A sample of the local JSON lines files, tokenised and scaled to their size."""
    from eyas.train.data.conversations import iterate_conversations

    data = run.recipe.data
    files = [path for source in training_sources(run) if source.name != "self" for path in local_files(source)]
    if not files or data.self_prompts.count or not all(path.name.endswith(JSON_LINES) for path in files):
        return None
    chat = target_chat(run)
    total = answers = conversations = 0
    size_read = size_all = 0
    for path in files:
        lengths = list(_line_lengths(path))
        size_all += sum(lengths)
        size_read += sum(lengths[:SAMPLED_CONVERSATIONS])
        rows = iterate_conversations(path, on_bad_line="skip")
        for row, _ in zip(rows, range(SAMPLED_CONVERSATIONS), strict=False):
            try:
                documents = chat.encode_conversation(row.messages, truncated=row.truncated, tools=row.tools)
            except ValueError:
                continue
            conversations += 1
            total += sum(min(len(document.token_ids), data.max_length) for document in documents)
            answers += sum(sum(document.answer_mask[: data.max_length]) for document in documents)
    if not total:
        return None
    return _scaled(run, Tokens(total=total, answers=answers), conversations, scale=size_all / size_read)


def _scaled(run: Run, sample: Tokens, conversations: int, *, scale: float) -> TokenEstimate:
    limit = run.recipe.data.max_train_tokens
    if limit is not None and sample.total * scale > limit:
        scale = limit * (1 + run.recipe.data.heldout_share) / sample.total
    tokens = Tokens(total=round(sample.total * scale), answers=round(sample.answers * scale))
    how = f"estimated from {conversations:,} conversations of the local files"
    if run.recipe.data.regenerate:
        how += ", with the answers they have now"
    return TokenEstimate(tokens=tokens, conversations=max(1, round(conversations * scale)), how=how)


def _line_lengths(path: Path) -> Iterator[int]:
    open_binary = gzip.open if path.suffix == ".gz" else open
    with open_binary(path, "rb") as stream:
        for line in stream:
            if line.strip():
                yield len(line)
