"""B: how it was measured."""

from __future__ import annotations

from typing import Any

from eyas.eval.report.document import Section, Table, table
from eyas.eval.report.names import PLACE, dataset_name, place
from eyas.eval.report.values import MISSING

TITLE = "B. Protocol"
LEFT_OUT = {
    "too_long": "too long",
    "duplicates": "the same prompt again",
    "other_split": "another split",
    "no_user_turn": "no user turn",
}
PROTOCOLS = {
    "starts": "one engine at a time, each start a fresh process, arms in alternating order",
    "side-by-side": "plain decoding and one arm loaded at the same time, taking turns: one serves all prompts of a cell once "
    "(a block), then the other",
}


def protocol_section(results: dict[str, Any]) -> Section:
    protocol = results["protocol"]
    short = [row for row in protocol["requests"] if prompts_of(row) < row["wanted"]]
    alerts = [
        f"{dataset_name(row['dataset'])} at batch size {row['batch_size']}: {prompts_of(row)} prompts of {row['wanted']} "
        "wanted; there are no more, and none is repeated."
        for row in short
    ]
    return Section(
        TITLE,
        tables=[_prompt_sets(protocol), _requests(protocol)],
        bullets=[*_load(results), *_decoding(protocol), *_engine(protocol)],
        alerts=alerts,
    )


def prompts_of(row: dict[str, Any]) -> int:
    """Independent prompts of a cell; protocols of earlier versions, which had one turn per prompt, count requests."""
    return row["prompts"] if "prompts" in row else row["requests"]


def _load(results: dict[str, Any]) -> list[str]:
    protocol, later = results["protocol"], results["order"].get("schedule")
    return [
        f"Protocol: {PROTOCOLS.get(protocol['protocol'], protocol['protocol'])}; {protocol['blocks']} "
        f"block{'' if protocol['blocks'] == 1 else 's'} per cell and start.",
        f"Order of starts, as planned: {', '.join(protocol['order'])}.",
        *([f"Order of starts of the schedule's phase, after the grid: {', '.join(later)}."] if later else []),
        "Load: closed loop. The client keeps as many requests under way as the batch size says and brings a new one as soon "
        "as one ends, until none is left; how many the engine really ran is logged at every step (section D). Prompts in the "
        "same order in every start, all of them unique; turns of conversations in rounds, the first of each before the second "
        "of any.",
        "Warm-up before every cell at its batch size, on a prompt that is not measured. "
        + ("Prefix caching ON; emptied before every block." if protocol["prefix_caching"] else "Prefix caching off."),
    ]


def _decoding(protocol: dict[str, Any]) -> list[str]:
    temperatures = " and ".join(f"{value:g}" for value in protocol["temperatures"])
    ends = (
        "every answer has exactly the limit of tokens (fixed length: no user's answer has)"
        if protocol["fixed_length"]
        else f"natural end of answer (stop tokens {', '.join(map(str, protocol['stop_token_ids']))})"
    )
    top_k = protocol["top_k"] or "none"
    return [
        f"Decoding: temperature {temperatures}, top_p {protocol['top_p']:g}, top_k {top_k}, seed {protocol['seed']}; "
        f"{ends}, at most {protocol['max_tokens']} tokens.",
        f"Chat template options: {protocol.get('template_options') or 'none'}.",
    ]


def _engine(protocol: dict[str, Any]) -> list[str]:
    mode = "eager (no compilation, no CUDA graphs)" if protocol["enforce_eager"] else "compiled (vLLM's default)"
    return [
        f"Engine: {mode}, dtype {protocol['dtype']}, max_model_len {protocol['max_model_len']}, max_num_seqs "
        f"{protocol['max_num_seqs']}, {protocol['threads']} threads (CPU only), KV cache {protocol['kv_cache_gib']} GiB (CPU "
        f"only), {_gpus(protocol)}."
    ]


def _gpus(protocol: dict[str, Any]) -> str:
    share = _told(protocol, "gpu_memory_utilization")
    split = ", half of it for each of two engines" if protocol["protocol"] == "side-by-side" else ""
    return (
        f"target split over {_told(protocol, 'tensor_parallel_size')}, share of a GPU's memory "
        f"{'as vLLM takes by itself' if share == MISSING else share}{split} (not used on a CPU)"
    )


def _prompt_sets(protocol: dict[str, Any]) -> Table:
    rows = [
        [
            dataset_name(name),
            _told(facts, "file"),
            _told(facts, "split"),
            "each user turn" if facts["turns"] == "all" else "first user turn",
            f"token ids {facts['sha256']}\nfile {_told(facts, 'file_sha256')}",
            str(facts["prompts"]),
            *(_told(facts, reason) for reason in LEFT_OUT),
        ]
        for name, facts in protocol["prompt_sets"].items()
    ]
    columns = [
        "set",
        "file",
        "split",
        "turns",
        "sha256",
        "prompts",
        *(f"left out: {name}" for name in LEFT_OUT.values()),
    ]
    return table(columns, rows, text_columns=5, caption="Prompt sets, as far as their files were read")


def _told(facts: dict[str, Any], name: str) -> str:
    """What a session of an earlier version, or a set drawn from others, has not."""
    value = facts.get(name)
    return MISSING if value is None else str(value)


def _requests(protocol: dict[str, Any]) -> Table:
    rows = [
        [*place(row), str(row["batch_size"]), str(row["requests"]), str(prompts_of(row)), str(row["wanted"])]
        for row in protocol["requests"]
    ]
    columns = [*PLACE, "batch size", "requests", "independent prompts", "prompts wanted"]
    return table(columns, rows, text_columns=2, caption="Requests per cell")
