"""benchmarks/first_contact before there is a GPU: all of it, tiny; a part that takes too long loses itself alone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

PARTS = ("machine", "probe", "selftest", "gradients", "train", "attention", "losses", "kill", "disk", "peer")


def first_contact(*words: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "benchmarks.first_contact", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)


def parts_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "first_contact.json").read_text())["parts"]


def test_all_parts_are_made_and_told_in_numbers_and_on_a_page(tmp_path: Path) -> None:
    assert first_contact(tmp_path, "machine", "--size=tiny").returncode == 0
    hasty = first_contact(tmp_path, "selftest", "--seconds=1")
    assert hasty.returncode == 1
    assert parts_in(tmp_path)["selftest"]["failed"].startswith("not finished after 1 s"), hasty
    kept = parts_in(tmp_path)["machine"]
    done = first_contact(tmp_path)
    assert done.returncode == 0, done
    parts = parts_in(tmp_path)
    assert set(parts) == set(PARTS)
    assert parts["machine"] == kept, "the same command makes what is missing"
    assert "[ok]   gradient" in parts["selftest"]["report"]
    assert parts["kill"]["equal to the bit"] == "True"
    assert 0 < parts["kill"]["continued from step"] < parts["kill"]["of"]
    assert parts["train"]["measured peak, MiB"] <= 1.15 * parts["train"]["predicted peak, MiB"] + 2
    assert parts["losses"]["losses in float32 apart"] < 1e-5
    assert parts["disk"]["ways"][1]["peak, MiB"] < parts["disk"]["ways"][0]["peak, MiB"]
    page = (tmp_path / "first_contact.md").read_text()
    assert "A rehearsal on a CPU" in page
    assert page.count("\n## ") == len(PARTS)
    assert page.count(" | ") > 40


@pytest.mark.parametrize(("words", "told"), [
    ([], "required: out"), (["{}", "gradient"], ", ".join(PARTS)), (["{}", "--size=huge"], "choose from"),
    (["{}", "--sise=tiny"], "--sise=tiny"), (["{}", "--seconds=long"], "--seconds"),
    (["{}/a"], "a cannot be used"),
])  # fmt: skip
def test_a_mistake_is_told(words: list[str], told: str, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("not a folder")
    done = first_contact(*(word.format(tmp_path / "out") for word in words))
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert told in done.stderr
    assert len(list(tmp_path.iterdir())) == 1
