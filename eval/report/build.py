"""Writing the report: raw records in, results.json, report.md and report.html out. No engine, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from eyas.eval.grid import read_failures
from eyas.eval.records import read_starts
from eyas.eval.report.document import markdown
from eyas.eval.report.sections import all_sections
from eyas.eval.results import compute_results
from eyas.heads.files import read_json, write_json, write_text

TITLE = "Does the draft head pay?"


def build_report(score_dir: Path) -> dict[str, Any]:
    """Recompute everything from the raw records in `score_dir`, write the three files there, return the results.

    Raises:
        ValueError: the directory holds no finished start, or one of its files is broken.
    """
    starts = read_starts(score_dir / "starts")
    if not starts:
        raise ValueError(f"{score_dir} holds no finished start, so there is nothing to report; run `eyas score` first")
    fidelity_path = score_dir / "fidelity.json"
    results = compute_results(
        starts,
        failures=read_failures(score_dir / "starts"),
        fidelity=read_json(fidelity_path) if fidelity_path.is_file() else None,
        protocol=read_json(score_dir / "protocol.json"),
        context=read_json(score_dir / "context.json"),
    )
    write_json(score_dir / "results.json", results)
    sections = all_sections(results)
    name = results["context"].get("name")
    title = f"{TITLE} {name}" if name else TITLE
    write_text(score_dir / "report.md", markdown(title, sections))
    loader = jinja2.PackageLoader("eyas.eval.report", package_path="")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    page = environment.get_template("template.html.j2").render(title=title, sections=sections)
    write_text(score_dir / "report.html", page)
    return results
