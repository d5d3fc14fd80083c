"""Findings about the config.json of a head directory: first what no reader can accept, then what vLLM makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyas.heads.config import DEFAULT_CAPTURED, HeadConfig
from eyas.heads.formats.eagle_repo import ARCHITECTURE as REPO_ARCHITECTURE
from eyas.heads.formats.files import Format
from eyas.heads.formats.findings import Finding, Severity
from eyas.heads.formats.speculators import MODEL_TYPE, layer_config, serving_fields
from eyas.heads.formats.vllm import EAGLE3_ARCHITECTURES, EAGLE_ARCHITECTURES, engine_captured, nested_config

OTHER_KINDS = ("medusa", "mtp", "dflash", "dspark", "peagle", "mlp_speculator", "mlpspeculator")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LAYER_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "hidden_act",
)
"""Values that vLLM needs; the raw layouts fall back on transformers' defaults, the speculators layout on nothing."""


def detect_format(values: dict[str, Any], *, path: Path) -> Format:
    """The layout of a head directory with this config.json.

    Raises:
        ValueError: no kind of head that eyas knows.
    """
    if "speculators_model_type" in values or "speculators_config" in values:
        kind = values.get("speculators_model_type")
        if kind != MODEL_TYPE:
            raise ValueError(
                f"{path}: speculators_model_type is {kind!r}; eyas handles EAGLE and EAGLE-3 heads, and of the "
                f"speculators format {MODEL_TYPE!r}"
            )
        return "speculators"
    names = values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ValueError(
            f"{path}: architectures is {names!r}, so vLLM cannot tell what to build; name one of "
            f"{', '.join((*EAGLE3_ARCHITECTURES, *EAGLE_ARCHITECTURES))}"
        )
    if names[0] in EAGLE3_ARCHITECTURES or names[0] in EAGLE_ARCHITECTURES:
        return "vllm"
    if names[0] == REPO_ARCHITECTURE:
        return "eagle-repo"
    other = next((kind for kind in OTHER_KINDS if kind in names[0].lower()), None)
    reason = f"a {other} head" if other else "no head that eyas knows"
    raise ValueError(
        f"{path}: architecture {names[0]!r} is {reason}; eyas handles EAGLE and EAGLE-3 heads: "
        f"{', '.join((*EAGLE3_ARCHITECTURES, *EAGLE_ARCHITECTURES))}, and {REPO_ARCHITECTURE} of the EAGLE repository"
    )


def layer_values(values: dict[str, Any], *, layout: Format, path: Path) -> dict[str, Any]:
    """The part of the config that describes the decoder layer."""
    return layer_config(values, path=path) if layout == "speculators" else values


def unsupported_findings(values: dict[str, Any], *, layout: Format, path: Path) -> list[Finding]:
    """Variants that a head of eyas does not have, so that reading the head would change it."""
    layer = layer_values(values, layout=layout, path=path)
    rope = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    rope = rope if isinstance(rope, dict) else {}
    partial = rope.get("partial_rotary_factor", layer.get("partial_rotary_factor"))
    refused = "vLLM refuses it"
    wrong = "vLLM builds another head than eyas would train or convert"
    cases: list[tuple[bool, str, str]] = [
        (layer.get("hidden_act", "silu") != "silu", f"hidden_act is {layer.get('hidden_act')!r}", refused),
        (bool(layer.get("mlp_bias")), "mlp_bias is set", wrong),
        (bool(layer.get("qkv_bias")), "qkv_bias is set", wrong),
        (layer.get("is_causal") is False, "is_causal is false", wrong),
        (layer.get("logit_scale", 1.0) != 1.0, f"logit_scale is {layer.get('logit_scale')!r}", wrong),
        (partial not in (None, 1, 1.0), f"partial_rotary_factor is {partial!r}", wrong),
        ("mrope_section" in rope, "mrope_section is set", wrong),
        (bool(values.get("quantization_config")), "quantization_config is set", wrong),
        (
            nested_config(values).get("use_aux_hidden_state") is False,
            "eagle_config.use_aux_hidden_state is false",
            wrong,
        ),
        (_mixed_windows(layer), f"layer_types is {layer.get('layer_types')!r}: layers of different kinds", wrong),
    ]
    mend = "eyas has no such variant; use the head as it is, without conversion or training"
    findings = [Finding("error", f"{path}: {what}", consequence, mend) for bad, what, consequence in cases if bad]
    return findings + _flag_findings(values, path=path)


def _mixed_windows(layer: dict[str, Any]) -> bool:
    kinds = layer.get("layer_types")
    return isinstance(kinds, list) and bool(set(kinds) - {"full_attention"}) and set(kinds) != {"sliding_attention"}


def _flag_findings(values: dict[str, Any], *, path: Path) -> list[Finding]:
    findings = []
    for holder, prefix in ((values, ""), (nested_config(values), "eagle_config.")):
        for name in FLAGS:
            if name in holder and not isinstance(holder[name], bool):
                what = f"{path}: {prefix}{name} is {holder[name]!r}"
                consequence = "vLLM takes any text or number but 0 for true"
                findings.append(Finding("error", what, consequence, "write true or false"))
    return findings


