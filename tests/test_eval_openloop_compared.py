"""What is compared in the open loop: ratios, servers that differ, files of other sessions, and what a server is started with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from eyas.eval import parts
from eyas.eval.arms import PLAIN, Arm
from eyas.eval.openloop import server as server_module
from eyas.eval.openloop.load import Patience, patience_of
from eyas.eval.openloop.plan import plan_starts
from eyas.eval.openloop.ratios import ratios_to
from eyas.eval.openloop.records import FailedCell, LoadCell, LoadRequest, cell_path, failure_path
from eyas.eval.openloop.rows import open_loop_rows
from eyas.eval.openloop.server import machine_facts, serve_command
from eyas.eval.serve_options import ServedEngine
from eyas.heads.files import read_json, write_json
from tests import openloop_records as made


def test_ratios_have_students_interval_over_starts() -> None:
    def starts(*tpots: float) -> list[LoadCell]:
        return [made.cell([made.request(0, arrives=0.0, finish=1.0 + 4 * tpot)]) for tpot in tpots]

    result = ratios_to(
        starts(0.1, 0.1 * math.e**0.1, 0.1 * math.e**-0.1), starts(0.2, 0.2 * math.e**0.1, 0.2 * math.e**-0.1)
    )
    tpot = result["tpot"]
    assert tpot is not None
    assert tpot["ratio"] == pytest.approx(2.0)
    # Each arm's logs are 0, 0.1, -0.1: variance 0.01, standard error sqrt(0.01 * 2 / 3); t(0.975, 4) = 2.7764.
    half = 2.7764451 * math.sqrt(0.02 / 3)
    assert tpot["interval"] == pytest.approx([2 * math.exp(-half), 2 * math.exp(half)])
    assert ratios_to(starts(0.1), starts(0.2))["tpot"] == {"ratio": pytest.approx(2.0), "interval": None}
    assert ratios_to(starts(0.1), [made.cell([made.request(0, arrives=0.0, failure="x")])])["ttft"] is None


def k3(requests: list[LoadRequest], *, start: int = 1) -> LoadCell:
    config = {"method": "eagle3", "num_speculative_tokens": 3}
    return made.cell(requests, arm="k3", kind="head", start=start, speculative_config=config)


def well_served(first: float = 1.0) -> list[LoadRequest]:
    return [made.request(i, arrives=1.0 + i, first=first) for i in range(4)]


def test_no_ratio_where_requests_failed(tmp_path: Path) -> None:
    """Three answers at half the latency and one that never came are no speed-up."""
    lossy = [*well_served(first=0.5)[:3], made.request(3, arrives=4.0, failure="no complete answer within 9 s")]
    made.write_session(tmp_path, [made.cell(well_served()), k3(lossy)])
    _, row = open_loop_rows(tmp_path, session=made.SESSION)
    assert row["ratio_to_ar"] is None
    assert row["no_ratio"] == "1 of 4 requests of k3 failed"
    made.write_session(tmp_path, [made.cell(lossy), k3(well_served(first=0.5))])
    assert open_loop_rows(tmp_path, session=made.SESSION)[1]["no_ratio"] == "1 of 4 requests of ar failed"
    made.write_session(tmp_path, [made.cell(well_served()), k3(well_served(first=0.5))])
    _, row = open_loop_rows(tmp_path, session=made.SESSION)
    assert (row["ratio_to_ar"]["ttft"]["ratio"], row["no_ratio"]) == (pytest.approx(0.5), None)


def test_an_arm_without_plain_decoding_beside_it_has_no_ratio(tmp_path: Path) -> None:
    made.write_session(tmp_path, [k3(well_served())])
    assert open_loop_rows(tmp_path, session=made.SESSION)[0]["no_ratio"] == "plain decoding has no result at this rate"


Spoil = Callable[[dict[str, Any]], Any]


def void_after(tmp_path: Path, arm: str, spoil: Spoil) -> dict[str, str | None]:
    """Why each arm is void when the description of one arm's server is changed."""
    made.write_session(tmp_path, [made.cell(well_served()), k3(well_served())])
    (path,) = tmp_path.glob(f"*-{arm}/server-0.json")
    told = read_json(path)
    spoil(told)
    write_json(path, told)
    rows = open_loop_rows(tmp_path, session=made.SESSION)
    assert [row["no_ratio"] for row in rows if row["arm"] == "k3"] == [
        row["void"] for row in rows if row["arm"] == "k3"
    ]
    return {row["arm"]: row["void"] for row in rows}


