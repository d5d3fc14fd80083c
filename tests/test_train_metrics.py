"""What a log line says: means over processes, packs and steps, throughput, and the measured peak."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from eyas.train import metrics, peak
from eyas.train.metrics import Window, peak_memory
from eyas.train.peak import Peak, measured_gemm_flops, peak_flops

CPU = torch.device("cpu")


@dataclass
class State:
    step: int = 3
    skipped: int = 0
    tokens: int = 300
    slots: int = 120


def pack(*, kl: list[float], hits: list[int], acceptance: list[float]) -> dict[str, Tensor]:
    return {"kl": torch.tensor(kl), "hits": torch.tensor(hits), "acceptance": torch.tensor(acceptance)}


def add(window: Window, *packs: tuple[float, dict[str, Tensor]], rows: list[int], **changes: object) -> None:
    for loss, sums in packs:
        window.add_pack(torch.tensor(loss), sums, flops=100.0)
    window.add_step(rows_K=rows, tokens=50, **({"grad_norm": 1.0, "learning_rate": 0.1} | changes))  # type: ignore[arg-type]


def alone(value: Tensor) -> Tensor:
    return value


def record(window: Window, **changes: object) -> dict[str, float]:
    return window.record(alone, **({"state": State(), "epoch": 0.5} | changes))  # type: ignore[arg-type]


def test_rows_of_packs_and_steps_weigh_alike() -> None:
    window = Window(device=CPU)
    one = pack(kl=[4.0], hits=[1], acceptance=[1.0])
    add(window, (0.5, one), (0.25, one), rows=[4], grad_norm=1.0)
    two = pack(kl=[2.0, 3.0], hits=[4, 1], acceptance=[3.0, 0.5])
    add(window, (0.25, two), rows=[6, 2], grad_norm=3.0, learning_rate=0.2)
    found = record(window)
    expected = {"kl_1": 1.0, "accuracy_1": 0.6, "acceptance_1": 0.5, "kl_2": 1.5, "accuracy_2": 0.5}
    expected |= {"acceptance_2": 0.25, "tau_product": 1 + 0.6 + 0.3, "loss": 0.5, "grad_norm": 2.0}
    expected |= {"learning_rate": 0.2, "step": 3, "cursor": 3, "tokens": 300, "slots": 120, "skipped": 0, "epoch": 0.5}
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert not {key for key in found if key.startswith("smooth_l1")}
    with pytest.raises(AssertionError):
        record(window)  # a new window has begun


def test_a_feature_loss_is_reported_when_there_is_one() -> None:
    window = Window(device=CPU)
    sums = pack(kl=[1.0], hits=[1], acceptance=[1.0]) | {"feature": torch.tensor([3.0])}
    add(window, (1.0, sums), rows=[2])
    assert record(window)["smooth_l1_1"] == pytest.approx(1.5)


def test_a_skipped_step_counts_time_and_tokens_only() -> None:
    window = Window(device=CPU)
    add(window, (1.0, pack(kl=[2.0], hits=[1], acceptance=[1.0])), rows=[2])
    broken = pack(kl=[math.nan], hits=[0], acceptance=[math.nan])
    add(window, (math.nan, broken), rows=[2], grad_norm=math.inf, skipped=True)
    found = record(window, state=State(skipped=1))
    assert [found[key] for key in ("kl_1", "loss", "grad_norm", "skipped")] == [1.0, 1.0, 1.0, 1]
    assert found["tokens_per_second"] / found["slots_per_second"] == pytest.approx(100 / 4)
    add(window, (math.nan, broken), rows=[2], grad_norm=math.inf, skipped=True)
    nothing = record(window)
    assert math.isnan(nothing["loss"]) and math.isnan(nothing["grad_norm"])
    assert "kl_1" not in nothing


def test_processes_are_summed_by_one_exchange_even_when_one_trained_on_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two windows as two processes have them; the second had only filler packs."""
    sent: list[Tensor] = []
    memories = iter([1000, 3000, 1000])
    monkeypatch.setattr(metrics, "peak_memory", lambda _device: next(memories))
    busy, idle = (Window(device=CPU, rank=rank, world_size=2, peak=Peak(1.0, metric="mfu")) for rank in (0, 1))
    sums = pack(kl=[2.0, 1.0], hits=[2, 1], acceptance=[1.0, 0.5])
    for window, packs in ((busy, [(3.0, sums)]), (idle, [])):
        add(window, *packs, rows=[4, 2])

    def collect(value: Tensor) -> Tensor:
        sent.append(value)
        return value

    for window in (busy, idle):
        window.record(collect, state=State(), epoch=0.0)
    assert sent[0].shape == sent[1].shape
    add(busy, (3.0, sums), rows=[4, 2])
    found = busy.record(lambda value: value + sent[1], state=State(), epoch=0.0)
    assert found["loss"] == pytest.approx(1.5)  # the mean over processes
    assert (found["kl_1"], found["kl_2"]) == (0.5, 0.5)
    assert found["memory_bytes"] == 3000
    assert found["mfu"] == pytest.approx(found["flops_per_second"] / 2)


