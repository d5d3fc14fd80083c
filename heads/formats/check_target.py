"""Findings about a head beside its target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.heads.config import (
    HeadConfig,
    default_capture_layers,
    head_rope_parameters,
    inherited_window,
    load_target_config,
)
from eyas.heads.files import read_json
from eyas.heads.formats.files import HeadFiles
from eyas.heads.formats.findings import Finding
from eyas.heads.target import TargetWeights

# The architectures of vLLM 0.32's registry whose class, or a base of it, has SupportsEagle3 among its bases
# (grep over model_executor/models and models; drafters and pooling models left out). Others may still run through vLLM's
# Transformers backend, which has it too, so a name that is not here is a warning.
_TARGETS = """
    AfmoeForCausalLM ApertusForCausalLM Cohere2MoeForCausalLM CohereCompassForConditionalGeneration DeepseekForCausalLM
    DeepseekV2ForCausalLM DeepseekV32ForCausalLM DeepseekV3ForCausalLM DeepseekV41ForCausalLM DeepseekV4ForCausalLM
    DeepseekV4ForConditionalGeneration Ernie4_5ForCausalLM Exaone4_5_ForConditionalGeneration Gemma4ForCausalLM
    Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration Glm5NextForCausalLM
    Glm5NextForConditionalGeneration GlmMoeDsaForCausalLM GptOssForCausalLM GraniteForCausalLM GraniteSWAForCausalLM
    IQuestCoderForCausalLM InternLM3ForCausalLM InternS1ProForConditionalGeneration K2HorizonForCausalLM
    KimiK25ForConditionalGeneration KimiK3ForConditionalGeneration KimiLinearForCausalLM LLaMAForCausalLM
    LagunaForCausalLM Llama4ForCausalLM Llama4ForConditionalGeneration LlamaForCausalLM LlavaForConditionalGeneration
    MiMoForCausalLM MiMoV2FlashForCausalLM MiMoV2ForCausalLM MiMoV2OmniForCausalLM MiniCPM3ForCausalLM
    MiniCPMForCausalLM MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration MiniMaxM2ForCausalLM
    MiniMaxM3SparseForCausalLM MiniMaxM3SparseForConditionalGeneration Ministral3ForCausalLM
    Mistral3ForConditionalGeneration MistralForCausalLM MuseGlimmerForCausalLM MuseGlimmerForConditionalGeneration
    NemotronHForCausalLM NemotronHPuzzleForCausalLM Phi3ForCausalLM PixtralForConditionalGeneration Plamo3ForCausalLM
    Qwen2ForCausalLM Qwen2_5_VLForConditionalGeneration Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM
    Qwen3OmniMoeForConditionalGeneration Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration
    Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration
    SarvamMLAForCausalLM Step1ForCausalLM TeleChat2ForCausalLM TeleChat3ForCausalLM TeleFLMForCausalLM
