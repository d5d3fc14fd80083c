"""The worker against real vLLM: a tiny random target, with and without a random EAGLE-3 head."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eyas.eval.fidelity import check_lossless, target_logits
from eyas.eval.grid import config_differences
from eyas.eval.launch import Launcher
from eyas.eval.plan import CellPlan, StartPlan
from eyas.eval.records import StartRecord, read_start
from eyas.eval.workload import Request
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
    )


def served(start: StartRecord) -> list[list[tuple[str, list[int]]]]:
    return [[(request.prompt_id, request.token_ids) for request in cell.requests] for cell in start.cells]


def test_plain_and_drafted_decoding_give_the_same_greedy_tokens(tmp_path: Path, tiny_target: Path) -> None:
    head = write_random_head(tmp_path / "head")
    lines: list[str] = []
    launcher = Launcher(engine_environment(threads=1, kv_cache_gib=1), 300, lines.append)
    plan = make_plan(tiny_target)
    config = speculative_config(head, method="eagle3", num_speculative_tokens=2)
    drafting = replace(plan, arm="k2", start=1, speculative_config=config)
    starts = []
    for each in (plan, drafting):
        stem = tmp_path / f"{each.start:03d}-{each.arm}"
        assert launcher.run(each, stem), stem.with_suffix(".log").read_text()[-3000:]
        starts.append(read_start(stem.with_suffix(".jsonl")))
    plain, drafted = starts

    assert served(plain)[0] == served(plain)[1], "greedy answers do not depend on the batch size in float32"
    prompts = {request.prompt_id: request.token_ids for request in plan.cells[0].requests}
    logits = target_logits(tiny_target, trust_remote_code=False)
    for one, other in zip(plain.cells, drafted.cells, strict=True):
        check = check_lossless(one.requests, other.requests, prompts=prompts, logits=logits)
        assert check["passed"], check["differences"]

    for request in plain.cells[1].requests:
        assert request.per_step_accepted is None
        assert request.n_out == len(request.token_ids) == sum(request.chunk_sizes) <= MAX_TOKENS
        assert request.t_submit <= request.t_first <= request.t_finish
        assert request.finish_reason == ("stop" if request.token_ids[-1] == 2 else "length")
    for cell in drafted.cells:
        steps = [count for request in cell.requests for count in request.per_step_accepted or []]
        assert cell.counters["num_drafts"] == len(steps) > 0
        assert cell.counters["num_accepted_tokens"] == sum(steps)
    assert plain.cells[0].mean_running == pytest.approx(1, abs=0.05)
    assert 1 < plain.cells[1].mean_running <= 4
    assert all(each["forced"] for each in config_differences(starts)), config_differences(starts)
    assert len(lines) == 4
    assert lines[0].startswith("000 ar   heldout")
