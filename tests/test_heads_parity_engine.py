"""Real vLLM and `draft_from_slots` draft the same tokens, for every variant of a head that vLLM has.

Targets and heads are tiny and random, everything is float32 and greedy. A case makes about 240 draft steps.
All of it takes 110 s on two idle cores, 140 s on busy ones: 20 s to import vLLM and write the files, 1.4 s a case.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from eyas.heads.build import build_head
from eyas.heads.config import head_rope_parameters, load_target_config
from eyas.heads.formats.files import Format
from eyas.heads.formats.read import read_head
from eyas.heads.formats.write import write_head
from tests import tiny
from tests.engine_lab import NUM_DRAFTED, compare, run_cases

pytestmark = pytest.mark.engine

VOCAB = 64
HIDDEN = 64
NUM_LAYERS = 4
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SHORT = 64
"""Positions that scaled rotary embeddings were made for; prompts of rotary cases are longer."""

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": SHORT,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": SHORT,
    },
    "yarn-told": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": SHORT,
        "attention_factor": 1.3,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": SHORT,
        "mscale": 0.7,
        "mscale_all_dim": 1.4,
        "truncate": False,
    },
}


@dataclass(frozen=True)
class Case:
    """A head's fields beside the standard ones, the target it drafts for, and the layout it is written in."""

    changes: dict[str, Any] = field(default_factory=dict)
    target: str = "llama"
    layout: Format = "vllm"
    long_prompts: bool = False
    num_drafted: int = NUM_DRAFTED
    engine: dict[str, Any] = field(default_factory=dict)
    speculative: dict[str, Any] = field(default_factory=dict)


FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
ALL_FLAGS = dict.fromkeys(FLAGS, True)
QWEN3 = {"layer": "qwen3"}
EAGLE = {"kind": "eagle"}
PREFIX_CACHE = {"enable_prefix_caching": True, "block_size": 32, "max_num_seqs": 2}
IN_PIECES: dict[str, Any] = {
    # By default vLLM 0.32 reads the prompt's last token, not the next one, at the end of every piece but the last
    # (`prepare_next_token_ids_padded`), and drafts that attend there differ from ours. This switches to its other path.
    "speculative": {"disable_padded_drafter_batch": True},
    "engine": {"max_num_batched_tokens": 100},
}


def _flag_cases() -> dict[str, Case]:
    return {
        "eagle3-" + ("+".join(itertools.compress(FLAGS, chosen)) or "no-flags"): Case(
            dict(zip(FLAGS, chosen, strict=True))
        )
        for chosen in itertools.product((False, True), repeat=len(FLAGS))
    }


CASES: dict[str, Case] = {
    **_flag_cases(),
    "eagle3-two-layers": Case({"num_layers": 2}),
    "eagle3-three-layers-all-flags": Case({"num_layers": 3, **ALL_FLAGS}),
    "eagle3-bias": Case({"attention_bias": True}),
    "eagle3-two-layers-bias": Case({"num_layers": 2, "attention_bias": True}),
    "eagle3-other-heads": Case({"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}),
    "eagle3-smaller": Case({"hidden_size": 32, "own_embedding": True}),
    "eagle3-larger-all-flags": Case({"hidden_size": 96, "own_embedding": True, **ALL_FLAGS}),
    "eagle3-own-embedding": Case({"own_embedding": True}),
    "eagle3-sliding": Case({"sliding_window": 8}),
    "eagle3-sliding-narrow": Case({"sliding_window": 2}),
    "eagle3-sliding-two-layers": Case({"sliding_window": 5, "num_layers": 2}),
    "eagle3-sliding-five-drafted": Case({"sliding_window": 2}, num_drafted=5),
    "eagle3-large-eps": Case({"rms_norm_eps": 0.5, "num_layers": 2, **ALL_FLAGS}),
    "qwen3-large-eps": Case({**QWEN3, "rms_norm_eps": 0.5}),
    "eagle3-one-drafted": Case(num_drafted=1),
    "eagle3-prompts-in-pieces": Case(long_prompts=True, **IN_PIECES),
    "eagle-prompts-in-pieces": Case(EAGLE, long_prompts=True, **IN_PIECES),
    "eagle3-shared-prefixes": Case(long_prompts=True, engine=PREFIX_CACHE),
    "eagle3-whole-vocabulary": Case({"draft_vocab_size": VOCAB}),
    "eagle3-tied-target": Case(target="llama-tied"),
    "eagle3-one-captured": Case({"capture_layers": (3,), "fc_norm": True}),
    "eagle3-four-captured": Case({"capture_layers": (1, 2, 3, 4), "norm_before_fc": True}),
    "eagle3-default-captured": Case({"capture_layers": (2, 4, 5)}, target="llama-deep"),
    "eagle3-qwen3-target": Case(target="qwen3"),
    "qwen3": Case(QWEN3),
    "qwen3-all-flags": Case({**QWEN3, **ALL_FLAGS}, target="qwen3"),
    "qwen3-residual-normed": Case({**QWEN3, "norm_before_residual": True}),
    "qwen3-3.1": Case({**QWEN3, "fc_norm": True, "norm_output": True}),
    "qwen3-bias": Case({**QWEN3, "attention_bias": True}),
    "qwen3-two-layers": Case({**QWEN3, "num_layers": 2, "capture_layers": (1, 4)}),
    "qwen3-sliding": Case({**QWEN3, "sliding_window": 8}),
    "qwen3-smaller": Case({**QWEN3, "hidden_size": 32, "own_embedding": True}),
    "eagle": Case(EAGLE),
    "eagle-bias": Case({**EAGLE, "attention_bias": True}),
    "eagle-two-layers": Case({**EAGLE, "num_layers": 2}),
    "eagle-own-embedding": Case({**EAGLE, "own_embedding": True}),
    "eagle-tied-target": Case(EAGLE, target="llama-tied"),
    "eagle-qwen3-target": Case(EAGLE, target="qwen3"),
    "speculators": Case(layout="speculators"),
    "speculators-3.1": Case(
        {**ALL_FLAGS, "norm_before_fc": False, "capture_layers": (1, 2, 3, 4)}, layout="speculators"
    ),
    "speculators-qwen3": Case({**QWEN3, "sliding_window": 8}, layout="speculators"),
    "speculators-own-embedding": Case({"own_embedding": True, "num_layers": 2}, layout="speculators"),
    **{f"eagle3-{rope}": Case(target=f"llama-{rope}", long_prompts=True) for rope in ROPES},
    "qwen3-yarn": Case(QWEN3, target="llama-yarn", long_prompts=True),
    "eagle-yarn": Case(EAGLE, target="llama-yarn", long_prompts=True),
    "speculators-llama3": Case(target="llama-llama3", layout="speculators", long_prompts=True),
}


def _write_target(name: str, directory: Path) -> None:
    torch.manual_seed(0)
    rope = name.removeprefix("llama-")
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 8 if name == "llama-deep" else NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "tie_word_embeddings": name == "llama-tied",
        "rope_parameters": dict(ROPES.get(rope, DEFAULT_ROPE)),
        "initializer_range": 0.2,
    }
    if name == "qwen3":
        Qwen3ForCausalLM(Qwen3Config(**fields)).save_pretrained(directory)
    else:
        LlamaForCausalLM(LlamaConfig(**fields)).save_pretrained(directory)


def _write_head(case: Case, directory: Path, *, target: Path) -> None:
    target_config = load_target_config(target)
    fields: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "head_dim": 32,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB if case.changes.get("kind") == "eagle" else 48,
        "rope_parameters": head_rope_parameters(target_config),
        "max_position_embeddings": target_config.max_position_embeddings,
    }
    config = tiny.head_config(**{**fields, **case.changes, "target_hidden_size": HIDDEN})
    directory.mkdir()
    write_head(directory, tiny.random_head(config), dtype=torch.float32, to=case.layout, verifier=str(target))


