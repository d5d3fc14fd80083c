"""The training loop: it learns, keeps its trajectory, resumes to the bit, and refuses what does not fit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas.heads.files import read_json, write_json
from eyas.heads.formats.check import check_head, errors
from eyas.heads.initialise import HeadStart
from eyas.train.loop import Trainer
from eyas.train.noise import FeatureNoise
from eyas.train.preemption import Preempted
from eyas.train.tracking import METRICS_NAME, read_metrics
from tests import training

REFERENCE = Path(__file__).parent / "references" / "trajectory.json"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> tuple[Path, Path, Path]:
    tokens, features = training.make_inputs(tmp_path_factory.mktemp("inputs"), target=tiny_target)
    return tiny_target, tokens, features


@pytest.fixture(scope="module")
def finished(inputs: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out_dir = tmp_path_factory.mktemp("finished")
    _train(out_dir, inputs)
    return out_dir


def _train(out_dir: Path, inputs: tuple[Path, Path, Path], **changes: object) -> dict[str, object]:
    target, tokens, features = inputs
    return training.train(out_dir, target=target, tokens=tokens, features=features, **changes)


def _curve(out_dir: Path) -> list[dict[str, float]]:
    kept = ("step", "kl_1", "grad_norm", "heldout/tau")
    return [{key: record[key] for key in kept if key in record} for record in read_metrics(out_dir / METRICS_NAME)]


def test_training_lowers_the_loss_and_leaves_a_valid_head(finished: Path, inputs: tuple[Path, Path, Path]) -> None:
    losses = [record["kl_1"] for record in _curve(finished) if "kl_1" in record]
    assert losses[-1] < 0.7 * losses[0]
    assert errors(check_head(finished / "head", target_dir=inputs[0])) == []
    heldout = read_json(finished / "heldout.json")
    assert 1.0 <= heldout["heldout_tau"] <= 4.0
    assert heldout["heldout_conversations"] == 4


def test_the_trajectory_is_the_committed_one(finished: Path) -> None:
    """A change that is meant to leave numbers alone must not move them. EYAS_WRITE_REFERENCES=1 writes them anew."""
    curve = _curve(finished)
    if os.environ.get("EYAS_WRITE_REFERENCES"):
        REFERENCE.parent.mkdir(exist_ok=True)
        REFERENCE.write_text(json.dumps(curve, indent=1) + "\n")
    expected = read_json(REFERENCE)
    assert [record["step"] for record in curve] == [record["step"] for record in expected]
    for ours, reference in zip(curve, expected, strict=True):
        # Processors sum in different orders; a real change moves the first steps by far more.
        assert ours == pytest.approx(reference, rel=2e-3)


def test_a_stopped_run_resumes_to_the_same_bits(
    finished: Path, inputs: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Trainer._log

    def interrupted_at_seven(self: Trainer, *arguments: object, **keywords: object) -> dict[str, str]:
        if self.state.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return log(self, *arguments, **keywords)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_log", interrupted_at_seven)
        with pytest.raises(Preempted, match="SIGTERM, saved at step 7"):
            _train(tmp_path, inputs)
    assert read_metrics(tmp_path / METRICS_NAME)[-1]["step"] == 7
    assert read_json(tmp_path / "REQUEUE")["step"] == 7
    _train(tmp_path, inputs)
    assert not (tmp_path / "REQUEUE").exists()
    _assert_same_run(tmp_path, finished)


def test_a_killed_run_resumes_from_its_last_checkpoint_to_the_same_bits(
    finished: Path, inputs: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    step = Trainer._step

    def killed_at_ten(self: Trainer, *arguments: object, **keywords: object) -> object:
        if self.state.step == 10:
            raise Killed
        return step(self, *arguments, **keywords)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", killed_at_ten)
        with pytest.raises(Killed):
            _train(tmp_path, inputs)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir())[-1] == "step-00000008"
    _train(tmp_path, inputs)
    _assert_same_run(tmp_path, finished)


def test_a_resumed_run_draws_the_noise_of_the_unbroken_one(
    inputs: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {
        "plan": training.plan(kind="eagle", draft_vocab_size="auto"),
        "loop": training.shorter(training.LOOP, epochs=1, noise=FeatureNoise(kind="length", width=0.2)),
    }
    _train(tmp_path / "whole", inputs, **changes)
    step = Trainer._step

    def killed_at_six(self: Trainer, *arguments: object, **keywords: object) -> object:
        if self.state.step == 6:
            raise KeyboardInterrupt
        return step(self, *arguments, **keywords)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", killed_at_six)
        with pytest.raises(KeyboardInterrupt):
            _train(tmp_path / "broken", inputs, **changes)
    _train(tmp_path / "broken", inputs, **changes)
    heads = [(tmp_path / run / "head" / "model.safetensors").read_bytes() for run in ("whole", "broken")]
    assert heads[0] == heads[1]


def _assert_same_run(ours: Path, reference: Path) -> None:
    assert _curve(ours) == _curve(reference)
    for name in ("head/model.safetensors", "heldout.json"):
        assert (ours / name).read_bytes() == (reference / name).read_bytes()
    a, b = (
        load_file(sorted((run / "checkpoints").iterdir())[-1] / "optimizer.safetensors") for run in (ours, reference)
    )
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_the_best_head_is_kept_not_the_last(finished: Path) -> None:
    evaluations = {r["step"]: r["heldout/tau"] for r in _curve(finished) if "heldout/tau" in r}
    state = read_json(sorted((finished / "checkpoints").iterdir())[-1] / "state.json")["state"]
    assert state["best_tau"] == max(evaluations.values())
    assert state["best_step"] == min(step for step, tau in evaluations.items() if tau == state["best_tau"])
    assert [path.name for path in (finished / "heads").iterdir()] == [f"step-{state['best_step']:08d}"]


@pytest.mark.parametrize(
    "changes",
    [
        "",
        "kind='eagle', draft_vocab_size='auto'",
        "draft_vocab_size='auto', num_layers=2, norm_output=True, start=HeadStart(train_lm_head=False)",
    ],
)
def test_two_processes_train_one_head(changes: str, inputs: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """accelerate with two CPU processes: one head, and each step is the mean over both batches."""
    script = tmp_path / "two.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom eyas.heads.initialise import HeadStart\nfrom tests import training\n"
        "training.train(Path(sys.argv[1]), target=Path(sys.argv[2]), tokens=Path(sys.argv[3]), features=Path(sys.argv[4]), "
        f"loop=training.shorter(training.LOOP, epochs=2), plan=training.plan({changes}))\n"
    )
    run = tmp_path / "run"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parent.parent
    result = subprocess.run(
        [*command, str(script), str(run), *map(str, inputs)],
        env={**environment, "PYTHONPATH": str(root)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    curve = [record for record in _curve(run) if "kl_1" in record]
    assert min(record["kl_1"] for record in curve) < 0.97 * curve[0]["kl_1"]
    # Together the first step sees the first two batches of the order, which one process with both would see too.
    single = tmp_path / "single"
    plan = eval(f"training.plan({changes})", {"training": training, "HeadStart": HeadStart})
    _train(single, inputs, plan=plan, loop=training.shorter(training.LOOP, epochs=1, batch_tokens=240))
    assert curve[0]["kl_1"] == pytest.approx(_curve(single)[0]["kl_1"], rel=0.2)
    assert errors(check_head(run / "head", target_dir=inputs[0])) == []


def test_unjoined_processes_are_refused(
    inputs: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="ACCELERATE_USE_CPU"):
        _train(tmp_path, inputs)


def test_states_of_other_tokens_and_half_a_store_are_refused(inputs: tuple[Path, Path, Path], tmp_path: Path) -> None:
    target, tokens, features = inputs
    shutil.copytree(tokens, tmp_path / "tokens")
    index = read_json(tmp_path / "tokens" / "index.json")
    write_json(tmp_path / "tokens" / "index.json", index | {"made": "again"})
    with pytest.raises(ValueError, match="made of other tokens"):
        _train(tmp_path, (target, tmp_path / "tokens", features))
    shutil.copytree(features, tmp_path / "features")
    min((tmp_path / "features").glob("train-*.safetensors")).unlink()
    with pytest.raises(ValueError, match="lacks 24 of 24 documents of the train split"):
        _train(tmp_path, (target, tokens, tmp_path / "features"))


def test_a_head_that_cannot_start_from_the_target_is_refused(inputs: tuple[Path, Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"init\.layer=random"):
        _train(tmp_path, inputs, plan=training.plan(intermediate_size=96))
    random_layer = HeadStart(layer="random")
    counts = _train(
        tmp_path,
        inputs,
        plan=training.plan(intermediate_size=96, start=random_layer),
        loop=training.shorter(training.LOOP, epochs=1),
    )
    assert counts["steps"] > 0
