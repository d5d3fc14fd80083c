"""Heads that the speculators library made: read, converted both ways, and served in both forms with the same drafts.

The library (0.9) is a test-only dependency. Its heads are built by its own classes and saved by its own writer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from eyas.heads.formats.check import check_head, errors
from eyas.heads.formats.read import read_files, read_head
from eyas.heads.formats.write import convert_head
from tests.engine_lab import compare, run_cases

pytestmark = pytest.mark.engine
pytest.importorskip("speculators")

VOCAB, HIDDEN, LAYERS = 64, 64, (1, 2, 4)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@dataclass(frozen=True)
class Made:
    """A head as the library makes it: fields of its configuration, and the class of its layer."""

    fields: dict[str, Any]
    layer: type = LlamaConfig
    num_layers: int = 1


HEADS = {
    "llama": Made({"draft_vocab_size": 48, "norm_before_residual": True}),
    "llama raw residual": Made({"draft_vocab_size": 48, "norm_before_residual": False}),
    "qwen3 3.1": Made(
        {"draft_vocab_size": 48, "norm_before_residual": True, "fc_norm": True, "norm_output": True}, layer=Qwen3Config
    ),
    "whole vocabulary": Made({"draft_vocab_size": VOCAB, "norm_before_fc": True}),
    "two layers": Made({"draft_vocab_size": 48, "norm_before_residual": True}, num_layers=2),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("target")
    config = LlamaConfig(**SIZES, num_hidden_layers=5, tie_word_embeddings=False, initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def _make(directory: Path, made: Made, *, target: Path) -> None:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = made.layer(**SIZES, num_hidden_layers=made.num_layers, attn_implementation="eager")
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        eagle_aux_hidden_state_layer_ids=list(LAYERS),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(target), architectures=["LlamaForCausalLM"]),
        ),
        **made.fields,
    )
    torch.manual_seed(1)
    model = Eagle3DraftModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                0.3 * torch.randn_like(parameter) if parameter.dim() == 2 else torch.rand_like(parameter) + 0.5
            )
    if model.d2t is not None and model.t2d is not None:
        ids = torch.sort(torch.randperm(VOCAB)[: made.fields["draft_vocab_size"]]).values
        model.d2t.copy_(ids - torch.arange(ids.shape[0]))
        model.t2d[ids] = True
    model.save_pretrained(directory)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, target: Path) -> dict[str, dict[str, Any]]:
    """Each head in the library's own form and converted to vLLM's, through one engine process."""
    directory = tmp_path_factory.mktemp("speculators")
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in (4, 9, 17, 30)]
    cases = []
    for name, made in HEADS.items():
        own, raw = directory / name / "own", directory / name / "vllm"
        _make(own, made, target=target)
        convert_head(own, raw, to="vllm", target=None)
        for form in (own, raw):
            case = {"target": str(target), "head": str(form), "method": "eagle3", "prompts": prompts, "max_tokens": 40}
            cases.append(case | {"name": name})
    results = run_cases(cases, directory / "lab")
    return {
        name: {"cases": cases[2 * index : 2 * index + 2], "results": results[2 * index : 2 * index + 2]}
        for index, name in enumerate(HEADS)
    }


@pytest.mark.parametrize("name", HEADS)
def test_both_forms_draft_and_accept_the_same(name: str, served: dict[str, dict[str, Any]]) -> None:
    own, raw = served[name]["results"]
    assert own["error"] is None and raw["error"] is None
    assert own["drafts"] == raw["drafts"]
    assert own["accepted"] == raw["accepted"]
    assert len(own["drafts"]) > 100


def test_some_drafts_are_accepted(served: dict[str, dict[str, Any]]) -> None:
    accepted = [sum(map(sum, case["accepted"])) for each in served.values() for case in each["results"]]
    assert sum(accepted) > 10, "equal counts of nothing would say little"


@pytest.mark.parametrize("name", HEADS)
def test_we_draft_with_them_as_the_engine_does(name: str, served: dict[str, dict[str, Any]]) -> None:
    case, result = served[name]["cases"][0], served[name]["results"][0]
    found = compare(case, result, head=read_head(Path(case["head"])))
    assert not found.differences, found
    assert found.ties <= 2
    assert found.distinct >= 10


@pytest.mark.parametrize("name", HEADS)
def test_conversion_both_ways_keeps_every_bit_and_the_library_reads_it(
    name: str, served: dict[str, dict[str, Any]], target: Path, tmp_path: Path
) -> None:
    from speculators.models.eagle3.core import Eagle3DraftModel

    own = Path(served[name]["cases"][0]["head"])
    raw = Path(served[name]["cases"][1]["head"])
    assert errors(check_head(own, target_dir=target)) == []
    assert errors(check_head(raw, target_dir=target)) == []
    convert_head(raw, tmp_path / "back", to="speculators", target=str(target))
    before, after = read_files(own), read_files(tmp_path / "back")
    assert after.config == before.config
    assert after.tensors.keys() == before.tensors.keys()
    for tensor, values in before.tensors.items():
        assert torch.equal(values, after.tensors[tensor]), tensor
    theirs, again = (Eagle3DraftModel.from_pretrained(path).state_dict() for path in (own, tmp_path / "back"))
    assert theirs.keys() == again.keys()
    for tensor, values in theirs.items():
        if not tensor.startswith("verifier_"):  # the target's own weights, which no head carries
            assert torch.equal(values, again[tensor]), tensor
