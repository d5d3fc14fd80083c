"""Writing the report: raw records in, results.json, report.md and report.html out. No engine, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyas.eval.records import read_starts
from eyas.eval.report.comparison import compare_runs
from eyas.eval.report.comparison_page import TITLE as COMPARISON_TITLE
from eyas.eval.report.comparison_page import comparison_sections
from eyas.eval.report.contents import all_sections
from eyas.eval.report.curves import latency_curves
from eyas.eval.report.document import Section, markdown
from eyas.eval.report.page import html_page
from eyas.eval.results import cells_by_phase, read_results
from eyas.heads.files import write_json, write_text

TITLE = "Does drafting pay?"


def build_report(score_dir: Path) -> dict[str, Any]:
    """Recompute everything from the raw records in `score_dir`, write the three files there, return the results.

    Raises:
        ValueError: the directory holds no finished start, one of its files is broken, or it mixes two sessions.
    """
    results = collect_results(score_dir)
    name = results["context"].get("name")
    _write(score_dir, "report", title=f"{TITLE} ({name})" if name else TITLE, sections=all_sections(results))
    write_json(score_dir / "results.json", results)
    return results


def collect_results(score_dir: Path) -> dict[str, Any]:
    """All numbers of the report, from raw records; nothing is written."""
    results = read_results(score_dir)
    grid = cells_by_phase(read_starts(score_dir / "starts")).get("grid", {})
    return results | {"latency_curves": latency_curves(grid)}


def build_comparison(first: Path, second: Path, *, out_dir: Path | None) -> dict[str, Any]:
    """Compare two score directories; with `out_dir` write comparison.json, .md and .html there.

    Raises:
        ValueError: as `build_report`.
    """
    comparison = compare_runs(collect_results(first), collect_results(second))
    if out_dir is not None:
        out_dir.mkdir(parents=True, exist_ok=True)
        _write(out_dir, "comparison", title=COMPARISON_TITLE, sections=comparison_sections(comparison))
        write_json(out_dir / "comparison.json", comparison)
    return comparison


def _write(directory: Path, stem: str, *, title: str, sections: list[Section]) -> None:
    write_text(directory / f"{stem}.md", markdown(title, sections))
    write_text(directory / f"{stem}.html", html_page(title, sections))
