"""`safetrain selftest --report` prints one screen to paste: its figures, no names, whatever a section does."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from safetrain.plan.report import report_lines, without_names
from tests.conftest import ROOT

LABELS = ["system", "versions", "memory", "device", "product", "attention", "update", "files"]


def labels(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines if line[0] not in " `" and not line.startswith("safetrain ")]


def test_the_command_prints_one_screen_without_names() -> None:
    command = [sys.executable, "-m", "safetrain.cli", "selftest", "--report"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    lines = done.stdout.splitlines()
    assert lines[0] == lines[-1] == "```"
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert labels(lines) == LABELS
    assert "FAILED" not in done.stdout
    for way in ("safetrain forward", "safetrain gradient", "mx.fast forward", "mx.fast gradient"):
        assert f"{way}: " in done.stdout
    for name in (str(Path.home()), str(ROOT), platform.node(), sys.prefix):
        assert name not in done.stdout


def test_a_section_that_dies_says_so_and_the_others_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dying_child.py").write_text(
        "import os, sys\n"
        "section = sys.argv[1] if len(sys.argv) > 1 else 'device'\n"
        "print(f'a banner\\n{section}\\t12.3 ms', flush=True)\n"
        "if section == 'attention': os.kill(os.getpid(), 9)\n"
        "if section == 'update': raise OSError(f'{os.getcwd()}/secret is missing')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    lines = list(report_lines("dying_child", "dying_child"))
    assert labels(lines) == LABELS
    assert "device     FAILED: the answer cannot be read" in lines
    assert "product    12.3 ms" in lines
    assert lines[lines.index("attention  12.3 ms") + 1] == "           FAILED: killed by signal 9"
    text = " ".join(" ".join(lines).split())
    assert "FAILED: exit code 1: OSError: (left out, it may name a path)" in text
    assert "secret" not in text
    assert "banner" not in text


def test_what_mlx_says_is_pasted_unless_it_names_a_path() -> None:
    said = "exit code 1: RuntimeError: [metal::malloc] no memory"
    assert without_names(f"{said} (traceback: {Path.home()}/log.txt)") == said
    assert Path.home().name not in without_names(f"exit code 1: ValueError: {Path.home().name} may not")
    assert without_names("exit code 1: /opt/x: cannot open: 3") == "exit code 1: (left out, it may name a path)"
