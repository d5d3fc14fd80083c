"""The report in a real browser: no message in its console, no sideways overflow on a phone, figures there, prints.

EYAS_SCREENSHOTS=DIRECTORY keeps the screenshots, to look at.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.browser import CHROMIUM, look_at, print_pdf, screenshot

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
]
PHONE, DESKTOP = 360, 1280
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def report(full_session: Path) -> Path:
    return full_session / "report.html"


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_page_fits_and_its_console_is_silent(report: Path, width: int, tmp_path: Path) -> None:
    look = look_at(report, width=width, work_dir=tmp_path)
    assert look.console == []
    assert look.wide == []
    assert look.scroll_width <= look.width == width
    assert look.smallest_font >= 12
    assert look.figures >= 10


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_screenshots(report: Path, width: int, tmp_path: Path) -> None:
    folder = Path(os.environ.get("EYAS_SCREENSHOTS", tmp_path))
    image = folder / f"report-{width}.png"
    screenshot(report, image, width=width, height=4000, work_dir=tmp_path)
    assert image.read_bytes().startswith(PNG)
    assert image.stat().st_size > 50_000, "more than an empty page"


def test_it_prints(report: Path, tmp_path: Path) -> None:
    document = tmp_path / "report.pdf"
    print_pdf(report, document, work_dir=tmp_path)
    assert document.read_bytes().startswith(b"%PDF")
    assert document.stat().st_size > 100_000


@pytest.mark.parametrize(
    ("body", "messages", "sideways"),
    [
        ('<script>console.error("broken")</script>', ["broken"], False),
        ("<script>missing();</script>", ["missing is not defined"], False),
        ('<div style="width: 900px">wide</div>', [], True),
        ('<div class="scroll" style="overflow-x: auto"><div style="width: 900px">wide</div></div>', [], False),
        ("<p>nothing wrong</p>", [], False),
    ],
)
def test_the_check_itself_finds_what_it_should(body: str, messages: list[str], sideways: bool, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(f'<!doctype html><meta charset="utf-8"><body><p>text</p>{body}</body>', encoding="utf-8")
    look = look_at(page, width=PHONE, work_dir=tmp_path)
    assert len(look.console) == len(messages)
    assert all(expected in found for expected, found in zip(messages, look.console, strict=True))
    assert (look.scroll_width > look.width) == sideways
    assert bool(look.wide) == sideways
