"""What fits of the states that generation left, and what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.heads.slots import teacher_positions
from eyas.train.features.encoding import DocumentEncoder, EncodedDocument, StoreForm
from eyas.train.features.generated import GeneratedStates, fitted
from eyas.train.features.identity import open_index
from eyas.train.features.shards import ShardWriter
from tests import features

FORMS = [features.form(**features.FORMS[kind]) for kind in ("float32 answers", "fp8 top-k", "bfloat16 everywhere")]


def _stored(form: StoreForm, *, length: int = 30, mask_T: torch.Tensor | None = None, seed: int = 0) -> EncodedDocument:
    """A document as generation keeps it: every token counts as an answer."""
    fields: dict[str, Any] = features.states(length, seed=seed)
    fields["answer_mask_T"] = torch.ones(length, dtype=torch.bool) if mask_T is None else mask_T
    encoder = DocumentEncoder(form, num_layers=features.NUM_LAYERS, readout_VH=features.readout())
    return encoder.encode(fields.pop("token_ids_T"), name="stored", **fields)


def _wanted(length: int = 30) -> dict[str, torch.Tensor]:
    fields = features.states(30)
    return {"token_ids_T": fields["token_ids_T"][:length], "answer_mask_T": fields["answer_mask_T"][:length]}


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("length", [30, 25])
def test_what_fits_is_what_encoding_would_give(form: StoreForm, length: int) -> None:
    document = fitted(_stored(form), form=form, **_wanted(length))
    assert document is not None
    encoder = DocumentEncoder(form, num_layers=features.NUM_LAYERS, readout_VH=features.readout())
    states = {name: tensor[:length] for name, tensor in features.states(30).items()}
    expected = encoder.encode(states.pop("token_ids_T"), name="x", **states)
    assert document.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        # Products of other numbers of rows round differently.
        torch.testing.assert_close(document.tensors[name].float(), tensor.float(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_stored_document_without_the_last_token_fits(form: StoreForm) -> None:
    document = fitted(_stored(form, length=29), form=form, **_wanted())
    positions = teacher_positions(_wanted()["answer_mask_T"])
    if form.last_everywhere:
        assert document is not None
        assert document.num_tokens == 30
        assert not document.tensors["last"][29].any()
        assert document.tensors["last"][28].any()
    else:  # its mask ends one position earlier, so the last teacher row is not there
        assert int(positions[-1]) == 28
        assert document is None


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_lacks_something_does_not_fit(form: StoreForm) -> None:
    assert fitted(_stored(form, length=28), form=form, **_wanted()) is None  # too short
    other = _wanted()
    other["token_ids_T"] = other["token_ids_T"].clone()
    other["token_ids_T"][17] += 1
    assert fitted(_stored(form), form=form, **other) is None  # other tokens
    mask_T = torch.zeros(30, dtype=torch.bool)
    mask_T[12:] = True
    without_the_first_answer = fitted(_stored(form, mask_T=mask_T), form=form, **_wanted())
    assert (without_the_first_answer is not None) == form.last_everywhere


def test_documents_are_found_by_their_tokens_among_others(tmp_path: Path) -> None:
    form = FORMS[0]
    made = features.identity(form)
    open_index(tmp_path, made, documents={"generated": None})
    writer = ShardWriter(tmp_path, identity=made, split="generated")
    writer.write("a", [(index, _stored(form, seed=seed)) for index, seed in enumerate((4, 0, 5))])
    writer.write("b", [(7, _stored(form, seed=6))])
    states = GeneratedStates(tmp_path, identity=made)
    found = states.find(**_wanted())
    assert found is not None
    assert torch.equal(found.tensors["captured"], _stored(form, seed=0).tensors["captured"])
    wanted = features.states(30, seed=6)
    assert states.find(wanted["token_ids_T"], wanted["answer_mask_T"]) is not None
    unknown = features.states(30, seed=9)
    assert states.find(unknown["token_ids_T"], unknown["answer_mask_T"]) is None


def test_an_empty_generation_holds_nothing(tmp_path: Path) -> None:
    made = features.identity(FORMS[0])
    open_index(tmp_path, made, documents={"generated": None})
    assert GeneratedStates(tmp_path, identity=made).find(**_wanted()) is None


def test_states_of_another_target_are_refused(tmp_path: Path) -> None:
    made = features.identity(FORMS[0])
    open_index(tmp_path, made, documents={"generated": None})
    with pytest.raises(ValueError, match="differ from what is to be extracted in target_fingerprint"):
        GeneratedStates(tmp_path, identity=features.identity(FORMS[0], target_fingerprint="other"))
