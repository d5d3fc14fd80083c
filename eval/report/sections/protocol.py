"""B: how it was measured."""

from __future__ import annotations

from typing import Any

from eyas.eval.report.document import Section, Table, table
from eyas.eval.report.names import PLACE, dataset_name, place

TITLE = "B. Protocol"
PROTOCOLS = {
    "starts": "one engine at a time, each start a fresh process, arms in alternating order",
    "side-by-side": "plain decoding and one arm loaded at the same time, alternating in blocks of seconds",
}


def protocol_section(results: dict[str, Any]) -> Section:
    protocol = results["protocol"]
    short = [row for row in protocol["requests"] if row["requests"] < row["wanted"]]
    alerts = [
        f"{dataset_name(row['dataset'])} at batch size {row['batch_size']}: {row['requests']} prompts of {row['wanted']} "
        "wanted; there are no more, and none is repeated."
        for row in short
    ]
    return Section(
        TITLE,
        tables=[_prompt_sets(protocol), _requests(protocol)],
        bullets=[*_load(protocol), *_decoding(protocol), *_engine(protocol)],
        alerts=alerts,
    )


def _load(protocol: dict[str, Any]) -> list[str]:
    return [
        f"Protocol: {PROTOCOLS.get(protocol['protocol'], protocol['protocol'])}; {protocol['blocks']} "
        f"block{'' if protocol['blocks'] == 1 else 's'} per cell and start.",
        f"Order of starts: {', '.join(protocol['order'])}.",
        "Load: closed loop, a new request as soon as one ends, until none is left. Prompts in the same order in every "
        "start, all of them unique.",
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
        "only)."
    ]


def _prompt_sets(protocol: dict[str, Any]) -> Table:
    rows = [
        [
            dataset_name(name),
            "each user turn" if facts["turns"] == "all" else "first user turn",
            facts["sha256"],
            str(facts["prompts"]),
            str(facts["too_long"]),
            str(facts["duplicates"]),
        ]
        for name, facts in protocol["prompt_sets"].items()
    ]
    columns = ["prompts", "turns", "sha256 of their token ids", "prompts", "left out: too long", "left out: duplicates"]
    return table(columns, rows, text_columns=3, caption="Prompt sets")


def _requests(protocol: dict[str, Any]) -> Table:
    rows = [
        [*place(row), str(row["batch_size"]), str(row["requests"]), str(row["wanted"])] for row in protocol["requests"]
    ]
    return table([*PLACE, "batch size", "requests", "wanted"], rows, text_columns=2, caption="Requests per cell")
