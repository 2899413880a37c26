"""Every file and function that docs/architecture.md names exists."""

import ast
import re

import pytest

from tests.conftest import ROOT

TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FILES = sorted(set(re.findall(r"`((?:safetrain|stages|tests|benchmarks)/[\w/]+(?:\.py)?)`", TEXT)))
NAMED = sorted(set(re.findall(r"`((?:safetrain|stages)/[\w/]+\.py)`((?:,? `\w+`)+)", TEXT)))


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
    missing = set(re.findall(r"\w+", names)) - defined(file)
    assert not missing, f"{file} has no {', '.join(sorted(missing))}"


def test_the_four_ways_are_there() -> None:
    assert len(NAMED) >= 30
