"""The training benchmark: both arms do the same work on the same data, and the operations it counts are those needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from eyas.heads.config import HeadConfig
from eyas.heads.flops import training_flops
from eyas.heads.slots import serving_slots
from eyas.train.features.documents import Document
from eyas.train.features.teacher import HiddenTeacher
from tests.benchmarks.train import line, parse, ratio, run_cell
from tests.benchmarks.train_cells import PRESETS, Cell, chat_documents, count_work
from tests.benchmarks.train_measure import measure_steps
from tests.benchmarks.train_ours import OurStep
from tests.benchmarks.train_served import tau

CELL = Cell(preset="tiny", tokens=256, ttt_steps=3, answer_share=0.5, precision="fp32", document_tokens=96)
CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("share", [0.1, 0.3, 0.75, 1.0])
def test_a_pack_has_the_tokens_and_the_answers_it_was_asked_for(share: float) -> None:
    cell = replace(CELL, tokens=8192, document_tokens=1024, answer_share=share)
    work = count_work(chat_documents(cell), ttt_steps=3)
    assert work.tokens == 8192
    assert work.answer_tokens == pytest.approx(share * 8192, rel=0.02)
    assert 5 <= work.documents <= 14
    assert work.num_slots == work.tokens - work.documents
    assert all(later <= earlier for earlier, later in pairwise(work.rows_K))


def test_pairs_are_counted_as_a_loop_over_slots_counts_them() -> None:
    documents = chat_documents(CELL)
    pairs = [0, 0, 0]
    for document in documents:
        for step, slots_S in enumerate(serving_slots(document.answer_mask_T, num_steps=3)):
            for slot in slots_S.tolist():
                pairs[step] += len(range(slot + 1)) + step
    assert count_work(documents, ttt_steps=3).attended_K == tuple(pairs)


def test_both_arms_run_and_count_the_same() -> None:
    pytest.importorskip("speculators")
    records = {}
    for arm in ("ours", "speculators"):
        options = ["--arm", arm, "--threads", "1", "--repeats", "2", "--warmup", "1", "--gemm-seconds", "0"]
        records[arm] = run_cell(CELL, parse(options))
    ours, peer = records.values()
    for name in ("tokens", "documents", "num_slots", "rows_K", "attended_K", "num_teacher_rows", "flops"):
        assert ours[name] == peer[name], name
    # A row of ours is a slot whose tokens t+1..t+2+i are one answer's; the peer also counts slots before the answer.
    assert ours["trained_rows_K"] == list(ours["rows_K"])
    assert peer["trained_rows_K"][0] == ours["rows_K"][0]
    assert all(theirs >= mine for mine, theirs in zip(ours["rows_K"], peer["trained_rows_K"], strict=True))
    for record in (ours, peer):
        assert record["share_of_gemm"] > 0.0
        assert record["seconds_median"] > 0.0
        assert "tok/s" in line(record)
    assert "x the speed" in ratio([ours | {"step_bytes": 1}], [peer | {"step_bytes": 2}])


def test_with_the_same_weights_both_arms_have_the_same_loss() -> None:
    """One answer that fills the document: then both train the same rows, and neither arm's set-up may differ."""
    pytest.importorskip("speculators")
    from tests.benchmarks.train_peer import PeerStep, peer_loss

    documents = _answer_documents(CELL.config, lengths=[70])
    cell = replace(CELL, tokens=70)
    ours, peer = OurStep(cell, device=CPU, documents=documents), PeerStep(cell, device=CPU, documents=documents)
    assert peer.rows_K == ours.rows_K
    state = {name: tensor for name, tensor in ours.head.state_dict().items() if name in peer.model.state_dict()}
    assert {name for name, _ in ours.head.named_parameters()} <= state.keys()
    peer.model.load_state_dict(state, strict=False)
    ours.weights = [1.0 / rows for rows in ours.rows_K]  # the peer's steps count the same
    loss = ours.backward(ours.pack())
    other, _ = peer_loss(peer.model, peer.batch, ttt_steps=3, autocast_to=None)
    assert loss == pytest.approx(float(other.detach()), rel=1e-4)
    other.backward()
    for name, parameter in ours.head.named_parameters():
        if parameter.requires_grad:
            theirs = peer.model.get_parameter(name).grad
            assert parameter.grad is not None and theirs is not None
            torch.testing.assert_close(parameter.grad, theirs, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("train_readout", [False, True])
@pytest.mark.parametrize("ttt_steps", [1, 3])
def test_operations_are_those_of_a_count_by_hand(ttt_steps: int, train_readout: bool) -> None:
    documents = chat_documents(CELL)
    work = count_work(documents, ttt_steps=ttt_steps)
    counted = training_flops(
        CELL.config,
        num_slots=work.num_slots,
        rows_K=work.rows_K,
        attended_K=work.attended_K,
        num_teacher_rows=work.num_teacher_rows,
        train_readout=train_readout,
    )
    by_hand = _operations_by_hand(CELL.config, documents, ttt_steps=ttt_steps, train_readout=train_readout)
    assert counted == pytest.approx(by_hand, rel=1e-9)


def test_the_step_computes_no_more_matrix_products_than_are_counted() -> None:
    """Products outside of attention, as torch sees them run, against the count without pairs."""
    cell = replace(CELL, train_readout=True)
    ours = OurStep(cell, device=CPU)
    work = count_work(ours.documents, ttt_steps=3)
    with FlopCounterMode(display=False) as counter:
        ours.backward(ours.pack())
    products = {"aten.mm", "aten.addmm"}
    run = sum(count for kind, count in counter.get_flop_counts()["Global"].items() if str(kind) in products)
    counted = training_flops(
        cell.config,
        num_slots=work.num_slots,
        rows_K=work.rows_K,
        attended_K=[0, 0, 0],
        num_teacher_rows=work.num_teacher_rows,
        train_readout=True,
    )
    # Torch's counter does not see products that are added to a tensor in place, such as the readout's gradient.
    assert 0.8 * counted <= run <= 1.02 * counted


def test_a_cell_runs_as_a_command_and_is_written(tmp_path: Path) -> None:
    out = tmp_path / "cells.jsonl"
    cell = ["--preset", "tiny", "--tokens", "192", "--ttt-steps", "2", "--answer-share", "0.5", "--precision", "bf16"]
    small = ["--document-tokens", "64", "--repeats", "1", "--gemm-seconds", "0", "--threads", "1", "--device", "cpu"]
    command = [sys.executable, "-m", "tests.benchmarks.train", *cell, *small, "--json", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, check=True, text=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert "of GEMM" in done.stdout
    (record,) = [json.loads(text) for text in out.read_text().splitlines()]
    assert record["tokens"] == 192
    assert record["step_bytes"] > 0


def test_memory_of_steps_is_what_they_hold_and_not_what_was_there_before() -> None:
    before = torch.ones(64 << 18)  # 64 MiB
    del before
    there = torch.ones(32 << 18)

    def step() -> float:
        return float(torch.ones(96 << 18).sum())

    steps = measure_steps(step, device=CPU, warmup=1, repeats=1)
    assert 90 << 20 < steps.bytes_peak - steps.bytes_before < 110 << 20
    assert len(steps.seconds) == 1
    del there


def test_served_tau_ends_at_the_answers_end() -> None:
    outputs = [[5, 6, 7, 2, 9, 9, 9], [5, 5, 5, 5]]
    accepted = [[1, 2, 2], [0, 3]]
    # First: 6 7 | 2 (the rest is after the stop) -> 3 tokens in 2 steps. Second: 5 | 5 5 -> 3 tokens in 2 steps.
    assert tau(outputs, accepted, stop_token_ids=[2]) == pytest.approx(6 / 4)


def _answer_documents(config: HeadConfig, *, lengths: list[int]) -> list[Document]:
    """Documents that are one answer from the first token to the last."""
    generator = torch.Generator().manual_seed(3)
    return [
        Document(
            token_ids_T=torch.randint(config.vocab_size, (length,), generator=generator),
            answer_mask_T=torch.ones(length, dtype=torch.bool),
            captured_TX=torch.randn(length, 3 * config.hidden_size, generator=generator).bfloat16(),
            last_TH=None,
            teacher=HiddenTeacher(torch.randn(length - 2, config.hidden_size, generator=generator).bfloat16()),
        )
        for length in lengths
    ]


def _operations_by_hand(config: HeadConfig, documents: list[Document], *, ttt_steps: int, train_readout: bool) -> float:
    """Multiplications and additions of every product, slot by slot and row by row.

    A product with trained weights runs three times (forward, and backward for input and weights); `fc`, whose input is
    frozen, twice; a frozen readout twice; the teacher's once. A pair of query and key costs a score and a weighted value
    forward, and twice that backward.
    """
    hidden, wide = config.hidden_size, 2 * config.hidden_size
    query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    keys_values = 3 * 2 * wide * 2 * key
    layer = 3 * 2 * (wide * query + query * hidden + 3 * hidden * config.intermediate_size)
    # The part of q, k and v that reads the embedding is the same at step i of slot t as at step 0 of slot t + i.
    once = 3 * 2 * hidden
    readout = (3 if train_readout else 2) * 2 * hidden * config.draft_vocab_size
    pair = 3 * 2 * 2 * query
    total = 0
    for document in documents:
        for _ in range(document.token_ids_T.shape[0] - 1):
            total += 2 * 2 * config.num_captured * hidden * hidden + keys_values
        for step, slots_S in enumerate(serving_slots(document.answer_mask_T, num_steps=ttt_steps)):
            for slot in slots_S.tolist():
                total += layer + readout + (slot + 1 + step) * pair
                total += keys_values - once * (query + 2 * key) if step else 0
        total += len(document.teacher) * 2 * hidden * config.draft_vocab_size
    return float(total)


def test_presets_have_the_published_sizes() -> None:
    sizes = {
        name: (config.hidden_size, config.intermediate_size, config.vocab_size, config.num_attention_heads)
        for name, config in PRESETS.items()
    }
    assert sizes["smollm2-135m"] == (576, 1536, 49152, 9)
    assert sizes["llama-3.1-8b"] == (4096, 14336, 128256, 32)
    assert sizes["qwen3-32b"] == (5120, 25600, 151936, 64)
