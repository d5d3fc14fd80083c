"""What differs between two runs, by kind, and which kinds forbid to claim that one run's head is faster than the other's."""

from __future__ import annotations

from typing import Any

from eyas.eval.configs import LEFTOVERS, MACHINE
from eyas.eval.prompts import FIXED_LENGTH
from eyas.eval.records import AR
from eyas.eval.report.sections.identity import leaves

BLOCKING = ("target", "engine", "machine", "decoding", "protocol", "prompts")
"""Kinds that forbid a claim; head, arms and recipe are what a comparison is about."""

DECODING = (
    "max_tokens",
    "top_p",
    "top_k",
    "seed",
    "fixed_length",
    "stop_token_ids",
    "template_options",
    "prefix_caching",
)
PROTOCOL = ("protocol", "blocks")
ENGINE_FACTS = ("packages", "vllm_commit")
"""Facts of the machine that are facts of the engine."""
# Where the files lie and how many blocks were left over: not what the engine does.
PLACES = (
    "model_config.model",
    "model_config.tokenizer",
    "model_config.served_model_name",
    "model_config.hf_config_path",
)
CAPACITY = ("cache_config.num_gpu_blocks", "cache_config.kv_cache_size_tokens", "cache_config.kv_cache_max_concurrency")


def run_differences(first: dict[str, Any], second: dict[str, Any]) -> list[dict[str, Any]]:
    """Every setting that differs: kind, setting, both values, and whether it blocks claims."""
    one, other = _settings(first), _settings(second)
    found = []
    for kind, setting in dict.fromkeys([*one, *other]):
        a, b = one.get((kind, setting)), other.get((kind, setting))
        if a != b:
            found.append({"kind": kind, "setting": setting, "first": a, "second": b, "blocks": kind in BLOCKING})
    return found


def blocking_reasons(differences: list[dict[str, Any]], *, dataset: str) -> list[str]:
    """The kinds of difference that forbid a claim about cells of `dataset`, which may carry the label of fixed length."""
    prompts = dataset.removesuffix(FIXED_LENGTH)
    kinds = [
        each["kind"]
        for each in differences
        if each["blocks"] and (each["kind"] != "prompts" or each["setting"] == prompts)
    ]
    return [kind for kind in BLOCKING if kind in kinds]


def _settings(results: dict[str, Any]) -> dict[tuple[str, str], str | None]:
    """(kind, setting) -> value as text."""
    protocol, context = results["protocol"], results["context"]
    described = results["engines"].get(AR) or next(iter(results["engines"].values()))
    engine = {name: part for name, part in described["engine"].items() if name != "speculative_config"}
    machine = described["machine"]
    settings = {("prompts", name): facts["sha256"] for name, facts in protocol["prompt_sets"].items()}
    settings |= {("target", "fingerprint"): str((context.get("target") or {}).get("fingerprint"))}
    settings |= {("decoding", name): str(protocol.get(name)) for name in DECODING}
    settings |= {("protocol", name): str(protocol.get(name)) for name in PROTOCOL}
    for part in MACHINE:
        kind = "engine" if part in ENGINE_FACTS else "machine"
        found = leaves(machine.get(part), prefix=part)
        settings |= {(kind, name): value for name, value in found if f"machine.{name}" not in LEFTOVERS}
    settings |= {
        ("engine", name): value
        for name, value in leaves(engine, prefix="")
        if name not in (*PLACES, *CAPACITY, *LEFTOVERS)
    }
    settings |= {("capacity", name): value for name, value in leaves(engine, prefix="") if name in CAPACITY}
    settings |= {("engine", "mended in its process"): "; ".join(results["mends"])}
    for arm, told in results["arms"].items():
        asked = told["speculative_config"] or {}
        settings |= {("arm", f"{arm}.{name}"): str(value) for name, value in asked.items() if name != "model"}
    settings |= {("head", "directory"): str(context.get("head"))}
    settings |= {("head", "fingerprint"): str((context.get("head_files") or {}).get("fingerprint"))}
    return settings | {("recipe", name): value for name, value in leaves(context.get("recipe"), prefix="")}
