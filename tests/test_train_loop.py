"""The training loop: it learns, keeps its trajectory, resumes to the bit, and refuses what does not fit."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas.heads.files import read_json, write_json
from eyas.heads.formats.check import check_head, errors
from eyas.heads.initialise import HeadStart
from eyas.train.loop import Trainer
from eyas.train.noise import FeatureNoise
from eyas.train.order import Pack
from eyas.train.pack import TrainingPack
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


def _train_until_killed(
    out_dir: Path, inputs: tuple[Path, Path, Path], *, step: int, monkeypatch: pytest.MonkeyPatch, **changes: object
) -> None:
    """Train, and end before a step without saving anything."""

    class Killed(BaseException):
        pass

    take = Trainer._step

    def killed(self: Trainer, *arguments: object, **keywords: object) -> object:
        if self.state.step == step:
            raise Killed
        return take(self, *arguments, **keywords)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", killed)
        with pytest.raises(Killed):
            _train(out_dir, inputs, **changes)


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
    _train_until_killed(tmp_path, inputs, step=10, monkeypatch=monkeypatch)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir())[-1] == "step-00000008"
    _train(tmp_path, inputs)
    _assert_same_run(tmp_path, finished)


def test_every_step_of_a_killed_run_is_in_one_record(
    finished: Path, inputs: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = training.shorter(training.LOOP, log_every=3, checkpoint_every=4)
    _train_until_killed(tmp_path, inputs, loop=loop, step=10, monkeypatch=monkeypatch)
    _train(tmp_path, inputs, loop=loop)
    losses = [record["loss"] for record in read_metrics(finished / METRICS_NAME) if "loss" in record]
    records = [record for record in read_metrics(tmp_path / METRICS_NAME) if "loss" in record]
    ends = [record["step"] for record in records]
    assert ends[:6] == [3, 4, 6, 8, 9, 12]
    for begin, record in zip([0, *ends], records, strict=False):
        steps = losses[begin : record["step"]]
        assert record["loss"] == pytest.approx(sum(steps) / len(steps), rel=1e-6), record["step"]
    assert ends[-1] == len(losses)
    assert {record["spikes"] for record in records} == {0}


def test_a_resumed_run_draws_the_noise_of_the_unbroken_one(
    inputs: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {
        "plan": training.plan(kind="eagle", draft_vocab_size="auto"),
        "loop": training.shorter(training.LOOP, epochs=1, noise=FeatureNoise(kind="length", width=0.2)),
    }
    _train(tmp_path / "whole", inputs, **changes)
    _train_until_killed(tmp_path / "broken", inputs, **changes, step=6, monkeypatch=monkeypatch)
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


@pytest.mark.processes
@pytest.mark.parametrize(
    "changes",
    [
        "",
        "kind='eagle', draft_vocab_size='auto'",
        "draft_vocab_size='auto', num_layers=2, norm_output=True, start=HeadStart(train_lm_head=False)",
    ],
)
def test_two_processes_train_what_one_does(changes: str, inputs: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """The same curves, with fillers where a batch has one conversation, and packs that are accumulated."""
    loop = "epochs=2, pack_tokens=60, max_skipped_steps=0"
    script = tmp_path / "two.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom eyas.heads.initialise import HeadStart\nfrom tests import training\n"
        "training.train(Path(sys.argv[1]), target=Path(sys.argv[2]), tokens=Path(sys.argv[3]), features=Path(sys.argv[4]), "
        f"loop=training.shorter(training.LOOP, {loop}), plan=training.plan({changes}))\n"
    )
    result = _launch(script, tmp_path / "two", inputs)
    assert result.returncode == 0, result.stderr[-3000:]
    plan = eval(f"training.plan({changes})", {"training": training, "HeadStart": HeadStart})
    _train(tmp_path / "one", inputs, plan=plan, loop=training.shorter(training.LOOP, epochs=2))
    curves = [
        [record for record in read_metrics(tmp_path / name / METRICS_NAME) if "loss" in record]
        for name in ("two", "one")
    ]
    assert len(curves[0]) == len(curves[1]) > 10
    for two, one in zip(*curves, strict=True):
        assert (two["tokens"], two["slots"]) == (one["tokens"], one["slots"])
        for key in ("loss", "grad_norm", "kl_1", "acceptance_1"):
            # Rounding differs, and Adam makes more of it from step to step; a row counted twice is off by percents.
            assert two[key] == pytest.approx(one[key], rel=2e-3), (one["step"], key)
    assert errors(check_head(tmp_path / "two" / "head", target_dir=inputs[0])) == []


@pytest.mark.processes
def test_a_signal_to_one_of_two_processes_saves_both_and_one_process_goes_on(
    inputs: tuple[Path, Path, Path], finished: Path, tmp_path: Path
) -> None:
    script = tmp_path / "stopped.py"
    script.write_text(
        "import os, signal, sys\nfrom pathlib import Path\nfrom eyas.train.loop import Trainer\n"
        "from eyas.train.preemption import Preempted\nfrom tests import training\n"
        "after = Trainer._after_step\n"
        "def signalled(self, progress):\n"
        "    if self.state.step == 7 and self.engine.rank == 1:\n"
        "        os.kill(os.getpid(), signal.SIGUSR2)\n"
        "    return after(self, progress)\n"
        "Trainer._after_step = signalled\n"
        "try:\n"
        "    training.train(Path(sys.argv[1]), target=Path(sys.argv[2]), tokens=Path(sys.argv[3]), "
        "features=Path(sys.argv[4]))\n"
        "except Preempted as stopped:\n"
        "    Path(sys.argv[1], f'stopped-{os.environ[\"RANK\"]}').write_text(str(stopped.step))\n"
    )
    run = tmp_path / "run"
    result = _launch(script, run, inputs)
    assert result.returncode == 0, result.stderr[-3000:]
    assert [(run / f"stopped-{rank}").read_text() for rank in range(2)] == ["7", "7"]
    assert read_json(run / "REQUEUE")["step"] == 7
    said: list[str] = []
    _train(run, inputs, say=said.append)
    assert any("is of 2 processes and goes on in 1" in line for line in said)
    for ours, reference in zip(_curve(run), _curve(finished), strict=True):
        assert ours == pytest.approx(reference, rel=2e-2), ours["step"]


def _launch(script: Path, run: Path, inputs: tuple[Path, Path, Path]) -> subprocess.CompletedProcess[str]:
    """Run a script in two processes of one thread each."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    return subprocess.run(
        [*command, str(script), str(run), *map(str, inputs)],
        env={
            **os.environ,
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parent.parent),
        },
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_averages_are_evaluated_kept_and_resumed_to_the_same_bits(
    inputs: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = training.shorter(training.LOOP, epochs=1, ema_decay=0.9)
    _train(tmp_path / "whole", inputs, loop=loop)
    _train_until_killed(tmp_path / "broken", inputs, loop=loop, step=6, monkeypatch=monkeypatch)
    _train(tmp_path / "broken", inputs, loop=loop)
    _assert_same_run(tmp_path / "broken", tmp_path / "whole")
    last = sorted((tmp_path / "whole" / "checkpoints").glob("step-*"))[-1]
    weights, averages = (load_file(last / f"{name}.safetensors") for name in ("weights", "ema"))
    assert weights.keys() == averages.keys()
    assert not torch.equal(weights["fc.weight"], averages["fc.weight"])


def test_a_step_that_is_not_finite_is_left_out_and_said(
    inputs: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = Trainer._prepare

    def broken(self: Trainer, item: tuple[int, Pack]) -> TrainingPack:
        pack = prepare(self, item)
        return replace(pack, states_TX=pack.states_TX * float("nan")) if item[0] == 3 else pack

    monkeypatch.setattr(Trainer, "_prepare", broken)
    said: list[str] = []
    loop = training.shorter(training.LOOP, epochs=1)
    counts = _train(tmp_path / "skipped", inputs, loop=loop, say=said.append)
    assert counts["skipped_steps"] == 1
    assert any("the gradient of step 3 is not finite" in line for line in said)
    records = [record for record in read_metrics(tmp_path / "skipped" / METRICS_NAME) if "loss" in record]
    assert [record["step"] for record in records if record["loss"] is None] == [4]
    with pytest.raises(ValueError, match=r"train\.max_skipped_steps=0"):
        _train(tmp_path / "stopped", inputs, loop=training.shorter(loop, max_skipped_steps=0))


def test_a_run_whose_tau_no_longer_rises_ends_and_has_ended_when_started_again(
    inputs: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    loop = training.shorter(training.LOOP, evaluate_every=1, stop_after_evaluations=3)
    said: list[str] = []
    counts = _train(tmp_path, inputs, loop=loop, say=said.append)
    assert any("3 evaluations in a row" in line for line in said)
    assert counts["steps"] == counts["best_step"] + 3
    assert _train(tmp_path, inputs, loop=loop) == counts


def test_a_run_does_not_stall_in_its_ttt_warm_up(inputs: tuple[Path, Path, Path], tmp_path: Path) -> None:
    stuck = training.shorter(training.LOOP, learning_rate=1e-30, evaluate_every=1, stop_after_evaluations=2)
    said: list[str] = []
    counts = _train(tmp_path, inputs, loop=stuck, say=said.append)
    told = re.search(r"stopped at step (\d+) of (\d+)", "\n".join(said))
    assert told is not None and counts["best_step"] == 1
    assert int(told[1]) == math.ceil(0.3 * int(told[2])) + 2  # without a warm-up, 3


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
