"""A headless Chromium that opens a page, says what its console said, what overflows and what is hard to read, and takes screenshots.

Chromium has a smallest window width of about 500 pixels, so a page is shown in a frame of the wanted width, as on a phone.
A printer's page is looked at as a screen that obeys the print style: nothing scrolls on paper, so what sticks out is lost.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
CONSOLE = re.compile(r":CONSOLE[:(]\d+[\])]*\s*(.*)")
PROBE = r"""
<script>
addEventListener("load", () => {
  const width = document.documentElement.clientWidth;
  const ancestors = (element) => element ? [element, ...ancestors(element.parentElement)] : [];
  const scrolls = (element) => ["auto", "scroll"].includes(getComputedStyle(element).overflowX);
  const sticksOut = (element) =>
    !ancestors(element.parentElement).some(scrolls) && element.getBoundingClientRect().right > width + 1;
  const shape = (element) => { const box = element.getBoundingClientRect(); return box.height / box.width; };
  const squeezed = (element) => element.textContent.length > 20 && shape(element) > 2;
  const fontOf = (element) => parseFloat(getComputedStyle(element).fontSize);
  const scaleOf = (element) => { const matrix = element.getScreenCTM(); return Math.hypot(matrix.a, matrix.b); };
  const numbers = (colour) => colour.match(/[\d.]+/g).map(Number);
  const light = (colour) => numbers(colour).slice(0, 3)
    .map((part) => part / 255).map((part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (element) => ancestors(element).map((each) => getComputedStyle(each).backgroundColor)
    .find((colour) => (numbers(colour)[3] ?? 1) > 0) ?? "rgb(255, 255, 255)";
  const contrast = (element) => {
    const pair = [light(getComputedStyle(element).color), light(behind(element))].sort((a, b) => b - a);
    return (pair[0] + 0.05) / (pair[1] + 0.05);
  };
  const named = (element) => element.tagName + "." + element.getAttribute("class") + " " + element.textContent.slice(0, 30);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const words = all("h1, h2, h3, p, li, td, th, figcaption, nav a, code");
  parent.postMessage(JSON.stringify({
    width, scroll_width: document.documentElement.scrollWidth, height: document.documentElement.scrollHeight,
    wide: all("body *").filter(sticksOut).map(named).slice(0, 5),
    faint: words.filter((element) => contrast(element) < 4.5).map(named).slice(0, 5),
    smallest_font: Math.min(...all("p, li, td, th, figcaption").map(fontOf)),
    smallest_figure_font: Math.min(...all("svg text").map((element) => fontOf(element) * scaleOf(element)), 99),
    squeezed: all("td:not(.n)").filter(squeezed).map(named).slice(0, 5),
    spilling: all("td, th").filter((element) => element.scrollWidth > element.clientWidth + 1).map(named).slice(0, 5),
    figures: all("figure svg").length,
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
  }), "*");
});
</script>
"""
WRAPPER = """<!doctype html><meta charset="utf-8"><style>body {{ margin: 0; }} iframe {{ border: 0; display: block; }}</style>
<title>waiting</title><iframe src="{source}" width="{width}" height="{height}"></iframe>
<pre id="probe"></pre>
<script>addEventListener("message", (event) => {{ document.getElementById("probe").textContent = event.data; }});</script>
"""


@dataclass(frozen=True)
class Look:
    """What a browser found. Lengths are CSS pixels as seen, also in figures, which are shrunk to the width.

    `console`: every message of the page. `wide`: elements that stick out to the right. `faint`: text whose contrast to what
    is behind it is below 4.5 (WCAG 2.1, AA). `squeezed`: words in a table whose column is much too narrow. `spilling`:
    cells whose words run into the next. `dark`: whether the page was asked to be dark.
    """

    width: int
    scroll_width: int
    height: int
    wide: list[str]
    faint: list[str]
    squeezed: list[str]
    spilling: list[str]
    smallest_font: float
    smallest_figure_font: float
    figures: int
    dark: bool
    console: list[str]


def look_at(page: Path, *, width: int, work_dir: Path, dark: bool = False, printed: bool = False) -> Look:
    """Open `page` in a frame of `width` pixels. `work_dir` takes copies and the browser's profile.

    Args:
        dark: the reader prefers dark pages. printed: obey the print style.
    """
    copy = work_dir / "probed.html"
    copy.write_text(_styled(page, printed=printed) + PROBE, encoding="utf-8")
    wrapper = _wrapper(copy, width=width, height=900, work_dir=work_dir)
    done = _chromium(wrapper, "--dump-dom", *_scheme(dark), work_dir=work_dir)
    found = re.search(r'<pre id="probe">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, f"the page did not report itself:\n{done.stderr[-2000:]}"
    console = [match[1] for line in done.stderr.splitlines() if (match := CONSOLE.search(line))]
    return Look(**json.loads(html.unescape(found[1])), console=console)


def screenshot(page: Path, image: Path, *, width: int, height: int, work_dir: Path, dark: bool = False) -> None:
    """A PNG of the first `height` pixels of the page at `width`."""
    wrapper = _wrapper(page, width=width, height=height, work_dir=work_dir)
    size = f"--window-size={max(width, 500)},{height}"
    _chromium(wrapper, f"--screenshot={image}", size, *_scheme(dark), work_dir=work_dir)


def print_pdf(page: Path, document: Path, *, work_dir: Path) -> None:
    """The page as it prints."""
    _chromium(page, f"--print-to-pdf={document}", "--no-pdf-header-footer", work_dir=work_dir)


def _styled(page: Path, *, printed: bool) -> str:
    """The page's text, with its print style in force when `printed`."""
    text = page.read_text(encoding="utf-8")
    assert not printed or "@media print" in text, f"{page} has a print style"
    return text.replace("@media print", "@media all") if printed else text


def _scheme(dark: bool) -> list[str]:
    return [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]


def _wrapper(page: Path, *, width: int, height: int, work_dir: Path) -> Path:
    wrapper = work_dir / "wrapper.html"
    wrapper.write_text(WRAPPER.format(source=page.as_uri(), width=width, height=height), encoding="utf-8")
    return wrapper


def _chromium(page: Path, *arguments: str, work_dir: Path) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    command = [
        *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
        *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--enable-logging=stderr"),
        *(f"--user-data-dir={work_dir / 'profile'}", "--virtual-time-budget=5000", *arguments, page.as_uri()),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
