"""Prompts that the target makes up: `data.self_prompts`.

What people ask a model and what it can be asked is not in any file that everybody may use; the model has seen it. So
user turns are sampled from the target's own template (user_turns.py), which works for every chat model. Topics and first
words are optional: they spread the prompts of a small model, which otherwise asks the same few things. The system prompt
that sets a topic is not kept in the conversation.

The answers of a killed run lie in the files of its rounds and are not asked for again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eyas.heads.chat import TargetChat
from eyas.train.data.answers import Generate
from eyas.train.data.conversations import prompt_hash, write_records
from eyas.train.data.user_turns import SELF_SOURCE, SelfPromptSeed, UserTurns, UserTurnSettings, self_prompt_seeds

OUTPUT_NAME = "prompts.jsonl"
ROUND_PROMPTS = 8192
OPENING_WORDS = 4
MIN_PER_OPENING = 6
OPENING_SHARE = 0.002
"""So many prompts may share their first four words: self-written turns cluster badly without a cap."""


def synthesise(
    out_dir: Path,
    *,
    chat: TargetChat,
    generate: Generate,
    count: int,
    settings: UserTurnSettings,
    topics: Sequence[str] = (),
    openers: Sequence[str] = (),
) -> dict[str, Any]:
    """Sample `count` user turns and write those that can be used to `prompts.jsonl`, as conversations of one turn.

    Args:
        generate: the backend, which keeps its answers in `out_dir`.
        topics: of the system prompt before the turn; empty = no system prompt.
        openers: first words of turns; empty = the turn starts from nothing.

    Returns:
        Counts: "prompts_sampled", "prompts" (kept) and "dropped" by reason.

    Raises:
        ValueError: nothing usable was written, or the template takes no system prompt and topics are given.
    """
    user_turns = UserTurns(chat, settings=settings)
    seeds = list(self_prompt_seeds(count, topics=topics, openers=openers, seed=settings.seed))
    dropped: Counter[str] = Counter()
    texts = _sampled(seeds, user_turns=user_turns, generate=generate, dropped=dropped)
    kept = list(_distinct(texts, count=count, dropped=dropped))
    if not kept:
        raise ValueError(
            f"none of {count} sampled user turns can be used ({dict(dropped)}); this target may not write user turns from "
            "its template: set data.self_prompts.count to 0 and name data.sources"
        )
    write_records(out_dir / OUTPUT_NAME, (_record(number, text) for number, text in kept))
    return {"prompts_sampled": count, "prompts": len(kept), "dropped": dict(dropped)}


def _sampled(
    seeds: Sequence[SelfPromptSeed], *, user_turns: UserTurns, generate: Generate, dropped: Counter[str]
) -> Iterator[tuple[int, str]]:
    """Number and text of every turn that passes the rules, in order."""
    prefixes = {system: user_turns.chat.user_turn_prefix(system=system) for system in {seed.system for seed in seeds}}
    for begin in range(0, len(seeds), ROUND_PROMPTS):
        asked = list(enumerate(seeds[begin : begin + ROUND_PROMPTS], start=begin))
        requests = [
            user_turns.request(_name(number), prefix=prefixes[seed.system] + seed.opener) for number, seed in asked
        ]
        answers = generate(requests, f"prompts-{begin // ROUND_PROMPTS:05d}")
        for number, seed in asked:
            text, refusal = user_turns.read(answers[_name(number)], opener=seed.opener)
            if refusal is None:
                yield number, text
            else:
                dropped[refusal] += 1


def _distinct(texts: Iterator[tuple[int, str]], *, count: int, dropped: Counter[str]) -> Iterator[tuple[int, str]]:
    """Without repeated prompts, and without those whose first words are already common."""
    most = max(MIN_PER_OPENING, round(OPENING_SHARE * count))
    seen: set[int] = set()
    openings: Counter[int] = Counter()
    for number, text in texts:
        key, opening = prompt_hash(text), prompt_hash(" ".join(text.split()[:OPENING_WORDS]))
        if key in seen:
            dropped["repeated"] += 1
        elif openings[opening] >= most:
            dropped["common_opening"] += 1
        else:
            seen.add(key)
            openings[opening] += 1
            yield number, text


def _name(number: int) -> str:
    return f"{SELF_SOURCE}-{number:06d}"


def _record(number: int, text: str) -> dict[str, Any]:
    """No split: collect decides it, as for every other prompt."""
    return {"id": _name(number), "source": SELF_SOURCE, "messages": [{"role": "user", "content": text}]}
