"""Optimiser and schedules: which parameter is updated how, one object for two optimisers, and rates step by step."""

from __future__ import annotations

import itertools
import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from eyas.train.optim import Schedule, learning_rate_at, make_optimizer, set_learning_rate

SCHEDULES: tuple[Schedule, ...] = ("cosine", "linear", "constant", "wsd")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 6)
        self.norm = nn.LayerNorm(8, bias=False)


class Head(nn.Module):
    """Parts of a draft head by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Layer()
        self.layers = nn.ModuleList([self.first])
        self.embed_tokens = nn.Embedding(12, 8)
        self.fc = nn.Linear(24, 8, bias=False)
        self.gate = nn.Linear(8, 1, bias=False)
        self.frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.lm_head = nn.Linear(8, 10, bias=False)

    def forward(self, inputs_TX: Tensor) -> Tensor:
        hidden_TH = self.fc(inputs_TX) + self.embed_tokens(torch.arange(len(inputs_TX)) % 12)
        hidden_TH = self.first.norm(hidden_TH)
        out = self.first.q_proj(hidden_TH).square().sum()
        return out + self.lm_head(self.frozen(hidden_TH)).sin().sum() + self.gate(hidden_TH).sum()


def make(kind: str, head: nn.Module, **changes: Any) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {"learning_rate": 1e-2, "muon_learning_rate": 3e-2, "betas": (0.9, 0.95)}
    return make_optimizer(head, kind=kind, **({"weight_decay": 0.1} | settings | changes))  # type: ignore[arg-type]


def head_with_gradients(seed: int = 0) -> Head:
    torch.manual_seed(seed)
    head = Head()
    head(torch.randn(64, 24)).backward()
    return head


def treated(optimizer: torch.optim.Optimizer, head: nn.Module) -> dict[str, tuple[str, float]]:
    names = {id(parameter): name for name, parameter in head.named_parameters()}
    return {
        names[id(parameter)]: (group["part"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def test_muon_takes_hidden_matrices_and_adamw_the_rest() -> None:
    head = Head()
    assert treated(make("muon", head), head) == {
        "first.q_proj.weight": ("muon", 0.1),
        "first.q_proj.bias": ("adamw", 0.0),
        "first.norm.weight": ("adamw", 0.0),
        "embed_tokens.weight": ("adamw", 0.1),
        "fc.weight": ("muon", 0.1),
        "gate.weight": ("adamw", 0.1),
        "lm_head.weight": ("adamw", 0.1),
    }


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_parameters_keep_the_order_of_the_module(kind: str) -> None:
    head = Head()
    optimizer = make(kind, head)
    assert list(treated(optimizer, head)) == [name for name, p in head.named_parameters() if p.requires_grad]
    assert all(group["fused"] for group in optimizer.param_groups if group["part"] == "adamw")


def test_adamw_is_torchs() -> None:
    ours, plain = head_with_gradients(), head_with_gradients()
    optimizer = make("adamw", ours)
    matrices = [p for p in plain.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in plain.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), foreach=False)
    for _ in range(3):
        optimizer.step()
        reference.step()
    assert_equal_weights(ours, plain)


def test_muon_is_torchs_two_optimisers_in_one_object() -> None:
    ours, plain = head_with_gradients(), head_with_gradients()
    optimizer = make("muon", ours)
    hidden = [plain.first.q_proj.weight, plain.fc.weight]
    decayed = [plain.embed_tokens.weight, plain.gate.weight, plain.lm_head.weight]
    others = [plain.first.q_proj.bias, plain.first.norm.weight]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    references = [
        torch.optim.Muon(hidden, lr=3e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), foreach=False),
    ]
    for step in range(3):
        set_learning_rate(optimizer, 1e-2 / (step + 1))
        references[0].param_groups[0]["lr"] = 3e-2 / (step + 1)
        for group in references[1].param_groups:
            group["lr"] = 1e-2 / (step + 1)
        for one in (optimizer, *references):
            one.step()
    assert_equal_weights(ours, plain)


def test_a_muon_step_moves_all_directions_alike_and_as_far_as_adamw_would() -> None:
    head = head_with_gradients()
    before = head.fc.weight.detach().clone()
    make("muon", head, weight_decay=0.0).step()
    update = (before - head.fc.weight.detach()) / 3e-2
    singular = torch.linalg.svdvals(update) / (0.2 * math.sqrt(24))
    assert head.fc.weight.grad is not None
    gradient = torch.linalg.svdvals(head.fc.weight.grad)
    assert gradient.max() > 2 * gradient.min()
    # The norm before it leaves next to no gradient in one direction.
    assert singular[-2] > 0.6
    assert singular[0] < 1.3
    assert float(update.square().mean().sqrt()) == pytest.approx(0.2, rel=0.2)


def test_a_parameter_without_gradient_stays(kind: str = "muon") -> None:
    head = head_with_gradients()
    head.fc.weight.grad = head.lm_head.weight.grad = None
    before = {name: parameter.detach().clone() for name, parameter in head.named_parameters()}
    make(kind, head).step()
    moved = {name for name, parameter in head.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == set(before) - {"fc.weight", "lm_head.weight", "frozen.weight"}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_goes_on_in_another_object_to_the_bit(kind: str) -> None:
    """By state_dict, and as accelerate wraps it, which replaces the state when it places it on the device."""
    first, second = head_with_gradients(), head_with_gradients()
    optimizers = [make(kind, first), Accelerator(cpu=True).prepare_optimizer(make(kind, second))]
    for _ in range(2):
        optimizers[0].step()
    second.load_state_dict(first.state_dict())
    optimizers[1].load_state_dict(deepcopy(optimizers[0].state_dict()))  # or they would share its tensors
    for optimizer in optimizers:
        set_learning_rate(optimizer, 5e-3)
        optimizer.step()
    assert_equal_weights(first, second, exactly=True)
    state = optimizers[0].state[first.fc.weight]
    assert set(state) == ({"momentum_buffer"} if kind == "muon" else {"step", "exp_avg", "exp_avg_sq"})
    optimizers[1].zero_grad()
    assert all(parameter.grad is None for parameter in second.parameters())


def assert_equal_weights(one: nn.Module, other: nn.Module, *, exactly: bool = False) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0 if exactly else 1e-5, atol=0 if exactly else 1e-6, msg=name)


def rates(schedule: Schedule, *, total: int = 100, warmup: int = 10, peak: float = 1.0, **shape: Any) -> list[float]:
    settings: dict[str, Any] = {"peak": peak, "total_steps": total, "warmup_steps": warmup, "schedule": schedule}
    return [learning_rate_at(step, **(settings | shape)) for step in range(total + 1)]


def test_rates_have_their_closed_values() -> None:
    warm = [(i + 1) / 10 for i in range(10)]
    for schedule in SCHEDULES:
        assert rates(schedule)[:10] == pytest.approx(warm)
    assert rates("constant", final_share=0.0)[10:] == [1.0] * 91
    assert rates("linear", final_share=0.0)[10:] == pytest.approx([1 - i / 90 for i in range(91)])
    assert rates("cosine", final_share=0.1)[55] == pytest.approx(0.1 + 0.9 / 2)
    wsd = rates("wsd", decay_share=0.25, final_share=0.2)
    assert wsd[10:76] == [1.0] * 66
    assert wsd[75:] == pytest.approx([1 - 0.8 * i / 25 for i in range(26)])


@given(
    schedule=st.sampled_from(SCHEDULES),
    total=st.integers(1, 300),
    warmup_share=st.floats(0, 0.99),
    decay_share=st.floats(0.01, 1),
    final_share=st.floats(0, 1),
    peak=st.floats(1e-6, 10),
)
def test_rates_rise_to_the_peak_and_fall_to_the_final_share(
    schedule: Schedule, total: int, warmup_share: float, decay_share: float, final_share: float, peak: float
) -> None:
    warmup = max(1, round(warmup_share * total))
    values = rates(schedule, total=total, warmup=warmup, peak=peak, decay_share=decay_share, final_share=final_share)
    tiny = 1e-9 * peak
    assert all(-tiny <= value <= peak + tiny for value in values)
    assert all(a <= b + tiny for a, b in itertools.pairwise(values[:warmup]))
    assert all(a >= b - tiny for a, b in itertools.pairwise(values[warmup:]))
    assert values[warmup - 1] == pytest.approx(peak)
    if total > warmup:
        assert values[-1] == pytest.approx(peak if schedule == "constant" else final_share * peak, abs=tiny)
    # No jump: neighbours differ by no more than the steepest of their lines (a cosine is pi / 2 times as steep).
    falling = total - warmup if schedule in ("cosine", "linear") else round(decay_share * total)
    falling = max(1, min(falling, total - warmup))
    assert all(
        abs(a - b) <= peak * max(1 / warmup, math.pi / 2 / falling) + tiny for a, b in itertools.pairwise(values)
    )
    past = learning_rate_at(
        2 * total + 1,
        peak=peak,
        total_steps=total,
        warmup_steps=warmup,
        schedule=schedule,
        decay_share=decay_share,
        final_share=final_share,
    )
    assert past == pytest.approx(peak if schedule == "constant" else final_share * peak)
