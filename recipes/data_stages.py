"""The stages that make training data out of sources: collection, and tokens with their answer masks.

The stages in which the target writes are in generation_stages.py. `settings` of a stage holds what changes its result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyas.heads.files import fingerprint_file
from eyas.recipes.generation_stages import SYNTHESISED
from eyas.recipes.run import Run
from eyas.recipes.schema_data import Source
from eyas.recipes.sources import expand, place_of, source_identity
from eyas.recipes.stage import Stage


def training_sources(run: Run) -> list[Source]:
    """Every source of a run's conversations, presets filled in, the target's own user turns last."""
    sources = [entry for source in run.recipe.data.all_sources for entry in expand(source)]
    if run.recipe.data.self_prompts.count:
        path = str(run.directory("synthesise") / SYNTHESISED)
        sources.append(Source(path=path, name="self", weight=_own_weight(sources)))
    return sources


def _own_weight(sources: list[Source]) -> float | None:
    """In a weighted mix, the target's own turns count as one average source."""
    weights = [source.weight for source in sources if source.weight is not None]
    return sum(weights) / len(weights) if weights else None


def collect_stage(run: Run) -> Stage:
    """Conversations of all sources in one file: checked, filtered, without duplicates, split, guarded."""
    data, score = run.recipe.data, run.recipe.score
    sources = training_sources(run)
    guarded = [entry for source in data.guard.sources for entry in expand(source)] if data.guard.enabled else []

    def body(out_dir: Path) -> dict[str, Any]:
        from eyas.eval.workload import humaneval_prompts
        from eyas.train.data.collect import collect
        from eyas.train.data.filters import Filters

        return collect(
            out_dir,
            sources=[place_of(source) for source in sources],
            evaluation=[place_of(source) for source in guarded],
            evaluation_prompts=humaneval_prompts() if data.guard.enabled and score.humaneval_requests else [],
            guard=data.guard.enabled,
            guard_ngram=data.guard.ngram,
            near_duplicates=data.near_duplicates,
            filters=Filters(
                min_turns=data.filters.min_turns,
                max_turns=data.filters.max_turns,
                min_characters=data.filters.min_characters,
                max_characters=data.filters.max_characters,
                languages=data.filters.languages,
            ),
            when_exhausted=data.when_exhausted,
            max_conversations=data.max_conversations,
            heldout_share=data.heldout_share,
            max_heldout=data.max_heldout,
            on_bad_line=data.on_bad_line,
            seed=run.recipe.seed,
        )

    names = {"when_exhausted", "max_conversations", "near_duplicates", "heldout_share", "max_heldout", "on_bad_line"}
    settings = data.model_dump(mode="json", include=names) | {
        "filters": data.filters.model_dump(mode="json"),
        "guard": {"enabled": data.guard.enabled, "ngram": data.guard.ngram},
        "humaneval": data.guard.enabled and bool(score.humaneval_requests),
        "seed": run.recipe.seed,
    }
    inputs = {f"source {number}": source_identity(source) for number, source in enumerate(sources)}
    inputs |= {f"evaluation {number}": source_identity(source) for number, source in enumerate(guarded)}
    return Stage(name="collect", settings=settings, inputs=inputs, body=body, describe=_describe_collection)


def _describe_collection(counts: dict[str, Any]) -> list[str]:
    """One line for each source, then one for the guard."""
    lines = []
    for name, found in counts["sources"].items():
        dropped = ", ".join(f"{number} {reason}" for reason, number in found["dropped"].items() if number)
        left = found["not_needed"]
        lines.append(
            f"{name} ({found['schema']}): {found['kept']} of {found['read']} conversations kept"
            + (f"; dropped: {dropped}" if dropped else "")
            + (f"; {'more' if left is None else left} not needed" if left != 0 else "")
        )
    guard = counts["guard"]
    lines.append(
        f"guard: {guard['exact'] + guard['ngram']} training conversations overlap one of {guard['evaluation_prompts']} "
        "evaluation prompts and were removed"
    )
    return lines


def prepare_stage(run: Run) -> Stage:
    """Conversations become token ids with an exact answer mask, split into training and held-out."""
    data, target = run.recipe.data, run.recipe.target

    def body(out_dir: Path) -> dict[str, Any]:
        from eyas.train.data.prepare import prepare

        _require_context(run)
        return prepare(
            out_dir,
            target_dir=run.target_dir,
            conversations=run.conversations,
            max_length=data.max_length,
            too_long=data.too_long,
            max_train_tokens=data.max_train_tokens,
            on_bad_line=data.on_bad_line,
            trust_remote_code=target.trust_remote_code,
            template_options=data.template_options,
            seed=run.recipe.seed,
        )

    inputs = {"target": run.target_fingerprint, "conversations": fingerprint_file(run.conversations)}
    return Stage(name="prepare", settings=prepare_settings(run), inputs=inputs, body=body, describe=_prepared_lines)


def _prepared_lines(counts: dict[str, Any]) -> list[str]:
    if not counts.get("template_prints_today"):  # not counted by an earlier version
        return []
    return [
        "the chat template prints today's date: on another day scoring has other prompts than training had, and so has a run that "
        "goes on; fix it with data.template_options.strftime_now='2026-11-30', or the variable that the template reads"
    ]


def prepare_settings(run: Run) -> dict[str, Any]:
    """What decides the tokens, besides the conversations and the target."""
    data = run.recipe.data
    return {
        "max_length": data.max_length,
        "too_long": data.too_long,
        "max_train_tokens": data.max_train_tokens,
        "on_bad_line": data.on_bad_line,
        "trust_remote_code": run.recipe.target.trust_remote_code,
        "template_options": data.template_options,
        "seed": run.recipe.seed,
    }


def _require_context(run: Run) -> None:
    """Tokens beyond the target's positions would have states that no server ever computes."""
    from eyas.heads.config import load_target_config

    config = load_target_config(run.target_dir, trust_remote_code=run.recipe.target.trust_remote_code).to_dict()
    positions, wanted = config.get("max_position_embeddings"), run.recipe.data.max_length
    if positions is not None and wanted > positions:
        raise ValueError(
            f"data.max_length: {wanted} tokens are more than the {positions} positions of the target; set it to "
            f"{positions} or less"
        )
