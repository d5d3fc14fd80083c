"""What the check of a GPU compares and measures: it notices what a wrong device would do, and its clocks count what they say."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.heads.attention_flex import TILE
from eyas.train.features import extract as extract_module
from eyas.train.pack import TrainingPack
from tests.benchmarks.train_cells import Cell, chat_documents
from tests.gpu import check, numerics, random_run
from tests.gpu.numerics import Difference, compare

CPU = torch.device("cpu")
CELL = Cell(preset="tiny", tokens=160, ttt_steps=2, answer_share=0.75, precision="fp32", document_tokens=48)


def test_its_documents_are_what_attention_must_keep_apart() -> None:
    """Several, of which one is longer than a tile of the kernel's mask and one begins behind a tile it must not see."""
    lengths = [each.token_ids_T.shape[0] for each in chat_documents(check_cell())]
    assert len(lengths) >= numerics.FEWEST_DOCUMENTS
    assert max(lengths) > TILE
    assert max(itertools.accumulate(lengths[:-1])) >= TILE


def check_cell() -> Cell:
    """Documents as those of the check, at tiny shapes."""
    return replace(CELL, tokens=numerics.TOKENS, document_tokens=numerics.DOCUMENT_TOKENS)


def test_attention_that_leaks_between_documents_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device = numerics.on_device

    def leaking(head: Any, pack: TrainingPack, **options: Any) -> numerics.Outcome:
        return on_device(head, replace(pack, lengths=(sum(pack.lengths),)), **options)

    assert all(each.fits for each in compare(check_cell(), device=CPU))
    monkeypatch.setattr(numerics, "on_device", leaking)
    assert not any(each.fits for each in compare(check_cell(), device=CPU))


def extracted(work: Path) -> random_run.Extracted:
    cell = replace(CELL, tokens=512, document_tokens=48)
    return random_run.extract(work, cell, num_layers=4, batch_tokens=256, repeats=1, device=CPU)


def test_hashing_the_target_is_not_in_the_time_of_its_extraction(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def hashed(_target: Path) -> str:
        raise AssertionError("while the clock runs")

    monkeypatch.setattr(extract_module, "target_fingerprint", hashed)
    assert extracted(tmp_path).states_error < 1e-2


def test_states_of_a_wrong_place_are_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As if the states had been copied away before the device had written them."""
    capture = extract_module.HiddenStateCapture.__call__

    def early(self: Any, token_ids_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        captured_BTX, last_BTH = capture(self, token_ids_BT)
        return captured_BTX.roll(1, dims=1), last_BTH

    monkeypatch.setattr(extract_module.HiddenStateCapture, "__call__", early)
    found = extracted(tmp_path)
    assert found.states_error > 0.5
    monkeypatch.setattr(check, "extract", lambda *_, **__: found)
    assert not check.Check(check.DRY, device=CPU, work=tmp_path, out=tmp_path / "out").extraction()


def test_the_peak_of_training_is_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Began(Exception):
        pass

    def begin(*_: Any, **__: Any) -> None:
        raise Began

    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: done.append(name))
    monkeypatch.setattr(random_run, "run_training", begin)
    with pytest.raises(Began):
        random_run.train(tmp_path, CELL, batch_tokens=256, epochs=1, precision="bf16")
    assert done == ["empty_cache", "reset_peak_memory_stats"]


def test_a_wrong_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the device dropped one document's share of the gradient of one matrix."""
    right = compare(CELL, device=CPU, precisions=["fp32"])[0]
    assert right.fits
    assert right.gradient < 1e-5
    on_device = numerics.on_device

    def wrong(*args: Any, **options: Any) -> numerics.Outcome:
        outcome = on_device(*args, **options)
        outcome.gradients["fc.weight"] *= 0.99
        return outcome

    monkeypatch.setattr(numerics, "on_device", wrong)
    found = compare(CELL, device=CPU, precisions=["fp32"])[0]
    assert not found.fits
    assert found.parameter == "fc.weight"
    assert found.gradient == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": 2.1},
        {"loss": float("nan")},
        {"gradient": float("nan")},
        {"hits": 0},
        {"acceptance": 4.0},
        {"acceptance": float("nan")},
    ],
)
def test_what_is_off_or_not_a_number_does_not_fit(changes: dict[str, float]) -> None:
    right = Difference(
        precision="fp32",
        loss=2.0,
        reference_loss=2.0,
        hits=3,
        reference_hits=4,
        acceptance=5.0,
        reference_acceptance=5.0,
        rows=100,
        gradient=1e-6,
        parameter="fc.weight",
    )
    assert right.fits
    assert not replace(right, **changes).fits  # type: ignore[arg-type]
