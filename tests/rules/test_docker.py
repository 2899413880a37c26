"""docker build sends the program's files, and none of a person's, by the rules of .dockerignore."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.rules.test_size import tracked

INSTALLED_BY = ("pyproject.toml", "README.md", "LICENSE", "constraints.txt")


def is_sent(path: str) -> bool:
    """The last rule that matches the path or a folder it is in decides, as Docker reads the file."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        rule = line.strip().removeprefix("!")
        if rule and not rule.startswith("#") and re.fullmatch(f"{_expression(rule)}(/.*)?", path):
            sent = line.startswith("!")
    return sent


def _expression(rule: str) -> str:
    parts = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(parts.get(part, re.escape(part)) for part in re.split(r"(\*\*/|\*\*|\*|\?)", rule))


@pytest.mark.parametrize("path", [
    "data/mine.jsonl", "data/mine/train.jsonl", "data/example/mine.jsonl", "models/mine/x", "models/mine.zip", ".env",
    "checkpoints_qlora/x", "fused/model.safetensors", "bug.zip", "mine.csv", "notebooks/mine.ipynb", ".netrc",
    "safetrain/.env", "safetrain/__pycache__/a.pyc", ".git/config", ".venv/bin/python",
    ".dvc/config.local", ".dvc/cache/1",
])  # fmt: skip
def test_what_is_a_person_s_stays_out_of_the_image(path: str) -> None:
    assert not is_sent(path)


def test_all_that_pip_installs_is_in_the_image() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    wanted = [*INSTALLED_BY]
    for package in tool["packages"]:
        folder = Path(tool["package-dir"].get(package, package.replace(".", "/")))
        patterns = tool["package-data"].get(package, [])
        of_package = [] if folder == Path() else [file.name for file in (ROOT / folder).glob("*.py")]
        wanted += [str(folder / name) for name in of_package]
        for pattern in patterns:
            found = [str(file.relative_to(ROOT)) for file in (ROOT / folder).glob(pattern)]
            assert found, pattern
            wanted += found
    owned = {str(path.relative_to(ROOT)) for path in tracked(".", ends="")}
    assert not [path for path in wanted if path in owned and not is_sent(path)]
    assert len(owned & set(wanted)) > 100
