"""results.json from raw records: what each phase is compared with, and the rows about speed itself."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eyas.eval.performance import best_draft_lengths, performance_results, running_row, throughput_row
from eyas.eval.records import AR, CellKey, StepRecord, arms_of, cells_by_arm, read_starts
from eyas.eval.results import cells_by_phase, read_results, reported_cells
from eyas.heads.files import read_json, write_json
from tests.eval_records import K1_STEPS, K3_STEPS, cell, head_config, protocol_of, write_session, write_start

SCHEDULE = head_config(3) | {"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 16, 0]]}


def write_two_phases(directory: Path) -> None:
    """A grid in which AR makes 40 tok/s and k3 50, and a later hour in which AR makes 20 and the schedule 24."""
    jitter = (1.0, 1.01, 0.99)
    for number in range(3):
        grid = {AR: (40.0, None, 0), "k3": (50.0, K3_STEPS, 3), "k1": (44.0, K1_STEPS, 1)}
        for place, (arm, (rate, steps, length)) in enumerate(grid.items()):
            made = [cell(rate * jitter[number], requests=8, accepted=steps, draft_length=length)]
            write_start(directory / "starts", 3 * number + place, arm, made, draft_length=length, round=number)
        later = {AR: (20.0, None, 0, "ar"), "schedule": (24.0, K3_STEPS, 3, "schedule")}
        for place, (arm, (rate, steps, length, kind)) in enumerate(later.items()):
            made = [cell(rate * jitter[number], requests=8, accepted=steps, draft_length=length)]
            write_start(
                directory / "starts",
                500 + 2 * number + place,
                arm,
                made,
                draft_length=length,
                kind=kind,  # type: ignore[arg-type]
                round=number,
                phase="schedule",
                speculative_config=SCHEDULE if arm == "schedule" else None,
            )
    write_json(directory / "context.json", {"name": "two phases"})
    write_json(directory / "protocol.json", protocol_of(["ar", "k3", "k1"]) | {"requests": []})


def test_each_phase_is_compared_within_itself(tmp_path: Path) -> None:
    write_two_phases(tmp_path)
    results = read_results(tmp_path)
    ratios = {row["arm"]: row["ratio"] for row in results["cells"]}
    assert ratios == pytest.approx({"k3": 1.25, "k1": 1.1, "schedule": 1.2})
    assert {row["arm"]: row["starts"] for row in results["cells"]} == {"k3": 3, "k1": 3, "schedule": 3}
    shown = {(row["phase"], row["arm"]): row["tokens_per_second"] for row in results["throughput"]}
    assert shown == pytest.approx(
        {("grid", AR): 40, ("grid", "k3"): 50, ("grid", "k1"): 44, ("schedule", AR): 20, ("schedule", "schedule"): 24},
        rel=0.01,
    )
    assert [(row["phase"], row["arm"]) for row in results["best_k"]] == [("grid", "k3")]
    later = [(row["phase"], row["arm"]) for row in results["loops"]]
    assert later == [("grid", AR), ("grid", "k3"), ("grid", "k1"), ("schedule", AR), ("schedule", "schedule")]
    assert set(reported_cells(read_starts(tmp_path / "starts"))[CellKey("heldout", 0.0, 1)]) == {
        AR,
        "k3",
        "k1",
        "schedule",
    }


def test_the_schedule_is_never_the_fastest_arm_of_the_grid(tmp_path: Path) -> None:
    """At 60 tok/s an hour later it beats k3's 50, but the machine of that hour is another."""
    write_two_phases(tmp_path)
    for number in range(3):
        path = tmp_path / "starts" / f"{500 + 2 * number + 1:03d}-schedule"
        made = [cell(60.0, requests=8, accepted=K3_STEPS)]
        place = {"draft_length": 3, "round": number, "speculative_config": SCHEDULE}
        write_start(path.parent, 500 + 2 * number + 1, "schedule", made, kind="schedule", phase="schedule", **place)
    assert [row["arm"] for row in read_results(tmp_path)["best_k"]] == ["k3"]


