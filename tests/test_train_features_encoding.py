"""What storing does to a document's states, and what it costs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.heads.slots import teacher_positions
from eyas.train.features.encoding import (
    DocumentEncoder,
    bytes_per_token,
    decode,
    dequantise,
    quantise,
)
from eyas.train.features.teacher import HiddenTeacher, TopKTeacher, top_k_teacher
from tests import features

TOLERANCE = {"float32": 0.0, "bfloat16": 2**-8, "float16": 2**-10, "fp8": 2**-4 + 2**-8}
"""Largest relative error of a state: half a step of the mantissa, and bfloat16's on top for fp8."""


@pytest.mark.parametrize("kind", features.FORMS)
def test_a_decoded_document_is_the_encoded_one_to_its_rounding(kind: str) -> None:
    form = features.form(**features.FORMS[kind])
    original = features.states(30)
    document = decode(features.encoded(form, 30))
    assert torch.equal(document.token_ids_T, original["token_ids_T"])
    assert document.token_ids_T.dtype == torch.long
    assert torch.equal(document.answer_mask_T, original["answer_mask_T"])
    limits = {"rtol": TOLERANCE[form.storage], "atol": 1e-2 if form.storage == "fp8" else 1e-6}
    torch.testing.assert_close(document.captured_TX.float(), original["captured_TX"], **limits)
    teacher_PH = original["last_TH"][teacher_positions(original["answer_mask_T"])]
    if form.last_everywhere:
        assert document.last_TH is not None
        torch.testing.assert_close(document.last_TH.float(), original["last_TH"], **limits)
    else:
        assert document.last_TH is None
    if form.teacher == "hidden":
        assert isinstance(document.teacher, HiddenTeacher)
        torch.testing.assert_close(document.teacher.hidden_PH.float(), teacher_PH, **limits)
        return
    expected = top_k_teacher(teacher_PH, readout_VH=features.readout(), k=8)
    assert isinstance(document.teacher, TopKTeacher)
    assert torch.equal(document.teacher.ids_PK, expected.ids_PK)
    assert torch.equal(document.teacher.tail_P, expected.tail_P)
    torch.testing.assert_close(document.teacher.log_probs_PK.float(), expected.log_probs_PK, rtol=2**-11, atol=1e-6)


@pytest.mark.parametrize("kind", features.FORMS)
def test_bytes_per_token_are_those_of_the_tensors(kind: str) -> None:
    form = features.form(**features.FORMS[kind])
    document = features.encoded(form, 30)
    share = len(decode(document).teacher) / 30
    expected = bytes_per_token(form, hidden_size=features.H, num_layers=features.NUM_LAYERS, answer_share=share)
    assert document.num_bytes / 30 == pytest.approx(expected)


def test_a_head_that_reads_no_layers_stores_none() -> None:
    form = features.form(last_everywhere=True)
    fields = features.states(20)
    encoder = DocumentEncoder(form, num_layers=0, readout_VH=None)
    fields["captured_TX"] = fields["captured_TX"][:, :0]
    document = encoder.encode(
        fields["token_ids_T"], name="x", **{k: v for k, v in fields.items() if k != "token_ids_T"}
    )
    assert "captured" not in document.tensors
    assert decode(document).captured_TX.shape == (20, 0)
    assert bytes_per_token(form, hidden_size=features.H, num_layers=0, answer_share=0.5) == 5 + 4 * features.H


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100)


@given(rows=st.lists(st.lists(FLOATS, min_size=6, max_size=6), min_size=1, max_size=4))
def test_fp8_keeps_every_entry_to_its_step(rows: list[list[float]]) -> None:
    states = torch.tensor(rows)
    values, scales = quantise(states, groups=2)
    assert values.dtype == torch.float8_e4m3fn
    assert scales.shape == (len(rows), 2)
    back = dequantise(values, scales).double().unflatten(-1, (2, 3))
    grouped, steps = states.double().unflatten(-1, (2, 3)), scales.double()[..., None]
    # Half of 2^-3 of the entry, or half of the smallest step, 2^-9 scales; reading back as bfloat16 rounds once more.
    bound = torch.maximum(grouped.abs() * 2**-4, steps * 2**-10) * (1 + 2**-7) + grouped.abs() * 2**-8
    assert ((back - grouped).abs() <= bound + 1e-37).all()
    assert torch.isfinite(back).all()


def test_fp8_keeps_zero_rows_and_the_greatest_entry() -> None:
    states = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1e-30, -3e30, 0.0, 5.0]])
    back = dequantise(*quantise(states, groups=2))
    assert back[0].tolist() == [0.0] * 4
    torch.testing.assert_close(back[1].float(), torch.tensor([0.0, -3e30, 0.0, 5.0]), rtol=2**-8, atol=0)


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "float16", "fp8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["captured_TX", "last_TH"])
def test_states_that_are_no_numbers_are_an_error_naming_the_document(storage: str, value: float, where: str) -> None:
    fields = features.states(20)
    fields[where][14, 3] = value
    encoder = DocumentEncoder(features.form(storage=storage), num_layers=features.NUM_LAYERS, readout_VH=None)
    with pytest.raises(ValueError, match=r"document conversation-7.*features\.dtype"):
        encoder.encode(fields.pop("token_ids_T"), name="conversation-7", **fields)


def test_a_state_too_large_for_float16_is_an_error_and_fits_fp8() -> None:
    fields = features.states(20)
    fields["captured_TX"][3, 0] = 1e5
    ids = fields.pop("token_ids_T")
    half = DocumentEncoder(features.form(storage="float16"), num_layers=3, readout_VH=None)
    with pytest.raises(ValueError, match=r"too large for float16.*features\.storage=bfloat16"):
        half.encode(ids, name="x", **fields)
    eighth = DocumentEncoder(features.form(storage="fp8"), num_layers=3, readout_VH=None)
    assert float(decode(eighth.encode(ids, name="x", **fields)).captured_TX[3, 0]) == pytest.approx(1e5, rel=2**-8)


def test_contradicting_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"features\.teacher=hidden"):
        features.form(last_everywhere=True, teacher="top-k")
    with pytest.raises(ValueError, match=r"features\.teacher_k=0"):
        features.form(teacher="top-k", teacher_k=0)
    with pytest.raises(ValueError, match=r"features\.storage='int4'"):
        features.form(storage="int4")
    fields = features.states(20)
    encoder = DocumentEncoder(
        features.form(teacher="top-k", teacher_k=features.V + 1), num_layers=3, readout_VH=features.readout()
    )
    with pytest.raises(ValueError, match=r"features\.teacher_k=51 .* 50 tokens"):
        encoder.encode(fields.pop("token_ids_T"), name="x", **fields)


def test_an_encoded_document_keeps_no_batch_alive_and_can_be_trained_on() -> None:
    fields = features.states(20)
    with torch.inference_mode():
        batch = torch.stack([fields["captured_TX"]] * 4)
        last = fields["last_TH"].clone()
    encoder = DocumentEncoder(features.form(), num_layers=3, readout_VH=None)
    document = encoder.encode(
        fields["token_ids_T"], answer_mask_T=fields["answer_mask_T"], captured_TX=batch[1], last_TH=last, name="x"
    )
    for tensor in document.tensors.values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        assert not tensor.is_inference()
