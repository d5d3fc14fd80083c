"""Shards and the store over them: what is written is read, grows, and is refused when it is broken or another's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from eyas.heads.files import read_json, write_json
from eyas.heads.slots import serving_slots
from eyas.train.features import store as store_module
from eyas.train.features.identity import INDEX_NAME, check_identity, open_index, read_identity
from eyas.train.features.shards import CLAIMS_DIRECTORY, ShardWriter, claim, shard_name, shard_plan
from eyas.train.features.store import FeatureStore
from tests import features

LENGTHS = [14, 20, 17, 15, 30]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("store")
    features.write_store(directory, features.form(storage="fp8"), lengths=LENGTHS)
    return directory


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a)


@pytest.mark.parametrize("kind", features.FORMS)
@pytest.mark.parametrize("verify", ["open", "read"])
def test_what_is_written_is_read_to_the_bit(kind: str, verify: str, tmp_path: Path) -> None:
    form = features.form(**features.FORMS[kind])
    features.write_store(tmp_path, form, lengths=LENGTHS)
    store = FeatureStore(tmp_path, split="train", verify=verify)  # type: ignore[arg-type]
    assert list(store.lengths) == LENGTHS
    assert store.missing() == []
    for index, length in enumerate(LENGTHS):
        assert _same(store.load_encoded(index).tensors, features.encoded(form, length, seed=index).tensors)
    assert [document.token_ids_T.shape[0] for document in store.load([4, 0, 4])] == [30, 14, 30]
    written = [features.states(length, seed=seed) for seed, length in enumerate(LENGTHS)]
    answers = torch.cat([fields["token_ids_T"][fields["answer_mask_T"]] for fields in written])
    expected = torch.bincount(answers, minlength=features.V)
    assert torch.equal(store.answer_token_counts(vocab_size=features.V), expected)
    slots = [serving_slots(fields["answer_mask_T"], num_steps=4) for fields in written]
    assert store.trained_rows(num_steps=4).tolist() == [[slots_S.shape[0] for slots_S in steps] for steps in slots]


def test_a_shard_is_an_ordinary_safetensors_file(store: Path) -> None:
    tensors = load_file(store / "train-000000002.safetensors")
    assert tensors["documents"].tolist() == [2, 3]
    assert tensors["offsets"].tolist() == [0, 17, 32]
    assert tensors["captured"].dtype == torch.float8_e4m3fn


def test_a_store_is_readable_while_it_grows(tmp_path: Path) -> None:
    form = features.form()
    made = features.identity(form)
    open_index(tmp_path, made, documents={"train": 5, "heldout": 0})
    reader = FeatureStore(tmp_path, split="train")
    assert (len(reader), reader.missing()) == (5, [0, 1, 2, 3, 4])
    writer = ShardWriter(tmp_path, identity=made, split="train")
    writer.write("b", [(i, features.encoded(form, LENGTHS[i], seed=i)) for i in (4, 1)])  # any order, any subset
    assert reader.refresh() == 1
    assert reader.refresh() == 0
    assert reader.missing() == [0, 2, 3]
    assert reader.missing_among(range(3, 5)) == [3]
    assert reader[4].token_ids_T.shape == (30,)
    with pytest.raises(ValueError, match=r"document 2 .* missing"):
        reader.load([4, 2])
    with pytest.raises(ValueError, match="lacks 3 of 5 documents"):
        reader.require_complete()
    # A shard that repeats a document changes nothing.
    writer.write("c", [(i, features.encoded(form, LENGTHS[i], seed=i)) for i in (1, 0, 2, 3)])
    reader.refresh()
    reader.require_complete()
    whole = FeatureStore(tmp_path, split="train")
    written = sum(int(features.states(n)["answer_mask_T"].sum()) for n in LENGTHS)
    assert int(whole.answer_token_counts(vocab_size=features.V).sum()) == written


def test_more_shards_than_files_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form = features.form()
    features.write_store(tmp_path, form, lengths=LENGTHS, per_shard=1)
    monkeypatch.setattr(store_module, "OPEN_FILES", 2)
    opened = FeatureStore(tmp_path, split="train", verify="read")
    documents = opened.load([0, 1, 2, 3, 4, 0])
    for index, document in zip([0, 1, 2, 3, 4, 0], documents, strict=True):
        assert torch.equal(document.captured_TX, features.states(LENGTHS[index], seed=index)["captured_TX"])
    assert torch.equal(opened.token_ids(3).long(), documents[3].token_ids_T)
    assert len(opened._files) == 2


def test_a_store_may_not_know_how_many_documents_it_will_have(tmp_path: Path) -> None:
    made = features.identity(features.form())
    open_index(tmp_path, made, documents={"generated": None})
    store = FeatureStore(tmp_path, split="generated")
    assert len(store) == 0
    document = features.encoded(made.form, 14)
    ShardWriter(tmp_path, identity=made, split="generated").write("x", [(3, document)])
    store.refresh()
    assert (len(store), store.missing()) == (4, [0, 1, 2])


@given(data=st.data())
def test_any_flipped_bit_is_found(store: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = bytearray((store / "train-000000002.safetensors").read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    places = st.one_of(st.integers(0, header - 1), st.integers(header, len(content) - 1))
    content[data.draw(places, label="byte")] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    broken = tmp_path_factory.mktemp("flipped")
    (broken / INDEX_NAME).write_bytes((store / INDEX_NAME).read_bytes())
    (broken / "train-000000002.safetensors").write_bytes(content)
    mend = r"train-000000002\.safetensors.*delete that file and run the extract stage again"
    with pytest.raises(ValueError, match=mend):
        FeatureStore(broken, split="train", verify="open")
    # Opened without a look at every byte, the flip is found in the document that it is in, and the other is read.
    with pytest.raises(ValueError, match=mend):
        _read_all(broken)


def test_any_flipped_bit_of_the_tables_is_found(store: Path, tmp_path: Path) -> None:
    """Such as one that gives a document the place of another."""
    content = bytearray((store / "train-000000002.safetensors").read_bytes())
    first = 8 + int.from_bytes(content[:8], "little")
    tables = 8 * (2 + 3 + 3 + 2)  # int64 tensors come first
    (tmp_path / INDEX_NAME).write_bytes((store / INDEX_NAME).read_bytes())
    for bit in range(8 * first, 8 * (first + tables)):
        content[bit // 8] ^= 1 << bit % 8
        (tmp_path / "train-000000002.safetensors").write_bytes(content)
        content[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"train-000000002.*delete that file"):
            FeatureStore(tmp_path, split="train", verify="open")


def _read_all(directory: Path) -> None:
    opened = FeatureStore(directory, split="train", verify="read")
    opened.load([2, 3])


def test_a_flipped_bit_spoils_its_document_only(store: Path, tmp_path: Path) -> None:
    for path in store.glob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / "train-000000002.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 4  # the last row of the last document
    path.write_bytes(content)
    opened = FeatureStore(tmp_path, split="train", verify="read")
    opened.load([0, 1, 2, 4])
    with pytest.raises(ValueError, match="document 3 changed"):
        opened.load([3])


@pytest.mark.parametrize("cut", [1, 100, 2000])
def test_a_truncated_shard_is_refused(cut: int, store: Path, tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_bytes((store / INDEX_NAME).read_bytes())
    path = tmp_path / "train-000000002.safetensors"
    path.write_bytes((store / path.name).read_bytes()[:-cut])
    with pytest.raises(ValueError, match=r"train-000000002.*cut short.*delete that file"):
        FeatureStore(tmp_path, split="train")


def test_a_shard_of_another_store_is_refused(store: Path, tmp_path: Path) -> None:
    features.write_store(tmp_path, features.form(), lengths=LENGTHS)
    (tmp_path / "train-000000002.safetensors").write_bytes((store / "train-000000002.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"train-000000002.*belongs to another feature store.*delete that file"):
        FeatureStore(tmp_path, split="train")


def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / INDEX_NAME, {"identity": {"target_fingerprint": "x"}, "shards": {"train": 1}})
    for read in (lambda: FeatureStore(tmp_path, split="train"), lambda: read_identity(tmp_path)):
        with pytest.raises(ValueError, match=r"another version.*delete it and run the extract stage again"):
            read()


def test_a_directory_holds_one_store(store: Path, tmp_path: Path) -> None:
    documents: dict[str, int | None] = {"train": len(LENGTHS)}
    open_index(store, features.identity(features.form(storage="fp8")), documents=documents)
    with pytest.raises(ValueError, match=r"another feature store \(differing in form\)"):
        open_index(store, features.identity(features.form()), documents=documents)
    with pytest.raises(ValueError, match="differing in documents"):
        open_index(store, features.identity(features.form(storage="fp8")), documents={"train": 6})
    changed = features.identity(features.form(storage="fp8"), target_fingerprint="other weights")
    with pytest.raises(ValueError, match="differing in target_fingerprint"):
        open_index(store, changed, documents=documents)
    (tmp_path / "train-000000000.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"without an index\.json"):
        open_index(tmp_path, features.identity(features.form()), documents=documents)


def test_the_identity_is_checked_against_target_and_tokens(store: Path) -> None:
    made = check_identity(store, target_fingerprint="target", tokens_fingerprint="tokens")
    assert made == features.identity(features.form(storage="fp8", teacher_k=0))
    with pytest.raises(ValueError, match="another target"):
        check_identity(store, target_fingerprint="other")
    with pytest.raises(ValueError, match="other tokens"):
        check_identity(store, target_fingerprint="target", tokens_fingerprint="other")


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from eyas.train.features.shards import ShardWriter, shard_name
from tests import features
form = features.form()
made = features.identity(form)
writer = ShardWriter(Path(sys.argv[1]), identity=made, split="train")
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, resource.RLIM_INFINITY))
writer.write(shard_name([0]), [(0, features.encoded(form, 14, seed=0))])
try:
    writer.write(shard_name([1]), [(1, features.encoded(form, 20, seed=1))])
except ValueError as error:
    print(error)
"""


