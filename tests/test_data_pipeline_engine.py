"""From prompts to features by every way there is, on a tiny taught target: the ways differ in cost and not in numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from eyas.heads.files import read_json
from eyas.train.features.store import FeatureStore
from eyas.train.tracking import read_metrics
from tests import tiny

pytestmark = pytest.mark.engine


def _eyas(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("eyas")), *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def _done(*arguments: str) -> str:
    result = _eyas(*arguments)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of prompts in two forms, a set to guard against, and answers that the target makes anew."""
    directory = tmp_path_factory.mktemp("data")
    conversations = tiny.write_conversation_file(directory / "conversations.jsonl", train=40, heldout=6)
    tiny.teach_target(directory / "target", conversations)
    rows = [json.loads(line) for line in conversations.read_text().splitlines()]
    sharegpt = [{"conversations": [_turn(message) for message in row["messages"]]} for row in rows[:20]]
    _write(directory / "sharegpt.jsonl", sharegpt)
    _write(directory / "own.jsonl", rows)
    _write(directory / "guarded.jsonl", [{"prompt": rows[0]["messages"][0]["content"]}])
    settings: dict[str, Any] = {
        "name": "tiny",
        "run_dir": str(directory / "run"),
        "target": {"model": str(directory / "target")},
        "data": {
            "sources": [{"path": str(directory / "sharegpt.jsonl")}, {"path": str(directory / "own.jsonl")}],
            "guard": {"sources": [{"path": str(directory / "guarded.jsonl"), "format": "pairs"}]},
            "max_length": 64,
            "regenerate": True,
            "generation": {"temperature": [0.0, 0.8], "max_tokens": 12, "batch_size": 8, "keep_states": True},
        },
        "features": {"capture_layers": list(tiny.CAPTURE_LAYERS), "dtype": "float32", "batch_tokens": 512},
        "head": {"draft_vocab_size": 128},
        "train": {
            "epochs": 2,
            "batch_tokens": 256,
            "precision": "fp32",
            "evaluate_conversations": 4,
            "evaluate_every": 10,
            "checkpoint_every": 10,
            "log_every": 1,
        },
        "score": {"max_model_len": 128, "max_tokens": 16, "humaneval_requests": 0, "kv_cache_gib": 1}
        | {"lossless": {"max_tokens": 16}},
    }
    path = directory / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def _turn(message: dict[str, str]) -> dict[str, str]:
    return {"from": {"user": "human", "assistant": "gpt"}.get(message["role"], "system"), "value": message["content"]}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def extracted(recipe: Path) -> tuple[Path, str]:
    output = _done("extract", str(recipe))
    return recipe.parent / "run", output


def test_collection_tells_schemas_and_drops(extracted: tuple[Path, str]) -> None:
    run, output = extracted
    counts = read_json(run / "collect" / "manifest.json")["counts"]
    assert "sharegpt.jsonl (sharegpt" in output
    sources = counts["sources"]
    assert sources["sharegpt.jsonl"]["read"] == 20
    assert sum(sources["own.jsonl"]["dropped"].values()) >= 19, "the first twenty were in the other file"
    for source in sources.values():
        assert source["read"] == source["kept"] + sum(source["dropped"].values())
    assert counts["guard"]["exact"] >= 1, "the guarded prompt is in the training data"


def test_answers_are_the_targets_and_states_come_with_them(extracted: tuple[Path, str]) -> None:
    run, _ = extracted
    conversations = [json.loads(line) for line in (run / "regenerate" / "conversations.jsonl").read_text().splitlines()]
    answers = [message for row in conversations for message in row["messages"] if message["role"] == "assistant"]
    assert all(answer["token_ids"] for answer in answers)
    counts = read_json(run / "features" / "manifest.json")["counts"]
    assert counts["documents"] == len(conversations)
    assert counts["from_generation"] == counts["documents"], "one pass made answers and states"


def test_every_way_to_the_features_gives_the_same(extracted: tuple[Path, str], recipe: Path, tmp_path: Path) -> None:
    """States of generation, of transformers and of vLLM's extraction, of the same tokens."""
    run, _ = extracted
    ways = {
        "hf": ["features.backend=hf"],
        "vllm": ["features.backend=vllm", "features.batch_size=8"],
    }
    reference = _documents(run / "features")
    for name, overrides in ways.items():
        other = tmp_path / name
        conversations = run / "regenerate" / "conversations.jsonl"
        data = [
            f"data.sources=[{{path: {conversations}}}]",
            "data.regenerate=false",
            "data.generation.keep_states=false",
        ]
        _done("extract", str(recipe), f"run_dir={other}", *data, "data.guard.enabled=false", *overrides)
        for key, (captured_TX, teacher_PH) in _documents(other / "features").items():
            expected_TX, expected_PH = reference[key]
            assert _error(captured_TX, expected_TX) < 1e-5, name
            assert _error(teacher_PH, expected_PH) < 1e-5, name


def _documents(store: Path) -> dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]]:
    """States by tokens: captured ones up to the last label, whose own state nothing reads, and the teacher's."""
    found = {}
    for split in ("train", "heldout"):
        documents = FeatureStore(store, split=split)
        for document in documents.load(range(len(documents))):
            key = tuple(document.token_ids_T.tolist())
            found[key] = (document.captured_TX[:-1], document.teacher.hidden_PH)  # type: ignore[union-attr]
    return found


def _error(values: torch.Tensor, expected: torch.Tensor) -> float:
    return float((values - expected).norm() / expected.norm())


@pytest.mark.parametrize("where", ["inline", "process"])
def test_online_training_learns_what_offline_training_learns(
    extracted: tuple[Path, str], recipe: Path, tmp_path: Path, where: str
) -> None:
    run, _ = extracted
    conversations = run / "regenerate" / "conversations.jsonl"
    data = [f"data.sources=[{{path: {conversations}}}]", "data.regenerate=false", "data.generation.keep_states=false"]
    data += ["data.guard.enabled=false"]
    taus, losses = [], []
    for name, overrides in {"offline": [], "online": ["features.mode=online", f"features.where={where}"]}.items():
        output = _done("train", str(recipe), f"run_dir={tmp_path / name}", *data, *overrides)
        assert (tmp_path / name / "features").exists() == (name == "offline")
        assert ("features: running" in output) == (name == "offline")
        taus.append(read_json(tmp_path / name / "train" / "heldout.json")["heldout_tau"])
        metrics = read_metrics(tmp_path / name / "train" / "metrics.jsonl")
        losses.append([line["kl_1"] for line in metrics if "kl_1" in line])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert taus[1] == pytest.approx(taus[0], abs=1e-6)
