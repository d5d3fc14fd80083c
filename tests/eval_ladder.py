"""A made-up losslessness ladder: arms, prompts, engines that follow a rule, and a target that says what is asked of it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.eval.arms import PLAIN, Arm
from eyas.eval.lossless.cases import Case, Counts, reference_cases, run_reference
from eyas.eval.lossless.laws import make_model
from eyas.eval.lossless.results import lossless_results
from eyas.eval.lossless.run import run_lossless
from eyas.eval.plan import CellPlan, StartPlan
from eyas.eval.records import PLACES
from eyas.eval.workload import Request
from eyas.heads.files import write_json
from eyas.heads.serving import speculative_config
from tests.eval_records import request

VOCABULARY = 64


def head(length: int) -> Arm:
    return Arm(f"k{length}", "head", speculative_config(Path("head"), method="eagle3", num_speculative_tokens=length))


NGRAM = Arm("ngram", "other", {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3})
ARMS = [PLAIN, head(3), head(1), NGRAM]


def base_plan(target_dir: str = "target") -> StartPlan:
    return StartPlan(
        target_dir=target_dir,
        trust_remote_code=False,
        dtype="bfloat16",
        max_model_len=128,
        seed=0,
        enforce_eager=True,
        stop_token_ids=[2],
        warmup=[5, 6, 7],
        cells=[],
        session="s",
    )


def prompts(count: int = 6) -> list[Request]:
    generator = random.Random(0)
    return [
        Request("heldout", f"p{index}", [generator.randrange(3, VOCABULARY) for _ in range(12 - index)])
        for index in range(count)
    ]


SETTINGS: dict[str, Any] = {"requests": 4, "max_tokens": 8, "dtype": "float32", "samples": 40}


def scheduled(*ranges: tuple[int, int, int]) -> Arm:
    longest = max(length for _, _, length in ranges)
    config = {**head(longest).speculative_config, "num_speculative_tokens_per_batch_size": [list(r) for r in ranges]}  # type: ignore[dict-item]
    return Arm("schedule", "schedule", config)


def row(values: dict[int, float]) -> NDArray[np.float32]:
    made = np.zeros(VOCABULARY, dtype=np.float32)
    for token, value in values.items():
        made[token] = value
    return made


def target_that_says(rows: dict[int, dict[int, float]]) -> Callable[[list[int], int], NDArray[np.float32]]:
    """Logits 20 for each token of the answer, except where `rows` says otherwise."""

    def logits(token_ids: list[int], num_prompt_tokens: int) -> NDArray[np.float32]:
        answer = token_ids[num_prompt_tokens:]
        return np.stack([row(rows.get(index, {token: 20.0})) for index, token in enumerate(answer)])

    return logits


class FakeLauncher:
    """Writes the records of a start from a rule; starts of arms named in `failing` fail, those in `idle` draft nothing."""

    def __init__(
        self,
        rule: Callable[[StartPlan, CellPlan, int], list[int]],
        failing: tuple[str, ...] = (),
        *,
        idle: tuple[str, ...] = (),
        quantization: str | None = None,
    ) -> None:
        self.rule, self.failing, self.idle, self.ran = rule, failing, idle, []
        self.engine = {"model_config": {"quantization": quantization}}

    def run(self, plan: StartPlan, stem: Path) -> bool:
        self.ran.append(stem.name)
        if plan.arm in self.failing:
            return False
        lines = []
        for number, cell in enumerate(plan.cells):
            for index, asked in enumerate(cell.requests):
                steps = None if plan.arm == "ar" else [] if plan.arm in self.idle else [1, 0, 2]
                made = request(asked.prompt_id, token_ids=self.rule(plan, cell, index), accepted=steps)
                lines.append({"kind": "request", "cell": number, **vars(made)})
            summary = {"dataset": cell.dataset, "batch_size": cell.batch_size, "temperature": cell.temperature}
            summary |= {"max_tokens": cell.max_tokens, "block": 0, "makespan": 1.0, "mean_running": 1.0}
            lines.append({"kind": "cell", "cell": number, **summary, "counters": {}, "steps": [], "harness_seconds": 0})
        description = {name: vars(plan)[name] for name in (*PLACES, "session", "speculative_config")}
        engine = self.engine | {"speculative_config": plan.speculative_config}
        description |= {"engine": engine, "mends": ["a mend"]}
        write_json(stem.with_suffix(".json"), description)
        stem.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return True


def right_rule(_: StartPlan, cell: CellPlan, index: int) -> list[int]:
    """Greedy: the prompt's number again and again. Sampled: drawn by the request's seed."""
    if cell.temperature == 0:
        return [3 + index] * cell.max_tokens
    generator = np.random.default_rng(cell.seed + index)
    return generator.integers(3, 6, size=cell.max_tokens).tolist()


def fake_counts(*, rounds: int, wrong: bool = False, session: str = "s") -> dict[str, Any]:
    model = make_model(vocabulary=10, draft_length=3, seed=7)
    counted = [run_reference(model, case, rounds=rounds, seed=seed) for seed, case in enumerate(reference_cases())]
    greedy = Counts(Case("greedy", "vllm", "one-hot", greedy="all"), 9, [], [], greedy_rows=9, greedy_wrong=0)
    if wrong:
        bad = next(each for each in counted if each.case.rule == "always-accept")
        counted.append(replace(bad, case=replace(bad.case, rule="right")))
    return {
        "session": session,
        "rounds": rounds,
        "exercised": {},
        "mends": [],
        "as_installed": [],
        "model": {"target": model.target.tolist(), "draft": model.draft.tolist()},
        "cases": [each.to_json() for each in [*counted, greedy]],
    }


def run_fake(directory: Path, launcher: Any, **changes: Any) -> dict[str, Any]:
    settings = (
        SETTINGS | {"arms": ARMS, "prompts": prompts(), "predict": lambda *_: [1, 0, 2], "rounds": 5000} | changes
    )
    run_lossless(directory, plan=base_plan(), launcher=launcher, **settings)
    return lossless_results(directory, session="s")
