"""The report in a real browser: a silent console, nothing sideways on a phone or on paper, all text large and strong enough.

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
PAPER = 717
"""A4 without Chromium's margins of 1 cm, in CSS pixels."""
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def report(full_session: Path) -> Path:
    return full_session / "report.html"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_page_fits_and_its_console_is_silent(report: Path, width: int, dark: bool, tmp_path: Path) -> None:
    look = look_at(report, width=width, dark=dark, work_dir=tmp_path)
    assert look.console == []
    assert look.wide == []
    assert look.faint == []
    assert look.dark == dark
    assert look.scroll_width <= look.width == width
    assert look.smallest_font >= 12
    assert look.smallest_figure_font >= 10
    assert look.squeezed == []
    assert look.spilling == []
    assert look.figures >= 10


@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_lost_or_faint_on_paper(report: Path, dark: bool, tmp_path: Path) -> None:
    look = look_at(report, width=PAPER, printed=True, dark=dark, work_dir=tmp_path)
    assert look.wide == []
    assert look.spilling == []
    assert look.faint == []
    assert look.smallest_font >= 8
    assert look.smallest_figure_font >= 8


@pytest.mark.parametrize(("width", "dark"), [(PHONE, False), (DESKTOP, False), (DESKTOP, True)])
def test_screenshots(report: Path, width: int, dark: bool, tmp_path: Path) -> None:
    folder = Path(os.environ.get("EYAS_SCREENSHOTS", tmp_path))
    image = folder / f"report-{width}{'-dark' if dark else ''}.png"
    screenshot(report, image, width=width, height=4000, dark=dark, work_dir=tmp_path)
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


@pytest.mark.parametrize(
    ("body", "figure_font", "faint", "printed_wide"),
    [
        (
            '<svg viewBox="0 0 600 100" width="300"><text y="50" style="font: 20px sans-serif">a</text></svg>',
            10,
            0,
            False,
        ),
        ('<p style="color: #999">grey on white</p>', 99, 1, False),
        ('<div style="background: #222"><p style="color: #eee">light on dark</p></div>', 99, 0, False),
        ('<div class="scroll"><table style="width: 900px"><tr><td>wide</table></div>', 99, 0, True),
    ],
)
def test_the_check_itself_sees_small_faint_and_cut_text(
    body: str, figure_font: float, faint: int, printed_wide: bool, tmp_path: Path
) -> None:
    style = "body { margin: 0; background: #fff; } .scroll { overflow-x: auto; } @media print { .scroll { overflow: visible; } }"
    page = tmp_path / "page.html"
    page.write_text(f'<!doctype html><meta charset="utf-8"><style>{style}</style><body><p>text</p>{body}</body>')
    look = look_at(page, width=PHONE, work_dir=tmp_path)
    assert look.smallest_figure_font == pytest.approx(figure_font, abs=0.1)
    assert len(look.faint) == faint
    assert look.wide == []
    assert bool(look_at(page, width=PHONE, printed=True, work_dir=tmp_path).wide) == printed_wide
