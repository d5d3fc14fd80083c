"""The models that arms are made of: checked before an engine starts, fingerprinted, and told in the report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.heads.config import head_config_for_target, load_target_config
from eyas.heads.files import sha256_file
from eyas.heads.formats.write import write_head
from eyas.recipes import score_context
from eyas.recipes.load import load_recipe
from eyas.recipes.run import Run
from eyas.recipes.score_context import measured_context
from eyas.recipes.score_heads import arm_fingerprints, head_files, require_servable_arm, servable_head
from tests import tiny


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """`fits`, an EAGLE-3 head of the tiny target, and `other`, one of another target."""
    folder = tmp_path_factory.mktemp("heads")
    target = load_target_config(tiny_target)
    fits = head_config_for_target(target, draft_vocab_size=128, capture_layers=tiny.CAPTURE_LAYERS)
    write_head(folder / "fits", tiny.random_head(fits), dtype=torch.float32)
    write_head(folder / "other", tiny.random_head(tiny.head_config()), dtype=torch.float32)
    return folder


def arm(model: Path | str, method: str = "eagle3") -> dict[str, Any]:
    return {"method": method, "model": str(model), "num_speculative_tokens": 3}


def check(config: dict[str, Any], target: Path) -> None:
    require_servable_arm("peer", config, target_dir=target, trust_remote_code=False)


def test_a_head_of_an_arm_is_checked_like_the_measured_one(heads: Path, tiny_target: Path) -> None:
    check(arm(heads / "fits"), tiny_target)
    with pytest.raises(
        ValueError, match=r"other cannot be served: .*hidden states of size 32, and the target's are 64"
    ):
        check(arm(heads / "other"), tiny_target)
    with pytest.raises(
        ValueError, match=r"score\.arms\.peer: .* is an eagle3 head, and method is eagle; set method to eagle3"
    ):
        check(arm(heads / "fits", method="eagle"), tiny_target)
    with pytest.raises(ValueError, match=r"score\.arms\.peer\.model: /no/such/head is no directory"):
        check(arm("/no/such/head"), tiny_target)


def test_what_is_no_head_in_a_directory_is_left_to_vllm(heads: Path, tiny_target: Path) -> None:
    check({"method": "ngram", "num_speculative_tokens": 3}, tiny_target)
    check(arm("somebody/a-head-of-the-hub"), tiny_target)
    check(arm(heads / "other", method="draft_model"), tiny_target)


def test_a_model_of_an_arm_that_changes_in_place_changes_the_session(tmp_path: Path) -> None:
    model = tmp_path / "draft"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"one")
    arms = {"draft": arm(model, method="draft_model"), "ngram": {"method": "ngram"}, "hub": arm("a/name")}
    before = arm_fingerprints(arms)
    assert set(before) == {"model of arm draft"}
    assert arm_fingerprints(arms) == before
    (model / "model.safetensors").write_bytes(b"two")
    assert arm_fingerprints(arms) != before


def test_the_files_and_the_form_of_a_head_are_told(heads: Path, tiny_target: Path) -> None:
    told = head_files(heads / "fits")
    paths = [heads / "fits" / name for name in told["sha256"]]
    assert {path.name for path in paths} == {"config.json", "model.safetensors"}
    assert told["sha256"] == {path.name: sha256_file(path) for path in paths}
    assert told["bytes"] == sum(path.stat().st_size for path in paths)
    assert told["fingerprint"] != head_files(heads / "other")["fingerprint"]
    assert servable_head(heads / "fits", target_dir=tiny_target, trust_remote_code=False).kind == "eagle3"


def test_what_belongs_to_a_measurement(tmp_path: Path, heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("smollm2-135m-eagle3-cpu", overrides=[f"run_dir={tmp_path}"])
    run = Run(recipe=recipe, run_dir=tmp_path, target_dir=tmp_path, target_fingerprint="t")
    run.conversations.parent.mkdir(parents=True)
    run.conversations.write_text("training data")
    monkeypatch.setattr(sys, "argv", ["eyas", "score", "mine.yaml", "score.seed=1"])
    monkeypatch.setattr(score_context, "git_state", lambda: None)
    told = measured_context(run, head_dir=heads / "fits", head=tiny.head_config())
    assert told["command"] == ["eyas", "score", "mine.yaml", "score.seed=1"]
    assert told["data_sha256"] == sha256_file(run.conversations)
    assert told["eyas"].keys() == {"version", "commit", "dirty"}
    assert told["eyas"]["commit"] is None
    assert told["head_files"] == head_files(heads / "fits")
    shown = {name: told["head_config"][name] for name in ("kind", "num_layers", "draft_vocab_size", "hidden_size")}
    assert shown == {"kind": "eagle3", "num_layers": 1, "draft_vocab_size": 40, "hidden_size": 32}
    assert list(told["head_config"]["capture_layers"]) == list(tiny.CAPTURE_LAYERS)
    json.dumps(told, allow_nan=False)
    foreign = run.recipe.model_copy(update={"score": run.recipe.score.model_copy(update={"head": "elsewhere"})})
    other = Run(recipe=foreign, run_dir=tmp_path, target_dir=tmp_path, target_fingerprint="t")
    assert measured_context(other, head_dir=None, head=None)["data_sha256"] is None
