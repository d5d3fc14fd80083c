"""What a run starts from: new heads of every kind, another head, draft vocabularies, and what does not fit together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from eyas.heads.config import load_target_config
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.files import read_json
from eyas.heads.formats.files import Format
from eyas.heads.formats.read import read_head
from eyas.heads.formats.write import write_head
from eyas.heads.head import DraftHead
from eyas.heads.initialise import HeadStart, new_head
from eyas.heads.target import load_target_pieces
from eyas.heads.vocab import choose_draft_vocabulary, coverage, size_for_coverage
from eyas.train.features.store import FeatureStore
from eyas.train.losses import TokenLoss
from eyas.train.noise import FeatureNoise
from eyas.train.objective import Losses
from eyas.train.start import HeadPlan, planned_config, require_possible, start_head
from tests import tiny, training

RANDOM = HeadStart(lm_head="random", final_norm="ones", layer="random")
PLANS: dict[str, dict[str, Any]] = {
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "qwen3 layers": {"layer": "qwen3", "num_layers": 2, "start": HeadStart(layer="random")},
    "two layers of the target": {"num_layers": 2},
    "another hidden size": {"hidden_size": 96, "start": RANDOM},
    "auto": {"draft_vocab_size": "auto", "draft_coverage": 0.5},
    "whole vocabulary, frozen": {"draft_vocab_size": None, "start": HeadStart(train_lm_head=False)},
    "window, biased": {"sliding_window": 8, "attention_bias": True},
}
FEW = training.shorter(training.LOOP, epochs=1)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> tuple[Path, Path, Path]:
    tokens, features = training.make_inputs(tmp_path_factory.mktemp("inputs"), target=tiny_target)
    return tiny_target, tokens, features


def _start(plan: HeadPlan, inputs: tuple[Path, Path, Path], *, say: Callable[[str], None] = print) -> DraftHead:
    target, tokens, features = inputs
    return start_head(
        plan,
        target_dir=target,
        target=load_target_config(target),
        pieces=load_target_pieces(target),
        documents=FeatureStore(features, split="train"),
        heldout=FeatureStore(features, split="heldout"),
        capture_layers=tiny.CAPTURE_LAYERS,
        stop_token_ids=read_json(tokens / "stop_tokens.json"),
        seed=0,
        say=say,
    )


def _require_possible(plan: HeadPlan, target: Path, *, layout: Format = "vllm") -> None:
    require_possible(
        plan, target_dir=target, capture_layers=tiny.CAPTURE_LAYERS, trust_remote_code=False, layout=layout
    )


@pytest.mark.parametrize("name", PLANS)
def test_every_kind_of_head_trains_and_reads_back(name: str, inputs: tuple[Path, Path, Path], tmp_path: Path) -> None:
    target, tokens, features = inputs
    plan = training.plan(**PLANS[name])
    _require_possible(plan, target)
    counts = training.train(tmp_path, target=target, tokens=tokens, features=features, loop=FEW, plan=plan)
    assert counts["steps"] > 5
    start, trained = _start(plan, inputs), read_head(tmp_path / "head")
    assert trained.config == start.config
    for (tensor, before), (_, after) in zip(start.named_parameters(), trained.named_parameters(), strict=True):
        assert torch.equal(before, after) == (not before.requires_grad), tensor


def test_eagle_trains_with_regression_noise_and_the_top_k_term(inputs: tuple[Path, Path, Path], tmp_path: Path) -> None:
    target, tokens, features = inputs
    arguments: dict[str, Any] = {
        "target": target,
        "tokens": tokens,
        "features": features,
        "plan": training.plan(kind="eagle", draft_vocab_size="auto"),
        "losses": Losses(token=TokenLoss(forward_kl=0.1, top_k=1.0, top_k_tokens=5), feature_weight=1.0, detach=True),
        "loop": training.shorter(training.LOOP, epochs=2, noise=FeatureNoise(kind="length", width=0.2)),
    }
    counts = training.train(tmp_path / "one", **arguments)
    assert counts["draft_vocab_size"] == load_target_config(target).vocab_size
    assert counts["draft_coverage_heldout"] == 1.0
    records = [record for record in training.metrics(tmp_path / "one") if "smooth_l1_1" in record]
    assert records[-1]["smooth_l1_1"] < records[0]["smooth_l1_1"]
    training.train(tmp_path / "two", **arguments)
    heads = [(tmp_path / run / "head" / "model.safetensors").read_bytes() for run in ("one", "two")]
    assert heads[0] == heads[1], "noise included, a run is a function of its seed"


def test_a_head_goes_on_from_another(inputs: tuple[Path, Path, Path], tmp_path: Path) -> None:
    first = _start(training.plan(), inputs)
    with torch.no_grad():
        first.fc.weight.add_(1.0)
    write_head(tmp_path, first, dtype=torch.float32)
    again = _start(training.plan(init_head=tmp_path), inputs)
    for (name, before), (_, after) in zip(first.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(before, after), name
    assert again.training


def test_a_draft_vocabulary_of_other_data_is_kept_only_when_asked_for(
    inputs: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    config = _start(training.plan(), inputs).config
    foreign = tiny.random_head(config, seed=3)
    write_head(tmp_path, foreign, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"head\.vocabulary=reuse"):
        _start(training.plan(init_head=tmp_path), inputs)
    kept = _start(training.plan(init_head=tmp_path, vocabulary="reuse"), inputs)
    assert torch.equal(kept.draft_to_target_D, foreign.draft_to_target_D)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "eagle"}, r"head\.kind=eagle3"),
        ({"norm_output": True}, r"head\.norm_output=True contradicts"),
        ({"num_layers": 2}, r"head\.num_layers=2 contradicts"),
        ({"draft_vocab_size": 64}, r"head\.draft_vocab_size=64 contradicts"),
    ],
)
def test_a_recipe_that_contradicts_the_head_it_starts_from_is_refused(
    changes: dict[str, Any], message: str, inputs: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    write_head(tmp_path, _start(training.plan(), inputs), dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        _start(training.plan(init_head=tmp_path, **changes), inputs)


def test_a_head_for_another_target_is_refused_before_extraction(
    inputs: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    write_head(tmp_path, tiny.random_head(tiny.head_config()), dtype=torch.float32)
    plan = training.plan(init_head=tmp_path)
    with pytest.raises(ValueError, match="hidden size 32 and 100 tokens, and this target has 64 and 320"):
        _require_possible(plan, inputs[0])


def test_a_copied_embedding_is_shared_again(inputs: tuple[Path, Path, Path], tmp_path: Path) -> None:
    pieces = load_target_pieces(inputs[0])
    plan = training.plan()
    config = _start(plan, inputs).config
    for same in (True, False):
        head = _start(plan, inputs)
        own = tiny.random_head(type(config)(**{**vars(config), "own_embedding": True}))
        own.load_state_dict(head.state_dict() | {"embed_tokens.weight": pieces.embedding_VH + (0.0 if same else 1.0)})
        own.draft_to_target_D.copy_(head.draft_to_target_D)
        write_head(tmp_path / str(same), own, dtype=torch.bfloat16)
        started = _start(training.plan(init_head=tmp_path / str(same)), inputs)
        assert (started.embed_tokens is None) == same


@pytest.mark.parametrize("part", ["lm_head", "final_norm", "layer"])
def test_each_part_starts_where_it_is_told(part: str, inputs: tuple[Path, Path, Path]) -> None:
    target = inputs[0]
    config = planned_config(
        training.plan(), target=load_target_config(target), capture_layers=(1, 2, 3), draft_vocab_size=128
    )
    pieces = load_target_pieces(target)
    pieces = type(pieces)(pieces.embedding_VH, pieces.readout_VH, pieces.final_norm_H + 0.5)

    def head(start: HeadStart) -> Eagle3Head:
        made = new_head(
            config,
            draft_to_target_D=torch.arange(128),
            pieces=pieces,
            target_dir=target,
            num_target_layers=6,
            start=start,
            seed=0,
        )
        assert isinstance(made, Eagle3Head)
        return made

    standard = head(HeadStart())
    other = head(HeadStart(**{part: "target" if part == "final_norm" else "random"}))
    places = {"lm_head": "lm_head.", "final_norm": "norm.", "layer": ("layers.", "fc.")}
    for (name, ours), (_, theirs) in zip(standard.named_parameters(), other.named_parameters(), strict=True):
        if not name.startswith(places[part]):
            assert torch.equal(ours, theirs), name
    assert torch.equal(standard.lm_head.weight, pieces.readout_VH[:128].float())
    assert torch.equal(standard.norm.weight, torch.ones(config.hidden_size))
    if part == "final_norm":
        assert torch.equal(other.norm.weight, pieces.final_norm_H.float())
    assert not torch.equal(
        dict(standard.named_parameters())[_named(part)], dict(other.named_parameters())[_named(part)]
    )


def _named(part: str) -> str:
    return {"lm_head": "lm_head.weight", "final_norm": "norm.weight", "layer": "layers.0.self_attn.q_proj.weight"}[part]


def test_the_automatic_size_is_the_smallest_that_covers() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 1000, (3000,), generator=generator) ** 2
    heldout = torch.randint(0, 50, (3000,), generator=generator)
    for share in (0.1, 0.5, 0.9, 1.0):
        size = size_for_coverage(counts, heldout_counts_V=heldout, share=share, always=[2999])
        assert size == 3000 or size % 128 == 0

        def covered(number: int) -> float:
            chosen = choose_draft_vocabulary(counts, size=number, always=[2999])
            return coverage(heldout, draft_to_target_D=chosen)

        assert covered(size) >= share
        assert size <= 128 or covered(min(size, 2944) - 128 if size < 3000 else 2944) < share


def test_a_bias_of_the_repository_layout_is_left_behind_unless_asked_for(
    inputs: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    biased = training.plan(kind="eagle", draft_vocab_size="auto", fc_bias=True)
    head = _start(biased, inputs)
    with torch.no_grad():
        head.fc.bias.add_(1.0)
    write_head(tmp_path, head, dtype=torch.float32, to="eagle-repo")
    kept = _start(replace(biased, init_head=tmp_path), inputs)
    assert torch.equal(kept.fc.bias, head.fc.bias)
    lines: list[str] = []
    left = _start(replace(biased, init_head=tmp_path, fc_bias=False), inputs, say=lines.append)
    assert any("fc.bias of" in line and "is left out" in line for line in lines)
    assert left.fc.bias is None
    assert torch.equal(left.fc.weight, head.fc.weight)


def test_a_head_goes_on_from_the_speculators_layout(inputs: tuple[Path, Path, Path], tmp_path: Path) -> None:
    first = _start(training.plan(), inputs)
    write_head(tmp_path, first, dtype=torch.float32, to="speculators", verifier=str(inputs[0]))
    again = _start(training.plan(init_head=tmp_path), inputs)
    assert again.config == first.config
    assert torch.equal(again.fc.weight, first.fc.weight)


def test_a_head_with_a_short_context_is_given_the_targets(inputs: tuple[Path, Path, Path], tmp_path: Path) -> None:
    first = _start(training.plan(), inputs)
    short = tiny.random_head(replace(first.config, max_position_embeddings=64))
    write_head(tmp_path, short, dtype=torch.float32)
    started = _start(training.plan(init_head=tmp_path, vocabulary="reuse"), inputs)
    assert started.config.max_position_embeddings == first.config.max_position_embeddings > 64


@pytest.mark.parametrize(
    ("changes", "layout", "message"),
    [
        ({"kind": "eagle", "draft_vocab_size": "auto", "fc_bias": True}, "vllm", "fc has a bias"),
        ({"kind": "eagle", "draft_vocab_size": "auto"}, "speculators", "only EAGLE-3 heads"),
        ({"norm_before_fc": True, "fc_norm": True}, "speculators", "norm_before_fc together with fc_norm"),
        ({"norm_output": True}, "eagle-repo", "no norm_output"),
        ({"hidden_size": 66, "start": RANDOM}, "vllm", "not a multiple of the number of attention heads"),
    ],
)
def test_a_head_that_its_layout_cannot_hold_is_refused_before_extraction(
    changes: dict[str, Any], layout: Format, message: str, tiny_target: Path
) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2} if "hidden_size" in changes else {}
    with pytest.raises(ValueError, match=message):
        _require_possible(training.plan(**changes, **heads), tiny_target, layout=layout)


def test_training_in_bfloat16_learns(
    inputs: tuple[Path, Path, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    target, tokens, features = inputs
    request.addfinalizer(AcceleratorState._reset_state)
    for kind in ("eagle3", "eagle"):
        AcceleratorState._reset_state()  # the other tests of this process chose float32
        plan = training.plan(kind=kind, draft_vocab_size=128 if kind == "eagle3" else "auto")
        training.train(tmp_path / kind, target=target, tokens=tokens, features=features, plan=plan, precision="bf16")
        losses = [record["kl_1"] for record in training.metrics(tmp_path / kind) if "kl_1" in record]
        assert losses[-1] < 0.95 * losses[0]