def _prompts(case: Case) -> list[list[int]]:
    lengths = (97, 113, 129, 150, 161, 90, 180, 120) if case.long_prompts else (4, 9, 2, 17, 30, 5, 12, 1)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]
    if case.engine.get("enable_prefix_caching"):
        return [prompts[4] + prompt[:5] for prompt in prompts]
    return prompts


Ran = dict[str, tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Every case and its result, from one engine process."""
    directory = tmp_path_factory.mktemp("parity")
    cases = []
    for name, case in CASES.items():
        target, head = directory / f"target-{case.target}", directory / f"head-{name}"
        if not target.exists():
            _write_target(case.target, target)
        _write_head(case, head, target=target)
        cases.append(
            {
                "name": name,
                "target": str(target),
                "head": str(head),
                "method": case.changes.get("kind", "eagle3"),
                "prompts": _prompts(case),
                "num_speculative_tokens": case.num_drafted,
                "engine": case.engine,
                "speculative": case.speculative,
            }
        )
    results = run_cases(cases, directory / "lab")
    return {case["name"]: (case, result) for case, result in zip(cases, results, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_the_engine_drafts_what_draft_from_slots_drafts(ran: Ran, name: str) -> None:
    case, result = ran[name]
    found = compare(case, result, head=read_head(Path(case["head"])))
    assert not found.differences, found
    assert found.ties <= 2, found
    assert found.drafts >= 200
    assert found.distinct >= 10, "drafts that hardly vary would agree by chance"


def test_some_drafts_are_accepted_and_some_prompts_cached(ran: Ran) -> None:
    accepted = [sum(map(sum, result["accepted"])) for _, result in ran.values()]
    assert sum(accepted) > 100
    assert sum(ran["eagle3-shared-prefixes"][1]["cached"]) >= 4 * 128


MISREAD: dict[str, dict[str, Any]] = {
    "eagle3-norm_before_residual": {"norm_before_residual": False},
    "eagle3-norm_output": {"norm_output": False},
    "eagle3-sliding": {"sliding_window": 9},
    "eagle3-large-eps": {"rms_norm_eps": 1e-5},
    "eagle3-default-captured": {"capture_layers": (2, 4, 6)},
    "eagle-yarn": {"rope_parameters": DEFAULT_ROPE},
    **{f"eagle3-{rope}": {"rope_parameters": DEFAULT_ROPE} for rope in ROPES if rope != "dynamic"},
}


@pytest.mark.parametrize("name", MISREAD)
def test_a_head_that_is_read_wrongly_drafts_otherwise(ran: Ran, name: str) -> None:
    """The comparison sees each of these, so agreement above is no chance."""
    case, result = ran[name]
    head = read_head(Path(case["head"]))
    wrong = build_head(replace(head.config, **MISREAD[name]), draft_to_target_D=head.draft_to_target_D)
    wrong.load_state_dict(head.state_dict())
    assert len(compare(case, result, head=wrong.eval()).differences) >= 10
