"""The text of `eyas plan`: which stages a run would do, and what it will take in tokens, disk and memory."""

from __future__ import annotations

from eyas.recipes.estimate import (
    TargetShape,
    checkpoint_bytes,
    feature_bytes,
    head_parameters,
    num_captured,
    read_target_shape,
    rough_tokens,
    training_bytes,
    weight_bytes,
)
from eyas.recipes.run import Run, open_run, stage_names
from eyas.recipes.schema import Recipe
from eyas.recipes.stage import MANIFEST


def plan_lines(recipe: Recipe) -> list[str]:
    """What `eyas run` would do with `recipe`.

    The target's sizes are needed, so a package target is unpacked and a hub target downloaded to the cache.
    """
    run = open_run(recipe)
    shape = read_target_shape(run.target_dir)
    return [
        f"run directory:  {run.run_dir}",
        f"target:         {run.target_dir} ({_gib(weight_bytes(run.target_dir))} of weights)",
        f"stages:         {', '.join(_stage_word(run, name) for name in stage_names(recipe, last='score'))}",
        *_estimate_lines(run, shape=shape),
    ]


def _stage_word(run: Run, name: str) -> str:
    return f"{name} (exists)" if (run.directory(name) / MANIFEST).is_file() else name


def _estimate_lines(run: Run, *, shape: TargetShape) -> list[str]:
    recipe = run.recipe
    captured = num_captured(recipe.features, kind=recipe.head.kind)
    parameters = head_parameters(recipe.head, target=shape, captured=captured)
    per_token = feature_bytes(1, hidden_size=shape.hidden_size, captured=captured, dtype=recipe.features.dtype)
    tokens, how = _tokens(run)
    disk = "unknown" if tokens is None else _gib(tokens * per_token)
    return [
        f"train tokens:   {how}",
        f"features disk:  {disk} = tokens x ({captured} captured layers + 1) x {shape.hidden_size} x dtype bytes "
        f"({per_token:,} bytes per token)",
        f"train disk:     {_gib(checkpoint_bytes(parameters))} (two checkpoints and the head)",
        f"head:           {_bound(recipe)}{parameters / 1e6:.1f} million trained parameters",
        f"train memory:   {_gib(training_bytes(parameters, target=shape))} without activations "
        "(16 bytes per trained parameter; embedding and lm_head of the target)",
        f"score memory:   {_gib(weight_bytes(run.target_dir))} weights + {recipe.score.kv_cache_gib} GiB KV cache "
        "(CPU) + the head, per engine; one engine at a time",
        "time:           not estimated; it depends on the machine",
    ]


def _bound(recipe: Recipe) -> str:
    """The size of an automatic draft vocabulary is known after the answers were counted."""
    return "at most " if recipe.head.kind == "eagle3" and recipe.head.draft_vocab_size == "auto" else ""


def _tokens(run: Run) -> tuple[int | None, str]:
    """Training tokens as far as they are known, and how they are known."""
    data = run.recipe.data
    guess = None if data.regenerate or not run.conversations.is_file() else rough_tokens(run.conversations)
    limit = data.max_train_tokens
    if guess is not None and (limit is None or guess < limit):
        return guess, f"about {guess:,} (from the size of {run.conversations})"
    if limit is not None:
        return limit, f"at most {limit:,} (data.max_train_tokens)"
    return None, "unknown until the conversations are generated (data.max_train_tokens is null)"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
