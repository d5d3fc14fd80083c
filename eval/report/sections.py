"""The order and the words of the report: verdict first, evidence after, what was not measured last."""

from __future__ import annotations

from typing import Any

from eyas.eval import latency
from eyas.eval.report import conditions, plots, tables
from eyas.eval.report.data import data_section
from eyas.eval.report.document import Section, number, percent, table
from eyas.eval.report.words import DATASET_NAMES, best_k_sentence, verdict_sentences
from eyas.eval.verdict import MIN_STARTS


def all_sections(results: dict[str, Any]) -> list[Section]:
    """Every section of the report, in order."""
    return [
        _verdict(results),
        _total_latency(results),
        _token_latency(results),
        _throughput(results),
        _acceptance(results),
        _best_k(results),
        _lossless(results),
        _parity(results),
        _null(results),
        conditions.protocol_section(results),
        conditions.configuration_section(results),
        conditions.failures_section(results),
        _loops(results),
        data_section(results),
        conditions.training_section(results),
        conditions.identity_section(results),
        Section("Not measured here", bullets=results["not_measured"]),
        _glossary(),
    ]


def _verdict(results: dict[str, Any]) -> Section:
    paragraphs = [" ".join(verdict_sentences(results)), best_k_sentence(results).capitalize() + "."]
    explanation = (
        "tok/s: output tokens of a cell over its wall time, geometric mean over starts. ratio: head over plain "
        "decoding (AR). "
        "tau: mean tokens per verification step, bonus token included, step-weighted, with chains of k drafted tokens. "
        "The interval resamples starts and prompts"
    )
    starts = min(results["starts"].values())
    few = f"; with {starts} starts per arm it is indicative only." if starts < MIN_STARTS else "."
    return Section(
        "Verdict",
        [*paragraphs, explanation + few],
        [tables.main_table(results), tables.reasons_table(results)],
        figures=[plots.speedup_figure(results)],
    )


def _throughput(results: dict[str, Any]) -> Section:
    return Section(
        "Throughput",
        [
            latency.THROUGHPUT_FORMULA + ".",
            "Mean running: time average of requests in flight; it falls below the batch size when the last requests end.",
        ],
        [tables.throughput_table(results)],
        figures=[plots.throughput_figure(results)],
    )


def _total_latency(results: dict[str, Any]) -> Section:
    words = f"{latency.E2E_FORMULA}. {latency.TTFT_FORMULA}. Over all requests of all starts of the arm."
    shown = [
        tables.latency_table(results, "e2e", unit="s", caption="Total latency (E2E)"),
        tables.latency_table(results, "ttft", unit="ms", caption="Time to first token (TTFT)"),
    ]
    return Section("Total latency", [words], shown)


def _token_latency(results: dict[str, Any]) -> Section:
    words = (
        "The chunk gap is the time between chunks of tokens as they leave the engine. With a head a chunk holds several "
        "tokens, so it is not a per-token latency and must not be compared as one."
    )
    shown = [
        tables.latency_table(results, "tpot", unit="ms", caption="Per-token latency (TPOT)"),
        tables.latency_table(results, "chunk_gap", unit="ms", caption="Chunk gap"),
    ]
    return Section("Per-token latency", [latency.TPOT_FORMULA + ".", words], shown)


def _acceptance(results: dict[str, Any]) -> Section:
    paragraphs = [
        "From the engine's counts per verification step, in the cell with the most prompts, all starts. Step-weighted "
        "tau weighs "
        "long answers more, request-mean tau weighs every answer alike. marginal: share of steps that accept at least "
        "i drafted "
        "tokens; conditional: the same among steps that accepted i - 1. tau at a shorter chain is 1 plus the first "
        "marginals.",
        "Reconciliation: output tokens should equal requests (one token from each prefill) + steps + accepted tokens. "
        "The residual is what "
        "was cut at the end of answers (the engine counts acceptance before it cuts), so a small negative share is "
        "expected.",
    ]
    shown = [
        tables.acceptance_table(results),
        tables.positions_table(results),
        tables.histogram_table(results),
        tables.reconciliation_table(results),
    ]
    return Section("Acceptance", paragraphs, shown, figures=[plots.acceptance_figure(results)])