def test_starts_are_counted_by_phase(tmp_path: Path) -> None:
    """AR has 3 starts of the grid and 3 of the schedule's phase: that is 3 beside either, and not 6."""
    write_two_phases(tmp_path)
    (tmp_path / "starts" / "500-ar.jsonl").unlink()
    results = read_results(tmp_path)
    assert results["starts"] == {AR: 3, "k3": 3, "k1": 3, "schedule": 3}
    assert results["schedule_starts"] == {AR: 2, "schedule": 3}
    write_session(tmp_path / "grid only")
    assert read_results(tmp_path / "grid only")["schedule_starts"] == {}


def test_mends_of_all_starts_are_told_once(tmp_path: Path) -> None:
    write_session(tmp_path)
    assert read_results(tmp_path)["mends"] == []
    for name in ("001-k3", "002-k1"):
        path = tmp_path / "starts" / f"{name}.json"
        write_json(path, read_json(path) | {"mends": ["temperatures expanded", name]})
    assert read_results(tmp_path)["mends"] == ["temperatures expanded", "001-k3", "002-k1"]


@pytest.mark.parametrize("name", ["protocol.json", "session.json"])
def test_files_of_another_session_give_no_results(tmp_path: Path, name: str) -> None:
    write_session(tmp_path)
    path = tmp_path / name
    before = read_json(path) if path.is_file() else {"session": "session-0"}
    write_json(path, before)
    read_results(tmp_path)
    write_json(path, before | {"session": "another"})
    with pytest.raises(ValueError, match=f"{name} is of session another"):
        read_results(tmp_path)


def test_turns_of_one_conversation_are_one_witness(tmp_path: Path) -> None:
    """Twelve turns at 40 and at 80 tok/s in three starts: sharp, and still of one conversation only."""
    jitter = (1.0, 1.01, 0.99)
    for number in range(3):
        for place, (arm, rate) in enumerate({AR: 40.0, "k3": 80.0}.items()):
            made = cell(rate * jitter[number], requests=12, accepted=None if arm == AR else K3_STEPS)
            turns = replace(made, requests=[replace(each, conversation="one") for each in made.requests])
            write_start(tmp_path / "starts", 2 * number + place, arm, [turns], draft_length=3 * place, round=number)
    write_json(tmp_path / "context.json", {"name": "one conversation"})
    write_json(tmp_path / "protocol.json", protocol_of([AR, "k3"]) | {"requests": []})
    (row,) = read_results(tmp_path)["cells"]
    assert (row["prompts"], row["requests"], row["verdict"]) == (1, 12, "INCONCLUSIVE")
    assert "1 independent prompt of the 12 this cell needs" in row["reason"]


def test_parts_of_another_session_give_no_results(tmp_path: Path) -> None:
    for name in ("instrument", "lossless"):
        write_session(tmp_path / name)
    write_start(tmp_path / "instrument" / "instrument", 0, AR, [cell(40.0)], draft_length=0, session="another")
    write_json(tmp_path / "lossless" / "lossless" / "ladder.json", {"session": "another"})
    for name in ("instrument", "lossless"):
        with pytest.raises(ValueError, match="another"):
            read_results(tmp_path / name)


def test_results_survive_json_and_name_their_session(tmp_path: Path) -> None:
    write_session(tmp_path)
    results = read_results(tmp_path)
    assert json.loads(json.dumps(results, allow_nan=False)) == results
    assert (results["schema"], results["session"]) == (2, "session-0")
    assert set(results["arms"]["k3"]) == {"kind", "draft_length", "speculative_config", "synthetic", "slowed_by"}
    assert results["config_differences"]["void"] is False
    assert results["lossless"]["status"] == "not run"
    assert results["open_loop"] == []


