"""Checkpoints: what is saved comes back, whatever kills the writer or damages a file, and never from other settings."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.heads.files import read_json, write_json
from eyas.train import checkpoint, checkpoint_files
from eyas.train.checkpoint import Checkpoints, Saved, TrainingState, head_directory
from eyas.train.rng import capture_rng, gather_rng, restore_rng

SETTINGS: dict[str, Any] = {"train": {"seed": 0, "betas": (0.9, 0.95)}, "target": "tiny"}
FILES = (
    "weights.safetensors",
    "optimizer.safetensors",
    "ema.safetensors",
    "rng.safetensors",
    "state.json",
    "files.json",
)


def contents(step: int) -> dict[str, dict[str, Tensor]]:
    """Tensors of every kind that a checkpoint may hold, different at every step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "weights": {"fc.weight": torch.randn(5, 3, generator=generator), "norm": torch.full((3,), float(step))},
        "optimizer": {
            "fc.weight/exp_avg": torch.randn(3, 5, generator=generator).T,
            "fc.weight/step": torch.tensor(step),
        },
        "ema": {"fc.weight": torch.randn(5, 3, generator=generator), "none": torch.zeros(0, 4)},
        "rng": {"0/torch": torch.arange(7, dtype=torch.uint8), "0/python": torch.tensor([step, 2**62])},
    }


def open_checkpoints(run_dir: Path, *, keep: int = 2, said: list[str] | None = None, **changes: Any) -> Checkpoints:
    say = (lambda _line: None) if said is None else said.append
    return Checkpoints(run_dir, settings=SETTINGS | changes, keep=keep, say=say)


def save(checkpoints: Checkpoints, step: int, *, facts: dict[str, Any] | None = None, best_step: int = -1) -> None:
    state = TrainingState(step=step, best_step=best_step, best_tau=1.5, tokens=10 * step)
    checkpoints.save(**contents(step), state=state, facts={"world_size": 1} if facts is None else facts)
    checkpoints.wait()


def write_head_files(run_dir: Path, step: int) -> None:
    """What stands for the head of an evaluated step."""
    path = head_directory(run_dir, step) / "model.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"fc.weight": torch.ones(3, 2)}, path)


def assert_is(saved: Saved | None, step: int) -> None:
    assert saved is not None
    assert (saved.step, saved.state.tokens) == (step, 10 * step)
    for name, tensors in contents(step).items():
        found: dict[str, Tensor] = getattr(saved, name)
        assert found.keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert found[key].dtype == tensor.dtype
            assert torch.equal(found[key], tensor)


def test_what_is_saved_comes_back_to_the_bit(tmp_path: Path) -> None:
    assert open_checkpoints(tmp_path).newest() is None
    save(open_checkpoints(tmp_path), 3, facts={"world_size": 2, "run_id": "abc"})
    saved = open_checkpoints(tmp_path).newest()
    assert_is(saved, 3)
    assert saved is not None
    assert saved.facts == {"world_size": 2, "run_id": "abc"}
    assert read_json(tmp_path / "checkpoints" / "latest.json") == {
        "step": 3,
        "checkpoint": "checkpoints/step-00000003",
        "best_head": None,
    }


