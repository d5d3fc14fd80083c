"""A document as one HTML page: no script, no file beside it, no address outside it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import jinja2
from markupsafe import Markup, escape

from eyas.eval.report.document import Section


def html_page(title: str, sections: Sequence[Section]) -> str:
    loader = jinja2.PackageLoader("eyas.eval.report", package_path="")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["prose"] = _prose
    return environment.get_template("template.html.j2").render(title=title, sections=sections)


def _prose(text: str) -> Markup:
    """Words of ours with `code` in them, everything else escaped."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
