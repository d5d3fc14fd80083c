"""Training online: the numbers of a store without one, the same bits after a kill, a target that ends with its trainer."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from eyas.heads.slots import teacher_positions
from eyas.train.data.tokens import Split, Tokens
from eyas.train.features import cache as cache_module
from eyas.train.features.cache import CACHE_NAME
from eyas.train.features.encoding import EncodedDocument, StoreForm
from eyas.train.features.online import (
    TargetSettings,
    TargetStates,
)
from eyas.train.features.store import FeatureStore
from eyas.train.features.target_process import TargetProcess
from eyas.train.inputs import Online, target_device
from eyas.train.loop import Trainer
from eyas.train.losses import TokenLoss
from eyas.train.objective import Losses
from tests import tiny, training
from tests.online import BATCH_TOKENS, EAGLE, PLAIN, SMALL, Inputs, make_inputs, online_features

RECIPES: dict[StoreForm, dict[str, Any]] = {
    PLAIN: {},
    EAGLE: {
        "plan": training.plan(kind="eagle", draft_vocab_size="auto"),
        "losses": Losses(token=TokenLoss(forward_kl=0.1, top_k=1.0, top_k_tokens=5), feature_weight=1.0, detach=True),
    },
    SMALL: {},
}
ROOT = Path(__file__).parent.parent
MACHINE = {"memory_bytes", "gemm_share", "mfu"}
"""Metrics that say how fast it went and not what was computed."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"), target=tiny_target)


def _train(out_dir: Path, inputs: Inputs, features: Online | Path, **changes: Any) -> dict[str, Any]:
    return training.train(out_dir, target=inputs.target, tokens=inputs.tokens, features=features, **changes)


def _curve(out_dir: Path) -> list[dict[str, float]]:
    return [
        {key: value for key, value in record.items() if key not in MACHINE and not key.endswith("_per_second")}
        for record in training.metrics(out_dir)
    ]


def _assert_same_bits(ours: Path, reference: Path) -> None:
    assert _curve(ours) == _curve(reference)
    for name in ("head/model.safetensors", "heldout.json"):
        assert (ours / name).read_bytes() == (reference / name).read_bytes()


# Training


