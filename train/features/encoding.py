"""How a document's states are stored: number type, and what the teacher is.

Captured states are stored at every slot. The teacher is stored at teacher positions only (heads/slots.py): the last
states in the same type, or the k likeliest tokens. An EAGLE head reads the last state at every slot; then that is
stored everywhere and is the teacher too.

Types: float32, bfloat16, float16, and fp8 (e4m3) with one float32 scale per token and layer, the greatest magnitude
over 448; so the greatest entry is exact and every other has 3 bits of mantissa. Log-probabilities are float16: they lie
between -40 and 0, where float16 has 8 times bfloat16's resolution. fp8 is read back as bfloat16.

Tensors of a document in a shard, with T rows: token_ids int32, answer_mask bool, captured [X], captured_scales [A], last
[H], last_scales [1]; with P rows: teacher [H], teacher_scales [1], teacher_ids int32 [K], teacher_log_probs float16
[K], teacher_tail float32. Which of them there are follows from the form.

Shapes: T tokens, P teacher positions, A captured layers, H hidden, X = A*H, K stored tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from eyas.heads.slots import teacher_positions
from eyas.train.features.documents import Document
from eyas.train.features.teacher import HiddenTeacher, Teacher, TopKTeacher, top_k_teacher

Storage = Literal["float32", "bfloat16", "float16", "fp8"]
TeacherKind = Literal["hidden", "top-k"]

STORED_DTYPES: dict[Storage, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
LARGEST_FP8 = 448.0


@dataclass(frozen=True, kw_only=True)
class StoreForm:
    """What a store keeps of a document.

    Attributes:
        storage: number type of states.
        teacher: "hidden" or "top-k".
        teacher_k: tokens of a top-k teacher; read for nothing else.
        last_everywhere: keep the last state at every slot, which EAGLE heads read; then the teacher is "hidden".

    Raises:
        ValueError: settings that contradict each other.
    """

    storage: Storage
    teacher: TeacherKind
    teacher_k: int
    last_everywhere: bool

    def __post_init__(self) -> None:
        if self.storage not in STORED_DTYPES:
            raise ValueError(f"features.storage={self.storage!r} is none of {', '.join(STORED_DTYPES)}")
        if self.last_everywhere and self.teacher != "hidden":
            raise ValueError(
                "an EAGLE head reads the last hidden state at every slot, so its teacher is already there; set "
                "features.teacher=hidden"
            )
        if self.teacher == "top-k" and self.teacher_k < 1:
            raise ValueError(f"features.teacher_k={self.teacher_k} must be at least 1")

    def as_json(self) -> dict[str, Any]:
        """The fields that decide what is stored."""
        fields = asdict(self)
        return fields if self.teacher == "top-k" else fields | {"teacher_k": 0}


@dataclass(frozen=True)
class EncodedDocument:
    """The tensors of one document as they lie in a shard, on the CPU."""

    tensors: dict[str, Tensor]

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.tensors["token_ids"].shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def stored_tensors(form: StoreForm, *, hidden_size: int, num_layers: int) -> dict[str, tuple[torch.dtype, int | None]]:
    """Name, type and row width of every tensor of a document; width None is a tensor of one dimension."""
    dtype, scaled = STORED_DTYPES[form.storage], form.storage == "fp8"
    tensors: dict[str, tuple[torch.dtype, int | None]] = {
        "token_ids": (torch.int32, None),
        "answer_mask": (torch.bool, None),
    }

    def add(name: str, width: int, scales: int) -> None:
        tensors[name] = (dtype, width)
        if scaled:
            tensors[f"{name}_scales"] = (torch.float32, scales)

    if num_layers > 0:
        add("captured", num_layers * hidden_size, num_layers)
    if form.last_everywhere:
        add("last", hidden_size, 1)
    elif form.teacher == "hidden":
        add("teacher", hidden_size, 1)
    else:
        tensors["teacher_ids"] = (torch.int32, form.teacher_k)
        tensors["teacher_log_probs"] = (torch.float16, form.teacher_k)
        tensors["teacher_tail"] = (torch.float32, None)
    return tensors


def has_teacher_rows(name: str) -> bool:
    """Whether a tensor has a row per teacher position; the others have one per token."""
    return name.startswith("teacher")


def bytes_per_token(form: StoreForm, *, hidden_size: int, num_layers: int, answer_share: float) -> float:
    """Bytes that a token costs on disk, on average.

    Args:
        answer_share: share of the tokens that are teacher positions; the share of answer tokens is a close bound.
    """
    total = 0.0
    for name, (dtype, width) in stored_tensors(form, hidden_size=hidden_size, num_layers=num_layers).items():
        row_bytes = dtype.itemsize * (1 if width is None else width)
        total += row_bytes * (answer_share if has_teacher_rows(name) else 1.0)
    return total


class DocumentEncoder:
    """Turns the target's states of a document into its stored form, on the device where the states are."""

    def __init__(self, form: StoreForm, *, num_layers: int, readout_VH: Tensor | None) -> None:
        """
        Args:
            num_layers: A.
            readout_VH: the target's readout, on the device of the states; only a top-k teacher reads it.
        """
        assert form.teacher == "hidden" or readout_VH is not None
        self.form, self.num_layers, self.readout_VH = form, num_layers, readout_VH

    @torch.no_grad()
    def encode(
        self, token_ids_T: Tensor, *, answer_mask_T: Tensor, captured_TX: Tensor, last_TH: Tensor, name: str
    ) -> EncodedDocument:
        """Encode one document.

        Args:
            captured_TX: states of the captured layers side by side; [T, 0] when there are none.
            last_TH: last state, after the final norm.
            name: of the document, for errors.

        Raises:
            ValueError: a state is not a finite number, or too large for the storage type.
        """
        tensors = {"token_ids": token_ids_T.int(), "answer_mask": answer_mask_T.bool()}
        if self.num_layers > 0:
            self._store(tensors, "captured", captured_TX, groups=self.num_layers, document=name)
        if self.form.last_everywhere:
            self._store(tensors, "last", last_TH, groups=1, document=name)
            return _on_cpu(tensors)
        teacher_PH = last_TH[teacher_positions(answer_mask_T).to(last_TH.device)]
        if self.form.teacher == "hidden":
            self._store(tensors, "teacher", teacher_PH, groups=1, document=name)
            return _on_cpu(tensors)
        assert self.readout_VH is not None
        if self.form.teacher_k > self.readout_VH.shape[0]:
            raise ValueError(
                f"features.teacher_k={self.form.teacher_k} is more than the target's {self.readout_VH.shape[0]} tokens"
            )
        teacher = top_k_teacher(teacher_PH, readout_VH=self.readout_VH, k=self.form.teacher_k)
        _require_finite(teacher.log_probs_PK, document=name, what="log-probabilities", storage="float16")
        tensors["teacher_ids"], tensors["teacher_tail"] = teacher.ids_PK, teacher.tail_P
        tensors["teacher_log_probs"] = teacher.log_probs_PK.to(torch.float16)
        return _on_cpu(tensors)

    def _store(self, tensors: dict[str, Tensor], name: str, states: Tensor, *, groups: int, document: str) -> None:
        if self.form.storage == "fp8":
            tensors[name], tensors[f"{name}_scales"] = quantise(states, groups=groups)
            checked = tensors[f"{name}_scales"]
        else:
            tensors[name] = checked = states.to(STORED_DTYPES[self.form.storage])
        _require_finite(checked, document=document, what=f"{name} states", storage=self.form.storage)


