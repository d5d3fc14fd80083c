"""The stream of one completion as vLLM sends it: server-sent events, each a chunk of token ids, and a last one of counts.

Token ids are asked back (`return_token_ids`), so that a chunk's tokens are counted and not guessed from its text: under
speculative decoding a chunk holds several. The last event (`stream_options.include_usage`) has no tokens but the count
of all of them, and what the engine knows of this request: how long it waited, how many drafts were accepted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

DONE = b"[DONE]"


class BadStream(Exception):
    """A stream that is no completion of vLLM. The message is the failure a record keeps."""


@dataclass(frozen=True)
class Chunk:
    """Tokens that came together; `finish_reason` stands in the last chunk that has tokens."""

    token_ids: list[int]
    finish_reason: str | None


@dataclass(frozen=True)
class Summary:
    """The closing event.

    Attributes:
        completion_tokens: how many tokens the server says it sent.
        queue_seconds: from the engine's queue to its first step with this request; None when it does not tell.
        steps, drafted, accepted: verification steps and tokens of speculative decoding; None without it.
    """

    completion_tokens: int
    queue_seconds: float | None
    steps: int | None
    drafted: int | None
    accepted: int | None


class EventReader:
    """Bytes in any pieces in, payloads of complete events out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads of the `data:` lines that `data` completes; comments and other fields are skipped."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def read_event(payload: bytes) -> Chunk | Summary:
    """What one event says.

    Raises:
        BadStream: it is no JSON, reports an error, or holds no token ids.
    """
    try:
        event = json.loads(payload)
    except ValueError as error:
        raise BadStream(f"an event is no JSON: {excerpt(payload)}") from error
    if not isinstance(event, dict) or "error" in event or not isinstance(event.get("choices"), list):
        raise BadStream(f"the server reports an error: {excerpt(payload)}")
    try:
        return _chunk(event["choices"][0]) if event["choices"] else _summary(event)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadStream(f"an event is no chunk of vLLM ({error!r}): {excerpt(payload)}") from error


def _chunk(choice: dict[str, Any]) -> Chunk:
    token_ids = choice["token_ids"]
    if not isinstance(token_ids, list) or not all(type(token) is int for token in token_ids):
        raise TypeError("token_ids are no token ids")
    return Chunk(token_ids, choice.get("finish_reason"))


def _summary(event: dict[str, Any]) -> Summary:
    metrics = event.get("metrics") or {}
    waited = metrics.get("queue_time_ms")
    drafting = metrics.get("speculative_decoding") or {}
    return Summary(
        completion_tokens=int(event["usage"]["completion_tokens"]),
        queue_seconds=None if waited is None else float(waited) / 1000,
        steps=drafting.get("num_spec_steps"),
        drafted=drafting.get("num_draft_tokens"),
        accepted=drafting.get("num_accepted_draft_tokens"),
    )


def excerpt(payload: bytes) -> str:
    """The beginning of what a server sent, on one line."""
    return " ".join(payload[:300].decode("utf-8", "replace").split()) or "nothing"
