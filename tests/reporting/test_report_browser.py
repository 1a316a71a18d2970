"""The page in a real browser: nothing fails, nothing is fetched, nothing sticks out on a phone."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pospre.reporting.page import write_report
from tests.reporting.fabricated_run import fabricate_run, logistic, write_evaluation

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-dev-shm-usage",  # which containers keep too small
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--enable-logging=stderr", "--virtual-time-budget=10000", "--dump-dom",
]  # fmt: skip

WIDTHS = (390, 1280)
PAPER = {"light": "rgb(247, 246, 242)", "dark": "rgb(17, 23, 27)"}
FRAME = '<iframe style="border:0;width:{width}px;height:900px" srcdoc="{page}"></iframe>'

# Chromium's own window is never narrower than 500 px, so the page sits in frames of the wanted
# widths; srcdoc keeps them of the same origin, so each may be asked about itself.
WRAPPER = """<!doctype html><meta charset="utf-8"><body>
{frames}
<script>
const look = frame => {{
  const page = frame.contentDocument;
  page.querySelectorAll("details").forEach(part => part.open = true);
  const images = [...page.images];
  return {{
    scrollWidth: page.documentElement.scrollWidth,
    innerWidth: frame.contentWindow.innerWidth,
    images: images.length,
    decoded: images.filter(image => image.complete && image.naturalWidth > 0).length,
    requests: frame.contentWindow.performance.getEntriesByType("resource")
      .map(request => request.name.slice(0, 60)),
    heat: [...page.querySelectorAll(".heat td b")].map(cell => cell.textContent),
    charts: [...page.querySelectorAll("#curves .plot svg")]
      .map(svg => svg.getBoundingClientRect().width),
    clipped: [...page.querySelectorAll(".headline dd, .heat td, .bar-value, .chart b")]
      .filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0).map(e => e.textContent),
    title: page.title,
    dead: [...page.querySelectorAll("a[href^='#']")]
      .filter(link => !page.getElementById(link.hash.slice(1))).map(link => link.hash),
    links: page.querySelectorAll("nav a").length,
    paper: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
  }};
}};
window.onload = () => {{
  const out = document.createElement("pre");
  out.id = "found";
  out.textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(look));
  document.body.replaceChildren(out);
}};
</script>
"""


def look_at(page: Path, scheme: str, work: Path) -> tuple[list[dict[str, Any]], str]:
    """Open ``page`` at all ``WIDTHS``; return what was found there and Chromium's own log."""
    wrapper = work / "wrapper.html"
    text = html.escape(page.read_text(encoding="utf-8"))
    frames = "".join(FRAME.format(width=width, page=text) for width in WIDTHS)
    wrapper.write_text(WRAPPER.format(frames=frames), encoding="utf-8")
    options = (
        f"--user-data-dir={work / 'profile'}",
        f"--window-size={max(WIDTHS)},900",
        f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
    )
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, *FLAGS, *options, wrapper.as_uri()],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found[1])), done.stderr


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)")
@pytest.mark.parametrize("scheme", PAPER)
def test_page_in_chromium(tmp_path: Path, scheme: str) -> None:
    name = "<script>console.error('escaped?')</script>_" + "a_very_long_name_" * 6
    folder = fabricate_run(tmp_path, name=name)
    write_evaluation(folder, "logistic", logistic())
    each, log = look_at(write_report(folder), scheme, tmp_path)
    assert "CONSOLE" not in log, log
    for width, found in zip(WIDTHS, each, strict=True):
        assert all(request.startswith("data:") for request in found["requests"])
        assert found["innerWidth"] == width and found["scrollWidth"] <= width
        assert found["images"] == found["decoded"] == 16
        assert found["heat"][0] == "62.0" and len(found["heat"]) == 16
        assert len(found["charts"]) == 6 and min(found["charts"]) > 240
        assert found["clipped"] == []
        assert found["title"].startswith("<script>console.error")
        assert found["dead"] == [] and found["links"] == 7
        assert found["paper"] == PAPER[scheme]
