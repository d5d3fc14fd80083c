"""The main job end to end on a tiny taught target with real vLLM, and heads that come from elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from eyas.heads.files import read_json
from eyas.train.tracking import read_metrics
from tests import tiny

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parent.parent
NUM_DRAFTED = 3


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe like the quickstart's on a tiny taught target: seconds of training, two starts an arm."""
    directory = tmp_path_factory.mktemp("pipeline")
    conversations = tiny.write_conversation_file(directory / "conversations.jsonl", train=48, heldout=6)
    tiny.teach_target(directory / "target", conversations)
    settings = {
        "name": "tiny",
        "run_dir": str(directory / "run"),
        "target": {"model": str(directory / "target")},
        "data": {"conversations": str(conversations), "max_length": 64, "max_train_tokens": None},
        "features": {"capture_layers": list(tiny.CAPTURE_LAYERS), "dtype": "float32", "batch_tokens": 512},
        "head": {"draft_vocab_size": 128},
        "train": {
            "epochs": 4,
            "batch_tokens": 256,
            "learning_rate": 3.0e-3,
            "precision": "fp32",
            "evaluate_every": 10,
            "evaluate_conversations": 4,
            "checkpoint_every": 10,
            "log_every": 5,
        },
        "score": {
            "draft_lengths": [NUM_DRAFTED],
            "batch_sizes": [1, 4],
            "starts_per_arm": 2,
            "min_requests": 4,
            "requests_per_batch_slot": 1,
            "max_tokens": 16,
            "humaneval_requests": 0,
            "dtype": "float32",
            "max_model_len": 256,
            "kv_cache_gib": 1,
            "time_split": False,
            "lossless": {"requests": 4, "max_tokens": 24, "samples": 0},
        },
    }
    path = directory / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="module")
def finished(recipe: Path) -> tuple[Path, str]:
    result = _eyas("run", str(recipe))
    assert result.returncode == 0, result.stderr[-4000:]
    return recipe.parent / "run", result.stdout


def _eyas(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("eyas")), *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_one_command_trains_exports_serves_and_reports(finished: tuple[Path, str]) -> None:
    run, output = finished
    assert "train: draft vocabulary: 128 of 320 tokens, which cover" in output
    last_line = output.rstrip().splitlines()[-1]
    assert str(run / "score" / "report.html") in last_line
    results = read_json(run / "score" / "results.json")
    (greedy,) = results["lossless"]["L1"]["arms"]
    assert greedy["identical"] == greedy["requests"] == 4
    parity = results["parity"]
    assert parity["served"]["tau_step_weighted"] > 1.3
    assert parity["offline"]["drafts"] == parity["served"]["drafts"]
    assert parity["offline"]["marginal"] == pytest.approx(parity["served"]["marginal"], abs=0.02)
    for cell in results["cells"]:
        assert cell["dataset"] == "heldout"
    html = (run / "score" / "report.html").read_text()
    assert "<svg" in html
    assert "http://" not in html.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )


def test_a_second_run_does_nothing(finished: tuple[Path, str], recipe: Path) -> None:
    run, _ = finished
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and path.parent != run}
    result = _eyas("run", str(recipe))
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.count("skipped") == 6
    after = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and path.parent != run}
    assert after == before


def test_the_report_is_recomputed_from_raw_records(finished: tuple[Path, str]) -> None:
    run, _ = finished
    results = (run / "score" / "results.json").read_bytes()
    for name in ("results.json", "report.html", "report.md"):
        (run / "score" / name).unlink()
    result = _eyas("report", str(run))
    assert result.returncode == 0, result.stderr[-4000:]
    assert (run / "score" / "results.json").read_bytes() == results
    assert (run / "score" / "report.html").is_file()


def test_the_export_carries_its_model_card(finished: tuple[Path, str], recipe: Path) -> None:
    run, _ = finished
    card = (run / "export" / "README.md").read_text()
    tau = read_json(run / "train" / "heldout.json")["heldout_tau"]
    assert f"{tau:.3f}" in card
    assert read_json(run / "prepare" / "manifest.json")["inputs"]["conversations"] in card
    assert "--speculative-config" in card
    assert f"| base model | `{recipe.parent / 'target'}` |" in card