"""
EAGLE3_TARGETS = frozenset(_TARGETS.split())


def target_findings(files: HeadFiles, target_dir: Path, *, trust_remote_code: bool = False) -> list[Finding]:
    """Whether the head fits the target, and what the engine will share between the two."""
    try:
        target = load_target_config(target_dir, trust_remote_code=trust_remote_code)
        weights = TargetWeights(target_dir)
    except ValueError as error:
        return [Finding("error", str(error), "the head cannot be checked against it", "name the target's directory")]
    config = files.config
    findings = _size_findings(config, target)
    if findings:
        return findings
    findings = _layer_findings(config, target) + _attention_findings(config, target)
    if config.kind == "eagle3":
        findings += _support_findings(target_dir)
    return findings + _dtype_findings(files, target) + _sharing_findings(files, weights, target)


def _size_findings(config: HeadConfig, target: Any) -> list[Finding]:
    mend = "name the target that the head was trained for"
    findings = []
    if config.target_hidden_size != target.hidden_size:
        what = f"the head reads hidden states of size {config.target_hidden_size}, and the target's are {target.hidden_size}"
        findings.append(Finding("error", what, "vLLM stops at the first draft", mend))
    if config.vocab_size != target.vocab_size:
        what = f"the head's vocabulary has {config.vocab_size} tokens, the target's {target.vocab_size}"
        consequence = "vLLM refuses to load the head, or drafts other tokens than it means"
        findings.append(Finding("error", what, consequence, mend))
    return findings


def _layer_findings(config: HeadConfig, target: Any) -> list[Finding]:
    if config.kind == "eagle":
        return []
    count = target.num_hidden_layers
    if config.capture_layers is None:
        try:
            default_capture_layers(count)
        except ValueError:
            what = f"the head names no captured layers, and 2, L//2 and L-3 do not differ in a target of {count} layers"
            consequence = "vLLM captures fewer states than fc reads and stops at the first draft"
            mend = "write eagle_aux_hidden_state_layer_ids into the head's config.json"
            return [Finding("error", what, consequence, mend)]
        return []
    outside = [layer for layer in config.capture_layers if not 1 <= layer <= count]
    if not outside:
        return []
    what = f"captured layers {outside} do not exist in a target of {count} layers"
    consequence = "vLLM captures fewer states than fc reads and stops at the first draft"
    return [Finding("error", what, consequence, "name the target that the head was trained for")]


def _attention_findings(config: HeadConfig, target: Any) -> list[Finding]:
    findings = []
    rope = head_rope_parameters(target)
    if _canonical_rope(config.rope_parameters) != _canonical_rope(rope):
        what = f"the head rotates with {config.rope_parameters}, the target with {rope}"
        consequence = "vLLM rotates as the head says; that is right only if it was trained so"
        mend = "compare with the training settings, and write the true ones into config.json"
        findings.append(Finding("warning", what, consequence, mend))
    if config.max_position_embeddings < target.max_position_embeddings:
        what = f"max_position_embeddings is {config.max_position_embeddings}, the target's {target.max_position_embeddings}"
        consequence = "vLLM stops drafting (all zeros) for a whole batch once one of its sequences is longer"
        mend = "write the target's max_position_embeddings into the head's config.json"
        findings.append(Finding("warning", what, consequence, mend))
    window = inherited_window(target)
    if window is not None and config.sliding_window is None:
        what = f"every layer of the target has a sliding window of {window}, and the head names none"
        consequence = "vLLM gives the head's layers the target's window"
        mend = "nothing to do for a head trained here, which learns with that window; others must have been trained with it"
        findings.append(Finding("info", what, consequence, mend))
    return findings


def _canonical_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    values = {"rope_type": "default", **parameters}
    return {name: float(value) if isinstance(value, int | float) else value for name, value in values.items()}


def _support_findings(target_dir: Path) -> list[Finding]:
    names = read_json(target_dir / "config.json").get("architectures") or []
    if set(names) & EAGLE3_TARGETS:
        return []
    what = f"vLLM 0.32 has no target architecture {', '.join(names) or '(none named)'} with hidden states for EAGLE-3"
    consequence = "it stops at start, unless its Transformers backend serves the target"
    return [Finding("warning", what, consequence, "try the head in vLLM before relying on it")]


def _dtype_findings(files: HeadFiles, target: Any) -> list[Finding]:
    serving = _target_dtype(target)
    stored = {tensor.dtype for tensor in files.tensors.values()}
    if serving is None or stored == {serving}:
        return []
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in stored))
    what = f"the head is stored in {names}, and the target in {str(serving).removeprefix('torch.')}"
    consequence = "vLLM converts the head to the type that it serves the target in"
    return [Finding("info", what, consequence, "nothing to do; export in the target's type to save space")]


def _target_dtype(target: Any) -> torch.dtype | None:
    dtype = getattr(target, "dtype", None)
    return getattr(torch, dtype, None) if isinstance(dtype, str) else dtype


def _sharing_findings(files: HeadFiles, weights: TargetWeights, target: Any) -> list[Finding]:
    config = files.config
    embedding_VH = weights.find("embed_tokens.weight")
    readout_VH = weights.find("lm_head.weight")
    serving = _target_dtype(target)
    findings = []
    if config.own_embedding:
        findings.append(_sharing("embed_tokens.weight", files, other=embedding_VH, dtype=serving))
    if config.kind == "eagle3" and config.draft_vocab_size == config.vocab_size:
        other = embedding_VH if readout_VH is None else readout_VH
        findings.append(_sharing("lm_head.weight", files, other=other, dtype=serving))
    return findings


def _sharing(name: str, files: HeadFiles, *, other: Tensor | None, dtype: torch.dtype | None) -> Finding:
    own = files.tensors[name]
    kind = dtype or own.dtype
    if other is not None and own.shape == other.shape and torch.equal(own.to(kind), other.to(kind)):
        what = f"{name} equals the target's"
        return Finding("info", what, "vLLM shares the target's and frees this copy", "nothing to do")
    size = own.numel() * kind.itemsize / 2**20
    what = f"{name} differs from the target's"
    return Finding(
        "info", what, f"vLLM keeps the head's own, {size:.0f} MiB", "nothing to do if the head was trained so"
    )