@pytest.mark.parametrize("dtype", checkpoint_files.TYPE_NAMES)
def test_the_library_reads_every_type_that_is_written(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a": torch.tensor([[1, 0, 3]]).to(dtype), "b": torch.tensor(1).to(dtype), "odd": torch.ones(3).byte()}
    checkpoint_files.write_directory(tmp_path / "step-00000001", tensors={"weights": tensors}, record=b"{}\n")
    found = load_file(tmp_path / "step-00000001" / "weights.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) and found[name].dtype == tensors[name].dtype for name in tensors)


def test_large_tensors_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "PIECE_BYTES", 7)
    save(open_checkpoints(tmp_path), 1)
    assert_is(open_checkpoints(tmp_path).newest(), 1)


def test_saving_does_not_wait_for_the_disk_and_a_second_one_waits_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun, writing, most = threading.Event(), [], [], []
    write = checkpoint.write_directory

    def gated(final: Path, **arguments: Any) -> None:
        begun.append(final.name)
        writing.append(final.name)
        most.append(len(writing))
        assert gate.wait(60)
        write(final, **arguments)
        writing.remove(final.name)

    monkeypatch.setattr(checkpoint, "write_directory", gated)
    checkpoints = open_checkpoints(tmp_path)
    state = TrainingState(step=1, tokens=10)
    checkpoints.save(**contents(1), state=state, facts={})
    assert not (tmp_path / "checkpoints" / "step-00000001").exists()
    state.tokens = -1  # the loop goes on with its state
    second = threading.Thread(
        target=lambda: checkpoints.save(**contents(2), state=TrainingState(step=2, tokens=20), facts={})
    )
    second.start()
    second.join(0.05)
    assert second.is_alive()
    gate.set()
    second.join(60)
    checkpoints.wait()
    assert (begun, max(most)) == (["step-00000001", "step-00000002"], 1)
    assert_is(open_checkpoints(tmp_path).newest(), 2)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000002")
    assert_is(open_checkpoints(tmp_path).newest(), 1)


def test_a_state_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    write = checkpoint.write_directory
    monkeypatch.setattr(
        checkpoint, "write_directory", lambda final, **rest: (written.append(final), write(final, **rest))
    )
    checkpoints = open_checkpoints(tmp_path)
    for facts in ({}, {}, {"new": 1}):
        save(checkpoints, 1, facts=facts)
    assert len(written) == 2


@contextmanager
def fault_at(count: int, act: Callable[[], None]) -> Iterator[list[str]]:
    """Call `act` before the `count`-th file operation of the block; yields the operations that were begun."""
    done: list[str] = []

    def watched(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            done.append(name)
            if len(done) == count:
                act()
            return operation(*arguments, **keywords)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "replace", "rename", "rmdir"):
            patch.setattr(os, name, watched(name, getattr(os, name)))
        patch.setattr(checkpoint_files._Hashed, "write", watched("write", checkpoint_files._Hashed.write))
        yield done


def operations_of(run_dir: Path, step: int) -> int:
    with fault_at(0, lambda: None) as done:
        save(open_checkpoints(run_dir, keep=1), step, facts={"again": True})
    assert {"fsync", "replace", "rename", "write", "rmdir"} <= set(done)
    return len(done)


@pytest.mark.parametrize("step", [2, 1], ids=["next", "same"])
def test_a_kill_before_any_file_operation_leaves_a_whole_checkpoint(step: int, tmp_path: Path) -> None:
    """Real kills, with one checkpoint kept: either the one before or the new one is there, whole, and nothing else."""
    save(open_checkpoints(tmp_path / "count"), 1)
    total = operations_of(tmp_path / "count", step)
    found: set[int] = set()
    for count in range(1, total + 1):
        run_dir = tmp_path / str(count)
        save(open_checkpoints(run_dir, keep=1), 1)
        child = os.fork()
        if child == 0:
            with fault_at(count, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                save(open_checkpoints(run_dir, keep=1), step, facts={"again": True})
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        said: list[str] = []
        saved = open_checkpoints(run_dir, said=said).newest()
        assert said == []
        assert saved is not None
        assert_is(saved, saved.step)
        found.add(saved.step)
        names = {path.name for path in (run_dir / "checkpoints").iterdir() if path.name.startswith("step-")}
        assert names <= {"step-00000001", "step-00000002"}
        save(open_checkpoints(run_dir, keep=1), 3)
        assert_is(open_checkpoints(run_dir).newest(), 3)
    assert found == {1, step}


def test_a_failing_disk_is_told_at_the_next_call_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    save(open_checkpoints(tmp_path / "count"), 1)
    total = operations_of(tmp_path / "count", 2)

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    failed = 0
    for count in range(1, total + 1):
        run_dir = tmp_path / str(count)
        save(open_checkpoints(run_dir, keep=1), 1)
        checkpoints = open_checkpoints(run_dir, keep=1)
        with fault_at(count, full):
            try:
                save(checkpoints, 2)
            except OSError as error:
                assert error.errno == errno.ENOSPC
                failed += 1
        saved = open_checkpoints(run_dir).newest()
        assert saved is not None
        assert_is(saved, saved.step)
        save(checkpoints, 3)  # told once; there is space again
        assert_is(open_checkpoints(run_dir).newest(), 3)
    assert failed > total / 2


def test_errors_of_the_writer_keep_their_kind_and_name_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = open_checkpoints(tmp_path)
    with monkeypatch.context() as patch:

        def full(_handle: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(os, "fsync", full)
        checkpoints.save(**contents(1), state=TrainingState(step=1), facts={})
        with pytest.raises(OSError, match="No space left") as caught:
            checkpoints.save(**contents(2), state=TrainingState(step=2), facts={})
        assert str(caught.value.filename).endswith("weights.safetensors")
    assert list((tmp_path / "checkpoints").iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files._Hashed, "write", lambda *_: 1 / 0)
        checkpoints.save(**contents(1), state=TrainingState(step=1), facts={})
        with pytest.raises(RuntimeError, match="could not be written: division by zero"):
            checkpoints.wait()
    checkpoints.wait()


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        save(open_checkpoints(run_dir), step)
    return run_dir


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), share=st.floats(0, 1, exclude_max=True), damage=st.sampled_from(["cut", "flip"]))
def test_any_damage_is_found_and_the_one_before_is_taken(
    name: str, share: float, damage: str, two_saved: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_dir = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(two_saved, run_dir)
    path = run_dir / "checkpoints" / "step-00000002" / name
    content = bytearray(path.read_bytes())
    place = int(share * len(content))
    if damage == "cut":
        content = content[:place]
    else:
        content[place] ^= 0x11
    path.write_bytes(content)
    said: list[str] = []
    saved = open_checkpoints(run_dir, said=said).newest()
    assert saved is not None
    if saved.step == 2:  # white space at the end of the listing, or a digit of another line than ours
        assert (name, said) == ("files.json", [])
    else:
        assert len(said) == 1
        assert name in said[0] or name == "files.json"
        assert (run_dir / "checkpoints" / "step-00000002.broken").is_dir()
    assert_is(saved, saved.step)
    shutil.rmtree(run_dir.parent)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_foreign_file_counts_as_broken(name: str, two_saved: Path, tmp_path: Path) -> None:
    if name != "ema.safetensors":
        shutil.copytree(two_saved, tmp_path / "unlisted")
        listing = tmp_path / "unlisted" / "checkpoints" / "step-00000002" / "files.json"
        content = read_json(listing)
        write_json(listing, content | {"files": {key: value for key, value in content["files"].items() if key != name}})
    for number, damage in enumerate((Path.unlink, lambda path: path.write_text("[1, 2]"))):
        run_dir = tmp_path / str(number)
        shutil.copytree(two_saved, run_dir)
        damage(run_dir / "checkpoints" / "step-00000002" / name)
        said: list[str] = []
        assert_is(open_checkpoints(run_dir, said=said).newest(), 1)
        assert f"step-00000002 is broken: {name} " in said[0]


def test_when_nothing_is_whole_training_starts_from_the_beginning_and_says_so(two_saved: Path, tmp_path: Path) -> None:
    shutil.copytree(two_saved, tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob("checkpoints/step-*/optimizer.safetensors"):
        path.unlink()
    said: list[str] = []
    assert open_checkpoints(tmp_path, said=said).newest() is None
    assert len(said) == 3
    assert "starts from the beginning" in said[-1]


def test_a_later_version_is_not_taken_for_a_broken_checkpoint(two_saved: Path, tmp_path: Path) -> None:
    shutil.copytree(two_saved, tmp_path, dirs_exist_ok=True)
    listing = tmp_path / "checkpoints" / "step-00000002" / "files.json"
    write_json(listing, read_json(listing) | {"format": 99})
    with pytest.raises(ValueError, match="checkpoint format 99"):
        open_checkpoints(tmp_path).newest()


def test_other_settings_are_refused_with_the_fields_that_differ(two_saved: Path) -> None:
    changed = {"train": {"seed": 1, "betas": [0.9, 0.95], "epochs": 2}}
    with pytest.raises(ValueError, match=r"train\.epochs was absent and is 2; train\.seed was 0 and is 1; ") as caught:
        open_checkpoints(two_saved, **changed).newest()
    assert "betas" not in str(caught.value)
    assert "target" not in str(caught.value)
    assert "run_dir=" in str(caught.value)
    many = {"train": {f"field_{i}": i for i in range(20)}}
    with pytest.raises(ValueError, match="and 14 more; set them back"):
        open_checkpoints(two_saved, **many).newest()


def test_the_newest_stay_with_the_heads_that_they_refer_to(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path, keep=2)
    for step, best in ((10, 5), (20, 15), (30, 15), (40, 38)):
        for head in (best, step):
            write_head_files(tmp_path, head)
        head_directory(tmp_path, 99).mkdir(parents=True, exist_ok=True)  # evaluated, not saved yet
        save(checkpoints, step, best_step=best)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest.json", "step-00000030", "step-00000040"]
    assert sorted(path.name for path in (tmp_path / "heads").iterdir()) == [
        "step-00000015",
        "step-00000038",
        "step-00000099",
    ]
    assert read_json(tmp_path / "checkpoints" / "latest.json")["best_head"] == "heads/step-00000038"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda head: shutil.rmtree(head), "is missing"),
        (lambda head: (head / "model.safetensors").unlink(), "has no weights"),
        (lambda head: os.truncate(head / "model.safetensors", 40), "cannot be read"),
    ],
)
def test_a_checkpoint_whose_best_head_is_damaged_is_passed_over(
    damage: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    checkpoints = open_checkpoints(tmp_path, keep=2)
    for step in (30, 40):
        write_head_files(tmp_path, step)
        save(checkpoints, step, best_step=step)
    damage(head_directory(tmp_path, 40))
    said: list[str] = []
    saved = open_checkpoints(tmp_path, said=said).newest()
    assert saved is not None
    assert saved.step == 30
    assert f"its best head, heads/step-00000040, {words}" in said[0]


def test_a_broken_checkpoint_never_takes_the_place_of_a_kept_one(two_saved: Path, tmp_path: Path) -> None:
    """With other numbers of steps between checkpoints, a broken later one must not push out the whole ones."""
    shutil.copytree(two_saved, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoints" / "step-00000002").rename(tmp_path / "checkpoints" / "step-00000009")
    (tmp_path / "checkpoints" / "step-00000009" / "weights.safetensors").unlink()
    checkpoints = open_checkpoints(tmp_path, keep=1)
    assert_is(checkpoints.newest(), 1)
    save(checkpoints, 3)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest.json", "step-00000003"]
    assert_is(open_checkpoints(tmp_path).newest(), 3)


def test_a_start_finishes_the_clearing_up_that_a_kill_interrupted(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write_head_files(tmp_path, step)
        save(open_checkpoints(tmp_path, keep=9), step, best_step=step)
    (tmp_path / "checkpoints" / "step-00000020" / "state.json").write_text("garbage")
    assert_is(open_checkpoints(tmp_path, keep=2).newest(), 30)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest.json", "step-00000020", "step-00000030"]
    assert [path.name for path in (tmp_path / "heads").iterdir()] == ["step-00000030"]


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        save(open_checkpoints(tmp_path), step)
    assert_is(open_checkpoints(tmp_path).newest(), 100_000_000)


class TwoRanks:
    """One of two processes; `sum` adds what the other would give."""

    def __init__(self, rank: int, other: list[Tensor]) -> None:
        self.rank, self.world_size, self._other = rank, 2, iter(other)

    def sum(self, value: Tensor) -> Tensor:
        return value + next(self._other)


def draws() -> list[Any]:
    return [torch.rand(3).tolist(), random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn()]


def test_random_states_of_every_process_come_back() -> None:
    random.seed(5)
    random.gauss(0, 1)  # keeps its second draw for later
    numpy.random.seed(6)
    numpy.random.randn()
    torch.manual_seed(7)
    names = list(capture_rng())
    zeros = [
        torch.zeros(2, state.numel() * state.element_size(), dtype=torch.uint8) for state in capture_rng().values()
    ]
    gathered = gather_rng(TwoRanks(1, zeros))  # type: ignore[arg-type]
    assert gathered.keys() == {f"{rank}/{name}" for rank in (0, 1) for name in names}
    expected = draws()
    draws()
    assert restore_rng(gathered, rank=1, world_size=2)
    assert draws() == expected
    before = capture_rng()
    assert not restore_rng(gathered, rank=0, world_size=1)
    assert all(torch.equal(state, before[name]) for name, state in capture_rng().items())
