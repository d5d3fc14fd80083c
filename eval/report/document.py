"""A report as data: sections of paragraphs, tables and figures, so that HTML and Markdown say the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

NOT_MEASURED = "Not measured in this session."
TALL = 16
"""A table with more rows scrolls in a box of its own on a screen; print and Markdown show all of it."""
WIDE = 9
"""A table with more columns is printed smaller."""


@dataclass(frozen=True)
class Table:
    """A table of ready strings; `numeric` columns are set to the right, `marks` holds one style word per value ("" = none).

    A value may hold line breaks. A `matrix` keeps its first column in sight while it scrolls sideways.
    """

    columns: list[str]
    rows: list[list[str]]
    numeric: list[bool]
    marks: list[list[str]]
    caption: str
    matrix: bool = False

    @property
    def tall(self) -> bool:
        return len(self.rows) > TALL

    @property
    def wide(self) -> bool:
        return len(self.columns) > WIDE

    def markdown(self) -> str:
        rule = ["---:" if number else "---" for number in self.numeric]
        lines = [self.columns, rule, *self.rows]
        grid = "\n".join("| " + " | ".join(_in_markdown(value) for value in line) + " |" for line in lines)
        return f"**{self.caption}**\n\n{grid}" if self.caption else grid


def _in_markdown(value: str) -> str:
    return value.replace("|", "\\|").replace("\n", "<br>")


@dataclass(frozen=True)
class Figure:
    """An inline SVG with its caption."""

    svg: str
    caption: str


@dataclass(frozen=True)
class Section:
    """One heading of the report: warnings, then words, tables and figures, then its sub-sections.

    Figures appear in HTML only, before the tables: their numbers stand in the tables.
    """

    title: str
    paragraphs: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    bullets: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    alerts: list[str] = field(default_factory=list)
    parts: list[Section] = field(default_factory=list)


def not_measured(title: str, why: str = "") -> Section:
    """A section whose numbers this session does not have."""
    return Section(title, [f"{NOT_MEASURED} {why}".strip()])


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    text_columns: int,
    row_marks: Sequence[str] | None = None,
    marks: Sequence[Sequence[str]] | None = None,
    caption: str = "",
    matrix: bool = False,
) -> Table:
    """A table whose first `text_columns` columns are words and whose others are numbers.

    Args:
        columns: the headings.
        rows: one value per column each.
        text_columns: how many columns are words.
        row_marks: a style word for each whole row.
        marks: a style word for each value; goes before `row_marks`.
        caption: what the table shows.
        matrix: the first column names the rows.
    """
    listed = [list(row) for row in rows]
    assert all(len(row) == len(columns) for row in listed), "a value per column"
    numeric = [index >= text_columns for index in range(len(columns))]
    by_row = [""] * len(listed) if row_marks is None else list(row_marks)
    styled = [[mark] * len(columns) for mark in by_row] if marks is None else [list(row) for row in marks]
    return Table(list(columns), listed, numeric, styled, caption, matrix)


def markdown(title: str, sections: Sequence[Section]) -> str:
    """The document as Markdown."""
    return "\n\n".join([f"# {title}", *(block for section in sections for block in _blocks(section, depth=2))]) + "\n"


def _blocks(section: Section, *, depth: int) -> list[str]:
    blocks = [f"{'#' * depth} {section.title}"]
    blocks += [f"**Warning:** {alert}" for alert in section.alerts]
    blocks += section.paragraphs
    blocks += [each.markdown() for each in section.tables]
    if section.bullets:
        blocks.append("\n".join(f"- {bullet}" for bullet in section.bullets))
    return blocks + [block for part in section.parts for block in _blocks(part, depth=depth + 1)]
