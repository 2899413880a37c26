"""Draws the sections of the page for docs/page.md, in headless Chromium: from a file with faults to a result.

python -m benchmarks.page_pictures [FOLDER]    # FOLDER: every section in both themes, 360 and 1,280 pixels wide
"""

import base64
import os
import re
import sys
import tempfile
from pathlib import Path

from tests.page.opened import opened
from tests.page.test_journey import FAULTS, NARROW, ROWS, WIDE, Browser
from tests.support.chaos.project import wait_for

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
HEIGHTS = {"data": 760, "plan": 760, "run": 620, "result": 860}
TOP = "const each = document.getElementById('{}').getBoundingClientRect(); return [each.top + scrollY, each.height]"


def main() -> None:
    """Go through a project once, and draw each section where it has something to show."""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ |= {"SAFETRAIN_LOCK_DIR": scratch, "SAFETRAIN_CACHE_DIR": f"{scratch}/cache"}
        Path(scratch, "cache").mkdir()
        with opened(Path(scratch)) as page:
            browser = Browser(page)
            rows = Path(scratch, "sums.csv")
            rows.write_text(f"prompt,completion\n{ROWS}{FAULTS}", encoding="utf-8")
            browser.driver.find_element("id", "file").send_keys(str(rows))
            browser.wait("data", "MOJIBAKE")
            draw(browser, "data")
            browser.press("plan", "Plan")
            browser.wait("plan", "predicted peak")
            draw(browser, "plan", "model", "stages")
            browser.press("run", "Train")
            wait_for(lambda: re.match(r"step \d{3} .* left", browser.text("places")) is not None, "a curve", 120)
            draw(browser, "run")
            browser.wait("result", "Back to this run", 200)
            browser.type("question", "Qual é a capital do Brasil?")
            browser.press("result", "Ask")
            browser.wait("answers", "tuned\n")
            draw(browser, "result")


def draw(browser: Browser, *sections: str) -> None:
    """Draw sections as they are now, without the message of the last command."""
    browser.driver.execute_script("document.getElementById('said').replaceChildren()")
    for section in sections:
        if section in HEIGHTS:
            _draw(browser, section, PICTURES / f"page_{section}_{WIDE}.png", WIDE, "light", HEIGHTS[section])
        for folder in map(Path, sys.argv[1:2]):
            for width, theme in ((width, theme) for width in (NARROW, WIDE) for theme in ("light", "dark")):
                _draw(browser, section, folder / f"{section}_{width}_{theme}.png", width, theme, 4000)


def _draw(browser: Browser, section: str, file: Path, width: int, theme: str, most: int) -> None:
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.resize(width)
    top, height = browser.driver.execute_script(TOP.format(section))
    clip = {"x": 0, "y": max(0, top - 8), "width": width, "height": min(height + 16, most), "scale": 1}
    found = browser.driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
    file.write_bytes(base64.b64decode(found["data"]))


if __name__ == "__main__":
    main()
