"""The main job end to end on a tiny random target with real vLLM, and the head's drafts against the engine's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from eyas.heads.drafting import draft_one_chain
from eyas.heads.files import read_json
from eyas.heads.formats.vllm import read_head
from eyas.heads.serving import engine_environment, speculative_config
from eyas.heads.target import HiddenStateCapture, load_target_model, load_target_pieces
from tests import tiny

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parent.parent
NUM_DRAFTED = 3

RECORD_DRAFTS = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

plan = json.load(open(sys.argv[1]))
drafts = []
update = Scheduler.update_draft_token_ids

def record(self, draft_token_ids):
    for request_id, tokens in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids):
        request = self.requests.get(request_id)
        if request is not None:
            drafts.append([request.all_token_ids[:], list(tokens)])
    return update(self, draft_token_ids)

Scheduler.update_draft_token_ids = record
llm = LLM(plan["target"], dtype="float32", max_model_len=256, max_num_seqs=4, skip_tokenizer_init=True,
          enforce_eager=True, enable_prefix_caching=False, async_scheduling=False,
          speculative_config=plan["speculative_config"])
llm.generate([{"prompt_token_ids": prompt} for prompt in plan["prompts"]],
             SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False))
json.dump(drafts, open(sys.argv[2], "w"))
"""


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
            "fidelity_requests": 4,
            "fidelity_max_tokens": 24,
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
    last_line = output.rstrip().splitlines()[-1]
    assert str(run / "score" / "report.html") in last_line
    results = read_json(run / "score" / "results.json")
    assert results["fidelity"]["lossless"]["identical"] == results["fidelity"]["lossless"]["requests"] == 4
    parity = results["fidelity"]["parity"]
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
    assert result.stdout.count("skipped") == 5
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


def test_the_engine_drafts_what_the_chain_drafter_drafts(
    finished: tuple[Path, str], recipe: Path, tmp_path: Path
) -> None:
    run, _ = finished
    tiny_target = recipe.parent / "target"
    head_dir = run / "export"
    drafts = _engine_drafts(head_dir, tiny_target, tmp_path)
    assert len(drafts) > 20
    head = read_head(head_dir)
    embedding_VH = load_target_pieces(tiny_target).embedding_VH.float()
    capture = HiddenStateCapture(
        load_target_model(tiny_target, dtype=torch.float32), capture_layers=head.config.capture_layers
    )
    for token_ids, drafted in drafts:
        token_ids_T = torch.tensor(token_ids)
        captured_BTX, _ = capture(token_ids_T[None])
        ours = draft_one_chain(
            head,
            embedding_VH=embedding_VH,
            token_ids_T=token_ids_T,
            captured_TX=captured_BTX[0],
            slot=len(token_ids) - 2,
            num_tokens=NUM_DRAFTED,
        )
        assert ours == drafted, f"after {len(token_ids)} tokens"


def _engine_drafts(head_dir: Path, target: Path, tmp_path: Path) -> list[tuple[list[int], list[int]]]:
    """(tokens so far, drafted tokens) of every draft that real vLLM makes for three prompts."""
    plan = {
        "target": str(target),
        "prompts": [[5, 6, 7, 8], [40, 41, 42, 43, 44, 45, 46], [200, 3, 100]],
        "speculative_config": speculative_config(head_dir, method="eagle3", num_speculative_tokens=NUM_DRAFTED),
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "record.py").write_text(RECORD_DRAFTS)
    result = subprocess.run(
        [sys.executable, str(tmp_path / "record.py"), str(tmp_path / "plan.json"), str(tmp_path / "drafts.json")],
        env=engine_environment(threads=2, kv_cache_gib=1),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return read_json(tmp_path / "drafts.json")


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
