"""What section H says of the ladder, and what section K says that the ladder and the time split leave open."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.eval.lossless.greedy import QUANTISED
from eyas.eval.lossless.results import lossless_results
from eyas.eval.lossless.words import not_run
from eyas.eval.not_measured import not_measured
from eyas.eval.report.document import NOT_MEASURED, markdown
from eyas.eval.report.sections.lossless import lossless_section
from tests.eval_full_parts import write_lossless
from tests.eval_records import SESSION, head_config

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("lossless")
    write_lossless(directory, generator=np.random.default_rng(1))
    return lossless_results(directory, session=SESSION)


@pytest.fixture
def results(measured: dict[str, Any]) -> dict[str, Any]:
    """The parts of results that both sections read, of a session whose cells are all covered by the ladder."""
    configs = {"ar": None, "k5": head_config(5), "k1": head_config(1), "ngram": NGRAM}
    return copy.deepcopy(measured) | {
        "arms": {
            name: {"kind": "head", "draft_length": 5, "speculative_config": config, "synthetic": False}
            for name, config in configs.items()
        },
        "protocol": {
            "dtype": "float32",
            "temperatures": [0.0, 1.0],
            "batch_sizes": [1, 16],
            "max_tokens": 48,
            "requests": [{"dataset": "heldout", "temperature": temperature} for temperature in (0.0, 1.0)],
            "prompt_sets": {"heldout": {}},
        },
        "open_loop": [{"dataset": "heldout", "temperature": temperature} for temperature in (0.0, 1.0)],
        "schedule": {},
        "failures": [],
        "throughput": [],
        "time_split": [{"arm": name, "dataset": "heldout", "temperature": 0.0} for name in configs],
        "time_not_measured": [],
    }


def section_h(results: dict[str, Any]) -> str:
    return markdown("title", [lossless_section(results)])


def section_k(results: dict[str, Any], word: str = "lossless") -> list[str]:
    return [line for line in not_measured(results) if word in line and not line.startswith("answer quality")]


def test_what_the_ladder_speaks_about_is_said(results: dict[str, Any]) -> None:
    results["lossless"]["L0"]["exercised"]["not_exercised"] = "penalties"
    text = section_h(results)
    assert "engines in float32, held-out prompts, answers of at most 48 tokens" in text
    assert "L3 and L4 sample at temperature 1, top-p 1, top-k off." in text
    assert "L0 does not exercise penalties." in text
    results["lossless"] |= {"top_p": 0.9, "top_k": 40}
    assert "top-p 0.9, top-k 40." in section_h(results)


def test_sizes_of_differences_stand_beside_the_probability_of_finding_them(results: dict[str, Any]) -> None:
    text = section_h(results)
    assert text.count("found with probability 80 %") == 2, "L3 and L4"
    assert "the test would find with probability 80 %, over the tokens as tested" in text
    assert "rare" in text.partition("### L3")[2]


def test_what_was_drafted_is_counted_by_level(results: dict[str, Any]) -> None:
    row = "| k=5 | 192 tokens in 16 of 16 answers, batch size 16 | 96 tokens in 8 of 8 answers, batch size 1 |"
    assert row in section_h(results)


def test_an_undecided_level_shows_its_numbers_and_its_reason(results: dict[str, Any]) -> None:
    for level, why in (("L1", QUANTISED), ("L3", "too few samples"), ("L4", "too few answers")):
        row = results["lossless"][level]["arms"][0]
        row |= {"passed": None, "outcome": "undecided", "why": why}
        results["lossless"][level]["passed"] = None
    text = section_h(results)
    assert f"| L1 | greedy tokens, all prompts in one batch | undecided | k=5: {QUANTISED} |" in text
    assert "| undecided | k=5: too few samples |" in text
    assert "| undecided | k=5: too few answers |" in text
    assert text.count("| k=5 | undecided | 16 | 768 | 15 | 1 | 0 | 0 |") == 1
    assert NOT_MEASURED not in text


def test_a_level_that_did_not_run_says_why(results: dict[str, Any]) -> None:
    results["lossless"] |= {"L3": not_run("no sampled answers were asked for"), "L4": not_run("no time")}
    text = section_h(results)
    assert f"{NOT_MEASURED} no sampled answers were asked for" in text
    assert "L3 and L4 sample at" not in text


def test_a_session_that_the_ladder_covers_has_nothing_left(results: dict[str, Any]) -> None:
    assert section_k(results) == []


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"dtype": "bfloat16"}, "in bfloat16, as the cells ran; the ladder's engines ran in float32"),
        ({"prompt_sets": {"heldout": {}, "humaneval": {}}}, "on humaneval; the ladder serves held-out prompts"),
        ({"temperatures": [0.0, 0.6, 1.0]}, "at temperature 0.6; L3 and L4 sampled at 1"),
        ({"max_tokens": 64}, "behind token 48 of an answer, where the ladder's answers end"),
        ({"batch_sizes": [1, 16, 32]}, "at batch size 32; the ladder's largest batch is 16"),
    ],
)
def test_cells_beyond_the_ladder_are_named(results: dict[str, Any], changed: dict[str, Any], line: str) -> None:
    results["protocol"] |= changed
    assert section_k(results) == [f"losslessness by inference only: {line}"]


def test_sampled_cells_without_sampled_levels_are_named(results: dict[str, Any]) -> None:
    results["lossless"] |= {"L3": not_run("samples 0"), "L4": not_run("samples 0")}
    assert section_k(results) == ["losslessness at temperature 1: samples 0"]
    results["protocol"]["temperatures"] = [0.0]
    assert section_k(results) == []


def test_arms_that_the_ladder_leaves_open_are_named(results: dict[str, Any]) -> None:
    results["lossless"]["arms"][1]["passed"] = None
    results["arms"]["schedule"] = results["arms"]["k5"]
    results["arms"]["made_up"] = results["arms"]["k5"] | {"synthetic": True}
    assert section_k(results) == [
        "losslessness of ngram: undecided, see section H",
        "losslessness of schedule: the ladder did not serve it",
    ]


def test_a_quantised_targets_ties_are_left_open(results: dict[str, Any]) -> None:
    results["lossless"]["quantised"] = True
    assert [line for line in not_measured(results) if "quantised" in line] != []


def test_a_ladder_that_did_not_run_is_one_line(results: dict[str, Any], tmp_path: Path) -> None:
    results |= lossless_results(tmp_path, session=SESSION)
    assert section_k(results) == ["losslessness: the ladder has not run"]
    assert "No cell can be SUPPORTED without it." in section_h(results)


def test_the_reach_of_the_time_split_is_said(results: dict[str, Any]) -> None:
    starts = "where the time goes in more than one start of an arm"
    elsewhere = "where the time goes on other prompts and temperatures than heldout at temperature 0"
    assert section_k(results, "where the time goes") == [elsewhere, starts]
    results["protocol"]["requests"] = [{"dataset": "heldout", "temperature": 0.0}]
    assert section_k(results, "where the time goes") == [starts]
    results["arms"]["schedule"] = results["arms"]["k5"]
    assert "where the time goes in these arms: schedule" in not_measured(results)
    results["time_split"] = []
    assert section_k(results, "where the time goes") == []


def test_the_reach_of_the_open_loop_is_said(results: dict[str, Any]) -> None:
    assert section_k(results, "request-rate") == []
    results["protocol"]["requests"].append({"dataset": "humaneval", "temperature": 0.0})
    (line,) = section_k(results, "request-rate")
    assert line.endswith("on other prompts and temperatures than heldout at temperature 0, heldout at temperature 1")
    results["open_loop"] = []
    (line,) = section_k(results, "request-rate")
    assert "the load is a closed loop" in line