def test_throughput_leaves_out_what_is_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 50.0, 60.0, 100.0])  # begins; an evaluation from 10 to 50; the record at 60; begins again
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    window = Window(device=CPU, peak=Peak(50.0, metric="gemm_share"))
    add(window, (1.0, pack(kl=[2.0], hits=[1], acceptance=[1.0])), rows=[2])
    with window.paused():
        pass
    found = record(window)
    assert (found["tokens_per_second"], found["slots_per_second"], found["flops_per_second"]) == (2.5, 0.1, 5.0)
    assert found["gemm_share"] == pytest.approx(0.1)
    assert "mfu" not in found


def test_peak_memory_is_in_bytes() -> None:
    before = peak_memory(CPU)
    held = torch.ones(before // 4 + (16 << 20))  # more than this process has ever held
    assert peak_memory(CPU) >= before + (32 << 20)
    del held


def test_a_measured_peak_is_quick_and_leaves_random_numbers_alone() -> None:
    torch.manual_seed(0)
    random.seed(0)
    state = torch.get_rng_state()
    started = time.process_time()
    measured = measured_gemm_flops(CPU, torch.float32)
    assert time.process_time() - started < 5 * torch.get_num_threads()  # wall time is 0.5 s on an idle machine
    assert torch.equal(torch.get_rng_state(), state)
    assert measured > 0


@pytest.mark.parametrize(("rate", "size"), [(1e9, 256), (1e10, 512), (1e15, 8192)])
def test_the_measured_peak_is_that_of_a_product_that_takes_long_enough(
    monkeypatch: pytest.MonkeyPatch, rate: float, size: int
) -> None:
    """On a made-up device; a product of 2 * 256^3 operations takes 34 ms at 1e9 a second, one of 512^3 27 ms at 1e10."""
    asked: list[tuple[int, float]] = []

    def seconds(of: int, *, device: torch.device, dtype: torch.dtype, budget: float) -> float:  # noqa: ARG001
        asked.append((of, budget))
        return 2.0 * of**3 / rate

    monkeypatch.setattr(peak, "_seconds", seconds)
    assert measured_gemm_flops(CPU, torch.float32) == pytest.approx(rate)
    assert asked[-1] == (size, 0.1)


def test_a_product_is_timed_at_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by hand: products of 50, 30 and 40 ms until 0.1 s are over; the one before them is not timed."""
    now = iter([0.0, 0.0, 0.05, 0.05, 0.08, 0.08, 0.12])
    monkeypatch.setattr(peak.time, "perf_counter", lambda: next(now))
    assert peak._seconds(256, device=CPU, dtype=torch.float32, budget=0.1) == pytest.approx(0.03)


def test_a_named_peak_is_taken_as_it_is() -> None:
    assert peak_flops(CPU, dtype=torch.float32, nominal=7.0) == Peak(7.0, metric="mfu")
