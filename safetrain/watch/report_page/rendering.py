"""Writes a page: one HTML file that loads nothing and runs nothing, with everything in it escaped."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetrain.core.storage.files import write_text
from safetrain.watch.report_page.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from safetrain.watch.report_page.page import page_of
from safetrain.watch.report_page.run_records import WholeRun
from safetrain.watch.report_page.shown import AbsentPart, ComparePage, ReportPage

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"
# Controls, writing directions, halves of pairs, tags: what is not seen, or moves or hides what is.
HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"
)


def render(page: ReportPage | ComparePage) -> str:
    """The page as HTML."""
    name = "report.html" if isinstance(page, ReportPage) else "compare.html"
    text = _environment().get_template(name).render(page=page, size=_SIZE)
    return re.sub(r"\n\s*\n+", "\n", text)


def write_report(records: WholeRun, path: Path) -> None:
    """The page about a run, whole or not at all. The same records give the same bytes."""
    write_text(path, render(page_of(records)))


def visible(text: str) -> str:
    """``text`` with what cannot be seen spelled: ``\\u202e``."""
    return HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)


def _finalize(value: Any) -> Any:
    """Applied by jinja to whatever a template writes, before it is escaped."""
    return visible(value) if type(value) is str else value


_SIZE = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "top": TOP, "bottom": HEIGHT - BOTTOM}


def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.tests["absent"] = lambda part: isinstance(part, AbsentPart)
    return made
