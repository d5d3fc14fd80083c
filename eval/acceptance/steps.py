"""Which engine step brought which tokens of an answer.

The engine tells per request how many tokens each *drafted* step accepted; it does not tell when that was, nor how
many steps ran without a draft (k = 0 in a schedule, no n-gram found). The chunks in which the answer came out tell
the rest: after the first, which the prefill brings, every chunk is one decode step, of `accepted + 1` tokens unless the
end of the answer cut it.

A step that accepted nothing and a step without a draft both bring one token. Where both kinds lie between two steps that
accepted something, only their numbers are known; they are then spread evenly.
"""

from __future__ import annotations

from collections.abc import Sequence

from eyas.eval.records import RequestRecord


def accepted_counts(request: RequestRecord) -> list[int]:
    """Accepted tokens of each drafted step; empty where nothing was drafted."""
    return request.per_step_accepted or []


def received_counts(request: RequestRecord) -> list[int]:
    """Tokens beyond one that each drafted step brought to the answer: the last step's without those behind its end."""
    accepted, cut = accepted_counts(request), cut_at_end(request)
    return [*accepted[:-1], accepted[-1] - cut] if cut else accepted


def accepted_in_answer(request: RequestRecord) -> list[int]:
    """Drafted tokens of each step that stand in the answer, as a walk over the answer counts them.

    One more than was received in a last step that the end cut within its drafts: its own token, the last one, is the
    first to go.
    """
    accepted, cut = accepted_counts(request), cut_at_end(request)
    return [*accepted[:-1], accepted[-1] - cut + 1] if cut else accepted


def drafted_counts(request: RequestRecord) -> list[int]:
    """Drafted tokens of each drafted step; empty where nothing was drafted."""
    return request.per_step_drafted or []


def decode_steps(request: RequestRecord) -> int:
    """Steps that decoded, with a draft or without: every chunk but the prefill's."""
    return max(len(request.chunk_sizes) - 1, 0)


def undrafted_steps(request: RequestRecord) -> int:
    """Decode steps in which nothing was drafted for this request."""
    return max(decode_steps(request) - len(accepted_counts(request)), 0)


def cut_at_end(request: RequestRecord) -> int:
    """Tokens that the last step verified and accepted behind the end of the answer, which nobody received.

    The engine counts a step's accepted tokens before it cuts the answer at a stop token or at max_tokens.
    """
    accepted = accepted_counts(request)
    chunks = chunks_of_steps(request.chunk_sizes, accepted)
    if not chunks or chunks[-1] != len(request.chunk_sizes) - 1:
        return 0
    return accepted[-1] + 1 - request.chunk_sizes[-1]


def step_positions(request: RequestRecord) -> list[int] | None:
    """Output tokens that were there before each drafted step; None when counts and chunks contradict each other."""
    chunks = chunks_of_steps(request.chunk_sizes, accepted_counts(request))
    if chunks is None:
        return None
    before = [0]
    for size in request.chunk_sizes:
        before.append(before[-1] + size)
    return [before[chunk] for chunk in chunks]


def chunks_of_steps(chunk_sizes: Sequence[int], accepted: Sequence[int]) -> list[int] | None:
    """Index of the chunk that each drafted step brought; None when counts and chunks contradict each other.

    Args:
        chunk_sizes: tokens of each chunk; the first is the prefill's.
        accepted: accepted tokens of each drafted step, in order.
    """
    if not accepted:
        return []
    anchors = _anchors(chunk_sizes, accepted)
    if anchors is None:
        return None
    chunks: list[int] = []
    last_step, last_chunk = -1, 0
    for step, chunk in [*anchors, (len(accepted), len(chunk_sizes))]:
        misses, singles = step - last_step - 1, chunk - last_chunk - 1
        if misses > singles:
            return None
        chunks += [last_chunk + 1 + (2 * index + 1) * singles // (2 * misses) for index in range(misses)]
        chunks.append(chunk)
        last_step, last_chunk = step, chunk
    return chunks[:-1]


def _anchors(chunk_sizes: Sequence[int], accepted: Sequence[int]) -> list[tuple[int, int]] | None:
    """(step, chunk) of every step that accepted something: its chunk is known by its size."""
    large = [index for index, size in enumerate(chunk_sizes) if index > 0 and size > 1]
    hits = [index for index, count in enumerate(accepted) if count > 0]
    cut_to_one = len(hits) == len(large) + 1 and hits[-1] == len(accepted) - 1 and len(chunk_sizes) > 1
    if cut_to_one and chunk_sizes[-1] == 1:
        large.append(len(chunk_sizes) - 1)
    if len(hits) != len(large):
        return None
    for step, chunk in zip(hits, large, strict=True):
        ends = chunk == len(chunk_sizes) - 1 and step == len(accepted) - 1
        if chunk_sizes[chunk] != accepted[step] + 1 and not (ends and chunk_sizes[chunk] <= accepted[step]):
            return None
    return list(zip(hits, large, strict=True))