@pytest.fixture(scope="module")
def offline(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> dict[StoreForm, Path]:
    runs = {form: tmp_path_factory.mktemp("offline") for form in inputs.stores}
    for form, out_dir in runs.items():
        _train(out_dir, inputs, inputs.stores[form], **RECIPES[form])
    return runs


@pytest.fixture(scope="module")
def online(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> dict[StoreForm, Path]:
    """Undisturbed runs with the target in the trainer's process."""
    runs = {form: tmp_path_factory.mktemp("online") for form in inputs.stores}
    for form, out_dir in runs.items():
        _train(out_dir, inputs, online_features(form), **RECIPES[form])
    return runs


@pytest.mark.parametrize("form", [PLAIN, EAGLE, SMALL], ids=["eagle3", "eagle", "eagle3 fp8 top-k"])
def test_online_follows_the_offline_trajectory(
    form: StoreForm, offline: dict[StoreForm, Path], online: dict[StoreForm, Path]
) -> None:
    ours, theirs = _curve(online[form]), _curve(offline[form])
    assert len(ours) == len(theirs) > 30
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(reference, rel=1e-5 if form.storage == "float32" else 1e-3, abs=1e-9)


@pytest.mark.parametrize(
    "changes", [{"where": "process"}, {"cache": "first-epoch"}, {"where": "process", "cache": "first-epoch"}], ids=str
)
def test_every_way_of_being_online_gives_the_same_bits(
    changes: dict[str, Any], online: dict[StoreForm, Path], inputs: Inputs, tmp_path: Path
) -> None:
    """Windows of a cached run end with the first epoch, so there the bits differ and the numbers do not."""
    _train(tmp_path, inputs, online_features(**changes))
    if "cache" in changes:
        for mine, reference in zip(_curve(tmp_path), _curve(online[PLAIN]), strict=True):
            assert mine == pytest.approx(reference, rel=1e-5, abs=1e-9)
        assert not (tmp_path / CACHE_NAME).exists()
    else:
        _assert_same_bits(tmp_path, online[PLAIN])


class Killed(BaseException):
    pass


def _killed_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    body = Trainer._step

    def killed(self: Trainer, *arguments: Any, **keywords: Any) -> Any:
        if self.state.step == step:
            raise Killed
        return body(self, *arguments, **keywords)

    monkeypatch.setattr(Trainer, "_step", killed)


@pytest.mark.parametrize("where", ["inline", "process"])
def test_a_killed_run_resumes_to_the_same_bits(
    where: str, online: dict[StoreForm, Path], inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        _killed_at(18, patch)
        with pytest.raises(Killed):
            _train(tmp_path, inputs, online_features(where=where))
    _train(tmp_path, inputs, online_features(where=where))
    _assert_same_bits(tmp_path, online[PLAIN])


def test_a_cached_document_is_never_computed_again(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    compute = TargetStates.compute

    def counted(self: TargetStates, split: Split, indices: Sequence[int]) -> dict[int, EncodedDocument]:
        computed.extend(indices if split == "train" else [])
        return compute(self, split, indices)

    monkeypatch.setattr(TargetStates, "compute", counted)
    monkeypatch.setattr("eyas.train.inputs.WINDOW_FORWARDS", 1)
    features, everything = online_features(cache="first-epoch"), list(range(24))
    _train(tmp_path / "whole", inputs, features)
    assert sorted(computed) == everything
    computed.clear()
    with monkeypatch.context() as patch:
        _killed_at(6, patch)  # in the first epoch
        with pytest.raises(Killed):
            _train(tmp_path / "killed", inputs, features)
    before = len(computed)
    assert 0 < before < len(everything)
    kept = FeatureStore(tmp_path / "killed" / CACHE_NAME, split="train")
    assert len(kept) - len(kept.missing()) == before
    with monkeypatch.context() as patch:
        _killed_at(18, patch)  # in the second
        with pytest.raises(Killed):
            _train(tmp_path / "killed", inputs, features)
    assert sorted(computed) == everything
    _train(tmp_path / "killed", inputs, features)
    assert sorted(computed) == everything
    _assert_same_bits(tmp_path / "killed", tmp_path / "whole")
    assert not (tmp_path / "killed" / CACHE_NAME).exists()


def test_a_cache_that_lost_a_shard_is_mended(inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.train.inputs.WINDOW_FORWARDS", 1)
    features = online_features(cache="first-epoch")
    _train(tmp_path / "whole", inputs, features)
    with monkeypatch.context() as patch:
        _killed_at(18, patch)
        with pytest.raises(Killed):
            _train(tmp_path / "killed", inputs, features)
    min((tmp_path / "killed" / CACHE_NAME).glob("train-*.safetensors")).unlink()
    _train(tmp_path / "killed", inputs, features)
    _assert_same_bits(tmp_path / "killed", tmp_path / "whole")


def test_a_cache_made_in_other_windows_is_used(
    offline: dict[StoreForm, Path], inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """batch_tokens may change while a run is stopped: what is there is read, in whichever shards."""
    monkeypatch.setattr("eyas.train.inputs.WINDOW_FORWARDS", 1)
    with monkeypatch.context() as patch:
        _killed_at(6, patch)
        with pytest.raises(Killed):
            _train(tmp_path, inputs, online_features(cache="first-epoch"))
    _train(tmp_path, inputs, online_features(cache="first-epoch", batch_tokens=BATCH_TOKENS + 130))
    for mine, reference in zip(_curve(tmp_path), _curve(offline[PLAIN]), strict=True):
        assert mine == pytest.approx(reference, rel=1e-5, abs=1e-9)


def test_a_cache_that_does_not_fit_the_disk_is_refused(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = cache_module.shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(ValueError, match=r"features\.cache=none or features\.storage=fp8"):
        _train(tmp_path, inputs, online_features(cache="first-epoch"))


def test_a_cache_of_another_target_is_refused(inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        _killed_at(2, patch)
        with pytest.raises(Killed):
            _train(tmp_path / "run", inputs, online_features(cache="first-epoch"))
    other = replace(inputs, target=tiny.write_target(tmp_path / "other", seed=1))
    with pytest.raises(ValueError, match="target_fingerprint"):
        _train(tmp_path / "run", other, online_features(cache="first-epoch"))


# The target's own process


def test_a_killed_target_is_a_clear_error(inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[TargetProcess] = []
    start, step = TargetProcess.__init__, Trainer._step

    def remembered(self: TargetProcess, settings: TargetSettings) -> None:
        start(self, settings)
        started.append(self)

    def killing(self: Trainer, *arguments: Any, **keywords: Any) -> Any:
        if self.state.step == 9:
            started[0]._process.kill()
            started[0]._process.wait()
        return step(self, *arguments, **keywords)

    # Windows of one batch, so that not everything was there before the kill.
    monkeypatch.setattr("eyas.train.inputs.WINDOW_FORWARDS", 0)
    monkeypatch.setattr(TargetProcess, "__init__", remembered)
    monkeypatch.setattr(Trainer, "_step", killing)
    with pytest.raises(ValueError, match=r"on cpu was killed by SIGKILL.*goes on from the last checkpoint"):
        _train(tmp_path, inputs, online_features(where="process"))


def test_what_stays_in_memory_is_said(inputs: Inputs, tmp_path: Path) -> None:
    lines: list[str] = []
    _train(tmp_path, inputs, online_features(), loop=training.shorter(training.LOOP, epochs=1), say=lines.append)
    assert "online: the target runs beside the head on cpu" in lines
    (line,) = (line for line in lines if "held-out conversations stay in memory" in line)
    heldout = Tokens(inputs.tokens, split="heldout")
    masks = [heldout[index][1] for index in range(4)]
    rows = sum(3 * mask.shape[0] + teacher_positions(mask).shape[0] for mask in masks)
    assert f"states of 4 held-out conversations stay in memory, {rows * 64 * 4 / 2**20:.1f} MiB" in line


ORPHAN = """
import os, signal, sys
from pathlib import Path
from eyas.train.features.encoding import StoreForm
from eyas.train.features.target_process import TargetProcess
from eyas.train.inputs import Online
from eyas.train.loop import Trainer
from tests import training

start, step, children = TargetProcess.__init__, Trainer._step, []

def remembered(self, settings):
    start(self, settings)
    children.append(self._process.pid)

def told(self, *arguments, **keywords):
    if self.state.step == 3:
        print(children[0], flush=True)
        sys.stdin.readline()
    return step(self, *arguments, **keywords)

TargetProcess.__init__, Trainer._step = remembered, told
form = StoreForm(storage="float32", teacher="hidden", teacher_k=0, last_everywhere=False)
features = Online(capture_layers=(1, 2, 3), dtype="float32", form=form, batch_tokens=200, where="process", threads=1)
training.train(Path(sys.argv[1]), target=Path(sys.argv[2]), tokens=Path(sys.argv[3]), features=features)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="watches a process that is not a child")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_target_ends_with_its_trainer(number: signal.Signals, inputs: Inputs, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ORPHAN)
    trainer = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "run"), str(inputs.target), str(inputs.tokens)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        start_new_session=True,
    )
    assert trainer.stdin is not None and trainer.stdout is not None
    line = trainer.stdout.readline()
    assert line, trainer.communicate()[1][-3000:]
    watched = os.pidfd_open(int(line))
    try:
        os.killpg(trainer.pid, number)  # the whole group, as a terminal does
        _, errors = trainer.communicate("go on\n", timeout=120)
        assert trainer.returncode != 0
        if number != signal.SIGKILL:
            assert "saved at step 4" in errors
        assert select.select([watched], [], [], 120)[0], "the target outlived its trainer"
    finally:
        os.close(watched)


def _launch_two(directory: Path, inputs: Inputs, features: str) -> list[dict[str, float]]:
    """Train in two processes; `features` is Python. The curve, in the directory `run`."""
    script = directory / "two.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom tests import training\nfrom tests.online import online_features\n"
        "training.train(Path(sys.argv[1]), target=Path(sys.argv[2]), tokens=Path(sys.argv[3]), "
        f"features={features}, loop=training.shorter(training.LOOP, epochs=2))\n"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [*command, str(script), str(directory / "run"), str(inputs.target), str(inputs.tokens)],
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return _curve(directory / "run")


def test_two_processes_with_a_target_each_train_as_from_one_store(inputs: Inputs, tmp_path: Path) -> None:
    """Also with a cache between them: in the second epoch each reads what the other computed in the first."""
    features = {
        "offline": f"Path({str(inputs.stores[PLAIN])!r})",
        "online": "online_features(where='process')",
        "cached": "online_features(cache='first-epoch')",
    }
    curves = {}
    for name, code in features.items():
        (tmp_path / name).mkdir()
        curves[name] = _launch_two(tmp_path / name, inputs, code)
    assert len(curves["offline"]) > 10
    for name in ("online", "cached"):
        for mine, reference in zip(curves[name], curves["offline"], strict=True):
            assert mine == pytest.approx(reference, rel=1e-5, abs=1e-9)
    assert not (tmp_path / "cached" / "run" / CACHE_NAME).exists()


@pytest.mark.parametrize("device", ["cuda:77", "no such thing"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match=rf"features\.device={device} cannot be used here"):
        target_device(online_features(device=device), accelerator=Accelerator())
    assert target_device(online_features(), accelerator=Accelerator()) == str(Accelerator().device)
