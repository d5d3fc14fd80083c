"""Under which conditions the numbers of the report hold: protocol, configuration, failures, training, identity."""

from __future__ import annotations

from typing import Any

from eyas.eval.report import plots
from eyas.eval.report.document import Section, Table, number, table
from eyas.eval.report.words import DATASET_NAMES
from eyas.eval.verdict import RULES


def protocol_section(results: dict[str, Any]) -> Section:
    protocol = results["protocol"]
    mode = "eager (no compilation, no CUDA graphs)" if protocol["enforce_eager"] else "compiled (vLLM's default)"
    cells = "; ".join(
        f"{DATASET_NAMES[cell['dataset']]} at {cell['batch_size']}: {cell['requests']}"
        + (
            f" of {cell['wanted']} wanted (no more prompts; none is repeated)"
            if cell["requests"] < cell["wanted"]
            else ""
        )
        for cell in protocol["requests"]
    )
    left_out = "; ".join(
        f"{DATASET_NAMES[name]}: {counts['too_long']} too long, {counts['duplicates']} duplicates"
        for name, counts in protocol["left_out"].items()
    )
    return Section(
        "Protocol",
        bullets=[
            f"Order of starts, each a fresh process: {', '.join(protocol['order'])}.",
            "Load: closed loop, a new request as soon as one ends, until none is left. Prompts in the same order in "
            "every start.",
            f"Requests per cell (all prompts unique): {cells}.",
            f"Prompts left out: {left_out}.",
            f"Decoding: temperature {protocol['temperature']:g}, top_p 1, no top_k, natural end of answer (stop tokens "
            f"{', '.join(map(str, protocol['stop_token_ids']))}), at most {protocol['max_tokens']} tokens, seed "
            f"{protocol['seed']}.",
            "Warm-up before every cell at its batch size, on a prompt that is not measured. Prefix caching off.",
            f"Engine: {mode}, dtype {protocol['dtype']}, max_model_len {protocol['max_model_len']}, max_num_seqs "
            f"{protocol['max_num_seqs']}, "
            f"{protocol['threads']} threads (CPU only), KV cache {protocol['kv_cache_gib']} GiB (CPU only).",
            *[f"Rule: {rule}" for rule in RULES],
        ],
    )


def configuration_section(results: dict[str, Any]) -> Section:
    words = (
        "Settings as the engine resolved them, other than speculative_config, that differ from the first plain start. "
        "Complete configurations: starts/*.json."
    )
    rows = [
        [each["arm"], each["setting"], each["forced"] or "NOT FORCED by the head", str(each["ar"]), str(each["value"])]
        for each in results["config_differences"]
    ]
    differences = table(["arm", "setting", "why", "AR", "this arm"], rows, text_columns=5)
    return Section("Resolved configuration", [words], [differences, _engines_table(results)])


def _engines_table(results: dict[str, Any]) -> Table:
    engines = results["engines"]
    facts = {
        "packages": lambda e: ", ".join(f"{name} {version}" for name, version in e["machine"]["packages"].items()),
        "processor": lambda e: f"{e['machine']['cpu']}, {e['machine']['cpu_count']} logical CPUs",
        "GPUs": lambda e: ", ".join(e["machine"]["gpus"]) or "none",
        "torch threads": lambda e: str(e["machine"]["torch_threads"]),
        "load average before each start": lambda e: ", ".join(number(value) for value in e["load_averages"]),
        "attention backends": lambda e: ", ".join(e["engine"]["attention_backends"]),
        "model dtype": lambda e: str(e["engine"]["model_config"]["dtype"]),
        "chunked prefill": lambda e: str(e["engine"]["scheduler_config"]["enable_chunked_prefill"]),
        "async scheduling": lambda e: str(e["engine"]["scheduler_config"]["async_scheduling"]),
        "max_num_batched_tokens": lambda e: str(e["engine"]["scheduler_config"]["max_num_batched_tokens"]),
        "KV cache blocks": lambda e: str(e["engine"]["cache_config"]["num_gpu_blocks"]),
        "speculative_config": lambda e: (
            "none" if e["speculative_config"] is None else _shown_config(e["speculative_config"])
        ),
        "environment": lambda e: ", ".join(f"{name}={value}" for name, value in e["machine"]["environment"].items()),
    }
    rows = [[name, _by_arm({arm: show(engine) for arm, engine in engines.items()})] for name, show in facts.items()]
    return table(["", "value (by arm where arms differ)"], rows, text_columns=2)


def _by_arm(values: dict[str, str]) -> str:
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    return "; ".join(f"{arm}: {value}" for arm, value in values.items())


def _shown_config(config: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in config.items())


def failures_section(results: dict[str, Any]) -> Section:
    if not results["failures"]:
        return Section("Failed starts", ["None."])
    words = "These starts failed and are in no figure; their logs are in starts/."
    rows = [
        [str(each["start"]), each["arm"], each["reason"], " ".join(each["log_tail"][-1:])]
        for each in results["failures"]
    ]
    return Section(
        "Failed starts", [words], [table(["start", "arm", "reason", "last line of the log"], rows, text_columns=4)]
    )


def training_section(results: dict[str, Any]) -> Section:
    figure = plots.training_figure(results)
    if figure is None:
        return Section("Training", ["No training metrics came with this head."])
    return Section("Training", ["Loss and held-out tau over training steps (HTML report)."], figures=[figure])


def identity_section(results: dict[str, Any]) -> Section:
    rows = [
        [name, value]
        for name, value in _leaves(results["context"], prefix="")
        if not name.startswith("training.metrics")
    ]
    return Section("What was measured", tables=[table(["", "value"], rows, text_columns=2)])


def _leaves(value: Any, *, prefix: str) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [
            leaf
            for name, inner in value.items()
            for leaf in _leaves(inner, prefix=f"{prefix}.{name}" if prefix else name)
        ]
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return [leaf for index, item in enumerate(value) for leaf in _leaves(item, prefix=f"{prefix}[{index}]")]
    shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return [(prefix, shown)]
