"""The text of `eyas plan`: which stages a run would do, and what it will take in tokens, disk and memory."""

from __future__ import annotations

from eyas.heads.config import DEFAULT_CAPTURED
from eyas.recipes.estimate import (
    TargetShape,
    checkpoint_bytes,
    feature_bytes,
    read_target_shape,
    rough_tokens,
    training_bytes,
    weight_bytes,
)
from eyas.recipes.run import Run, open_run, stage_names
from eyas.recipes.schema import Recipe
from eyas.recipes.stage import MANIFEST
from eyas.recipes.train_stages import captured_layers, head_parameters


def plan_lines(recipe: Recipe) -> list[str]:
    """What `eyas run` would do with `recipe`.

    The target's sizes are needed, so a package target is unpacked and a hub target downloaded to the cache.
    """
    run = open_run(recipe)
    shape = read_target_shape(run.target_dir)
    names = stage_names(recipe, last="score")
    return [
        f"run directory:  {run.run_dir}",
        f"target:         {run.target_dir} ({_gib(weight_bytes(run.target_dir))} of weights)",
        f"stages:         {', '.join(_stage_word(run, name) for name in names)}",
        *(
            _training_lines(run, shape=shape)
            if "train" in names
            else [f"head:           {recipe.score.head}, as it is"]
        ),
        f"score memory:   {_gib(weight_bytes(run.target_dir))} weights + {recipe.score.kv_cache_gib} GiB KV cache "
        "(CPU) + the head, per engine; one engine at a time",
        "time:           not estimated; it depends on the machine",
    ]


def _stage_word(run: Run, name: str) -> str:
    return f"{name} (exists)" if (run.directory(name) / MANIFEST).is_file() else name


def _training_lines(run: Run, *, shape: TargetShape) -> list[str]:
    recipe = run.recipe
    layers = captured_layers(run)
    captured = DEFAULT_CAPTURED if layers is None else len(layers)
    least, parameters = head_parameters(run)
    bound = "" if least == parameters else "at most "
    per_token = feature_bytes(1, hidden_size=shape.hidden_size, captured=captured, dtype=recipe.features.dtype)
    tokens, how = _tokens(run)
    disk = "unknown" if tokens is None else _gib(tokens * per_token)
    return [
        f"train tokens:   {how}",
        f"features disk:  {disk} = tokens x ({captured} captured layers + 1) x {shape.hidden_size} x dtype bytes "
        f"({per_token:,} bytes per token)",
        f"train disk:     {bound}{_gib(checkpoint_bytes(parameters))} (two checkpoints and the head)",
        f"head:           {bound}{parameters / 1e6:.1f} million trained parameters",
        f"train memory:   {bound}{_gib(training_bytes(parameters, target=shape))} without activations "
        "(16 bytes per trained parameter; embedding and lm_head of the target)",
    ]


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