def test_a_full_disk_leaves_no_half_shard_and_the_rest_goes_on(tmp_path: Path) -> None:
    form = features.form()
    made = features.identity(form)
    open_index(tmp_path, made, documents={"train": 2})
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], cwd=root, capture_output=True, text=True, check=True
    )
    assert "no space for" in done.stdout
    assert "run the extract stage again and it goes on" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {INDEX_NAME, "train-000000000.safetensors"}
    assert FeatureStore(tmp_path, split="train", verify="open").missing() == [1]
    ShardWriter(tmp_path, identity=made, split="train").write("later", [(1, features.encoded(form, 20, seed=1))])
    FeatureStore(tmp_path, split="train", verify="open").require_complete()


def test_the_half_file_of_a_killed_writer_is_swept(tmp_path: Path) -> None:
    made = features.identity(features.form())
    open_index(tmp_path, made, documents={"train": 1})
    (tmp_path / ".train-000000000.safetensors.abc").write_bytes(b"half")
    ShardWriter(tmp_path, identity=made, split="train").write(shard_name([0]), [(0, features.encoded(made.form, 14))])
    assert sorted(path.name for path in tmp_path.iterdir()) == [INDEX_NAME, "train-000000000.safetensors"]


HOLDER = """
import sys
from pathlib import Path
from eyas.train.features.shards import claim
with claim(Path(sys.argv[1]), split="train", name="x") as mine:
    print(mine, flush=True)
    sys.stdin.read()
"""


