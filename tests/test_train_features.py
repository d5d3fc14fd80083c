"""Extraction against transformers' own hidden states, the store, and batching."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from eyas.heads.config import default_capture_layers
from eyas.heads.target import load_target_pieces
from eyas.heads.target_source import target_fingerprint
from eyas.train.batches import epoch_batches, run_batches
from eyas.train.data.prepare import prepare
from eyas.train.features import extract as extract_module
from eyas.train.features.extract import extract, length_batches, shard_bounds
from eyas.train.features.store import FeatureStore, check_identity
from tests import tiny


@pytest.fixture(scope="module")
def tokens_dir(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    directory = tmp_path_factory.mktemp("tokens")
    prepare(
        directory,
        target_dir=tiny_target,
        conversations=tiny.write_conversation_file(directory / "c.jsonl"),
        max_length=64,
        max_train_tokens=None,
        on_bad_line="stop",
        trust_remote_code=False,
        seed=0,
    )
    return directory


def _extract(out_dir: Path, *, tokens_dir: Path, target: Path, batch_tokens: int = 200) -> dict[str, int]:
    return extract(
        out_dir,
        tokens_dir=tokens_dir,
        target_dir=target,
        capture_layers=tiny.CAPTURE_LAYERS,
        dtype="float32",
        batch_tokens=batch_tokens,
        threads=None,
        trust_remote_code=False,
    )


def test_features_are_the_targets_hidden_states(tmp_path: Path, tokens_dir: Path, tiny_target: Path) -> None:
    counts = _extract(tmp_path, tokens_dir=tokens_dir, target=tiny_target)
    store = FeatureStore(tmp_path, split="train")
    assert counts["tokens"] == sum(store.lengths) + sum(FeatureStore(tmp_path, split="heldout").lengths)
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    readout = load_target_pieces(tiny_target).readout_VH
    for index in (0, len(store) // 2, len(store) - 1):
        document = store[index]
        with torch.inference_mode():
            output = model(document.token_ids_T[None], output_hidden_states=True)
        expected = torch.cat([output.hidden_states[layer][0] for layer in tiny.CAPTURE_LAYERS], dim=-1)
        torch.testing.assert_close(document.captured_TX, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(document.last_TH, output.hidden_states[-1][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(document.last_TH @ readout.T, output.logits[0], rtol=1e-4, atol=1e-4)


def test_a_killed_extraction_goes_on_after_its_last_shard(
    tmp_path: Path, tokens_dir: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extract_module, "SHARD_BYTES", 300 * 4 * 64 * 4)  # about 300 tokens a shard
    _extract(tmp_path / "whole", tokens_dir=tokens_dir, target=tiny_target)
    written: list[Path] = []

    def killed_after_two(store: Path, **arguments: object) -> Path:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(_write_shard(store, **arguments))  # type: ignore[arg-type]
        return written[-1]

    _write_shard = extract_module.write_shard
    with monkeypatch.context() as patch:
        patch.setattr(extract_module, "write_shard", killed_after_two)
        with pytest.raises(KeyboardInterrupt):
            _extract(tmp_path / "killed", tokens_dir=tokens_dir, target=tiny_target)
    stamps = {path: path.stat().st_mtime_ns for path in written}
    _extract(tmp_path / "killed", tokens_dir=tokens_dir, target=tiny_target)
    assert {path: path.stat().st_mtime_ns for path in written} == stamps
    whole, resumed = (FeatureStore(tmp_path / name, split="train") for name in ("whole", "killed"))
    assert whole.lengths == resumed.lengths
    assert torch.equal(whole[20].captured_TX, resumed[20].captured_TX)


def test_a_store_of_another_target_is_refused(tmp_path: Path, tokens_dir: Path, tiny_target: Path) -> None:
    _extract(tmp_path / "store", tokens_dir=tokens_dir, target=tiny_target)
    other = tiny.write_target(tmp_path / "other", seed=1)
    check_identity(tmp_path / "store", target_fingerprint=target_fingerprint(tiny_target))
    with pytest.raises(ValueError, match="another target"):
        check_identity(tmp_path / "store", target_fingerprint=target_fingerprint(other))


def test_another_chat_template_is_another_target(tmp_path: Path) -> None:
    target = tiny.write_target(tmp_path / "t")
    before = target_fingerprint(target)
    tiny.write_tokenizer(target, chat_template=tiny.CHAT_TEMPLATE + " ")
    assert target_fingerprint(target) != before


def test_too_little_disk_is_refused_before_anything_is_written(
    tmp_path: Path, tokens_dir: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = extract_module.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(extract_module.shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(ValueError, match="GB free"):
        _extract(tmp_path, tokens_dir=tokens_dir, target=tiny_target)
    assert list(tmp_path.iterdir()) == []


def test_default_layers_need_a_deep_enough_target() -> None:
    assert default_capture_layers(30) == (2, 15, 27)
    assert default_capture_layers(32) == (2, 16, 29)
    with pytest.raises(ValueError, match="capture_layers"):
        default_capture_layers(4)


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), budget=st.integers(1, 120))
def test_length_batches_hold_everything_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = length_batches(lengths, batch_tokens=budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or max(lengths[index] for index in batch) * len(batch) <= budget


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), budget=st.integers(1, 120))
def test_shards_hold_everything_in_order_within_the_budget(lengths: list[int], budget: int) -> None:
    offsets = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
    bounds = shard_bounds(offsets, shard_tokens=budget)
    assert [index for first, last in bounds for index in range(first, last)] == list(range(len(lengths)))
    for first, last in bounds:
        assert last - first == 1 or offsets[last] - offsets[first] <= budget


@given(
    lengths=st.lists(st.integers(1, 50), min_size=8, max_size=60),
    budget=st.integers(1, 100),
    seed=st.integers(0, 5),
)
def test_epoch_batches_are_disjoint_over_processes_and_reproducible(lengths: list[int], budget: int, seed: int) -> None:
    def of(rank: int, world_size: int) -> list[list[int]]:
        return epoch_batches(lengths, batch_tokens=budget, seed=seed, epoch=0, rank=rank, world_size=world_size)

    whole = of(0, 1)
    assert whole == of(0, 1)
    assert sorted(index for batch in whole for index in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or sum(lengths[i] for i in batch) <= budget for batch in whole)
    if len(whole) < 2:
        with pytest.raises(ValueError, match="2 processes"):
            of(0, 2)
        return
    halves = of(0, 2), of(1, 2)
    assert len(halves[0]) == len(halves[1])
    assert [batch for pair in zip(*halves, strict=True) for batch in pair] == whole[: len(whole) // 2 * 2]


def test_a_run_is_its_epochs_one_after_another_though_they_differ_in_length() -> None:
    lengths = [1, 30, 2, 40, 3, 50, 4, 45, 5, 35, 20, 20, 25]

    def epoch(number: int) -> list[list[int]]:
        return epoch_batches(lengths, batch_tokens=60, seed=0, epoch=number, rank=0, world_size=1)

    epochs = [epoch(number) for number in range(6)]
    assert len({len(batches) for batches in epochs}) > 1
    whole = run_batches(lengths, batch_tokens=60, seed=0, epochs=6, rank=0, world_size=1)
    assert whole == [batch for batches in epochs for batch in batches]


def test_epochs_differ_in_order() -> None:
    orders = [epoch_batches([1] * 50, batch_tokens=5, seed=0, epoch=epoch, rank=0, world_size=1) for epoch in (0, 1)]
    assert orders[0] != orders[1]
