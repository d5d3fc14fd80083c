"""Signals: remembered once, left to the parent, and a second Ctrl-C obeyed."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from eyas.heads.files import read_json
from eyas.train import preemption
from eyas.train.preemption import SIGNALS, Preempted, StopRequest, clear_requeue, mark_for_requeue, stop_on_signals


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_remembered_and_the_handlers_before_come_back(number: signal.Signals) -> None:
    before = {other: signal.getsignal(other) for other in SIGNALS}
    with stop_on_signals() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        if number != signal.SIGINT:
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        assert stop.signal_number == number
    assert {other: signal.getsignal(other) for other in SIGNALS} == before


@pytest.mark.parametrize("first", SIGNALS)
def test_ctrl_c_after_a_signal_stops_at_once(first: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), stop_on_signals() as stop:
        os.kill(os.getpid(), first)
        assert stop.requested
        os.kill(os.getpid(), signal.SIGINT)


def test_a_launcher_that_passes_ctrl_c_on_is_no_second_person(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(preemption.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with stop_on_signals() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal_number == signal.SIGINT
        now[0] += 3
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_forked_child_leaves_the_decision_to_its_parent() -> None:
    with stop_on_signals() as stop:
        child = os.fork()
        if child == 0:
            for number in (*SIGNALS, signal.SIGINT):
                os.kill(os.getpid(), number)
            os._exit(17 if not stop.requested else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
        assert not stop.requested


def test_outside_the_main_thread_nothing_is_installed() -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    seen: list[bool] = []

    def body() -> None:
        with stop_on_signals() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [False]
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


def test_a_request_before_any_signal_is_none() -> None:
    stop = StopRequest()
    assert (stop.requested, stop.signal_number) == (False, None)


def test_the_marker_says_what_happened_and_goes_away(tmp_path: Path) -> None:
    mark_for_requeue(tmp_path, signal_number=signal.SIGUSR1, step=7)
    marker = read_json(tmp_path / "REQUEUE")
    assert (marker["signal"], marker["step"]) == ("SIGUSR1", 7)
    mark_for_requeue(tmp_path, signal_number=None, step=8)
    assert read_json(tmp_path / "REQUEUE")["signal"] is None
    clear_requeue(tmp_path)
    clear_requeue(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_stopped_is_said() -> None:
    assert str(Preempted(signal_number=signal.SIGTERM, step=7)) == "stopped by SIGTERM, saved at step 7"
    assert str(Preempted(signal_number=None, step=7)) == "stopped by a signal to another process, saved at step 7"
    assert not isinstance(Preempted(signal_number=None, step=7), ValueError | OSError | KeyboardInterrupt)