def engine_setting(section: str, name: str, value: Any) -> Spoil:
    return lambda told: told["settings"]["engine"][section].update({name: value})


def test_servers_that_are_alike_are_comparable(tmp_path: Path) -> None:
    assert void_after(tmp_path, "k3", engine_setting("scheduler_config", "max_num_seqs", 4)) == {"ar": None, "k3": None}
    own_cache = engine_setting("cache_config", "num_gpu_blocks", 700)
    assert void_after(tmp_path, "k3", own_cache) == {"ar": None, "k3": None}, "a head's own cache takes memory"
    switched_off = engine_setting("scheduler_config", "async_scheduling", False)
    assert void_after(tmp_path, "k3", switched_off)["k3"] is None, "vLLM chooses by the method"
    assert void_after(tmp_path, "ar", switched_off)["k3"] is not None, "and never the other way round"


def test_servers_that_differ_are_not(tmp_path: Path) -> None:
    void = void_after(tmp_path, "k3", engine_setting("scheduler_config", "max_num_seqs", 8))
    assert void == {"ar": None, "k3": "the engines differ in scheduler_config.max_num_seqs"}
    void = void_after(tmp_path, "k3", lambda told: told["settings"]["machine"].update(vllm_version="0.33.0"))
    assert void["k3"] == "the engines differ in machine.vllm_version"
    void = void_after(tmp_path, "k3", lambda told: told["environment"].update(OMP_NUM_THREADS="1"))
    assert void["k3"] == "the engines differ in machine.environment.OMP_NUM_THREADS"


def test_a_server_that_did_not_tell_its_configuration_is_not_comparable(tmp_path: Path) -> None:
    void = void_after(tmp_path, "k3", lambda told: told.update(settings=None))
    assert void == {"ar": None, "k3": "the configuration of its server in start 1 is unknown"}
    void = void_after(tmp_path, "ar", lambda told: told.update(settings=None))
    assert void["k3"] == "plain decoding: the configuration of its server in start 0 is unknown"
    made.write_session(tmp_path, [made.cell(well_served()), k3(well_served())])
    (tmp_path / "001-k3" / "server-0.json").unlink()
    assert open_loop_rows(tmp_path, session=made.SESSION)[1]["void"] is not None


@pytest.mark.parametrize(("blocks", "void"), [(1010, False), (900, True)])
def test_free_memory_may_differ_a_little_between_starts_of_plain_decoding(
    tmp_path: Path, blocks: int, void: bool
) -> None:
    made.write_session(tmp_path, [made.cell(well_served()), k3(well_served()), made.cell(well_served(), start=2)])
    cache = {"num_gpu_blocks": blocks}
    write_json(tmp_path / "002-ar" / "server-0.json", made.server("ar", start=2, config=None, cache_config=cache))
    rows = open_loop_rows(tmp_path, session=made.SESSION)
    assert [row["void"] is not None for row in rows] == [void, void]


def test_what_a_server_tells_of_its_machine() -> None:
    system = {
        "vllm_version": "0.32.0",
        "os": "Debian",
        "cpu_info": "CPU(s):   2\nModel name:  Some: Processor\nCPU MHz: 99",
    }
    facts = machine_facts(system)
    assert (facts["vllm_version"], facts["cpu"], facts["cpu_count"]) == ("0.32.0", "Some: Processor", "2")
    assert "99" not in facts.values()
    assert machine_facts({})["cpu"] is None


