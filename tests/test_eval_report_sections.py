"""Sections A, B, D and J: what was measured, how, with which absolute numbers, and where the raw records are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.eval.report.document import Section, Table
from eyas.eval.report.figures.latency import cdf_figures, frontier_figures
from eyas.eval.report.sections.identity import identity_section
from eyas.eval.report.sections.performance import performance_section
from eyas.eval.report.sections.protocol import protocol_section
from eyas.eval.report.sections.raw import raw_section
from eyas.heads.files import read_json

Results = dict[str, Any]
OF_PHASE = ": phase of the schedule"


@pytest.fixture(scope="module")
def full(full_session: Path) -> Results:
    return read_json(full_session / "results.json")


def tables(section: Section) -> Iterator[Table]:
    yield from section.tables
    for part in section.parts:
        yield from tables(part)


def column(table: Table, name: str) -> list[str]:
    return [row[table.columns.index(name)] for row in table.rows]


def facts(section: Section) -> dict[str, str]:
    """Rows of the two-column tables of A."""
    return {row[0]: row[1] for table in tables(section) if len(table.columns) == 2 for row in table.rows}


def test_absolute_numbers_of_the_schedule_stand_with_the_ar_of_its_own_phase(full: Results) -> None:
    found = {table.caption: table for table in tables(performance_section(full))}
    for caption in (
        "Total latency (E2E)",
        "Time to first token (TTFT)",
        "Per-token latency (TPOT)",
        "Chunk gap",
        "Throughput",
    ):
        assert set(column(found[caption], "arm")) == {"AR", "k=5", "k=3", "k=1", "ngram"}
        assert set(column(found[caption + OF_PHASE], "arm")) == {"AR", "k=3", "k=1", "schedule"}
    rates = {
        (row["phase"], row["batch_size"]): row["tokens_per_second"] for row in full["throughput"] if row["arm"] == "ar"
    }
    later = found["Throughput" + OF_PHASE]
    assert later.rows[0][3:5] == ["1", f"{rates['schedule', 1]:.1f}"]


def test_a_session_without_a_schedule_has_no_second_tables(full: Results) -> None:
    names = ("throughput", "latency", "running", "loops", "lengths")
    grid = {name: [row for row in full[name] if row["phase"] == "grid"] for name in names}
    captions = [table.caption for table in tables(performance_section(full | grid | {"schedule_starts": {}}))]
    assert not [caption for caption in captions if caption.endswith(OF_PHASE)]


def test_a_percentile_tells_how_many_answers_it_is_of(full: Results) -> None:
    table = next(table for table in tables(performance_section(full)) if table.caption == "Total latency (E2E)")
    assert table.columns[3:] == ["batch size", "n", "mean [s]", "p50 [s]", "p90 [s]", "p99 [s]"]
    by_size = {row[3]: row for row in table.rows if row[:3] == ["held-out chat", "0", "AR"]}
    assert by_size["1"][4] == "36", "12 prompts in 3 starts"
    assert {row[-1] for row in by_size.values()} == {"n/a"}, "at most 32 prompts"
    many = full | {"latency": [row | {"e2e": row["e2e"] | {"p99": 1.25}} for row in full["latency"]]}
    assert next(tables(performance_section(many))).rows[0][-1] == "1.25"


def test_lengths_are_told_as_quantiles_and_as_a_histogram(full: Results) -> None:
    lengths = {"n": 3, "mean": 5.0, "min": 1, "p10": 2.0, "p50": 3.0, "p90": 9.0, "max": 11}
    row = {"phase": "grid", "dataset": "heldout", "temperature": 0.0, "arm": "ar"}
    row |= {"prompt_tokens": lengths | {"histogram": [[1, 1, 1], [2, 3, 0], [8, 15, 2]]}}
    row |= {"output_tokens": lengths | {"histogram": [[4, 7, 3]]}}
    found = {
        table.caption: table for table in tables(performance_section(full | {"lengths": [row, row | {"arm": "k3"}]}))
    }
    assert found["Length of prompts"].rows == [
        ["held-out chat", "0", "1-1: 1, 2-3: 0, 8-15: 2", "3", "5", "1", "2", "3", "9", "11"]
    ], "all arms read the same prompts"
    assert [row[2:4] for row in found["Length of answers"].rows] == [["AR", "4-7: 3"], ["k=3", "4-7: 3"]]


def test_figures_of_absolute_numbers_leave_the_schedule_out_and_say_so(full: Results) -> None:
    assert {row["arm"] for row in full["latency_curves"]} == {"ar", "k5", "k3", "k1", "ngram"}
    figures = [*cdf_figures(full), *frontier_figures(full)]
    assert figures
    for figure in figures:
        assert "The schedule is not shown" in figure.caption
        assert "schedule" not in figure.svg
    alone = full | {"schedule_starts": {}}
    assert "The schedule is not shown" not in cdf_figures(alone)[0].caption


def test_the_protocol_tells_files_splits_and_the_order_of_both_phases(full: Results) -> None:
    section = protocol_section(full)
    sets = section.tables[0]
    assert column(sets, "set") == ["held-out chat", "HumanEval"]
    assert column(sets, "split") == ["heldout", "n/a"]
    assert column(sets, "file")[0] == "runs/made-up/collect/conversations.jsonl"
    assert column(sets, "sha256")[0] == f"token ids {'cd' * 32}\nfile {'23' * 32}"
    assert column(sets, "left out: another split") == ["9", "0"]
    bullets = "\n".join(section.bullets)
    assert (
        "Order of starts of the schedule's phase, after the grid: ar, k3, k1, schedule, schedule, k1, k3, ar, ar"
        in bullets
    )
    assert "blocks of seconds" not in bullets


def test_a_cell_short_of_conversations_is_said_to_be(full: Results) -> None:
    rows = [{"dataset": "heldout", "temperature": 0.0, "batch_size": 4, "requests": 40, "prompts": 5, "wanted": 12}]
    section = protocol_section(full | {"protocol": full["protocol"] | {"requests": rows}})
    assert section.alerts == [
        "held-out chat at batch size 4: 5 prompts of 12 wanted; there are no more, and none is repeated."
    ]
    assert section.tables[1].rows == [["held-out chat", "0", "4", "40", "5", "12"]]


def test_engine_and_machine_are_told_as_far_as_they_are_known(full: Results) -> None:
    engine = full["engines"]["k3"]
    machine = engine["machine"] | {"vllm_commit": "abc123", "cuda": "13.0", "memory_gib": 128.5}
    machine |= {"gpu_limits": [{"driver_version": "580.1", "power.limit": "700 W"}] * 2}
    resolved = engine["engine"] | {"model_runner_v2": True, "compilation_config": {"cudagraph_mode": "FULL"}}
    resolved |= {"speculative_config": {"draft_sample_method": "greedy", "rejection_sample_method": "standard"}}
    known = facts(identity_section(full | {"engines": {"k3": engine | {"machine": machine, "engine": resolved}}}))
    assert known["vLLM's commit"] == "abc123"
    assert known["CUDA of torch"] == "13.0"
    assert known["driver, clocks and power of the GPUs"] == "driver_version 580.1, power.limit 700 W"
    assert known["model runner"] == "vLLM's second (v2)"
    assert (known["how drafts are sampled"], known["how drafts are accepted"]) == ("greedy", "standard")
    assert known["CUDA graphs"] == "FULL"
    assert known["mended in its process before measuring"] == "nothing"
    unknown = facts(identity_section(full | {"mends": ["a", "b"]}))
    assert unknown["vLLM's commit"] == "n/a"
    assert unknown["mended in its process before measuring"] == "a; b"


def test_the_head_and_its_data_are_told_by_their_hashes(full: Results) -> None:
    context = full["context"] | {
        "head_files": {"fingerprint": "12" * 32, "bytes": 1000, "sha256": {"model.safetensors": "34" * 32}},
        "head_config": {"kind": "eagle3", "capture_layers": [2, 15, 27]},
        "data_sha256": "56" * 32,
        "command": ["eyas", "score", "mine.yaml"],
    }
    section = identity_section(full | {"context": context})
    known = facts(section)
    assert known["head_files.fingerprint"] == "12" * 32
    assert known["head_config.capture_layers"] == "2, 15, 27"
    assert not [name for name in known if name.startswith("command")], "it stands in J"
    words = "\n".join(paragraph for part in section.parts for paragraph in part.paragraphs)
    assert f"sha256 of the training conversations: `{'56' * 32}`." in words


def test_raw_records_are_named_with_the_command_that_made_them(full: Results) -> None:
    failure = {"arm": "k3", "start": 4, "reason": "exit code 1", "log_tail": ["one", "MemoryError"], "kept_blocks": 2}
    context = full["context"] | {"command": ["eyas", "score", "a recipe.yaml"]}
    section = raw_section(full | {"context": context, "failures": [failure]})
    bullets = "\n".join(section.bullets)
    assert "Measured by `eyas score 'a recipe.yaml'`." in bullets
    for name in ("protocol.json", "starts/*.log", "lossless/", "instrument/", "open_loop/", "schedule.json"):
        assert name in bullets
    (shown,) = tables(section)
    assert shown.rows == [["k=3", "exit code 1", "one\nMemoryError", "4", "2"]]
    assert "Measured by" not in "\n".join(raw_section(full).bullets)
