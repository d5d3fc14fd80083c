"""A: what was measured and on what: target, head, training data, engine and machine as they resolved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eyas.eval.report.document import Section, Table, table
from eyas.eval.report.figures.training import training_figure
from eyas.eval.report.names import KINDS, arm_label, is_control
from eyas.eval.report.sections.training_data import data_section
from eyas.eval.report.values import MISSING, number, percent

TITLE = "A. Identity"


def identity_section(results: dict[str, Any]) -> Section:
    return Section(
        TITLE,
        tables=[_arms(results)],
        parts=[_configuration(results), data_section(results), _training(results), _origin(results)],
    )


def _arms(results: dict[str, Any]) -> Table:
    rows = [
        [
            arm_label(results, arm),
            "control: plain decoding again" if is_control(results, arm) else KINDS[facts["kind"]],
            _shown_config(facts["speculative_config"]),
            "YES: no result" if facts["synthetic"] else "no",
            percent(facts["slowed_by"], 0) if facts.get("slowed_by") else "no",
            str(facts["draft_length"]),
            str(results["starts"].get(arm, 0)),
        ]
        for arm, facts in results["arms"].items()
    ]
    columns = ["arm", "kind", "speculative_config", "synthetic acceptance", "slowed on purpose", "longest k", "starts"]
    caption = "Arms; starts: in the phase in which the arm is judged"
    return table(columns, rows, text_columns=5, caption=caption)


def _shown_config(config: dict[str, Any] | None) -> str:
    return "none" if config is None else ", ".join(f"{name}={value}" for name, value in config.items())


def _configuration(results: dict[str, Any]) -> Section:
    differences = results["config_differences"]
    words = (
        "Settings as the engine resolved them, other than speculative_config, that differ from the first plain start, or "
        "from the arm's own first start. Forced: they follow from drafting at all. Any other difference voids the comparison. "
        "Complete configurations: starts/*.json."
    )
    reasons = [f"{arm_label(results, arm)}: {reason}" for arm, reason in differences["reasons"].items()]
    alerts = [f"Void: {'; '.join(reasons)}"] if differences["void"] else []
    rows = [
        [
            arm_label(results, each["arm"]),
            each["setting"],
            each["forced"] or "NOT FORCED by drafting",
            arm_label(results, each["against"]),
            str(each["reference"]),
            str(each["value"]),
        ]
        for each in differences["differences"]
    ]
    heads = ["arm", "setting", "why", "first start of", "its value", "this start"]
    shown = table(heads, rows, text_columns=6, caption="Differences between starts")
    return Section("Resolved configuration", [words], [shown, _engines(results)], alerts=alerts)


def _engines(results: dict[str, Any]) -> Table:
    engines = results["engines"]
    rows = [["mended in its process before measuring", "; ".join(results["mends"]) or "nothing"]]
    rows += [
        [name, _by_arm(results, {arm: _fact(show, e) for arm, e in engines.items()})] for name, show in FACTS.items()
    ]
    return table(["", "value (by arm where arms differ)"], rows, text_columns=2, caption="Engine and machine")


def _fact(show: Callable[[dict[str, Any]], str], engine: dict[str, Any]) -> str:
    """A fact that this version of the engine may not have."""
    try:
        return show(engine)
    except (KeyError, TypeError):
        return MISSING


def _setting(section: str, name: str) -> Callable[[dict[str, Any]], str]:
    return lambda e: _known(e["engine"][section][name])


def _of_machine(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda e: _known(e["machine"][name])


def _known(value: Any) -> str:
    return MISSING if value is None else str(value)


def _limits(engine: dict[str, Any]) -> str:
    """Driver, clocks and power of every GPU; GPUs that are alike are told once."""
    told = [", ".join(f"{name} {value}" for name, value in gpu.items()) for gpu in engine["machine"]["gpu_limits"]]
    return "; ".join(dict.fromkeys(told))


FACTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "packages": lambda e: ", ".join(f"{name} {version}" for name, version in e["machine"]["packages"].items()),
    "vLLM's commit": _of_machine("vllm_commit"),
    "Python": _of_machine("python"),
    "processor": lambda e: f"{e['machine']['cpu']}, {e['machine']['cpu_count']} logical CPUs",
    "GPUs": lambda e: ", ".join(e["machine"]["gpus"]) or "none",
    "driver, clocks and power of the GPUs": _limits,
    "CUDA of torch": _of_machine("cuda"),
    "memory [GiB]": _of_machine("memory_gib"),
    "torch threads": lambda e: str(e["machine"]["torch_threads"]),
    "load average before each start": lambda e: ", ".join(number(value) for value in e["load_averages"]),
    "attention backends": lambda e: ", ".join(e["engine"]["attention_backends"]),
    "model runner": lambda e: "vLLM's second (v2)" if e["engine"]["model_runner_v2"] else "vLLM's first",
    "how drafts are sampled": _setting("speculative_config", "draft_sample_method"),
    "how drafts are accepted": _setting("speculative_config", "rejection_sample_method"),
    "model dtype": _setting("model_config", "dtype"),
    "quantisation": _setting("model_config", "quantization"),
    "tensor parallel size": _setting("parallel_config", "tensor_parallel_size"),
    "compilation": _setting("compilation_config", "mode"),
    "CUDA graphs": _setting("compilation_config", "cudagraph_mode"),
    "graph sizes": _setting("compilation_config", "cudagraph_capture_sizes"),
    "chunked prefill": _setting("scheduler_config", "enable_chunked_prefill"),
    "prefix caching": _setting("cache_config", "enable_prefix_caching"),
    "async scheduling": _setting("scheduler_config", "async_scheduling"),
    "max_num_seqs": _setting("scheduler_config", "max_num_seqs"),
    "max_num_batched_tokens": _setting("scheduler_config", "max_num_batched_tokens"),
    "KV cache blocks": _setting("cache_config", "num_gpu_blocks"),
    "environment": lambda e: ", ".join(f"{name}={value}" for name, value in e["machine"]["environment"].items()),
}
"""Name of a fact -> how it reads from one arm's description."""


def _by_arm(results: dict[str, Any], values: dict[str, str]) -> str:
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    return "; ".join(f"{arm_label(results, arm)}: {value}" for arm, value in values.items())


def _training(results: dict[str, Any]) -> Section:
    figure = training_figure(results)
    if figure is None:
        return Section("Training", ["No training metrics came with this head."])
    return Section("Training", ["Loss and held-out tau over training steps (HTML report)."], figures=[figure])


def _origin(results: dict[str, Any]) -> Section:
    rows = [
        [name, value]
        for name, value in leaves(results["context"], prefix="")
        if not name.startswith(("training.metrics", "command"))
    ]
    return Section("Target, head and recipe", tables=[table(["", "value"], rows, text_columns=2)])


def leaves(value: Any, *, prefix: str) -> list[tuple[str, str]]:
    """(dotted path, value) of everything inside a JSON value."""
    if isinstance(value, dict):
        return [
            leaf
            for name, inner in value.items()
            for leaf in leaves(inner, prefix=f"{prefix}.{name}" if prefix else name)
        ]
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return [leaf for index, item in enumerate(value) for leaf in leaves(item, prefix=f"{prefix}[{index}]")]
    shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return [(prefix, shown)]
