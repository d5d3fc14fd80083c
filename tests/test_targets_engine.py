"""Heads for every family of targets, from conversations to real vLLM: prepare, extract, train, export, serve.

Targets are tiny and random; heads are trained for some steps only, so that they are what the train stage makes.
All of it takes about a minute: half a second to make a head, 1.5 s to serve it, and the import of vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from eyas.heads.chat import TargetChat
from eyas.heads.config import load_target_config
from eyas.heads.formats.export import export_head
from eyas.heads.formats.read import read_head
from eyas.heads.head import DraftHead
from eyas.heads.initialise import HeadStart
from eyas.train.data.conversations import iterate_conversations
from tests import tiny, training
from tests.engine_lab import NUM_DRAFTED, compare, run_cases

pytestmark = pytest.mark.engine

WINDOW = 16
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}

TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-untied": ("Llama", {"tie_word_embeddings": False}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-sliding": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "rope_parameters": YARN,
            "tie_word_embeddings": False,
        },
    ),
}
"""Name of transformers' classes, and what differs from the standard fields."""


@dataclass(frozen=True)
class Case:
    """A head and its target; `changes` are those of `training.plan`."""

    target: str
    changes: dict[str, Any] = field(default_factory=dict)


RANDOM: dict[str, Any] = {"start": HeadStart(layer="random")}
"""For targets whose layers are not those of the head."""

CASES: dict[str, Case] = {
    "llama-eagle3": Case("llama"),
    "llama-untied-eagle3": Case("llama-untied"),
    "mistral-eagle3": Case("mistral"),
    "mistral-sliding-eagle3": Case("mistral-sliding", {"sliding_window": WINDOW}),
    "mistral-sliding-inherited": Case("mistral-sliding"),
    "mistral-sliding-eagle": Case("mistral-sliding", {"kind": "eagle"}),
    "qwen2-eagle3": Case("qwen2"),
    "qwen3-eagle3": Case("qwen3", RANDOM),
    "qwen3-qwen3-layer": Case("qwen3", {"layer": "qwen3", "norm_before_residual": True}),
    "qwen3-moe-eagle3": Case("qwen3-moe", RANDOM),
    "qwen3-moe-qwen3-layer": Case("qwen3-moe", {"layer": "qwen3", "fc_norm": True, "norm_output": True, **RANDOM}),
    "gpt-oss-eagle3": Case("gpt-oss", RANDOM),
    **{
        f"{target}-eagle": Case(target, {"kind": "eagle"})
        for target in ("llama", "llama-untied", "mistral", "qwen2", "qwen3", "qwen3-moe", "gpt-oss")
    },
}


def _write_target(name: str, directory: Path) -> Path:
    family, changes = TARGETS[name]
    fields: dict[str, Any] = {
        "vocab_size": tiny.VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(fields | changes))
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(directory)
    tiny.write_tokenizer(directory)
    return directory


def _prompts(target: Path, conversations: Path) -> list[list[int]]:
    chat = TargetChat(target)
    rows = list(iterate_conversations(conversations, on_bad_line="stop"))
    return [chat.encode_conversation(row.messages)[0].token_ids[:20] for row in rows[:8]]


def _trained_case(name: str, directory: Path) -> dict[str, Any]:
    """A trained and exported head as a case of the engine's process; inputs are shared by the heads of a target."""
    case = CASES[name]
    target, inputs = directory / f"target-{case.target}", directory / f"inputs-{case.target}"
    if not target.exists():
        _write_target(case.target, target)
        training.make_inputs(inputs, target=target)
    training.train(
        directory / name,
        target=target,
        tokens=inputs / "prepare",
        features=inputs / "features",
        loop=training.shorter(training.LOOP, epochs=1),
        plan=training.plan(**case.changes),
    )
    (directory / f"head-{name}").mkdir()
    export_head(
        directory / f"head-{name}",
        head_dir=directory / name / "head",
        target_dir=target,
        dtype=torch.float32,
        to="vllm",
        verifier=str(target),
        card="",
        draft_tokens=NUM_DRAFTED,
    )
    return {
        "name": name,
        "target": str(target),
        "head": str(directory / f"head-{name}"),
        "method": case.changes.get("kind", "eagle3"),
        "prompts": _prompts(target, inputs / "c.jsonl"),
    }


Ran = dict[str, tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Every case and its result, from one engine process."""
    directory = tmp_path_factory.mktemp("targets")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny matrices; see tests/engine_lab.py
    cases = [_trained_case(name, directory) for name in CASES]
    torch.set_num_threads(threads)
    results = run_cases(cases, directory / "lab")
    return {case["name"]: (case, result) for case, result in zip(cases, results, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_a_trained_head_drafts_in_the_engine_what_it_drafts_here(ran: Ran, name: str) -> None:
    case, result = ran[name]
    found = compare(case, result, head=_served_head(case))
    assert not found.differences, found
    assert found.ties <= 2, found
    assert found.drafts >= 100
    assert found.distinct >= 3, "drafts that never vary would agree by chance"


@pytest.mark.parametrize("name", ["mistral-sliding-inherited", "mistral-sliding-eagle"])
def test_a_target_that_slides_in_every_layer_makes_its_head_slide(ran: Ran, name: str) -> None:
    """vLLM gives such a target's window to every layer without one of its own, so without it other drafts come out."""
    case, result = ran[name]
    head = read_head(Path(case["head"]))
    assert head.config.window is None
    assert _served_head(case).config.window == WINDOW
    assert len(compare(case, result, head=head).differences) >= 10


def _served_head(case: dict[str, Any]) -> DraftHead:
    return read_head(Path(case["head"]), target_config=load_target_config(Path(case["target"])))
