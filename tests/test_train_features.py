"""Extraction: transformers' own hidden states, resumed, shared by processes, spread over devices, out of generation."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from eyas.heads.config import default_capture_layers
from eyas.heads.slots import teacher_positions
from eyas.heads.target import HiddenStateCapture, input_device, load_target_model, load_target_pieces
from eyas.heads.target_source import target_fingerprint
from eyas.train.data.prepare import prepare
from eyas.train.data.tokens import Tokens
from eyas.train.features import extract as extract_module
from eyas.train.features.documents import Document
from eyas.train.features.encoding import StoreForm
from eyas.train.features.extract import extract, length_batches, planned_identity
from eyas.train.features.identity import INDEX_NAME, check_identity, open_index
from eyas.train.features.shards import CLAIMS_DIRECTORY, ShardWriter, shard_name
from eyas.train.features.store import FeatureStore
from eyas.train.features.teacher import HiddenTeacher
from tests import tiny

FORM = StoreForm(storage="float32", teacher="hidden", teacher_k=0, last_everywhere=False)
EVERYWHERE = StoreForm(storage="float32", teacher="hidden", teacher_k=0, last_everywhere=True)
TOP_K = StoreForm(storage="fp8", teacher="top-k", teacher_k=8, last_everywhere=False)
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tokens_dir(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    directory = tmp_path_factory.mktemp("tokens")
    prepare(
        directory,
        target_dir=tiny_target,
        conversations=tiny.write_conversation_file(directory / "c.jsonl"),
        max_length=64,
        too_long="cut",
        max_train_tokens=None,
        on_bad_line="stop",
        trust_remote_code=False,
        template_options={},
        seed=0,
    )
    return directory


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """About 200 tokens a shard."""
    monkeypatch.setattr(extract_module, "SHARD_BYTES", 1)
    monkeypatch.setattr(extract_module, "BATCHES_PER_SHARD", 1)


def _extract(out_dir: Path, *, tokens_dir: Path, target: Path, **changes: Any) -> dict[str, int]:
    arguments: dict[str, Any] = {
        "capture_layers": tiny.CAPTURE_LAYERS,
        "dtype": "float32",
        "form": FORM,
        "batch_tokens": 200,
        "threads": None,
        "device_map": None,
        "trust_remote_code": False,
        "generated_states": None,
    }
    return extract(out_dir, tokens_dir=tokens_dir, target_dir=target, **(arguments | changes))


def _assert_same_stores(ours: Path, reference: Path, *, tolerance: float = 0.0) -> None:
    for split in ("train", "heldout"):
        a, b = (FeatureStore(directory, split=split, verify="open") for directory in (ours, reference))
        a.require_complete()
        assert list(a.lengths) == list(b.lengths)
        for index in range(len(a)):
            one, two = a.load_encoded(index).tensors, b.load_encoded(index).tensors
            assert one.keys() == two.keys()
            for name in one:
                torch.testing.assert_close(one[name].float(), two[name].float(), rtol=tolerance, atol=tolerance)


def _whole_model(target: Path, document: Document) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Captured states, last state and logits from transformers' own lists."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.inference_mode():
        output = model(document.token_ids_T[None], output_hidden_states=True)
    captured = torch.cat([output.hidden_states[layer][0] for layer in tiny.CAPTURE_LAYERS], dim=-1)
    return captured, output.hidden_states[-1][0], output.logits[0]


def test_features_are_the_targets_hidden_states(tmp_path: Path, tokens_dir: Path, tiny_target: Path) -> None:
    counts = _extract(tmp_path / "a", tokens_dir=tokens_dir, target=tiny_target)
    _extract(tmp_path / "e", tokens_dir=tokens_dir, target=tiny_target, form=EVERYWHERE)
    store, everywhere = (FeatureStore(tmp_path / name, split="train") for name in ("a", "e"))
    heldout = FeatureStore(tmp_path / "a", split="heldout")
    assert counts["documents"] == len(store) + len(heldout)
    assert counts["tokens"] == sum(store.lengths) + sum(heldout.lengths)
    assert counts["bytes"] == sum(path.stat().st_size for path in (tmp_path / "a").glob("*.safetensors"))
    assert counts["from_generation"] == 0
    readout = load_target_pieces(tiny_target).readout_VH
    for index in (0, len(store) // 2, len(store) - 1):
        document = store[index]
        captured, last, logits = _whole_model(tiny_target, document)
        torch.testing.assert_close(document.captured_TX, captured, rtol=1e-4, atol=1e-4)
        last_TH = everywhere[index].last_TH
        assert last_TH is not None
        torch.testing.assert_close(last_TH, last, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(last_TH @ readout.T, logits, rtol=1e-4, atol=1e-4)
        assert isinstance(document.teacher, HiddenTeacher)
        assert torch.equal(document.teacher.hidden_PH, last_TH[teacher_positions(document.answer_mask_T)])


def test_relative_error_of_extracted_states_is_below_a_hundred_thousandth(
    tmp_path: Path, tokens_dir: Path, tiny_target: Path
) -> None:
    """Batches are padded and sorted; the reference runs each document alone."""
    _extract(tmp_path, tokens_dir=tokens_dir, target=tiny_target, form=EVERYWHERE)
    store = FeatureStore(tmp_path, split="train")
    for index in range(0, len(store), 5):
        document = store[index]
        captured, last, _ = _whole_model(tiny_target, document)
        for ours, reference in ((document.captured_TX, captured), (document.last_TH, last)):
            assert ours is not None
            assert float((ours - reference).norm() / reference.norm()) < 1e-5


@pytest.mark.parametrize("form", [FORM, TOP_K], ids=["float32", "fp8 and top-k"])
@pytest.mark.usefixtures("small_shards")
def test_a_killed_extraction_goes_on_after_its_last_shard(
    form: StoreForm, tmp_path: Path, tokens_dir: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _extract(tmp_path / "whole", tokens_dir=tokens_dir, target=tiny_target, form=form)
    written: list[Path] = []
    write = ShardWriter.write

    def killed_after_two(self: ShardWriter, name: str, documents: Sequence[Any]) -> Path:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(write(self, name, documents))
        return written[-1]

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write", killed_after_two)
        with pytest.raises(KeyboardInterrupt):
            _extract(tmp_path / "killed", tokens_dir=tokens_dir, target=tiny_target, form=form)
    assert (tmp_path / "killed" / INDEX_NAME).is_file()
    stamps = {path: path.stat().st_mtime_ns for path in written}
    assert len(stamps) == 2
    resumed = _extract(tmp_path / "killed", tokens_dir=tokens_dir, target=tiny_target, form=form)
    assert {path: path.stat().st_mtime_ns for path in written} == stamps
    assert resumed["padding_tokens"] < whole["padding_tokens"]
    assert {**resumed, "padding_tokens": 0} == {**whole, "padding_tokens": 0}
    _assert_same_stores(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.usefixtures("small_shards")
def test_only_a_deleted_shard_is_made_again_whatever_the_plan(
    tmp_path: Path, tokens_dir: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _extract(tmp_path / "whole", tokens_dir=tokens_dir, target=tiny_target)
    _extract(tmp_path / "mended", tokens_dir=tokens_dir, target=tiny_target)
    shards = sorted((tmp_path / "mended").glob("train-*.safetensors"))
    assert len(shards) > 3
    shards[1].write_bytes(shards[1].read_bytes()[:-5])
    with pytest.raises(ValueError, match=rf"{shards[1].name}.*delete that file"):
        _extract(tmp_path / "mended", tokens_dir=tokens_dir, target=tiny_target)
    shards[1].unlink()
    stamps = {path: path.stat().st_mtime_ns for path in shards if path != shards[1]}
    monkeypatch.setattr(extract_module, "BATCHES_PER_SHARD", 3)
    _extract(tmp_path / "mended", tokens_dir=tokens_dir, target=tiny_target)
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    # Other documents share its batches now.
    _assert_same_stores(tmp_path / "mended", tmp_path / "whole", tolerance=1e-4)


EXTRACTOR = """
import json, sys
from pathlib import Path
from eyas.train.features import extract as module
from tests import test_train_features as tests
module.SHARD_BYTES, module.BATCHES_PER_SHARD = 1, 1
print("ready", flush=True)
sys.stdin.readline()
counts = tests._extract(Path(sys.argv[1]), tokens_dir=Path(sys.argv[2]), target=Path(sys.argv[3]), batch_tokens=80)
print(json.dumps(counts))
"""


@pytest.mark.usefixtures("small_shards")
def test_two_extractors_share_one_directory(tmp_path: Path, tokens_dir: Path, tiny_target: Path) -> None:
    whole = _extract(tmp_path / "whole", tokens_dir=tokens_dir, target=tiny_target, batch_tokens=80)
    command = [sys.executable, "-c", EXTRACTOR, str(tmp_path / "shared"), str(tokens_dir), str(tiny_target)]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    counts = [json.loads(process.communicate()[0]) for process in processes]
    # Each padded position was computed once, by one of them.
    assert counts[0]["padding_tokens"] + counts[1]["padding_tokens"] == whole["padding_tokens"]
    assert counts[0]["bytes"] == counts[1]["bytes"] == whole["bytes"]
    _assert_same_stores(tmp_path / "shared", tmp_path / "whole")
    names = [sorted(path.name for path in (tmp_path / run).glob("*.safetensors")) for run in ("shared", "whole")]
    assert names[0] == names[1]
    assert list((tmp_path / "shared" / CLAIMS_DIRECTORY).iterdir()) == []


def test_layers_over_devices_give_the_same_states(tmp_path: Path, tokens_dir: Path, tiny_target: Path) -> None:
    _extract(tmp_path / "one", tokens_dir=tokens_dir, target=tiny_target)
    _extract(tmp_path / "auto", tokens_dir=tokens_dir, target=tiny_target, device_map="auto")
    _assert_same_stores(tmp_path / "auto", tmp_path / "one", tolerance=1e-5)


def test_offloaded_layers_give_the_same_states(tiny_target: Path) -> None:
    """Weights that accelerate brings in only while a layer runs: what becomes of a target larger than its devices."""
    token_ids_BT = torch.arange(3, 43).reshape(2, 20)
    plain = load_target_model(tiny_target, dtype=torch.float32)
    expected = HiddenStateCapture(plain, capture_layers=tiny.CAPTURE_LAYERS)(token_ids_BT)
    offloaded = cpu_offload(load_target_model(tiny_target, dtype=torch.float32), torch.device("cpu"))
    assert offloaded.get_input_embeddings().weight.device.type == "meta"
    assert input_device(offloaded) == torch.device("cpu")
    states = HiddenStateCapture(offloaded, capture_layers=tiny.CAPTURE_LAYERS)(token_ids_BT)
    for ours, reference in zip(states, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)


def test_states_that_are_no_numbers_name_the_conversation(
    tmp_path: Path, tokens_dir: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __init__(self, *_arguments: object, **_keywords: object) -> None: ...

        def __call__(self, token_ids_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            states = torch.full((*token_ids_BT.shape, 64), float("nan"))
            return states.repeat(1, 1, 3), states

    monkeypatch.setattr(extract_module, "HiddenStateCapture", Broken)
    with pytest.raises(ValueError, match=r"document row-\d+: .*NaN"):
        _extract(tmp_path, tokens_dir=tokens_dir, target=tiny_target)


def _generated(store: Path, *, tokens_dir: Path, target: Path, form: StoreForm, keep: slice) -> None:
    """What generation would have left of the training split: every slot, teachers everywhere, the last state missing."""
    whole = store.parent / "for-generation"
    _extract(whole, tokens_dir=tokens_dir, target=target, form=EVERYWHERE)
    source = FeatureStore(whole, split="train")
    encoder = extract_module.DocumentEncoder(
        form, num_layers=len(tiny.CAPTURE_LAYERS), readout_VH=load_target_pieces(target).readout_VH
    )
    made = planned_identity(
        target,
        tokens_dir=tokens_dir,
        capture_layers=tiny.CAPTURE_LAYERS,
        dtype="float32",
        form=form,
        trust_remote_code=False,
    )
    open_index(store, made, documents={"generated": None})
    rows = []
    for number, index in enumerate(range(len(source))[keep]):
        document = source[index]
        assert document.last_TH is not None
        captured_TX, last_TH = document.captured_TX.clone(), document.last_TH.clone()
        captured_TX[-1], last_TH[-1] = 0.0, 0.0
        everywhere = torch.ones_like(document.answer_mask_T)
        rows.append(
            (
                number,
                encoder.encode(
                    document.token_ids_T,
                    answer_mask_T=everywhere,
                    captured_TX=captured_TX,
                    last_TH=last_TH,
                    name=str(number),
                ),
            )
        )
    ShardWriter(store, identity=made, split="generated").write(shard_name([0]), rows)


@pytest.mark.parametrize("form", [FORM, EVERYWHERE, TOP_K], ids=["answers", "everywhere", "top-k"])
def test_documents_are_taken_from_generation_and_the_rest_computed(
    form: StoreForm, tmp_path: Path, tokens_dir: Path, tiny_target: Path
) -> None:
    states = tmp_path / "states"
    _generated(states, tokens_dir=tokens_dir, target=tiny_target, form=form, keep=slice(0, None, 2))
    counts = _extract(tmp_path / "out", tokens_dir=tokens_dir, target=tiny_target, form=form, generated_states=states)
    _extract(tmp_path / "separate", tokens_dir=tokens_dir, target=tiny_target, form=form)
    taken, computed = (FeatureStore(tmp_path / name, split="train", verify="open") for name in ("out", "separate"))
    assert counts["from_generation"] == len(range(0, len(computed), 2))
    for index in range(len(computed)):
        one, two = taken[index], computed[index]
        assert torch.equal(one.token_ids_T, two.token_ids_T)
        assert torch.equal(one.answer_mask_T, two.answer_mask_T)
        assert len(one.teacher) == len(two.teacher)
        # The last state is read by nothing.
        torch.testing.assert_close(one.captured_TX[:-1], two.captured_TX[:-1], rtol=2**-6, atol=2e-2)
        if isinstance(one.teacher, HiddenTeacher) and isinstance(two.teacher, HiddenTeacher):
            torch.testing.assert_close(one.teacher.hidden_PH, two.teacher.hidden_PH, rtol=1e-4, atol=1e-4)


def test_a_cut_document_is_taken_from_a_longer_generation(tmp_path: Path, tokens_dir: Path, tiny_target: Path) -> None:
    short = tmp_path / "short"
    short.mkdir()
    prepare(
        short,
        target_dir=tiny_target,
        conversations=tokens_dir / "c.jsonl",
        max_length=40,
        too_long="cut",
        max_train_tokens=None,
        on_bad_line="stop",
        trust_remote_code=False,
        template_options={},
        seed=0,
    )
    states = tmp_path / "states"
    _generated(states, tokens_dir=tokens_dir, target=tiny_target, form=FORM, keep=slice(None))
    counts = _extract(tmp_path / "out", tokens_dir=short, target=tiny_target, generated_states=states)
    assert counts["from_generation"] == len(Tokens(short, split="train"))
    _extract(tmp_path / "separate", tokens_dir=short, target=tiny_target)
    taken, computed = (FeatureStore(tmp_path / name, split="train", verify="open") for name in ("out", "separate"))
    for index in range(len(computed)):
        one, two = taken[index], computed[index]
        assert torch.equal(one.token_ids_T, two.token_ids_T)
        torch.testing.assert_close(one.captured_TX[:-1], two.captured_TX[:-1], rtol=1e-4, atol=1e-4)
        assert isinstance(one.teacher, HiddenTeacher)
        assert isinstance(two.teacher, HiddenTeacher)
        torch.testing.assert_close(one.teacher.hidden_PH, two.teacher.hidden_PH, rtol=1e-4, atol=1e-4)


def test_states_of_another_generation_are_refused(tmp_path: Path, tokens_dir: Path, tiny_target: Path) -> None:
    states = tmp_path / "states"
    _generated(states, tokens_dir=tokens_dir, target=tiny_target, form=EVERYWHERE, keep=slice(0, 3))
    arguments = {"tokens_dir": tokens_dir, "target": tiny_target, "generated_states": states}
    with pytest.raises(ValueError, match="differ from what is to be extracted in capture_layers"):
        _extract(tmp_path / "a", capture_layers=(1, 2, 4), **arguments)
    with pytest.raises(ValueError, match="in storage, teacher"):
        _extract(tmp_path / "b", form=TOP_K, **arguments)


def test_a_store_of_another_target_is_refused(tmp_path: Path, tokens_dir: Path, tiny_target: Path) -> None:
    _extract(tmp_path / "store", tokens_dir=tokens_dir, target=tiny_target)
    other = tiny.write_target(tmp_path / "other", seed=1)
    check_identity(tmp_path / "store", target_fingerprint=target_fingerprint(tiny_target))
    with pytest.raises(ValueError, match="another target"):
        check_identity(tmp_path / "store", target_fingerprint=target_fingerprint(other))
    with pytest.raises(ValueError, match="differing in target_fingerprint"):
        _extract(tmp_path / "store", tokens_dir=tokens_dir, target=other)


def test_another_chat_template_is_another_target(tmp_path: Path) -> None:
    target = tiny.write_target(tmp_path / "t")
    before = target_fingerprint(target)
    tiny.write_tokenizer(target, chat_template=tiny.CHAT_TEMPLATE + " ")
    assert target_fingerprint(target) != before


def test_too_little_disk_is_refused_before_a_shard_is_written(
    tmp_path: Path, tokens_dir: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = extract_module.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(extract_module.shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(ValueError, match="GB free"):
        _extract(tmp_path, tokens_dir=tokens_dir, target=tiny_target)
    assert list(tmp_path.glob("*.safetensors")) == []


def test_layers_that_do_not_exist_are_refused(tmp_path: Path, tokens_dir: Path, tiny_target: Path) -> None:
    with pytest.raises(ValueError, match=r"features\.capture_layers=\[1, 9\]"):
        _extract(tmp_path, tokens_dir=tokens_dir, target=tiny_target, capture_layers=(1, 9))


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
