"""How many tokens a recipe's conversations have, and how many of them are answers: counted, sampled, or told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eyas.heads.chat import TargetChat
from eyas.recipes.data_stages import prepare_settings, training_sources
from eyas.recipes.estimate import Tokens
from eyas.recipes.generation import target_chat
from eyas.recipes.packaged_targets import is_packaged
from eyas.recipes.run import Run
from eyas.recipes.schema_data import Source
from eyas.recipes.sources import local_files, place_of
from eyas.recipes.stage import MANIFEST, read_manifest
from eyas.train.data.sources import JSON_LINES, SourceReader

SAMPLED_CONVERSATIONS = 200


@dataclass(frozen=True, kw_only=True)
class TokenEstimate:
    """Tokens of both splits, documents, and how they are known; `at_most`: all that the recipe's limits let in."""

    tokens: Tokens
    documents: int
    how: str
    at_most: bool = False

    @property
    def mean_length(self) -> float:
        return self.tokens.total / max(self.documents, 1)


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """What was read of one source, and what that says of all of it."""

    conversations: int
    heldout_share: float
    mean_tokens: float
    mean_answers: float


def estimate_tokens(run: Run, *, tokens: int | None, answer_share: float | None) -> TokenEstimate | None:
    """Tokens of a run's conversations, both splits; None when nothing on this machine tells them.

    Args:
        tokens, answer_share: what the user says they are. Without `tokens` those that are known are taken, or at most those
            that the recipe's limits let in; without `answer_share` the share that is known, or 1 of a limit.

    Raises:
        ValueError: a share outside 0 to 1, or one that cannot be known for `tokens`.
    """
    if answer_share is not None and not 0 < answer_share <= 1:
        raise ValueError(f"--answer-share {answer_share:g}: must be above 0 and at most 1")
    if tokens is not None and tokens < 1:
        raise ValueError(f"--tokens {tokens}: must be at least 1")
    known = _prepared(run) or _sampled(run)
    if tokens is not None:
        return _told(run, tokens=tokens, answer_share=answer_share, known=known)
    found = known or _limited(run)
    if found is None or answer_share is None:
        return found
    total = found.tokens.total
    answers = Tokens(total=total, answers=round(total * answer_share))
    return replace(found, tokens=answers, how=f"{found.how}; share of answers as told")


def _told(run: Run, *, tokens: int, answer_share: float | None, known: TokenEstimate | None) -> TokenEstimate:
    share = answer_share if answer_share is not None else (known.tokens.answer_share if known else None)
    if share is None:
        raise ValueError("--tokens: the share of answers is not known either; give --answer-share as well")
    mean = known.mean_length if known else run.recipe.data.max_length
    told = Tokens(total=tokens, answers=round(tokens * share))
    return TokenEstimate(tokens=told, documents=max(1, round(tokens / mean)), how="as told")


def _limited(run: Run) -> TokenEstimate | None:
    """The most that a recipe with data.max_train_tokens lets in: conversations of full length that are all answers."""
    data = run.recipe.data
    if data.max_train_tokens is None or data.max_heldout is None:
        return None
    total = data.max_train_tokens + data.max_heldout * data.max_length
    return TokenEstimate(
        tokens=Tokens(total=total, answers=total),
        documents=max(1, round(total / data.max_length)),
        how="at most (data.max_train_tokens and data.max_heldout)",
        at_most=True,
    )


def _prepared(run: Run) -> TokenEstimate | None:
    """Exact counts, once the prepare stage stands with the recipe's settings."""
    directory = run.directory("prepare")
    if not (directory / MANIFEST).is_file():
        return None
    manifest = read_manifest(directory)
    if manifest["settings"] != prepare_settings(run):
        return None
    total, answers, documents = (
        sum(manifest["counts"][f"{split}_{what}"] for split in ("train", "heldout"))
        for what in ("tokens", "answer_tokens", "documents")
    )
    return TokenEstimate(
        tokens=Tokens(total=total, answers=answers), documents=documents, how="counted by the prepare stage"
    )


def _sampled(run: Run) -> TokenEstimate | None:
    """A sample of each source, tokenised and scaled; None when one of them is no JSON lines file on this machine, or the
    target's tokenizer is not here."""
    data, sources = run.recipe.data, training_sources(run)
    if is_packaged(run.target_dir) or data.self_prompts.count or not all(_is_readable(source) for source in sources):
        return None
    chat = target_chat(run)
    samples = [
        _sample(source, chat=chat, max_length=data.max_length, heldout_share=data.heldout_share) for source in sources
    ]
    taken = _mixed(sources, samples, continues=data.when_exhausted == "continue", limit=data.max_conversations)
    everything = sum(taken)
    if not everything or not any(sample.mean_tokens for sample in samples):
        return None
    pairs = list(zip(taken, samples, strict=True))
    heldout = sum(count * sample.heldout_share for count, sample in pairs)
    if data.max_heldout is not None:
        heldout = min(heldout, data.max_heldout)
    mean = sum(count * sample.mean_tokens for count, sample in pairs) / everything
    share = sum(count * sample.mean_answers for count, sample in pairs) / everything / mean
    train = (everything - sum(count * sample.heldout_share for count, sample in pairs)) * mean
    train = train if data.max_train_tokens is None else min(train, data.max_train_tokens)
    total = round(train + heldout * mean)
    how = "estimated from samples of the local files"
    if data.regenerate:
        how += ", with the answers they have now"
    return TokenEstimate(
        tokens=Tokens(total=total, answers=round(total * share)), documents=max(1, round(total / mean)), how=how
    )


def _is_readable(source: Source) -> bool:
    files = local_files(source)
    return bool(files) and all(path.name.endswith(JSON_LINES) for path in files)


def _sample(source: Source, *, chat: TargetChat, max_length: int, heldout_share: float) -> _Sample:
    """The first conversations of a source, as the collect and prepare stages would take them."""
    reader = SourceReader(place_of(source), on_bad_line="skip", seed=0)
    lengths, answers, heldout = [], [], 0
    rows = reader.conversations(heldout_share=heldout_share)
    for row, _ in zip(rows, range(SAMPLED_CONVERSATIONS), strict=False):
        try:
            documents = chat.encode_conversation(row.messages, truncated=row.truncated, tools=row.tools)
        except ValueError:
            continue
        heldout += row.split == "heldout"
        lengths.append(sum(min(len(document.token_ids), max_length) for document in documents))
        answers.append(sum(sum(document.answer_mask[:max_length]) for document in documents))
    usable, read = len(lengths), max(reader.tally.read, 1)
    lines = sum(_num_lines(path) for path in local_files(source))
    return _Sample(
        conversations=min(round(lines * usable / read), source.limit or lines),
        heldout_share=heldout / usable if usable == lines else heldout_share,
        mean_tokens=sum(lengths) / max(usable, 1),
        mean_answers=sum(answers) / max(usable, 1),
    )


def _mixed(sources: Sequence[Source], samples: Sequence[_Sample], *, continues: bool, limit: int | None) -> list[float]:
    """Conversations taken of each source by its weight, as the mix takes them."""
    taken = [float(sample.conversations) for sample in samples]
    if sources[0].weight is not None and not continues:
        rounds = min(count / (source.weight or 1.0) for count, source in zip(taken, sources, strict=True))
        taken = [rounds * (source.weight or 1.0) for source in sources]
    scale = 1.0 if limit is None else min(1.0, limit / max(sum(taken), 1.0))
    return [count * scale for count in taken]


def _num_lines(path: Path) -> int:
    from eyas.train.data.conversations import read_lines

    return sum(1 for _ in read_lines(path))