def test_a_difference_of_settings_voids_the_arm_whatever_it_measured(tmp_path: Path) -> None:
    write_two_phases(tmp_path)
    for path in (tmp_path / "starts").glob("*-k3.json"):
        description = read_json(path)
        engine = description["engine"] | {"model_config": {"dtype": "torch.float32"}}
        write_json(path, description | {"engine": engine})
    results = read_results(tmp_path)
    assert results["config_differences"]["reasons"] == {"k3": "the engines differ in model_config.dtype"}
    verdicts = {row["arm"]: (row["verdict"], row["reason"]) for row in results["cells"]}
    assert verdicts["k3"][0] == "NOT SUPPORTED"
    assert "void" in verdicts["k3"][1]
    assert verdicts["k1"][0] != "NOT SUPPORTED"


def test_made_up_acceptance_is_never_supported(tmp_path: Path) -> None:
    write_two_phases(tmp_path)
    synthetic = head_config(3) | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.5}
    for path in (tmp_path / "starts").glob("*-k3.json"):
        write_json(path, read_json(path) | {"speculative_config": synthetic})
    results = read_results(tmp_path)
    assert results["arms"]["k3"]["synthetic"]
    assert {row["verdict"] for row in results["cells"] if row["arm"] == "k3"} == {"NOT SUPPORTED"}
    assert {row["arm"] for row in results["best_k"]} <= {AR, "k1", "schedule"}


def test_records_of_two_sessions_give_no_results(tmp_path: Path) -> None:
    write_session(tmp_path)
    path = tmp_path / "starts" / "003-k1.json"
    write_json(path, read_json(path) | {"session": "another"})
    with pytest.raises(ValueError, match="mixes records of two sessions"):
        read_results(tmp_path)


def test_without_records_there_is_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no finished start"):
        read_results(tmp_path)


def test_throughput_of_blocks_is_their_geometric_mean(tmp_path: Path) -> None:
    del tmp_path
    row = throughput_row([[cell(40.0), cell(90.0, block=1)], [cell(60.0)]])
    assert row["tokens_per_second_by_start"] == pytest.approx([60.0, 60.0])
    assert row["tokens_per_second"] == pytest.approx(60.0)
    assert row["harness_share"] == pytest.approx(0.002)


def test_the_running_batch_is_weighted_by_time() -> None:
    made = cell(40.0, batch_size=4)
    steps = [StepRecord(3.0, 4, 4, 0), StepRecord(1.0, 2, 2, 0)]
    block = type(made)(**(vars(made) | {"steps": steps, "counters": {"preemptions": 0, "held_back_steps": 2}}))
    row = running_row([[block]])
    assert row["mean"] == pytest.approx(3.5)
    assert (row["p10"], row["p50"], row["max"]) == (2, 4, 4)
    assert row["at_nominal"] == pytest.approx(0.75)
    assert row["held_back_steps"] == 2


def test_a_control_is_never_the_best_arm(tmp_path: Path) -> None:
    write_start(tmp_path, 0, AR, [cell(40.0)], draft_length=0)
    write_start(tmp_path, 1, "control", [cell(45.0)], draft_length=0, kind="other")
    starts = read_starts(tmp_path)
    (row,) = best_draft_lengths(cells_by_arm(starts), arms_of(starts))
    assert row["arm"] == AR


def test_every_row_says_where_it_belongs(tmp_path: Path) -> None:
    write_session(tmp_path)
    starts = read_starts(tmp_path / "starts")
    found: dict[str, list[dict[str, Any]]] = performance_results(cells_by_phase(starts), arms_of(starts))
    for name in ("best_k", "throughput", "latency", "running"):
        assert all({"phase", "dataset", "temperature", "batch_size", "arm"} <= row.keys() for row in found[name])


def test_results_need_neither_torch_nor_vllm(tmp_path: Path) -> None:
    write_session(tmp_path)
    code = (
        "import sys; from pathlib import Path; from eyas.eval.results import read_results; "
        "read_results(Path(sys.argv[1])); assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
