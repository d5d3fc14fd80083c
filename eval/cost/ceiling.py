"""`eyas ceiling`: before any training, what acceptance would a head need at each batch size, and what is the best case?

Plain decoding and a head of random weights are served in alternating fresh processes, the head with synthetic acceptance
at two lengths per k. Prompts are random tokens and answers have a fixed length: only step times are taken from this, and
those do not depend on the text (in a mixture of experts they may, by the experts that it visits).
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eyas.eval.arms import PLAIN, Arm
from eyas.eval.cost.ceiling_rows import ceiling_results
from eyas.eval.cost.ceiling_words import ceiling_sentences
from eyas.eval.cost.synthetic import synthetic_config
from eyas.eval.grid import plan_turns, require_both_sides, run_grid
from eyas.eval.launch import Launcher
from eyas.eval.plan import CellPlan, StartPlan
from eyas.eval.records import read_starts
from eyas.eval.sessions import open_session
from eyas.eval.settings import Engine
from eyas.eval.workload import Request
from eyas.heads.config import Kind, load_target_config
from eyas.heads.files import write_json, write_text
from eyas.heads.serving import engine_environment, require_vllm, speculative_config

DATASET = "synthetic"
LENGTHS = {"low": 0.25, "high": 0.75}
"""Arm suffix -> share of the drafts that are accepted on average."""
FIRST_TOKEN = 3
"""Random prompts leave out the first ids, which are special tokens in most vocabularies."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What is measured: batch sizes, draft lengths, and how much of it.

    `requests` are served in a cell at least, each with a prompt of `prompt_tokens` and an answer of `answer_tokens`.
    """

    batch_sizes: tuple[int, ...]
    draft_lengths: tuple[int, ...]
    starts_per_arm: int
    requests: int
    prompt_tokens: int
    answer_tokens: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Shape of the random head; None is what random_head.py takes."""

    kind: Kind
    draft_vocab_size: int | None
    capture_layers: tuple[int, ...] | None


def run_ceiling(
    out_dir: Path,
    *,
    target_dir: Path,
    trust_remote_code: bool,
    shape: HeadShape,
    measurement: Measurement,
    engine: Engine,
    relay: Callable[[str], None],
) -> dict[str, Any]:
    """Measure and answer; writes starts/ (raw records), ceiling.json and ceiling.md. Finished starts are kept.

    Raises:
        ValueError: vLLM is missing, prompt and answer do not fit, or all starts of one side failed.
    """
    require_vllm()
    engine = fitting_engine(engine, target_dir=target_dir, trust_remote_code=trust_remote_code)
    _require_room(measurement, max_model_len=engine.max_model_len)
    out_dir.mkdir(parents=True, exist_ok=True)
    head_dir = out_dir / "random-head"
    from eyas.eval.cost.random_head import write_random_head

    write_random_head(
        head_dir,
        target_dir=target_dir,
        kind=shape.kind,
        draft_vocab_size=shape.draft_vocab_size,
        capture_layers=shape.capture_layers,
        dtype=engine.dtype,
        trust_remote_code=trust_remote_code,
    )
    arms = ceiling_arms(head_dir, method=shape.kind, draft_lengths=measurement.draft_lengths)
    plan = ceiling_plan(
        out_dir, target_dir=target_dir, trust_remote_code=trust_remote_code, measurement=measurement, engine=engine
    )
    environment = engine_environment(threads=engine.threads, kv_cache_gib=engine.kv_cache_gib)
    launcher = Launcher(environment, engine.timeout_s, relay)
    turns = plan_turns(arms, protocol="starts", starts_per_arm=measurement.starts_per_arm)
    run_grid(out_dir / "starts", plan=plan, turns=turns, launcher=launcher)
    require_both_sides(out_dir / "starts")
    shutil.rmtree(head_dir)
    context = {"target": str(target_dir), "head": vars(shape), "measurement": vars(measurement), "engine": vars(engine)}
    results = ceiling_results(read_starts(out_dir / "starts"), context=context)
    write_json(out_dir / "ceiling.json", results)
    write_text(out_dir / "ceiling.md", "\n".join(f"- {each}" for each in ceiling_sentences(results)) + "\n")
    return results


def fitting_engine(engine: Engine, *, target_dir: Path, trust_remote_code: bool) -> Engine:
    """The settings with no longer context than the target has: vLLM refuses more, and a plain target has no recipe to say."""
    positions = load_target_config(target_dir, trust_remote_code=trust_remote_code).max_position_embeddings
    return replace(engine, max_model_len=min(engine.max_model_len, positions))


def ceiling_arms(head_dir: Path, *, method: str, draft_lengths: Sequence[int]) -> list[Arm]:
    """Plain decoding, and each draft length at two synthetic acceptance lengths."""
    arms = [PLAIN]
    for length in draft_lengths:
        base = speculative_config(head_dir, method=method, num_speculative_tokens=length)
        for name, share in LENGTHS.items():
            config = synthetic_config(base, acceptance_length=1 + share * length)
            arms.append(Arm(f"k{length}_{name}", "head", config))
    return arms


def ceiling_plan(
    out_dir: Path, *, target_dir: Path, trust_remote_code: bool, measurement: Measurement, engine: Engine
) -> StartPlan:
    """The cells: random prompts, every answer of the same length."""
    vocab_size = load_target_config(target_dir, trust_remote_code=trust_remote_code).vocab_size
    prompts = random_prompts(
        max(measurement.requests, *measurement.batch_sizes) + 1,
        tokens=measurement.prompt_tokens,
        vocab_size=vocab_size,
        seed=measurement.seed,
    )
    cells = [
        CellPlan(
            dataset=DATASET,
            batch_size=size,
            temperature=0.0,
            max_tokens=measurement.answer_tokens,
            seed=measurement.seed,
            requests=prompts[: max(measurement.requests, size)],
            ignore_eos=True,
        )
        for size in measurement.batch_sizes
    ]
    return StartPlan(
        target_dir=str(target_dir),
        trust_remote_code=trust_remote_code,
        dtype=engine.dtype,
        max_model_len=engine.max_model_len,
        seed=measurement.seed,
        enforce_eager=engine.enforce_eager,
        stop_token_ids=[],
        warmup=prompts[-1].token_ids,
        cells=cells,
        session=open_session(out_dir),
        prefix_caching=engine.prefix_caching,
        tensor_parallel_size=engine.tensor_parallel_size,
        gpu_memory_utilization=engine.gpu_memory_utilization,
    )


def random_prompts(count: int, *, tokens: int, vocab_size: int, seed: int) -> list[Request]:
    """`count` different prompts of random token ids."""
    generator = random.Random(seed)
    return [
        Request(DATASET, f"random-{number}", [generator.randrange(FIRST_TOKEN, vocab_size) for _ in range(tokens)])
        for number in range(count)
    ]


def _require_room(measurement: Measurement, *, max_model_len: int) -> None:
    longest = measurement.prompt_tokens + measurement.answer_tokens + max(measurement.draft_lengths) + 1
    if longest > max_model_len:
        raise ValueError(
            f"a prompt of {measurement.prompt_tokens} tokens, an answer of {measurement.answer_tokens} and "
            f"{max(measurement.draft_lengths)} drafts do not fit into max_model_len {max_model_len}; ask for fewer tokens or "
            "raise score.max_model_len"
        )
