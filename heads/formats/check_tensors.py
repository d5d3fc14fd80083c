"""Findings about the weights of a head directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from eyas.heads.config import HeadConfig
from eyas.heads.formats.files import FLOATS, MAPPING, expected_shapes
from eyas.heads.formats.findings import Finding

NOT_LOADED = "vLLM's EAGLE loaders do not notice a missing tensor: it keeps the value it was created with and the head drafts badly"
REFUSED = "vLLM refuses to load the head: it has no parameter of this name"
SHOWN = 5


def tensor_findings(tensors: dict[str, Tensor], config: HeadConfig, *, directory: Path) -> list[Finding]:
    """Missing, extra, mis-shaped, non-finite and odd-typed weights; `tensors` by the module's names."""
    expected = expected_shapes(config)
    findings = [_missing(name, config, directory=directory) for name in expected if name not in tensors]
    for name, shape in expected.items():
        if name in tensors:
            findings += _one_tensor(name, tensors[name], shape=shape, directory=directory)
    extra = [name for name in tensors if name not in expected and name not in MAPPING]
    return findings + _extra(extra, config, directory=directory)


def unused(name: str, config: HeadConfig) -> bool:
    """Whether the engine takes the tensor and never uses it, so that leaving it out changes nothing."""
    later_norm = name.endswith(".hidden_norm.weight") and not name.startswith("layers.0.")
    return "rotary_emb." in name or (later_norm and config.kind == "eagle3")


def _missing(name: str, config: HeadConfig, *, directory: Path) -> Finding:
    consequence, mend = NOT_LOADED, "save the head again with this tensor, or correct the config"
    if name == "lm_head.weight":
        if config.draft_vocab_size == config.vocab_size:
            consequence = "vLLM would use the target's lm_head"
        else:
            consequence = "vLLM would use the target's lm_head, whose rows are not the draft vocabulary, and stop at the first draft"
        mend = "add the rows of the target's lm_head of the draft vocabulary"
    return Finding("error", f"{directory}: tensor {name} is missing", consequence, mend)


def _one_tensor(name: str, tensor: Tensor, *, shape: tuple[int, ...], directory: Path) -> list[Finding]:
    where = f"{directory}: tensor {name}"
    if tuple(tensor.shape) != shape:
        what = f"{where} has shape {tuple(tensor.shape)}, and config.json implies {shape}"
        return [Finding("error", what, "vLLM refuses to load it", "correct the sizes in config.json or the weights")]
    if tensor.dtype not in FLOATS:
        what = f"{where} is of type {str(tensor.dtype).removeprefix('torch.')}"
        mend = "save the head in float32, bfloat16 or float16"
        return [Finding("error", what, "vLLM would take the numbers for unscaled weights", mend)]
    if not bool(torch.isfinite(tensor).all()):
        what = f"{where} holds NaN or infinity"
        return [Finding("error", what, "every draft is wrong", "use an earlier checkpoint; this training diverged")]
    return []


def _extra(names: Sequence[str], config: HeadConfig, *, directory: Path) -> list[Finding]:
    findings = []
    idle = [name for name in names if unused(name, config)]
    if idle:
        what = f"{directory}: {_listed(idle)} has no use in a head"
        findings.append(Finding("info", what, "vLLM never uses it and conversion drops it", "nothing to do"))
    dropped = [name for name in names if name not in idle and _silently_dropped(name, config)]
    if dropped:
        consequence = "vLLM drops it without a word and the head drafts as if it were not there"
        mend = "set the variant that it belongs to in config.json, or remove the tensor"
        what = f"{directory}: config.json has no place for {_listed(dropped)}"
        findings.append(Finding("error", what, consequence, mend))
    unknown = [name for name in names if name not in idle and name not in dropped]
    if unknown:
        mend = "remove the tensor, or correct config.json if it belongs to a variant of the head"
        findings.append(Finding("error", f"{directory}: unknown tensor {_listed(unknown)}", REFUSED, mend))
    return findings


def _silently_dropped(name: str, config: HeadConfig) -> bool:
    return name.endswith(".bias") or (name.startswith("input_norm.") and config.kind == "eagle3")


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(sorted(names)[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def mapping_findings(stored: dict[str, Tensor], config: HeadConfig, *, directory: Path) -> list[Finding]:
    """What d2t and t2d say about the draft vocabulary, and whether they can be true."""
    if config.kind == "eagle":
        what = f"{directory}: an EAGLE head with {' and '.join(name for name in MAPPING if name in stored)}"
        mend = "remove it: an EAGLE head proposes the whole vocabulary"
        return [Finding("error", what, REFUSED, mend)] if set(MAPPING) & set(stored) else []
    size, vocab = config.draft_vocab_size, config.vocab_size
    if "d2t" not in stored:
        if size == vocab:
            return []
        what = f"{directory}: tensor d2t is missing, and draft_vocab_size {size} is less than vocab_size {vocab}"
        consequence = f"vLLM takes draft ids for target ids and drafts only tokens 0 to {size - 1}"
        return [Finding("error", what, consequence, "save the head with d2t: target id minus draft id, int64")]
    d2t = stored["d2t"]
    if tuple(d2t.shape) != (size,) or d2t.dtype.is_floating_point or d2t.dtype == torch.bool:
        what = f"{directory}: tensor d2t is {str(d2t.dtype).removeprefix('torch.')} of shape {tuple(d2t.shape)}"
        mend = f"d2t must hold {size} whole numbers, one for each draft id"
        return [Finding("error", what, "vLLM refuses to load it", mend)]
    return _offset_findings(d2t.long(), stored.get("t2d"), config, directory=directory)


def _offset_findings(d2t_D: Tensor, t2d_V: Tensor | None, config: HeadConfig, *, directory: Path) -> list[Finding]:
    target_ids_D = d2t_D + torch.arange(d2t_D.shape[0])
    outside = bool((target_ids_D < 0).any()) or bool((target_ids_D >= config.vocab_size).any())
    if outside or torch.unique(target_ids_D).numel() != target_ids_D.numel():
        problem = "leads outside the target's vocabulary" if outside else "maps two draft ids to one target id"
        mend = "d2t must hold offsets: target id minus draft id"
        if _in_vocabulary(d2t_D, config.vocab_size):
            mend += "; these look like target ids, so subtract the position from each"
        consequence = "vLLM writes draft logits to the wrong tokens, or past the end of its buffer"
        return [Finding("error", f"{directory}: tensor d2t {problem}", consequence, mend)]
    findings = []
    if not bool((target_ids_D[1:] > target_ids_D[:-1]).all()):
        what = f"{directory}: the draft vocabulary in d2t is not in ascending order"
        mend = "nothing to do; training from the head sorts it"
        findings.append(Finding("warning", what, "vLLM serves it as it is; other loaders may expect the order", mend))
    if t2d_V is not None:
        mask_V = torch.zeros(config.vocab_size, dtype=torch.bool)
        mask_V[target_ids_D] = True
        if t2d_V.shape != mask_V.shape or not torch.equal(t2d_V.bool(), mask_V):
            what = f"{directory}: tensors t2d and d2t name different draft vocabularies"
            consequence = "vLLM believes d2t; which of the two the head was trained with cannot be told"
            findings.append(Finding("error", what, consequence, "save the head again with both made from one list"))
    return findings


def _in_vocabulary(ids_D: Tensor, vocab_size: int) -> bool:
    inside = bool((ids_D >= 0).all()) and bool((ids_D < vocab_size).all())
    return inside and torch.unique(ids_D).numel() == ids_D.numel()
