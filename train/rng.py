"""Random state of every process, as tensors.

Training draws nothing from global generators: orders and noise are functions of seed, step and document. Their state
is kept all the same, so that a part which draws (a target's dropout, a library) does not make a resumed run another one.
"""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import Tensor

from eyas.train.parallel.engine import TrainingEngine


def capture_rng() -> dict[str, Tensor]:
    """State of this process's generators: torch's on the CPU and on its GPU, Python's and numpy's.

    Every process has the same names and shapes.
    """
    version, words, normal = random.getstate()
    assert version == 3, version
    twister: Any = numpy.random.get_state(legacy=False)
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.tensor([*twister["state"]["key"].tolist(), twister["state"]["pos"]], dtype=torch.int64),
        # Both keep the second of a pair of normal draws for later: whether there is one, and which.
        "normals": torch.tensor(
            [normal is not None, normal or 0.0, twister["has_gauss"], twister["gauss"]], dtype=torch.float64
        ),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def gather_rng(engine: TrainingEngine) -> dict[str, Tensor]:
    """State of every process, "<rank>/<name>", on every process; collective."""
    gathered: dict[str, Tensor] = {}
    for name, own in capture_rng().items():
        # The bytes of the other processes are zero, so the sum over all is what each had.
        table = torch.zeros(engine.world_size, own.numel() * own.element_size(), dtype=torch.uint8)
        table[engine.rank] = own.view(torch.uint8)
        rows = engine.sum(table).cpu()
        gathered |= {f"{rank}/{name}": row.clone().view(own.dtype) for rank, row in enumerate(rows)}
    return gathered


def restore_rng(gathered: dict[str, Tensor], *, rank: int, world_size: int) -> bool:
    """Put this process's state back; False, and nothing is done, when the states are of another number of processes."""
    if {name.partition("/")[0] for name in gathered} != {str(other) for other in range(world_size)}:
        return False
    own = {name.partition("/")[2]: state for name, state in gathered.items() if name.startswith(f"{rank}/")}
    has_python, python_normal, has_numpy, numpy_normal = own["normals"].tolist()
    torch.set_rng_state(own["torch"])
    random.setstate((3, tuple(own["python"].tolist()), python_normal if has_python else None))
    *keys, position = own["numpy"].tolist()
    numpy.random.set_state(("MT19937", numpy.array(keys, dtype=numpy.uint32), position, int(has_numpy), numpy_normal))
    if "cuda" in own and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["cuda"])
    return True
