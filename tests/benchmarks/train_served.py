"""Tau of heads as vLLM serves them: tokens per forward of the target, greedily, up to the end of each answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.train.features.documents import Document
from tests.engine_lab import run_cases

MAX_TOKENS = 96


def served_tau(
    heads: Mapping[str, Path],
    *,
    target_dir: Path,
    documents: Sequence[Document],
    stop_token_ids: Sequence[int],
    chain_lengths: Sequence[int],
    directory: Path,
    threads: int,
) -> dict[str, dict[str, float]]:
    """Tau by head and by drafted tokens, in float32, on the first question of each document.

    Args:
        heads: head directories by name. directory: for the engine's files.
    """
    prompts = [_prompt(document) for document in documents if bool(document.answer_mask_T.any())]
    names = [(name, length) for name in heads for length in chain_lengths]
    cases: list[dict[str, Any]] = [
        {
            "name": f"{name} {length}",
            "target": str(target_dir),
            "head": str(heads[name].resolve()),
            "method": "eagle3",
            "num_speculative_tokens": length,
            "prompts": prompts,
            "max_tokens": MAX_TOKENS,
            "max_model_len": max(map(len, prompts)) + MAX_TOKENS + 16,
        }
        for name, length in names
    ]
    found: dict[str, dict[str, float]] = {name: {} for name in heads}
    for (name, length), result in zip(names, run_cases(cases, directory, threads=threads, timeout=3600), strict=True):
        if result["error"] is not None:
            raise SystemExit(f"vLLM could not serve the head {name}: {result['error']}")
        found[name][str(length)] = tau(result["outputs"], result["accepted"], stop_token_ids=stop_token_ids)
    return found


def tau(outputs: Sequence[list[int]], accepted: Sequence[list[int]], *, stop_token_ids: Sequence[int]) -> float:
    """Tokens per step until an answer's first stop token; the engine went on to the requested length.

    Args:
        outputs: tokens of each request; the first comes from the prompt's forward. accepted: drafts accepted at each step.
    """
    steps = tokens = 0
    for output, counts in zip(outputs, accepted, strict=True):
        stops = [index for index, token in enumerate(output) if token in stop_token_ids]
        end = min([*stops, len(output) - 1])
        place = 0
        for count in counts:
            if place >= end:
                break
            gained = min(count + 1, end - place)
            steps, tokens, place = steps + 1, tokens + gained, place + gained
    return tokens / steps if steps else 0.0


def _prompt(document: Document) -> list[int]:
    """The document up to its first answer."""
    first = int(document.answer_mask_T.nonzero()[0])
    return document.token_ids_T[:first].tolist()