def engine_findings(values: dict[str, Any], config: HeadConfig, *, layout: Format, path: Path) -> list[Finding]:
    """What vLLM 0.32 makes of a config that can be read."""
    layer = layer_values(values, layout=layout, path=path)
    findings = _missing_keys(layer, layout=layout, path=path) + _window_findings(layer, config, path=path)
    if config.kind == "eagle":
        return findings + _eagle_findings(values, path=path)
    if layer.get("bias"):
        what, consequence = f"{path}: bias is true", "vLLM gives o_proj a bias that no tensor fills"
        findings.append(Finding("error", what, consequence, "remove the key"))
    findings += _default_findings(values, layout=layout, path=path)
    return findings + _capture_findings(values, layer, config, layout=layout, path=path)


def _missing_keys(layer: dict[str, Any], *, layout: Format, path: Path) -> list[Finding]:
    missing = [name for name in LAYER_KEYS if layer.get(name) is None]
    if not missing:
        return []
    severity: Severity = "error" if layout == "speculators" else "warning"
    consequence = "vLLM takes transformers' default, which is seldom the head's value"
    if layout == "speculators":
        consequence = "vLLM builds this layout without defaults and stops at start, or takes another value"
    return [Finding(severity, f"{path}: {', '.join(missing)} is missing", consequence, "write the value out")]


def _window_findings(layer: dict[str, Any], config: HeadConfig, *, path: Path) -> list[Finding]:
    if config.kind == "eagle" and layer.get("layer_types"):
        what, mend = f"{path}: layer_types in an EAGLE head", "remove the key"
        return [Finding("error", what, "vLLM counts it from the target's first layer and stops at start", mend)]
    if layer.get("sliding_window") and config.sliding_window is None:
        what = f"{path}: sliding_window is {layer['sliding_window']}, and layer_types does not ask for it"
        return [Finding("info", what, "vLLM gives the draft layers no window of their own", "nothing to do")]
    return []


def _eagle_findings(values: dict[str, Any], *, path: Path) -> list[Finding]:
    findings = []
    if values.get("bias"):
        what = f"{path}: bias is true"
        consequence = "the EAGLE repository means fc by it, vLLM q, k, v and o, and fills those biases from nothing"
        findings.append(Finding("error", what, consequence, "remove the key; true is the repository's default"))
    size = values.get("draft_vocab_size")
    if size is not None and size != values.get("vocab_size"):
        what = f"{path}: draft_vocab_size is {size} in an EAGLE head"
        consequence = "vLLM reads out with the target's whole lm_head and ignores it"
        findings.append(Finding("warning", what, consequence, "remove the key"))
    return findings


def _default_findings(values: dict[str, Any], *, layout: Format, path: Path) -> list[Finding]:
    nested, findings = nested_config(values), []
    if layout == "speculators" and "norm_before_residual" not in values:
        what = f"{path}: norm_before_residual is missing"
        consequence = "vLLM takes it as true in this layout, the speculators library as false"
        mend = "write the value that the head was trained with"
        findings.append(Finding("warning", what, consequence, mend))
    if layout == "vllm" and "norm_before_residual" not in values:
        what = f"{path}: norm_before_residual is missing"
        findings.append(Finding("info", what, "vLLM takes it as false in this layout", "write the value out"))
    if "norm_before_fc" in nested and nested["norm_before_fc"] != values.get(
        "norm_before_fc", nested["norm_before_fc"]
    ):
        what = f"{path}: norm_before_fc differs between eagle_config and the top level"
        findings.append(Finding("warning", what, "vLLM takes the one in eagle_config", "make them equal"))
    if layout == "speculators":
        verifier, _, tokens = serving_fields(values)
        if verifier is None or tokens is None:
            what = f"{path}: speculators_config names no verifier or no speculative_tokens"
            consequence = "`vllm serve HEAD` cannot start; `vllm serve TARGET --speculative-config` can"
            findings.append(Finding("warning", what, consequence, "convert again with --target NAME"))
    return findings


def _capture_findings(
    values: dict[str, Any], layer: dict[str, Any], config: HeadConfig, *, layout: Format, path: Path
) -> list[Finding]:
    findings = []
    top, nested = values.get("eagle_aux_hidden_state_layer_ids"), nested_config(values)
    inner = nested.get("eagle_aux_hidden_state_layer_ids")
    source = {**layer, "eagle_aux_hidden_state_layer_ids": top} if layout == "speculators" else values
    wide = engine_captured(source, style=config.layer)
    if wide != config.num_captured:
        what = f"{path}: the head reads {config.num_captured} captured layers, and vLLM makes fc for {wide}"
        mend = f"set num_aux_hidden_states={config.num_captured}, or convert the head with `eyas convert`"
        findings.append(Finding("error", what, "vLLM refuses fc.weight for its shape", mend))
    if config.capture_layers is None and layout != "eagle-repo":
        what = f"{path}: names no captured layers"
        consequence = f"vLLM captures {DEFAULT_CAPTURED}: 2, L//2 and L-3 of a target of L layers"
        findings.append(
            Finding("info", what, consequence, "write eagle_aux_hidden_state_layer_ids if others are meant")
        )
    elif not top and inner:
        what = f"{path}: names captured layers {inner} in eagle_config alone"
        consequence = (
            "one of vLLM's two runners takes them as they are, the other its default, and SGLang adds 1 to each"
        )
        mend = "write the ids at the top level too, where k is the residual stream after k layers"
        findings.append(Finding("warning", what, consequence, mend))
    elif top and inner and inner != [layer_id - 1 for layer_id in top]:
        what = f"{path}: eagle_config names layers {inner}, and the top level {top}"
        consequence = "vLLM reads the top level; SGLang adds 1 to those in eagle_config and so reads other layers"
        findings.append(Finding("info", what, consequence, "for SGLang, write each id less 1 in eagle_config"))
    return findings
