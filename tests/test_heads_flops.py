"""The count of operations against the products that torch sees run."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from eyas.heads.flops import training_flops
from eyas.heads.slots import teacher_positions
from eyas.train.features.documents import Document
from eyas.train.features.teacher import HiddenTeacher
from eyas.train.losses import TokenLoss
from eyas.train.objective import HeadObjective, Losses, trained_hidden_states
from eyas.train.pack import training_pack
from tests.tiny import VARIANTS, head_config, random_head

V, H = 100, 32


def _document() -> Document:
    mask_T = torch.zeros(60, dtype=torch.bool)
    mask_T[20:50] = True
    last_TH = torch.randn(60, H)
    return Document(
        torch.randint(0, V, (60,)),
        mask_T,
        torch.randn(60, 3 * H),
        last_TH,
        HiddenTeacher(last_TH[teacher_positions(mask_T)]),
    )


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("variant", ["eagle3", "eagle3.1", "qwen3", "layers", "full vocabulary", "eagle"])
def test_the_count_is_that_of_the_products_that_run(variant: str, num_steps: int) -> None:
    """Every product of the head's steps in forward and backward, attention left out."""
    head = random_head(head_config(**VARIANTS[variant]))
    pack = training_pack([_document()], source=head.feature_source, num_steps=num_steps, embedding_VH=torch.randn(V, H))
    with FlopCounterMode(display=False) as counter:
        outputs = trained_hidden_states(head, pack, num_steps=num_steps)
        torch.cat(outputs).square().sum().backward()
    products = {"aten.mm", "aten.addmm"}
    run = sum(count for kind, count in counter.get_flop_counts()["Global"].items() if str(kind) in products)
    # Neither teacher nor readout runs here; a readout of no rows is counted as none.
    rows_K = [slots_S.shape[0] for slots_S in pack.slots]
    counted = training_flops(
        head.config,
        num_slots=sum(pack.lengths),
        rows_K=rows_K,
        attended_K=[0] * num_steps,
        num_teacher_rows=0,
        train_readout=False,
    )
    counted -= 4.0 * sum(rows_K) * H * head.config.draft_vocab_size
    # A norm's gradient for its weight is a product of one column, which the counter sees.
    assert counted <= run <= 1.06 * counted


def test_attention_readout_and_teacher_are_counted_by_their_sizes() -> None:
    config = head_config()
    arguments = {"num_slots": 100, "rows_K": [50, 40], "train_readout": True}
    base = training_flops(config, attended_K=[0, 0], num_teacher_rows=0, **arguments)
    attended = training_flops(config, attended_K=[1000, 500], num_teacher_rows=0, **arguments)
    assert attended - base == 3 * 2 * 2 * 1500 * config.num_attention_heads * config.head_dim
    taught = training_flops(config, attended_K=[0, 0], num_teacher_rows=30, **arguments)
    assert taught - base == 2 * 30 * H * config.draft_vocab_size
    frozen = training_flops(config, attended_K=[0, 0], num_teacher_rows=0, **(arguments | {"train_readout": False}))
    assert base - frozen == 2 * 90 * H * config.draft_vocab_size


def test_a_step_runs_no_more_products_than_are_counted() -> None:
    head = random_head(head_config())
    pack = training_pack([_document()], source="captured", num_steps=2, embedding_VH=torch.randn(V, H))
    objective = HeadObjective(
        head, target_readout_DH=torch.randn(40, H), losses=Losses(token=TokenLoss()), autocast=None
    )
    with FlopCounterMode(display=False) as counter:
        objective(pack, [1.0, 1.0])[0].backward()
    rows_K = [slots_S.shape[0] for slots_S in pack.slots]
    counted = training_flops(
        head.config,
        num_slots=sum(pack.lengths),
        rows_K=rows_K,
        attended_K=[0, 0],
        num_teacher_rows=len(pack.teacher),
        train_readout=True,
    )
    run = sum(
        count for kind, count in counter.get_flop_counts()["Global"].items() if str(kind) in {"aten.mm", "aten.addmm"}
    )
    # The counter does not see products that are added to a tensor in place, such as the readout's gradient.
    assert 0.8 * counted <= run <= 1.06 * counted
