"""The self-test passes on what is right and fails on what is wrong; --report prints one screen, without names."""

import os
import platform
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.errors import MachineError
from safetrain.plan.selftest import judge, report_lines, selftest
from tests.conftest import ROOT

LABELS = ["system", "versions", "device", "training"]


def command(*words: str) -> str:
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def labels(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines if line[0] not in " `" and not line.startswith("safetrain ")]


def test_a_wrong_gradient_fails() -> None:
    found = {
        "in_float32": True, "on_cpu": True, "loss_difference": 1e-7, "gradient_difference": 0.2, "packs_rows": True,
        "layers_with_adapter": 2, "step_seconds": 1.0, "tokens_per_second": 1.0, "peak_memory_bytes": 1,
    }  # fmt: skip
    assert [name for name, _, passed in judge(found) if not passed] == ["gradient"]


def test_the_command_says_what_it_found() -> None:
    said = command("selftest")
    assert said.count("[ok]") == 5
    assert said.endswith("the self-test passed\n")


def test_the_report_is_one_screen_without_names() -> None:
    said = command("selftest", "--report")
    lines = said.splitlines()
    assert lines[0] == lines[-1] == "```"
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert labels(lines) == LABELS
    assert "FAILED" not in said
    assert float(said.partition("within ")[2].split()[0]) < 1e-5  # of mlx-lm's own loss and gradient
    for name in (str(Path.home()), str(ROOT), platform.node(), sys.prefix):
        assert name not in said


def test_a_child_that_dies_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dying_child.py").write_text(
        "import os, sys\n"
        "print('a banner', flush=True)\n"
        "if len(sys.argv) > 1: raise OSError(f'{os.getcwd()}/secret is missing')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(MachineError, match="did not finish"):
        selftest("dying_child", tmp_path / "nowhere")
    lines = list(report_lines("dying_child", tmp_path))
    assert labels(lines) == LABELS
    assert "device     FAILED: the answer cannot be read" in lines
    text = "\n".join(lines)
    assert "FAILED: exit code 1: OSError\n" in text
    assert "secret" not in text
    assert "banner" not in text
