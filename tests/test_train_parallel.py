"""Every TrainingEngine trains as one process does, and continues any other's checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.heads.files import read_json
from tests import parallel_worker as worker
from tests.parallel_head_worker import head_curve

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "recipes"
ZERO = ("zero1", "zero2", "zero3", "zero2-offload", "zero3-offload")
LAUNCHES = {
    "ddp": ("cpu-2-processes.yaml", {"ACCELERATE_USE_CPU": "true"}),
    "zero": ("zero2.yaml", {"DS_ACCELERATOR": "cpu"}),
    "fsdp2": ("fsdp2.yaml", {}),
}


def one_process() -> worker.Processes:
    return worker.start_processes(
        threads=None, max_grad_norm=worker.MAX_GRAD_NORM, max_grad_value=None, optimizer="adamw"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """reference.safetensors: the run of one process that all others are compared with."""
    folder = tmp_path_factory.mktemp("parallel")
    curve, kept = worker.train(worker.make_engine(one_process()))
    curves = {
        "curve": curve,
        "head_curve": head_curve(one_process(), max_grad_norm=worker.MAX_GRAD_NORM, export=folder / worker.EXPORT),
    }
    kept |= {name: torch.tensor(values, dtype=torch.float64) for name, values in curves.items()}
    save_file(kept, folder / "reference.safetensors")
    return folder


@pytest.fixture(scope="module", params=LAUNCHES)
def launched(request: pytest.FixtureRequest, folder: Path) -> list[Path]:
    """Folders of the results of two processes, one per engine of the launch."""
    name: str = request.param
    config, environment = LAUNCHES[name]
    out = folder / name
    out.mkdir()
    (out / "reference.safetensors").symlink_to(folder / "reference.safetensors")
    files = [f"recipes/deepspeed/{stage}.json" for stage in ZERO] if name == "zero" else []
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(RECIPES / "accelerate" / config),
    ]
    done = subprocess.run(
        [*command, "tests/parallel_worker.py", str(out), *files],
        cwd=ROOT,
        env=os.environ | environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    results = sorted(path for path in out.iterdir() if path.is_dir())
    assert len(results) == max(1, len(files))
    return results


def assert_same_run(found: dict[str, Tensor], reference: dict[str, Tensor], *, part: str, prefix: str = "") -> None:
    """`found` holds what the reference holds of `part`, to rounding."""
    wanted = {key: tensor for key, tensor in reference.items() if key.startswith(part)}
    assert wanted.keys() == {key.removeprefix(prefix) for key in found if key.startswith(prefix + part)}
    for key, tensor in wanted.items():
        # Sums over processes are rounded differently, relative to the largest entry of a tensor.
        error = (found[prefix + key].double() - tensor.double()).abs().max() / tensor.abs().max()
        assert error < 1e-5, (prefix + key, error)


def check_results(results: Path, reference: dict[str, Tensor]) -> None:
    """What `worker.exercise` wrote against the reference."""
    found = load_file(results / "results.safetensors")
    for part in ("curve", "saved:", "last:", "head_curve"):
        assert_same_run(found, reference, part=part)
    half = 2 * worker.SAVED_STEP
    assert torch.equal(found["own_curve"], found["curve"][half:])
    for key in (key for key in found if key.startswith("last:")):
        assert torch.equal(found[f"own:{key}"], found[key]), key
    assert_same_run(found, reference, part="last:", prefix="foreign:")
    torch.testing.assert_close(found["foreign_curve"], reference["curve"][half:], rtol=1e-5, atol=0)


def assert_same_export(found: Path, reference: Path) -> None:
    """The exported files of a head: the same names, settings and vocabulary, and weights equal to rounding."""
    names = [{path.name for path in directory.iterdir()} for directory in (found, reference)]
    assert names[0] == names[1] >= {"config.json", "model.safetensors"}
    assert read_json(found / "config.json") == read_json(reference / "config.json")
    weights, wanted = (load_file(directory / "model.safetensors") for directory in (found, reference))
    assert weights.keys() == wanted.keys()
    for key, tensor in wanted.items():
        if tensor.is_floating_point():
            error = (weights[key].double() - tensor.double()).abs().max() / tensor.abs().max()
            assert error < 1e-5, (key, error)
        else:
            assert torch.equal(weights[key], tensor), key


def test_one_process(folder: Path) -> None:
    out = folder / "one"
    out.mkdir()
    reference = load_file(folder / "reference.safetensors")
    worker.exercise(one_process(), out=out, reference=reference)
    check_results(out, reference)
    assert not any("frozen" in key for key in reference)


def test_checkpoint_of_another_head_is_refused() -> None:
    engine = worker.make_engine(one_process())
    weights = engine.weights()
    with pytest.raises(ValueError, match=r"fc.bias is \[2\] in the checkpoint and \[13\]"):
        engine.load(weights | {"fc.bias": torch.zeros(2)}, None)
    with pytest.raises(ValueError, match=r"differ in what is trained: fc\.bias"):
        engine.load({name: tensor for name, tensor in weights.items() if name != "fc.bias"}, None)


def test_weights_are_copies() -> None:
    engine = worker.make_engine(one_process())
    before = engine.weights()
    kept = {name: tensor.clone() for name, tensor in before.items()}
    worker.train(engine, first=worker.NUM_STEPS - 1)
    assert all(torch.equal(before[name], kept[name]) for name in kept)
    assert not torch.equal(engine.weights()["fc.weight"], before["fc.weight"])


@pytest.mark.processes
def test_two_processes_are_one(launched: list[Path], folder: Path) -> None:
    """Value of the loss and the norm at 50 steps, weights and optimiser state, dropped steps, resumed runs."""
    reference = load_file(folder / "reference.safetensors")
    for results in launched:
        check_results(results, reference)
        assert_same_export(results / worker.EXPORT, folder / worker.EXPORT)
        outputs = [load_file(results / f"output-{rank}.safetensors")["output"] for rank in (0, 1)]
        assert torch.equal(outputs[0], outputs[1])
        resumed = worker.make_engine(one_process(), seed=3)
        worker.resume(resumed, load_file(results / "own.safetensors"))
        assert_same_run(worker.train(resumed, first=worker.SAVED_STEP)[1], reference, part="last:")
