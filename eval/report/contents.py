"""The order of the report: verdict first, evidence after in sections A to K, terms last."""

from __future__ import annotations

from typing import Any

from eyas.eval.report.document import Section
from eyas.eval.report.sections.acceptance import acceptance_section
from eyas.eval.report.sections.baseline import baseline_section
from eyas.eval.report.sections.cells import cells_section
from eyas.eval.report.sections.identity import identity_section
from eyas.eval.report.sections.lossless import lossless_section
from eyas.eval.report.sections.model import model_section
from eyas.eval.report.sections.performance import performance_section
from eyas.eval.report.sections.protocol import protocol_section
from eyas.eval.report.sections.raw import raw_section
from eyas.eval.report.sections.rest import not_measured_section, terms_section
from eyas.eval.report.sections.steps import steps_section
from eyas.eval.report.sections.verdict import verdict_section


def all_sections(results: dict[str, Any]) -> list[Section]:
    """Every section of the report, in order."""
    return [
        verdict_section(results),
        identity_section(results),
        protocol_section(results),
        baseline_section(results),
        performance_section(results),
        acceptance_section(results),
        steps_section(results),
        model_section(results),
        lossless_section(results),
        cells_section(results),
        raw_section(results),
        not_measured_section(results),
        terms_section(),
    ]
