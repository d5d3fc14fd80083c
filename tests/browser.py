"""A headless Chromium that opens a page, says what its console said and whether it overflows, and takes screenshots.

Chromium has a smallest window width of about 500 pixels, so a page is shown in a frame of the wanted width, as on a phone.
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
PROBE = """
<script>
addEventListener("load", () => {
  const width = document.documentElement.clientWidth;
  const inScrollBox = (element) => element.closest(".scroll") !== null && !element.matches(".scroll");
  const sticksOut = (element) => !inScrollBox(element) && element.getBoundingClientRect().right > width + 1;
  const wide = [...document.body.querySelectorAll("*")].filter(sticksOut);
  const smallest = Math.min(...[...document.querySelectorAll("p, li, td, th, figcaption")].map(
    (element) => parseFloat(getComputedStyle(element).fontSize)));
  parent.postMessage(JSON.stringify({
    width, scrollWidth: document.documentElement.scrollWidth, height: document.documentElement.scrollHeight,
    wide: wide.map((element) => element.tagName + "." + element.className).slice(0, 5),
    smallestFont: smallest, figures: document.querySelectorAll("figure svg").length,
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
    """What a browser found. Lengths are CSS pixels; `console`: every message of the page; `wide`: elements that stick out."""

    width: int
    scroll_width: int
    height: int
    wide: list[str]
    smallest_font: float
    figures: int
    console: list[str]


def look_at(page: Path, *, width: int, work_dir: Path) -> Look:
    """Open `page` in a frame of `width` pixels. `work_dir` takes copies and the browser's profile."""
    copy = work_dir / "probed.html"
    copy.write_text(page.read_text(encoding="utf-8") + PROBE, encoding="utf-8")
    done = _chromium(_wrapper(copy, width=width, height=900, work_dir=work_dir), "--dump-dom", work_dir=work_dir)
    found = re.search(r'<pre id="probe">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, f"the page did not report itself:\n{done.stderr[-2000:]}"
    facts = json.loads(html.unescape(found[1]))
    console = [match[1] for line in done.stderr.splitlines() if (match := CONSOLE.search(line))]
    return Look(
        width=facts["width"],
        scroll_width=facts["scrollWidth"],
        height=facts["height"],
        wide=facts["wide"],
        smallest_font=facts["smallestFont"],
        figures=facts["figures"],
        console=console,
    )


def screenshot(page: Path, image: Path, *, width: int, height: int, work_dir: Path) -> None:
    """A PNG of the first `height` pixels of the page at `width`."""
    wrapper = _wrapper(page, width=width, height=height, work_dir=work_dir)
    _chromium(wrapper, f"--screenshot={image}", f"--window-size={max(width, 500)},{height}", work_dir=work_dir)


def print_pdf(page: Path, document: Path, *, work_dir: Path) -> None:
    """The page as it prints."""
    _chromium(page, f"--print-to-pdf={document}", "--no-pdf-header-footer", work_dir=work_dir)


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
