"""`eyas ceiling`: is a head worth training for this target on this machine? Registered by recipes/cli.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.recipes.arguments import OverridesArgument, complete_recipe

if TYPE_CHECKING:
    from eyas.eval.cost.ceiling import HeadShape
    from eyas.eval.settings import Engine
    from eyas.recipes.schema_score import Score


def ceiling(
    target: Annotated[
        str,
        typer.Argument(help="Recipe, or a target: directory, hub id or package:NAME.", autocompletion=complete_recipe),
    ],
    overrides: OverridesArgument = None,
    batch_sizes: Annotated[str | None, typer.Option(help="Such as 1,4,16; default: the recipe's.")] = None,
    draft_lengths: Annotated[str, typer.Option(help="Drafted tokens k to look at.")] = "1,3,5",
    starts: Annotated[int, typer.Option(min=1, help="Fresh engine processes per arm.")] = 2,
    requests: Annotated[int, typer.Option(min=1, help="Requests of a cell at least.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the random prompts.")] = 64,
    answer_tokens: Annotated[int, typer.Option(min=16, help="Length of every answer.")] = 64,
    out: Annotated[Path | None, typer.Option(help="Directory for the records; default: runs/ceiling-NAME.")] = None,
) -> None:
    """Before any training: what tau would a head need at each batch size, and what is the best case?"""
    from eyas.eval.cost.ceiling import Measurement, run_ceiling
    from eyas.eval.cost.ceiling_words import ceiling_sentences, ceiling_table
    from eyas.heads.target_source import cache_root, resolve_target

    asked = _ask(target, overrides)
    out_dir = out or Path("runs") / f"ceiling-{asked.name}"
    measurement = Measurement(
        batch_sizes=_numbers(batch_sizes, option="--batch-sizes") if batch_sizes else asked.score.batch_sizes,
        draft_lengths=_numbers(draft_lengths, option="--draft-lengths"),
        starts_per_arm=starts,
        requests=requests,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        seed=asked.score.seed,
    )
    results = run_ceiling(
        out_dir,
        target_dir=resolve_target(asked.model, revision=asked.revision, cache_dir=cache_root()),
        trust_remote_code=asked.trust_remote_code,
        shape=asked.shape,
        measurement=measurement,
        engine=_engine(asked.score),
        relay=lambda line: typer.echo(line, nl=False),
    )
    typer.echo(ceiling_table(results))
    typer.echo("\n".join(ceiling_sentences(results)))
    typer.echo(f"records and figures: {out_dir / 'ceiling.json'}")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the argument means: a recipe's target, head shape and engine settings, or a target with the defaults."""

    name: str
    model: str
    revision: str | None
    trust_remote_code: bool
    shape: HeadShape
    score: Score


def _ask(target: str, overrides: list[str] | None) -> Asked:
    from eyas.eval.cost.ceiling import HeadShape
    from eyas.recipes.load import load_recipe
    from eyas.recipes.schema_score import Score

    if is_recipe(target):
        recipe = load_recipe(target, overrides=overrides or ())
        size = recipe.head.draft_vocab_size
        shape = HeadShape(
            kind=recipe.head.kind,
            draft_vocab_size=size if isinstance(size, int) else None,
            capture_layers=recipe.features.capture_layers,
        )
        return Asked(
            name=recipe.name,
            model=recipe.target.model,
            revision=recipe.target.revision,
            trust_remote_code=recipe.target.trust_remote_code,
            shape=shape,
            score=recipe.score,
        )
    if overrides:
        raise ValueError(f"{target} is a target and no recipe, so there is nothing that {overrides[0]!r} could change")
    return Asked(
        name=target.rpartition(":")[2].rstrip("/").rpartition("/")[2],
        model=target,
        revision=None,
        trust_remote_code=False,
        shape=HeadShape(kind="eagle3", draft_vocab_size=None, capture_layers=None),
        score=Score(),
    )


def is_recipe(target: str) -> bool:
    """Whether an argument names a recipe: a YAML file, or one that is shipped."""
    from eyas.recipes.load import shipped_recipes

    return target.endswith((".yaml", ".yml")) or target in shipped_recipes()


def _engine(score: Score) -> Engine:
    """The recipe's engine settings. Prompts are random, so a prefix cache would find nothing."""
    from eyas.recipes.score_settings import engine_of

    return replace(engine_of(score), prefix_caching=False)


def _numbers(text: str, *, option: str) -> tuple[int, ...]:
    """Distinct positive integers from "1,4,16", ascending.

    Raises:
        ValueError: it is no such list.
    """
    parts: list[Any] = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts) or len(set(parts)) < len(parts):
        raise ValueError(f"{option} {text}: write different numbers above 0 with commas between, such as 1,4,16")
    return tuple(sorted(int(part) for part in parts))
