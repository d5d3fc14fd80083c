"""Guards: steps that are not finite, losses that jump, runs that stall, and packs that do not fit memory."""

from __future__ import annotations

import random

import pytest
import torch

from eyas.train.checkpoint import TrainingState
from eyas.train.guards import EarlyStop, NonFiniteGuard, SpikeGuard, explain_out_of_memory


def test_steps_that_are_not_finite_are_counted_until_the_limit() -> None:
    said: list[str] = []
    state = TrainingState()
    guard = NonFiniteGuard(limit=2, say=said.append)
    assert guard.accepts(1e30, step=0, documents=[1], state=state)
    for step, norm in ((1, float("nan")), (2, float("inf"))):
        assert not guard.accepts(norm, step=step, documents=[4, 9], state=state)
    assert state.skipped == 2
    assert said[0] == (
        "the gradient of step 1 is not finite (its batch: conversations 4, 9 of the train split, counted from 0); "
        "skipped, 1 of at most 2"
    )
    # The count comes from the state, so that a restart does not begin anew.
    with pytest.raises(ValueError, match=r"step 3 .*conversations 0, 1, .* 11 and 8 more .*max_skipped_steps=2"):
        NonFiniteGuard(limit=2).accepts(-float("inf"), step=3, documents=range(20), state=state)
    with pytest.raises(ValueError, match="max_skipped_steps=0"):
        NonFiniteGuard(limit=0).accepts(float("nan"), step=0, documents=[1], state=TrainingState())


def test_a_loss_that_jumps_is_reported_once_with_its_batch() -> None:
    noise = random.Random(0)
    guard = SpikeGuard()
    for step in range(300):
        assert guard.look(3.0 * 0.99**step + noise.gauss(0, 0.05) + 1, step=step, documents=[step]) is None
    spike = guard.look(5.0, step=300, documents=[7, 8])
    assert spike is not None
    assert "loss at step 300 is 5, " in spike
    assert "times the median 1." in spike
    assert "conversations 7, 8 of" in spike
    assert guard.look(6.0, step=301, documents=[9]) is None  # still the same spike
    assert guard.look(1.1, step=302, documents=[9]) is None
    assert guard.look(5.0, step=303, documents=[9]) is not None


def test_no_spike_without_enough_losses_or_in_a_constant_or_broken_one() -> None:
    guard = SpikeGuard()
    for step in range(15):
        assert guard.look(1.0, step=step, documents=[0]) is None
    assert guard.look(50.0, step=15, documents=[0]) is None
    for step in range(100):
        assert guard.look(1.0, step=step, documents=[0]) is None
    assert guard.look(1.4, step=16, documents=[0]) is None  # no deviation at all, and yet no spike
    assert guard.look(float("nan"), step=17, documents=[0]) is None
    assert guard.look(1.6, step=18, documents=[0]) is not None
    guard.forget()
    assert guard.look(500.0, step=19, documents=[0]) is None


def test_a_run_that_stalls_stops_by_setting() -> None:
    state = TrainingState(since_best=3)
    assert not EarlyStop(patience=None, first=0).stalled(state)
    assert not EarlyStop(patience=4, first=0).stalled(state)
    assert EarlyStop(patience=3, first=0).stalled(state)


def test_evaluations_of_the_warm_up_do_not_count_towards_a_stop() -> None:
    stop, state = EarlyStop(patience=2, first=30), TrainingState(best_step=10)
    stalled: dict[int, bool] = {}
    for step in (10, 20, 30, 40, 50):  # after 30 steps, 0 to 29, every one of them was of the warm-up
        state.step = step
        stop.count(state)
        stalled[step] = stop.stalled(state)
    assert stalled == {10: False, 20: False, 30: False, 40: False, 50: True}
    state.step = state.best_step = 60
    stop.count(state)
    assert state.since_best == 0


def test_running_out_of_memory_is_explained_with_numbers() -> None:
    with pytest.raises(RuntimeError) as real:
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"train\.pack_tokens") as caught:
        explain_out_of_memory(real.value, tokens=4096, rows=[900, 850], draft_vocab_size=32000, documents=3)
    message = str(caught.value)
    assert "4096 tokens with 900 + 850 trained rows in 2 TTT steps, a draft vocabulary of 32000" in message
    assert f"{2**60} bytes more were asked for" in message
    assert caught.value.__cause__ is real.value
    gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...")
    with pytest.raises(ValueError, match=r"2\.50 GiB more were asked for"):
        explain_out_of_memory(gpu, tokens=1, rows=[1], draft_vocab_size=8, documents=1)
    explain_out_of_memory(
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"), tokens=1, rows=[1], draft_vocab_size=8, documents=1
    )
