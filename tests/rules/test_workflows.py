"""The workflows run the tests on every system, with pinned actions and the right to read alone."""

import re
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+")


def jobs(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load(text)["jobs"].values())


def test_each_system_of_the_readme_is_tested() -> None:
    (job,) = jobs((ROOT / ".github" / "workflows" / "test.yml").read_text())
    assert job["strategy"]["matrix"]["system"] == ["ubuntu-24.04", "ubuntu-24.04-arm", "macos-15"]
    assert job["runs-on"] == "${{ matrix.system }}"
    assert "make test" in [step.get("run") for step in job["steps"]]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_and_may_only_read(path: Any) -> None:
    text = path.read_text(encoding="utf-8")
    used = [line.partition("uses:")[2].strip() for line in text.splitlines() if "uses:" in line]
    assert used
    assert all(PINNED.fullmatch(action) for action in used), used
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] for job in jobs(text))
