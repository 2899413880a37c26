"""README and docs: links lead somewhere, quoted words are the program's, what they name exists."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from safetrain.core.storage import paths
from safetrain.data.findings import KINDS
from tests.conftest import ROOT
from tests.core.readings import READINGS
from tests.rules.imports import python_files
from tests.support.documented import Block, all_blocks, headings, links, pages, target_of
from tools import reference

PAGES = pages()
LANGUAGES = {"sh", "bash", "text", "python", "json", "yaml", "jinja"}
SAID = [
    block
    for block in all_blocks()
    if block.language == "text" and block.page.startswith(("docs/trouble", "docs/how_to"))
]
LABEL = re.compile(r"(error: |note: |warning: | *(what|where|do|expected|got|because|advice): +)")


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(page: str) -> None:
    for path, anchor in links(PAGES[page]):
        target = target_of(page, path)
        assert target.exists(), path
        if anchor and target.suffix == ".md":
            assert anchor in headings(target.read_text(encoding="utf-8")), f"{path}#{anchor}"


def test_the_committed_reference_is_that_of_the_code() -> None:
    for name, text in reference.pages().items():
        found = (reference.FOLDER / name).read_text(encoding="utf-8")
        assert found == text, f"docs/reference/{name} is out of date: run python -m tools.reference"


def test_every_page_is_in_the_navigation_and_every_trouble_on_the_first_pages() -> None:
    configured = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    listed = set(_names(configured))
    assert listed == {page.removeprefix("docs/") for page in PAGES if page != "README.md"}
    first, readme = dict(links(PAGES["docs/index.md"])), dict(links(PAGES["README.md"]))
    for page in listed:
        if page.startswith(("trouble/", "how_to/")):
            assert page in first
        if page.startswith("trouble/"):
            assert f"docs/{page}" in readme


def _names(entry: Any) -> list[str]:
    """The files of a navigation."""
    if isinstance(entry, str):
        return [entry]
    inside = entry.values() if isinstance(entry, dict) else entry
    return [name for each in inside for name in _names(each)]


def test_a_block_of_code_says_what_it_is() -> None:
    assert [f"{block.page}:{block.line}" for block in all_blocks() if block.language not in LANGUAGES] == []


@cache
def _said_by_the_program() -> str:
    """Every text in the code, a line each, with … for what is filled in."""
    found = [re.sub(r"\$\{?\w+\}?", "…", (ROOT / "tools" / "setup.sh").read_text(encoding="utf-8"))]
    for file in [*python_files("safetrain"), *python_files("stages")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


@pytest.mark.parametrize("block", SAID, ids=lambda block: f"{block.page}:{block.line}")
def test_quoted_words_are_the_program_s(block: Block) -> None:
    for line in block.text.splitlines():
        words = LABEL.sub("", line).strip()
        assert words in _said_by_the_program(), words


def test_every_file_that_the_pipeline_writes_is_in_the_table_of_files() -> None:
    told = PAGES["docs/reference/files.md"]
    names = {value.name for value in vars(paths).values() if isinstance(value, Path)}
    names |= {paths.POINTER, paths.BAD_UPDATES, paths.FLIGHT, paths.POSTMORTEM, paths.LADDER}
    names |= {paths.STACKS, paths.ERROR}
    assert {name for name in names if name not in told} == set()


def test_the_page_of_findings_has_their_severities() -> None:
    text = PAGES["docs/data.md"]
    told = re.findall(r"^### (\S+)\n\n\*(\w+)\*", text, re.M)
    assert dict(told) == {name: kind.severity for name, kind in KINDS.items()}
    always = next(part for part in text.split("\n\n") if "always stay errors" in part)
    assert {name for name in KINDS if re.search(rf"\b{name}\b", always)} == {n for n in KINDS if KINDS[n].fixed}


def test_the_first_screen_of_readme_stays_one() -> None:
    lines = PAGES["README.md"].splitlines()
    assert len(lines) <= 110
    assert "not yet run it on Metal or CUDA" in "\n".join(lines[:40])


TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FILES = sorted(set(re.findall(r"`((?:safetrain|stages|tests|benchmarks)/[\w/]+(?:\.py)?)`", TEXT)))
NAMED = sorted(set(re.findall(r"`((?:safetrain|stages)/[\w/]+\.py)`((?:,?(?: and)? `\w+`)+)", TEXT)))


def defined(file: str) -> set[str]:
    """Functions, classes and constants of a file."""
    names = set[str]()
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_named_exists(file: str) -> None:
    assert (ROOT / file).exists()


@pytest.mark.parametrize(("file", "names"), NAMED)
def test_a_function_that_is_named_exists(file: str, names: str) -> None:
    missing = set(re.findall(r"`(\w+)`", names)) - defined(file)
    assert not missing, f"{file} has no {', '.join(sorted(missing))}"


def test_the_readings_that_the_budgets_of_macs_and_gpus_rest_on_are_counted_right() -> None:
    backends = [reading.backend for reading in READINGS]
    text = (ROOT / "docs/platforms.md").read_text(encoding="utf-8")
    assert f"{backends.count('metal')} published readings" in text
    assert f"published for {backends.count('cuda')} GPUs" in text
