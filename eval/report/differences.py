"""What differs between two runs, by kind, and which kinds forbid to claim that one run's head is faster than the other's."""

from __future__ import annotations

from typing import Any

from eyas.eval.records import AR
from eyas.eval.report.sections.identity import leaves

BLOCKING = ("target", "engine", "machine", "decoding", "protocol", "prompts")
"""Kinds that forbid a claim; head and recipe are what a comparison is about."""

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
MACHINE = ("cpu", "cpu_count", "gpus", "torch_threads", "environment")
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
    """The kinds of difference that forbid a claim about cells of `dataset`."""
    kinds = [
        each["kind"]
        for each in differences
        if each["blocks"] and (each["kind"] != "prompts" or each["setting"] == dataset)
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
    settings |= {("machine", name): value for part in MACHINE for name, value in leaves(machine.get(part), prefix=part)}
    settings |= {("engine", f"package {name}"): version for name, version in machine["packages"].items()}
    settings |= {
        ("engine", name): value for name, value in leaves(engine, prefix="") if name not in (*PLACES, *CAPACITY)
    }
    settings |= {("capacity", name): value for name, value in leaves(engine, prefix="") if name in CAPACITY}
    settings |= {("head", "directory"): str(context.get("head"))}
    return settings | {("recipe", name): value for name, value in leaves(context.get("recipe"), prefix="")}
