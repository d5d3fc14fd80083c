"""A report as data: sections of paragraphs, tables and figures, so that HTML and Markdown say the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Table:
    """A table of ready strings; `numeric` columns are set to the right."""

    columns: list[str]
    rows: list[list[str]]
    numeric: list[bool]
    emphasised: list[bool]
    caption: str

    def markdown(self) -> str:
        rule = ["---:" if number else "---" for number in self.numeric]
        lines = [self.columns, rule, *self.rows]
        grid = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"**{self.caption}**\n\n{grid}" if self.caption else grid


@dataclass(frozen=True)
class Figure:
    """An inline SVG with its caption."""

    svg: str
    caption: str


@dataclass(frozen=True)
class Section:
    """One heading of the report. Figures appear in HTML only."""

    title: str
    paragraphs: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    bullets: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    text_columns: int,
    emphasised: Sequence[bool] | None = None,
    caption: str = "",
) -> Table:
    """A table whose first `text_columns` columns are words and whose others are numbers."""
    listed = [list(row) for row in rows]
    numeric = [index >= text_columns for index in range(len(columns))]
    marks = [False] * len(listed) if emphasised is None else list(emphasised)
    return Table(list(columns), listed, numeric, marks, caption)


def markdown(title: str, sections: Sequence[Section]) -> str:
    """The document as Markdown."""
    parts = [f"# {title}"]
    for section in sections:
        parts.append(f"## {section.title}")
        parts.extend(section.paragraphs)
        parts.extend(each.markdown() for each in section.tables)
        if section.bullets:
            parts.append("\n".join(f"- {bullet}" for bullet in section.bullets))
    return "\n\n".join(parts) + "\n"


def number(value: float | None, digits: int = 2) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.1f} %"


def milliseconds(value: float | None) -> str:
    return "n/a" if value is None else f"{1000 * value:.1f}"