def _require_finite(values: Tensor, *, document: str, what: str, storage: str) -> None:
    if not bool(torch.isfinite(values).all()):
        raise ValueError(
            f"document {document}: the target's {what} hold NaN, infinity or a number too large for {storage}; run the "
            "target in another type (features.dtype=bfloat16 or float32) or store in one with more range "
            "(features.storage=bfloat16)"
        )


def _on_cpu(tensors: dict[str, Tensor]) -> EncodedDocument:
    return EncodedDocument({name: _own(tensor.cpu().contiguous()) for name, tensor in tensors.items()})


def _own(tensor: Tensor) -> Tensor:
    """A tensor that keeps no larger one alive, as a slice of a batch does, and that autograd takes as an input."""
    is_view = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return tensor.clone() if is_view or tensor.is_inference() else tensor


def quantise(states_TX: Tensor, *, groups: int) -> tuple[Tensor, Tensor]:
    """fp8 values [T, X] and scales [T, groups] of states, one scale per token and group of columns."""
    grouped_TGH = states_TX.float().unflatten(-1, (groups, -1))
    scales_TG = grouped_TGH.abs().amax(dim=-1) / LARGEST_FP8
    divisors_TG1 = torch.where(scales_TG == 0.0, 1.0, scales_TG)[..., None]
    # Division may round past the largest value, which some devices turn into NaN.
    values_TGH = (grouped_TGH / divisors_TG1).clamp(-LARGEST_FP8, LARGEST_FP8)
    return values_TGH.flatten(-2).to(torch.float8_e4m3fn), scales_TG


def dequantise(values_TX: Tensor, scales_TG: Tensor) -> Tensor:
    """States [T, X] in bfloat16 from fp8 values and scales."""
    grouped_TGH = values_TX.float().unflatten(-1, (scales_TG.shape[-1], -1))
    return (grouped_TGH * scales_TG[..., None]).flatten(-2).to(torch.bfloat16)


def decode(encoded: EncodedDocument) -> Document:
    """The document as training reads it."""
    tensors = encoded.tensors
    answer_mask_T = tensors["answer_mask"].bool()
    last_TH = _states(tensors, "last") if "last" in tensors else None
    teacher: Teacher
    if last_TH is not None:
        teacher = HiddenTeacher(last_TH[teacher_positions(answer_mask_T)])
    elif "teacher" in tensors:
        teacher = HiddenTeacher(_states(tensors, "teacher"))
    else:
        teacher = TopKTeacher(tensors["teacher_ids"], tensors["teacher_log_probs"], tensors["teacher_tail"])
    captured_TX = _states(tensors, "captured") if "captured" in tensors else torch.empty((encoded.num_tokens, 0))
    return Document(
        token_ids_T=tensors["token_ids"].long(),
        answer_mask_T=answer_mask_T,
        captured_TX=captured_TX,
        last_TH=last_TH,
        teacher=teacher,
    )


def _states(tensors: dict[str, Tensor], name: str) -> Tensor:
    scales = tensors.get(f"{name}_scales")
    return tensors[name] if scales is None else dequantise(tensors[name], scales)