def test_a_head_from_elsewhere_is_scored_without_training(
    finished: tuple[Path, str], recipe: Path, tmp_path: Path
) -> None:
    """The speculators form of the trained head, as a stranger would bring it: same acceptance, nothing trained."""
    run, _ = finished
    head = tmp_path / "head"
    converted = _eyas("convert", str(run / "export"), str(head), "--to", "speculators")
    assert converted.returncode == 0, converted.stderr
    overrides = [f"score.head={head}", f"run_dir={tmp_path / 'run'}", "score.batch_sizes=[4]", "score.starts_per_arm=1"]
    result = _eyas("score", str(recipe), *overrides)
    assert result.returncode == 0, result.stderr[-4000:]
    assert not (tmp_path / "run" / "train").exists()
    (scored,) = (tmp_path / "run").glob("score-*")
    theirs, ours = (read_json(path / "results.json")["parity"] for path in (scored, run / "score"))
    assert theirs["served"] == ours["served"]
    assert theirs["offline"] == ours["offline"]


def test_an_eagle_head_goes_the_same_way(recipe: Path, tmp_path: Path) -> None:
    """Trained with regression, noise and the HASS term, exported, served as method eagle, scored against plain decoding."""
    overrides = [f"run_dir={tmp_path / 'run'}", "head.kind=eagle", "head.draft_vocab_size=auto"]
    overrides += ["features.capture_layers=null", "train.losses.feature=1.0", "train.feature_noise=length"]
    overrides += ["train.losses.top_k=0.5", "score.batch_sizes=[4]", "score.starts_per_arm=1"]
    result = _eyas("run", str(recipe), *overrides)
    assert result.returncode == 0, result.stderr[-4000:]
    results = read_json(tmp_path / "run" / "score" / "results.json")
    (greedy,) = results["lossless"]["L1"]["arms"]
    assert greedy["identical"] == greedy["requests"] == 4
    parity = results["parity"]
    assert parity["offline"]["drafts"] == parity["served"]["drafts"]
    assert parity["offline"]["marginal"] == pytest.approx(parity["served"]["marginal"], abs=0.02)
    assert parity["served"]["tau_step_weighted"] > 1.1
    assert '"method": "eagle"' in (tmp_path / "run" / "export" / "README.md").read_text()


def test_a_missing_or_broken_head_is_refused_before_an_engine_starts(recipe: Path, tmp_path: Path) -> None:
    missing = _eyas("score", str(recipe), f"score.head={tmp_path / 'none'}", f"run_dir={tmp_path / 'run'}")
    assert missing.returncode == 2
    assert "no head directory" in missing.stderr
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}'
    )
    broken = _eyas("score", str(recipe), f"score.head={tmp_path / 'head'}", f"run_dir={tmp_path / 'run'}")
    assert broken.returncode == 2
    assert "model.safetensors is missing" in broken.stderr


def test_training_goes_on_from_the_exported_head(finished: tuple[Path, str], recipe: Path, tmp_path: Path) -> None:
    run, _ = finished
    overrides = [f"run_dir={tmp_path / 'run'}", f"init.head={run / 'export'}", "train.epochs=1"]
    result = _eyas("train", str(recipe), *overrides)
    assert result.returncode == 0, result.stderr[-4000:]
    first, second = (
        read_metrics(directory / "train" / "metrics.jsonl")[0]["kl_1"] for directory in (run, tmp_path / "run")
    )
    assert second < 0.7 * first, "the first steps must know what the head had learnt"


def test_training_launched_in_two_processes_leaves_one_head(recipe: Path, tmp_path: Path) -> None:
    """The multi-process form of `eyas train`, through accelerate's launcher, on CPU."""
    run = f"run_dir={tmp_path / 'run'}"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command = [*launch, "-m", "eyas.train", str(recipe), run]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}

    def launched() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)

    early = launched()
    assert early.returncode != 0
    assert "run `eyas extract`" in early.stderr
    assert _eyas("extract", str(recipe), run).returncode == 0
    result = launched()
    assert result.returncode == 0, result.stderr[-4000:]
    manifest = read_json(tmp_path / "run" / "train" / "manifest.json")
    assert manifest["counts"]["steps"] > 10
    assert (tmp_path / "run" / "train" / "head" / "model.safetensors").is_file()
    again = launched()
    assert again.returncode == 0, again.stderr[-4000:]
    assert again.stdout.count("skipped") == 1