@pytest.mark.parametrize(
    "name", ["plan.json", "000-ar/rate-1.jsonl", "000-ar/rate-2.failed.json", "000-ar/server-0.json"]
)
def test_files_of_another_session_are_refused(tmp_path: Path, name: str) -> None:
    made.write_session(tmp_path, [made.cell(well_served())])
    lost = FailedCell(made.SESSION, "ar", "ar", 0, 2.0, "gone", [])
    write_json(failure_path(cell_path(tmp_path / "000-ar", rate=2.0)), asdict(lost))
    open_loop_rows(tmp_path, session=made.SESSION)
    path = tmp_path / name
    path.write_text(path.read_text().replace('"session": "this"', '"session": "another"', 1))
    with pytest.raises(ValueError, match=rf"{path.name} is of session another, the score of this; .* score again"):
        open_loop_rows(tmp_path, session=made.SESSION)


def test_a_cell_of_another_session_is_measured_again(tmp_path: Path) -> None:
    (start,) = plan_starts(tmp_path, made.plan(), arms=[PLAIN], starts_per_arm=1)
    other = replace(start, plan=replace(start.plan, session="another"))
    assert start.fingerprint(1.0) != other.fingerprint(1.0)


def test_arms_of_a_server_differ_in_the_speculative_config_only() -> None:
    engine = made.plan().engine
    plain = serve_command(engine, port=1, name="n")
    drafting = serve_command(replace(engine, speculative_config={"method": "ngram"}), port=1, name="n")
    extra = ["--speculative-config", '{"method": "ngram"}', "--per-request-spec-decode-metrics", "summary"]
    assert Counter(drafting) - Counter(plain) == Counter(extra)
    assert not Counter(plain) - Counter(drafting)
    assert "--no-enable-prefix-caching" in plain


def words(engine: ServedEngine, *, cpu: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(server_module, "on_cpu", lambda: cpu)
    return " ".join(serve_command(engine, port=1, name="n"))


def test_a_server_has_the_engine_settings_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read whole on CPU, in steps of 4096 tokens or more, as `eyas.eval.engine` asks for."""
    engine = replace(made.plan().engine, tensor_parallel_size=2, gpu_memory_utilization=0.8, max_num_batched_tokens=777)
    on_cpu, on_gpu = (words(engine, cpu=cpu, monkeypatch=monkeypatch) for cpu in (True, False))
    assert "--no-enable-chunked-prefill" in on_cpu and "--max-num-batched-tokens 4096" in on_cpu
    assert "--gpu-memory-utilization" not in on_cpu
    assert "chunked-prefill" not in on_gpu and "--max-num-batched-tokens 777" in on_gpu
    assert "--gpu-memory-utilization 0.8" in on_gpu
    assert all("--tensor-parallel-size 2" in command for command in (on_cpu, on_gpu))


@pytest.mark.parametrize(("limit", "silence"), [(900.0, 120.0), (60.0, 15.0)])
def test_a_silent_server_is_given_up_before_its_requests_are(limit: float, silence: float) -> None:
    assert patience_of(limit) == Patience(request_s=limit, silence_s=silence)
    with pytest.raises(AssertionError):
        Patience(request_s=limit, silence_s=limit)


NGRAM = Arm("ngram", "other", {"method": "ngram", "num_speculative_tokens": 1})


@pytest.mark.parametrize(
    ("temperatures", "arms", "cpu", "served"),
    [
        ((1.0, 0.0), (PLAIN, NGRAM), True, 0.0),
        ((1.0, 0.0), (PLAIN, NGRAM), False, 1.0),
        ((1.0,), (PLAIN,), True, 1.0),
        ((0.0, 1.0), (PLAIN, NGRAM), True, 0.0),
    ],
)
def test_a_cpu_server_that_drafts_is_greedy(
    monkeypatch: pytest.MonkeyPatch, temperatures: tuple[float, ...], arms: tuple[Arm, ...], cpu: bool, served: float
) -> None:
    monkeypatch.setattr(parts, "on_cpu", lambda: cpu)
    assert parts.open_loop_temperature(temperatures, arms=arms) == served


def test_a_cpu_server_that_would_have_to_sample_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "on_cpu", lambda: True)
    with pytest.raises(ValueError, match=r"score\.open_loop: .* samples wrongly .* add 0 to score\.temperatures"):
        parts.open_loop_temperature((0.7, 1.0), arms=(PLAIN, NGRAM))