def test_a_claim_is_one_process_and_ends_with_it(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"True\n"
    with claim(tmp_path, split="train", name="x") as mine:
        assert not mine
    with claim(tmp_path, split="train", name="y") as mine:
        assert mine
    holder.kill()
    with claim(tmp_path, split="train", name="x", wait=True) as mine:
        assert mine
    holder.communicate()


def test_the_lock_of_a_finished_shard_is_removed(tmp_path: Path) -> None:
    with claim(tmp_path, split="train", name="x"):
        (tmp_path / "train-x.safetensors").write_bytes(b"")
    assert list((tmp_path / CLAIMS_DIRECTORY).iterdir()) == []


@given(lengths=st.lists(st.integers(1, 50), max_size=40), budget=st.integers(1, 120))
def test_shards_hold_everything_in_order_within_the_budget(lengths: list[int], budget: int) -> None:
    plan = shard_plan(lengths, shard_tokens=budget)
    assert [index for documents in plan for index in documents] == list(range(len(lengths)))
    for documents in plan:
        assert len(documents) == 1 or sum(lengths[index] for index in documents) <= budget
    assert all(
        sum(lengths[index] for index in documents) + lengths[documents[-1] + 1] > budget for documents in plan[:-1]
    )


def test_the_index_says_what_the_numbers_are(store: Path) -> None:
    index = read_json(store / INDEX_NAME)
    assert index["version"] == 2
    assert index["documents"] == {"train": 5}
    assert index["identity"]["form"] == {
        "storage": "fp8",
        "teacher": "hidden",
        "teacher_k": 0,
        "last_everywhere": False,
    }