def _best_k(results: dict[str, Any]) -> Section:
    words = (
        "The measured arm with the highest throughput in each cell, by the point estimate; k = 0 is plain decoding. Where "
        "the interval above includes 1 the choice is within the noise. Other values of k were not run."
    )
    return Section("Best draft length", [words], [tables.best_k_table(results)])


def _lossless(results: dict[str, Any]) -> Section:
    fidelity = results["fidelity"]
    if fidelity is None or fidelity["status"] != "done":
        why = "it has not run" if fidelity is None else fidelity["why"]
        return Section("Losslessness", [f"Not checked: {why}. No cell can be SUPPORTED without it."])
    check = fidelity["lossless"]
    outcome = "No violation was found" if check["passed"] else f"{check['violations']} VIOLATIONS were found"
    words = (
        f"{outcome}: greedy {fidelity['dtype']} answers of plain decoding and of {fidelity['arm']} to "
        f"{check['requests']} prompts "
        f"({check['tokens']} tokens, one batch of {fidelity['batch_size']}, at most {fidelity['max_tokens']} tokens "
        "each) compared token by token. "
        f"Identical: {check['identical']}. Ties: {check['ties']}. Violations: {check['violations']}. A tie: the two "
        "differing tokens "
        f"are the target's two best in a float32 forward, at most {check['tie_gap']:g} apart in logit."
    )
    rows = [
        [each["prompt_id"], each["outcome"], each["why"], str(each["index"]), number(each["gap"], 6)]
        for each in check["differences"]
    ]
    listed = (
        [table(["prompt", "outcome", "why", "first differing token", "logit gap"], rows, text_columns=3)]
        if rows
        else []
    )
    return Section("Losslessness", [words], listed)


def _parity(results: dict[str, Any]) -> Section:
    title = "Predicted against served acceptance"
    fidelity = results["fidelity"]
    if fidelity is None or fidelity["status"] != "done":
        return Section(title, ["Not checked: the fidelity starts did not finish."])
    parity = fidelity["parity"]
    outcome = "agree" if parity["passed"] else "DO NOT agree"
    gap = parity["relative_difference"]
    words = (
        f"Offline and served tau {outcome} (difference {percent(gap)}, tolerance {percent(parity['tolerance'])}): "
        "chain drafting simulated outside "
        f"the engine, along the served answers of the check above, k={parity['draft_length']}, step-weighted."
    )
    rows = [
        [
            name,
            str(parity[name]["drafts"]),
            number(parity[name]["tau_step_weighted"], 4),
            " ".join(number(rate, 4) for rate in parity[name]["marginal"]),
        ]
        for name in ("offline", "served")
    ]
    return Section(title, [words], [table(["", "drafts", "tau", "marginal by position"], rows, text_columns=1)])


def _null(results: dict[str, Any]) -> Section:
    words = (
        "How much plain decoding differs from itself: the same cell in different starts of the same arm. A ratio of "
        "the head inside "
        "this spread is noise, whatever its interval says."
    )
    return Section("Plain decoding against itself", [words], [tables.null_table(results)])


def _loops(results: dict[str, Any]) -> Section:
    words = (
        "Answers of which more than 30 % of the 8-grams repeat an earlier one. Loops are easy to draft and flatter "
        "acceptance; they are counted, not removed."
    )
    rows = [
        [DATASET_NAMES[row["dataset"]], row["arm"], str(row["flagged"]), str(row["requests"]), percent(row["share"])]
        for row in results["loops"]
    ]
    shown = [
        table(["prompts", "arm", "flagged", "answers", "share"], rows, text_columns=2),
        tables.outputs_table(results),
    ]
    return Section("Outputs", [words], shown)


def _glossary() -> Section:
    return Section(
        "Terms",
        bullets=[
            "AR: plain autoregressive decoding of the same target in the same engine.",
            "arm: one engine configuration; kN drafts N tokens per step. start: one process of an arm. cell: one set "
            "of prompts at one batch size.",
            "batch size: number of requests kept running at a time.",
            "Every number here is recomputed from starts/*.jsonl by `eyas report`, without an engine.",
        ],
    )
