"""What the figures draw: styles that differ, whose acceptance they show, and legends that fit."""

from __future__ import annotations

import re
from typing import Any

import pytest
from matplotlib.figure import Figure as Canvas

from eyas.eval.report.figures.acceptance import chain_figure, longest_heads
from eyas.eval.report.figures.canvas import arm_styles, legend_below, style_handles, style_of
from eyas.eval.report.sections.acceptance import acceptance_section

RATES = {5: [0.6, 0.4, 0.2, 0.1, 0.05], 3: [0.5, 0.3, 0.1]}


def row(arm: str, kind: str, *, temperature: float = 0.0, length: int = 5, drafted: bool = True) -> dict[str, Any]:
    """A row of results["acceptance"] as far as the chain figure reads it."""
    rates = RATES[length] if drafted else []
    place = {"dataset": "heldout", "temperature": temperature, "arm": arm, "kind": kind, "draft_length": length}
    return place | {"marginal": rates, "conditional": list(rates)}


def arms_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    facts = {each["arm"]: {"kind": each["kind"], "draft_length": each["draft_length"]} for each in rows}
    return {"arms": {"ar": {"kind": "ar", "draft_length": 0}} | facts}


def labels(svg: str) -> list[str]:
    """The words of a figure, without numbers."""
    return [text for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg) if re.search("[a-z]", text)]


def test_more_arms_than_colours_look_different() -> None:
    for shown in (8, 36):
        styles = [style_of(index, f"arm {index}") for index in range(shown)]
        assert len({(style.colour, style.marker, str(style.dashes)) for style in styles}) == shown
    arms = {f"arm{index}": {"kind": "other", "draft_length": 3} for index in range(8)}
    results = {
        "arms": {"ar": {"kind": "ar", "draft_length": 0}, **arms, "schedule": {"kind": "schedule", "draft_length": 3}}
    }
    drawn = [(style.colour, style.marker, str(style.dashes)) for style in arm_styles(results).values()]
    assert len(set(drawn)) == 10, "plain decoding and the schedule too"


def test_the_chain_figure_shows_the_head_and_names_it() -> None:
    """n-gram lookup and a schedule may draft as many tokens as the longest head, by another law."""
    rows = [row("k5", "head"), row("k5", "head", temperature=1.0), row("k3", "head", length=3)]
    rows += [row("ngram", "other"), row("schedule", "schedule"), row("schedule", "schedule", temperature=1.0)]
    shown = longest_heads(rows)
    assert [(each["arm"], each["temperature"]) for each in shown] == [("k5", 0.0), ("k5", 1.0)]
    words = labels(chain_figure(arms_of(rows), shown).svg)
    assert [text for text in words if "temperature" in text] == [
        "k=5, held-out chat, temperature 0",
        "k=5, held-out chat, temperature 1",
    ]
    assert not any("schedule" in text or "ngram" in text for text in words)


def test_two_heads_of_one_length_are_two_lines() -> None:
    rows = [row("first", "head"), row("second", "head")]
    words = labels(chain_figure(arms_of(rows), longest_heads(rows)).svg)
    assert [text.split(",")[0] for text in words if "temperature" in text] == ["first", "second"]


def test_no_head_has_no_chain() -> None:
    assert longest_heads([row("ngram", "other"), row("schedule", "schedule"), row("k5", "head", drafted=False)]) == []


@pytest.mark.parametrize(
    ("names", "columns"),
    [
        (["k=5", "k=3", "k=1"], 3),
        (["plain decoding (AR)", "k=5", "k=3"], 3),
        (["plain decoding (AR)", "a head of mine", "another head of mine"], 1),
        (["k=5, held-out chat, temperature 0", "k=5, held-out chat, temperature 1"], 1),
    ],
)
def test_a_legend_has_as_many_columns_as_fit(names: list[str], columns: int) -> None:
    canvas = Canvas(figsize=(5.0, 3.9), layout="constrained")
    legend_below(canvas, style_handles([style_of(0, name) for name in names]), names)
    canvas.draw_without_rendering()
    places = [text.get_window_extent() for text in canvas.legends[0].get_texts()]
    assert len({round(place.x0) for place in places}) == columns
    assert max(place.x1 for place in places) < canvas.bbox.width


def test_batch_sizes_with_other_prompts_are_a_warning(full_acceptance: dict[str, Any]) -> None:
    (section,) = [part for part in acceptance_section(full_acceptance).parts if part.title == "By batch size"]
    few = min(cell["prompts"] for cell in full_acceptance["acceptance_cells"])
    assert section.alerts == [
        f"Batch sizes served different prompts. Common to all sizes: {few} of held-out chat, temperature 0 and {few} of held-out "
        "chat, temperature 1. What changes with the batch size may be the prompts, but for the column of the common ones."
    ]
    for cell in full_acceptance["acceptance_cells"]:
        cell["prompts"] = cell["common_prompts"]
    (section,) = [part for part in acceptance_section(full_acceptance).parts if part.title == "By batch size"]
    assert section.alerts == []


@pytest.fixture
def full_acceptance(full_session: Any) -> dict[str, Any]:
    """Results of the made-up session, whose large batch sizes serve more prompts than the small ones."""
    from eyas.heads.files import read_json

    return read_json(full_session / "results.json")
