"""Graph coverage and memory of arms, against vLLM's own dispatcher rule worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.eval.cost.capacity import capacity_results, draft_length_at, graph_of
from eyas.eval.records import AR, ArmFacts
from eyas.eval.report.sections.capacity import capacity_section

CAPTURED = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [4, 8, 16, 32]}


@pytest.mark.parametrize(
    ("mode", "tokens", "query_length", "uniform", "graph"),
    [
        ("FULL_AND_PIECEWISE", 16, 4, True, "FULL"),
        ("FULL_AND_PIECEWISE", 16, 4, False, "PIECEWISE"),
        ("FULL_AND_PIECEWISE", 17, 4, True, "FULL"),  # padded to 32 = 4 tokens of 8 requests
        ("FULL_AND_PIECEWISE", 33, 4, True, "eager"),  # above the largest captured size
        ("FULL_AND_PIECEWISE", 1, 8, True, "PIECEWISE"),  # no uniform graph is captured for less than one request
        ("FULL_AND_PIECEWISE", 32, 2, True, "PIECEWISE"),  # 2 tokens of 8 requests are 16: none of 32
        ("FULL_DECODE_ONLY", 16, 4, True, "FULL"),
        ("FULL_DECODE_ONLY", 16, 4, False, "eager"),
        ("PIECEWISE", 16, 4, True, "PIECEWISE"),
        ("FULL", 16, 4, False, "FULL"),
        ("NONE", 16, 4, True, "eager"),
    ],
)
def test_the_graph_of_a_step(mode: str, tokens: int, query_length: int, uniform: bool, graph: str) -> None:
    compilation = CAPTURED | {"cudagraph_mode": mode}
    found = graph_of(compilation, tokens=tokens, query_length=query_length, uniform=uniform, max_num_seqs=8)
    assert found == graph


def test_an_engine_without_graphs_is_eager_and_one_that_does_not_tell_is_unknown() -> None:
    arguments: dict[str, Any] = {"tokens": 4, "query_length": 1, "uniform": True, "max_num_seqs": 4}
    cpu = {"cudagraph_mode": "NONE", "cudagraph_capture_sizes": [], "max_cudagraph_capture_size": None}
    assert graph_of(cpu, **arguments) == "eager"
    assert graph_of({}, **arguments) is None


def engine(blocks: int, compilation: dict[str, Any]) -> dict[str, Any]:
    return {
        "engine": {
            "compilation_config": compilation,
            "scheduler_config": {"max_num_seqs": 16},
            "cache_config": {"num_gpu_blocks": blocks, "block_size": 16},
        }
    }


SCHEDULE = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 16, 0]]}
ARMS = {
    AR: ArmFacts("ar", 0, None, False),
    "k3": ArmFacts("head", 3, {"num_speculative_tokens": 3}, False),
    "ngram": ArmFacts("other", 3, {"method": "ngram", "num_speculative_tokens": 3}, False),
    "twin": ArmFacts("other", 0, None, False),
    "schedule": ArmFacts("schedule", 3, SCHEDULE, False),
}


def results(compilation: dict[str, Any]) -> dict[str, Any]:
    engines = {arm: engine(1000 if facts.draft_length == 0 else 900, compilation) for arm, facts in ARMS.items()}
    named = {arm: {"kind": facts.kind, "draft_length": facts.draft_length} for arm, facts in ARMS.items()}
    return {"arms": named, "cost": capacity_results(engines, ARMS, batch_sizes=[1, 4, 16], head_bytes=3 * 2**20)}


def test_rows_of_graphs_and_memory() -> None:
    cost = results(CAPTURED)["cost"]
    graphs = {(row["arm"], row["batch_size"]): (row["tokens"], row["graph"]) for row in cost["graphs"]}
    assert [graphs[AR, size] for size in (1, 4, 16)] == [(1, "FULL"), (4, "FULL"), (16, "FULL")]
    assert [graphs["k3", size] for size in (1, 4, 16)] == [(4, "FULL"), (16, "FULL"), (64, "eager")]
    assert graphs["ngram", 4] == (16, "PIECEWISE"), "what it finds differs from request to request"
    assert graphs["twin", 4] == (4, "FULL"), "plain decoding under another name"
    assert [graphs["schedule", size] for size in (4, 16)] == [(16, "FULL"), (16, "PIECEWISE")]
    memory = {row["arm"]: row for row in cost["memory"]}
    assert memory[AR]["kv_tokens"] == 16_000
    assert (memory["k3"]["kv_tokens_lost"], memory["k3"]["kv_share_lost"]) == (1600, 0.1)
    assert [memory[arm]["head_bytes"] for arm in ARMS] == [None, 3 * 2**20, None, None, 3 * 2**20]


def test_k_of_a_schedule_by_batch_size() -> None:
    assert [draft_length_at(ARMS["schedule"], size) for size in (1, 4, 5, 99)] == [3, 3, 0, 0]
    assert draft_length_at(ARMS["k3"], 7) == 3


def test_the_section_names_arms_that_leave_the_graphs() -> None:
    section = capacity_section(results(CAPTURED))
    assert "k=3 at 16, ngram at 16 (arm at batch size)" in section.alerts[0]
    assert section.tables[0].rows[2][:3] == ["16", "FULL (16)", "eager (64)"]
    assert section.tables[1].rows[1] == ["k=3", "14,400", "1,600", "10.0 %", "3.0"]
    eager = capacity_section(results({"cudagraph_mode": "NONE", "cudagraph_capture_sizes": []}))
    assert eager.alerts == []
    assert "every step of every arm runs eagerly" in eager.paragraphs[1]
    memory_alone = capacity_section(results({}))
    assert [table.caption for table in memory_alone.tables] == ["Memory"]
    engines = {arm: {"engine": {}} for arm in ARMS}
    unknown = {"arms": {}, "cost": capacity_results(engines, ARMS, batch_sizes=[1], head_bytes=None)}
    assert "does not tell" in capacity_section(unknown).paragraphs[0]
