"""What the head was trained on: sources, what was dropped and why, and the guard against evaluation prompts."""

from __future__ import annotations

from typing import Any

from eyas.eval.report.document import Section, Table, table
from eyas.eval.report.values import percent

TITLE = "Training data"


def data_section(results: dict[str, Any]) -> Section:
    """Counts of the collect and prepare stages, as the context carries them."""
    context = results["context"]
    stages = context.get("stages", {})
    if "collect" not in stages:
        return Section(TITLE, ["No counts of the training data came with this head.", _identity_words(context)])
    counts = stages["collect"]["counts"]
    if "train" not in stages:
        words = (
            "The head comes from elsewhere: what it was trained on is not known here, so nothing says that the prompts "
            "measured above were kept out of it. The counts below are of the conversations that the prompts come from."
        )
        return Section(TITLE, [words, _identity_words(context)], [_sources_table(counts)])
    told = [_guard_words(context, counts), _token_words(stages["prepare"]["counts"]), _identity_words(context)]
    return Section(TITLE, told, [_sources_table(counts)])


def _identity_words(context: dict[str, Any]) -> str:
    digest = context.get("data_sha256")
    if digest is None:
        return "No hash of the training conversations is known."
    return f"sha256 of the training conversations: `{digest}`."


def _guard_words(context: dict[str, Any], counts: dict[str, Any]) -> str:
    settings, guard = context["recipe"]["data"]["guard"], counts["guard"]
    if not settings["enabled"]:
        return (
            "Evaluation prompts were NOT kept out of the training data (data.guard.enabled=false): acceptance and speed on "
            "prompts that the head has seen flatter it."
        )
    ngram = f"{settings['ngram']} words in a row in common" if settings["ngram"] else "no comparison by runs of words"
    return (
        f"{guard['exact'] + guard['ngram']} training conversations were removed because a user turn overlaps one of "
        f"{guard['evaluation_prompts']} evaluation prompts: {guard['exact']} the same prompt but for case, spacing and "
        f"punctuation, {guard['ngram']} by {ngram}. Evaluation prompts: those held out, HumanEval where it is scored, and "
        "the sets of data.guard.sources."
    )


def _token_words(counts: dict[str, Any]) -> str:
    share = counts["train_answer_tokens"] / max(counts["train_tokens"], 1)
    return (
        f"Trained on {counts['train_conversations']} conversations of {counts['train_tokens']} tokens, {percent(share)} of "
        f"them answers; {counts['heldout_conversations']} conversations of {counts['heldout_tokens']} tokens held out."
    )


def _sources_table(counts: dict[str, Any]) -> Table:
    rows = [
        [
            name,
            found["schema"],
            str(found["read"]),
            str(found["kept"]),
            "not counted" if found["not_needed"] is None else str(found["not_needed"]),
            ", ".join(f"{number} {reason.replace('_', ' ')}" for reason, number in found["dropped"].items() if number)
            or "none",
        ]
        for name, found in counts["sources"].items()
    ]
    return table(["source", "form", "read", "kept", "not needed", "dropped"], rows, text_columns=2)
