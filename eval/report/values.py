"""How numbers are written in the report: one form per kind of quantity, and "n/a" where there is none."""

from __future__ import annotations

from collections.abc import Sequence

MISSING = "n/a"


def number(value: float | None, digits: int = 2) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def count(value: float | None) -> str:
    """A whole number with thin groups of thousands: 12,345."""
    return MISSING if value is None else f"{round(value):,}"


def percent(value: float | None, digits: int = 1) -> str:
    return MISSING if value is None else f"{100 * value:.{digits}f} %"


def milliseconds(value: float | None, digits: int = 1) -> str:
    """Seconds, written in milliseconds."""
    return MISSING if value is None else f"{1000 * value:.{digits}f}"


def times(value: float | None, digits: int = 2) -> str:
    """A ratio: 1.36x."""
    return MISSING if value is None else f"{value:.{digits}f}x"


def span(interval: Sequence[float | None] | None, digits: int = 2) -> str:
    """An interval: 1.12 to 1.67; an end that is None is open."""
    if interval is None or all(end is None for end in interval):
        return MISSING
    low, high = interval
    return f"{'?' if low is None else f'{low:.{digits}f}'} to {'?' if high is None else f'{high:.{digits}f}'}"


def p_value(value: float | None) -> str:
    if value is None:
        return MISSING
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"


def significant(value: float | None, digits: int = 3) -> str:
    """Three significant digits, for fitted constants of unknown magnitude."""
    return MISSING if value is None else f"{value:.{digits}g}"


def listing(parts: Sequence[str]) -> str:
    """ "1", "1 and 2", "1, 2 and 4"."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"
