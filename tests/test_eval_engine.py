"""The worker against real vLLM: a tiny random target, with and without a random EAGLE-3 head."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eyas.eval.arms import PLAIN, Arm
from eyas.eval.configs import config_differences
from eyas.eval.grid import plan_turns, read_failures, run_grid
from eyas.eval.launch import Launcher
from eyas.eval.plan import CellPlan, StartPlan
from eyas.eval.records import StartRecord, read_start, read_starts
from eyas.eval.workload import Request
from eyas.heads.files import write_json
from eyas.heads.serving import engine_environment, speculative_config
from tests import tiny

pytestmark = pytest.mark.engine

HIDDEN, HEADS, HEAD_DIM, DRAFT_VOCAB = 64, 2, 32, 128
MAX_TOKENS = 12


def write_random_head(directory: Path) -> Path:
    """A head directory as vLLM reads it, with random weights: drafts are bad, outputs must be right all the same."""
    directory.mkdir()
    torch.manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return 0.05 * torch.randn(rows, columns)

    target_ids = torch.arange(DRAFT_VOCAB) * 2
    kept = torch.zeros(tiny.VOCAB_SIZE, dtype=torch.bool)
    kept[target_ids] = True
    weights = {
        "fc.weight": matrix(HIDDEN, 3 * HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(DRAFT_VOCAB, HIDDEN),
        "d2t": target_ids - torch.arange(DRAFT_VOCAB),
        "t2d": kept,
        "midlayer.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
        "midlayer.mlp.down_proj.weight": matrix(HIDDEN, 2 * HIDDEN),
    }
    weights |= {f"midlayer.self_attn.{name}_proj.weight": matrix(HEADS * HEAD_DIM, 2 * HIDDEN) for name in "qkv"}
    weights |= {f"midlayer.mlp.{name}_proj.weight": matrix(2 * HIDDEN, HIDDEN) for name in ("gate", "up")}
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    weights |= {f"midlayer.{name}.weight": torch.ones(HIDDEN) for name in norms}
    save_file(weights, directory / "model.safetensors")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "vocab_size": tiny.VOCAB_SIZE,
        "draft_vocab_size": DRAFT_VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]},
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def make_plan(target_dir: Path) -> StartPlan:
    generator = random.Random(0)
    prompts = [[generator.randrange(3, tiny.VOCAB_SIZE) for _ in range(6 + index)] for index in range(5)]
    requests = [Request("heldout", f"p{index}", prompt) for index, prompt in enumerate(prompts)]
    return StartPlan(
        target_dir=str(target_dir),
        trust_remote_code=False,
        dtype="float32",
        max_model_len=128,
        seed=0,
        enforce_eager=True,
        stop_token_ids=[2],
        warmup=[5, 6, 7],
        cells=[CellPlan("heldout", size, 0.0, MAX_TOKENS, 0, requests) for size in (1, 4)],
        session="session-0",
    )


def launcher_of(lines: list[str], *, timeout_s: float = 300) -> Launcher:
    return Launcher(engine_environment(threads=1, kv_cache_gib=1), timeout_s, lines.append)


def served(start: StartRecord) -> list[list[tuple[str, list[int]]]]:
    return [[(request.prompt_id, request.token_ids) for request in cell.requests] for cell in start.cells]


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StartRecord]:
    """One start of plain decoding, of a random head, of n-gram lookup and of a schedule, and one slowed down."""
    folder = tmp_path_factory.mktemp("starts")
    target = tiny.write_target(folder / "target")
    head = write_random_head(folder / "head")
    k2 = speculative_config(head, method="eagle3", num_speculative_tokens=2)
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    schedule = k2 | {"num_speculative_tokens_per_batch_size": [[1, 2, 2], [3, 4, 0]]}
    arms = [
        PLAIN,
        Arm("k2", "head", k2),
        Arm("ngram", "other", ngram),
        Arm("schedule", "schedule", schedule),
        Arm("slow", "other", None, slowed_by=1.0),
    ]
    lines: list[str] = []
    turns = plan_turns(arms, protocol="starts", starts_per_arm=1)
    run_grid(folder / "starts", plan=make_plan(target), turns=turns, launcher=launcher_of(lines))
    assert read_failures(folder / "starts") == []
    assert len(lines) == 10
    assert lines[0].startswith("000 ar   heldout   T=0 batch   1")
    return {start.arm: start for start in read_starts(folder / "starts")}


def test_greedy_answers_do_not_depend_on_the_arm_or_the_batch_size(starts: dict[str, StartRecord]) -> None:
    plain = served(starts["ar"])
    assert plain[0] == plain[1], "float32 on one thread"
    assert served(starts["slow"]) == plain
    for arm in ("k2", "ngram", "schedule"):
        assert [name for name, _ in served(starts[arm])[0]] == [name for name, _ in plain[0]]
        same = sum(
            one == other
            for cell, of_arm in zip(plain, served(starts[arm]), strict=True)
            for one, other in zip(cell, of_arm, strict=True)
        )
        assert same >= 9, f"{arm}: at most one tie among ten answers"


def test_requests_are_recorded_whole(starts: dict[str, StartRecord]) -> None:
    for request in starts["ar"].cells[1].requests:
        assert request.per_step_accepted is None
        assert request.n_out == len(request.token_ids) == sum(request.chunk_sizes) <= MAX_TOKENS
        assert request.t_submit <= request.t_first <= request.t_finish
        assert request.finish_reason == ("stop" if request.token_ids[-1] == 2 else "length")
    for arm in ("k2", "ngram"):
        for cell in starts[arm].cells:
            steps = [count for request in cell.requests for count in request.per_step_accepted or []]
            assert cell.counters["num_drafts"] == len(steps)
            assert cell.counters["num_accepted_tokens"] == sum(steps)
    assert sum(cell.counters["num_drafts"] for cell in starts["k2"].cells) > 0


def test_steps_account_for_every_token_prefill_and_second(starts: dict[str, StartRecord]) -> None:
    for start in starts.values():
        for cell in start.cells:
            assert sum(step.tokens for step in cell.steps) == sum(request.n_out for request in cell.requests)
            assert sum(step.prefills for step in cell.steps) == len(cell.requests)
            assert max(step.running for step in cell.steps) == cell.batch_size
            assert 0 <= cell.harness_seconds < 0.2 * cell.makespan, "a step of this target takes a millisecond"
            assert sum(step.seconds for step in cell.steps) + cell.harness_seconds <= cell.makespan * 1.001
    assert starts["ar"].cells[0].mean_running == pytest.approx(1)
    assert 1 < starts["ar"].cells[1].mean_running <= 4


def test_a_schedule_drafts_at_small_batches_only(starts: dict[str, StartRecord]) -> None:
    alone, four = starts["schedule"].cells
    assert alone.counters["num_drafts"] > 0
    full = [step for step in four.steps if step.running > 2]
    assert full
    assert starts["schedule"].draft_length == 2


def test_arms_differ_in_what_drafting_forces_and_in_nothing_else(starts: dict[str, StartRecord]) -> None:
    differences = config_differences(list(starts.values()))
    unforced = {(each["arm"], each["setting"]) for each in differences if not each["forced"]}
    # vLLM's n-gram drafter takes all cores whatever OMP_NUM_THREADS says: on fewer threads the comparison is void.
    assert unforced <= {("ngram", "machine.torch_threads")}
    assert {each["arm"] for each in differences} == {"k2", "ngram", "schedule"}


def test_sampling_is_explicit_repeatable_and_mended_where_vllm_is_broken(tmp_path: Path, tiny_target: Path) -> None:
    """Two starts with the same seeds sample the same answers, other seeds others; fixed length ignores the stop token."""
    plan = make_plan(tiny_target)
    cell = replace(plan.cells[1], temperature=1.0, top_p=0.9, top_k=50)
    other = replace(cell, seed=100)
    fixed = replace(cell, dataset="heldout-fixed-length", ignore_eos=True)
    sampling = replace(plan, cells=[cell, other, fixed], prefix_caching=True)
    lines: list[str] = []
    found = []
    for number in (0, 1):
        stem = tmp_path / f"{number:03d}-ar"
        assert launcher_of(lines).run(replace(sampling, start=number), stem), stem.with_suffix(".log").read_text()[
            -3000:
        ]
        found.append(served(read_start(stem.with_suffix(".jsonl"))))
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
    assert all(len(tokens) == MAX_TOKENS for _, tokens in found[0][2])


def test_two_engines_side_by_side_take_turns(tmp_path: Path, tiny_target: Path) -> None:
    plan = replace(make_plan(tiny_target), protocol="side-by-side", blocks=2)
    lines: list[str] = []
    turns = plan_turns([PLAIN], protocol="side-by-side", starts_per_arm=1)
    assert run_grid(tmp_path, plan=plan, turns=turns, launcher=launcher_of(lines)) == 2
    assert [line.split()[1] for line in lines] == ["ar", "ar_twin", "ar_twin", "ar", "ar", "ar_twin", "ar_twin", "ar"]
    plain, beside = read_starts(tmp_path)
    assert (plain.beside, beside.beside) == ("ar_twin", "ar")
    assert served(plain) == served(beside)
    assert len(plain.cells) == 4


def test_a_killed_session_leaves_no_engine_behind(tmp_path: Path, tiny_target: Path) -> None:
    """kill -9 of the parent, while one engine of a pair works and the other waits."""
    plan = replace(make_plan(tiny_target), protocol="side-by-side", blocks=400)
    for number, arm in enumerate(("ar", "control")):
        write_json(tmp_path / f"{arm}.plan.json", replace(plan, arm=arm, kind="other", start=number).to_json())
    session = subprocess.Popen(
        [sys.executable, "-c", KILLED_SESSION, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert session.stdout is not None
    first = session.stdout.readline()
    assert first.startswith("000 ar"), first
    children = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(children) == 2
    session.kill()
    session.wait()
    deadline = time.monotonic() + 30
    while any(running(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(running(child) for child in children)


KILLED_SESSION = """
import sys
from pathlib import Path
from eyas.eval import child
from eyas.eval.launch import Launcher
from eyas.eval.plan import read_plan
from eyas.heads.serving import engine_environment
folder = Path(sys.argv[1])
names = ("ar", "control")
plans = tuple(read_plan(folder / f"{name}.plan.json") for name in names)
popen = child.subprocess.Popen
def noting(command, **options):
    process = popen(command, **options)
    (folder / f"{process.pid}.pid").write_text(str(process.pid))
    return process
child.subprocess.Popen = noting
Launcher(engine_environment(threads=1, kv_cache_gib=1), 600).run_pair(plans, tuple(folder / name for name in names))
"""


def running(process: int) -> bool:
    """Whether a process lives; a zombie that nobody has waited for does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False
