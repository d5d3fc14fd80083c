"""How a recipe stores hidden states, and the forms that `eyas plan` compares it with."""

from __future__ import annotations

from eyas.recipes.schema import Recipe
from eyas.train.features.encoding import StoreForm

DEFAULT_TEACHER_K = 64


def store_form(recipe: Recipe) -> StoreForm:
    """The form that a recipe asks for; an EAGLE head reads the last state at every slot."""
    features = recipe.features
    return StoreForm(
        storage=features.stored_as,
        teacher=features.teacher,
        teacher_k=features.teacher_k,
        last_everywhere=recipe.head.kind == "eagle",
    )


FORMS = {
    "bfloat16": StoreForm(storage="bfloat16", teacher="hidden", teacher_k=0, last_everywhere=False),
    "fp8": StoreForm(storage="fp8", teacher="hidden", teacher_k=0, last_everywhere=False),
    "fp8 with a top-64 teacher": StoreForm(
        storage="fp8", teacher="top-k", teacher_k=DEFAULT_TEACHER_K, last_everywhere=False
    ),
    "bfloat16 for EAGLE": StoreForm(storage="bfloat16", teacher="hidden", teacher_k=0, last_everywhere=True),
    "fp8 for EAGLE": StoreForm(storage="fp8", teacher="hidden", teacher_k=0, last_everywhere=True),
}
"""Shown by `eyas plan` beside the recipe's own, as far as its kind of head can read them."""
