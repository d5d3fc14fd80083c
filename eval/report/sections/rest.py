"""K: what was not measured; and the terms used."""

from __future__ import annotations

from typing import Any

from eyas.eval.report.document import Section


def not_measured_section(results: dict[str, Any]) -> Section:
    return Section("K. Not measured here", bullets=list(results["not_measured"]))


def terms_section() -> Section:
    return Section(
        "Terms",
        bullets=[
            "AR: plain autoregressive decoding of the same target in the same engine with the same settings.",
            "arm: one engine configuration; k=N drafts N tokens per step. start: one process of an arm. cell: one set of "
            "prompts at one temperature and batch size. block: the cell's prompts served once.",
            "tau: mean tokens per target forward (verification step), the target's own token included. Step-weighted: over "
            "all steps; request mean: over each request's own tau.",
            "tau_min: the tau at which drafting costs as much as it saves: step time with drafting over step time of AR.",
            "E2E: total latency of a request. TTFT: time to its first token. TPOT: time per token after the first.",
        ],
    )
