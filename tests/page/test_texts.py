"""The page in Portuguese: one table has every text, and nothing else."""

import re
from collections.abc import Iterator

from safetrain.data.findings import KINDS, ORDER
from safetrain.page.commands import BUTTONS
from safetrain.page.views import HERE, STAGES, Tongue, portuguese
from safetrain.watch.monitor import State
from tests.conftest import ROOT

TEMPLATES = {file.name: file.read_text(encoding="utf-8") for file in (HERE / "templates").glob("*.html")}
# What a template takes from records: states of stages, rows of the monitor, severities, columns, what rows are called
FROM_RECORDS = {
    "up to date", "will run", "checks every time", "done", "waits", "unknown", "next", "doing", "last", "loss", "pairs",
    "speed", "process", "mlx", "batch", "saved", "unread", "rows", "documents", "prompt", "completion", "text",
    "base", "tuned", "running", "failed", *STAGES, *ORDER, *KINDS, *(state.value for state in State),
}  # fmt: skip


def said() -> Iterator[str]:
    """Every text in a template."""
    for text in TEMPLATES.values():
        yield from re.findall(r"\bt\('([^']+)'\)", text)
        yield from re.findall(r"\('\w+', '([A-Z]\w+)'\)", text)  # the sections


def causes() -> set[str]:
    """Every cause of a death."""
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "safetrain/guard").glob("*.py")]
    return set(re.findall(r"Cause\(\s*\"(\w+)\"", "".join(texts)))


def test_the_table_has_every_text_and_no_other() -> None:
    needed = {*said(), *FROM_RECORDS, *causes()}
    assert needed - portuguese().keys() == set()
    assert portuguese().keys() - needed == set()
    assert all(text.strip() for text in portuguese().values())


def test_a_text_is_english_unless_portuguese_is_asked_for() -> None:
    assert [Tongue(language)("Train") for language in ("en", "pt", "de", "")] == ["Train", "Treinar", "Train", "Train"]


def test_no_template_has_a_text_of_its_own() -> None:
    for name, text in TEMPLATES.items():
        bare = re.sub(
            r"(?s)\{[{%#].*?[}%#]\}|<code.*?</code>|<title>.*?</title>|<[^>]*>|safetrain|params\.yaml", " ", text
        )
        assert re.findall(r"[A-Za-z]{3,}", bare) == [], name


def test_every_button_of_a_template_is_one() -> None:
    pressed = {name for text in TEMPLATES.values() for name in re.findall(r"/do/(\w+)|press\(t, '(\w+)'", text)}
    names = {first or second for first, second in pressed}
    assert names - BUTTONS.keys() == {"cancel", "stop"}
    assert BUTTONS.keys() - names == set()
