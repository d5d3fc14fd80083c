"""The average of the weights: its closed form, changing places with them, and sharded tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from eyas.train.ema import Ema, NoAverages, averages


def closed_form(values: list[Tensor], *, decay: float) -> Tensor:
    """Each value times (1 - d) of its own update and d of all later ones; the first one begins."""
    decays = [min(decay, (1 + n) / (10 + n)) for n in range(len(values) - 1)]
    average = values[0].double() * torch.tensor(decays, dtype=torch.float64).prod()
    for place, value in enumerate(values[1:]):
        later = torch.tensor(decays[place + 1 :], dtype=torch.float64).prod()
        average += (1 - decays[place]) * later * value.double()
    return average


def trained(ema: Ema, parameter: Tensor, *, steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    values = [parameter.detach().clone()]
    for _ in range(steps):
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        ema.update()
        values.append(parameter.detach().clone())
    return values


@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_it_is_the_closed_form(decay: float) -> None:
    parameter = nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    ema = Ema([("weight", parameter)], decay=decay)
    values = trained(ema, parameter, steps=40)
    with ema.swapped():
        torch.testing.assert_close(parameter.detach().double(), closed_form(values, decay=decay), rtol=1e-5, atol=1e-6)
    assert torch.equal(parameter, values[-1])
    assert ema.updates == 40


def test_weights_come_back_to_the_bit_whatever_happens_inside() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    ema = Ema([("weight", parameter)], decay=0.9)
    weights = trained(ema, parameter, steps=3)[-1]
    with ema.swapped():
        average = parameter.detach().clone()
    with pytest.raises(RuntimeError, match="evaluation"), ema.swapped():
        raise RuntimeError("evaluation failed")
    assert torch.equal(parameter, weights)
    with pytest.raises(AssertionError), ema.swapped():
        ema.update()
    with ema.swapped():
        assert torch.equal(parameter, average)
    assert not torch.equal(average, weights)
    assert parameter.grad_fn is None and parameter.requires_grad


def test_a_restored_average_goes_on_to_the_bit() -> None:
    """As a resumed run does it: averages are put into the parameters, then `reset`, then the weights."""
    whole = nn.Parameter(torch.zeros(5))
    ema = Ema([("weight", whole)], decay=0.9)
    weights = trained(ema, whole, steps=4)[-1]
    with ema.swapped():
        stored = whole.detach().clone()
    resumed = nn.Parameter(torch.ones(5))
    other = Ema([("weight", resumed)], decay=0.9)
    with torch.no_grad():
        resumed.copy_(stored)
        other.reset(updates=4)
        resumed.copy_(weights)
    for one, parameter in ((ema, whole), (other, resumed)):
        trained(one, parameter, steps=3)
    with ema.swapped(), other.swapped():
        assert torch.equal(whole, resumed)


def test_no_average_is_a_null_object_and_frozen_weights_are_left_out() -> None:
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    none = averages(module.named_parameters(), decay=None)
    before = module.weight.detach().clone()
    none.update()
    none.reset(updates=3)
    with none.swapped():
        assert torch.equal(module.weight, before)
    assert isinstance(none, NoAverages) and not none.active
    some = averages(module.named_parameters(), decay=0.9)
    assert some.active
    with torch.no_grad():
        module.weight.zero_()
        module.bias.zero_()
    with some.swapped():
        assert torch.equal(module.weight, before)
        assert not module.bias.any()


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process_group")
def test_sharded_parameters_are_averaged_share_by_share() -> None:
    mesh = init_device_mesh("cpu", (1,))
    generator = torch.Generator().manual_seed(0)
    plain = nn.Parameter(torch.randn(4, 3, generator=generator))
    shared = nn.Parameter(distribute_tensor(plain.detach().clone(), mesh, [Shard(0)]))
    ema, sharded = (averages([("weight", parameter)], decay=0.9) for parameter in (plain, shared))
    for _ in range(3):
        value = torch.randn(4, 3, generator=generator)
        with torch.no_grad():
            plain.copy_(value)
            shared.copy_(distribute_tensor(value, mesh, [Shard(0)]))
        ema.update()
        sharded.update()
    with ema.swapped(), sharded.swapped():
        assert isinstance(shared, DTensor)
        assert torch.equal(shared.full_tensor(), plain)
