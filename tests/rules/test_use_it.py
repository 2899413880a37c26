"""The commands of docs/use_it.md, as far as they can be run here; other tests run those that open a model."""

import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

from safetrain.cli import app
from tests.conftest import ROOT

TEXT = (ROOT / "docs" / "use_it.md").read_text(encoding="utf-8")
SHELL = [
    part.strip()
    for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
    for part in re.split(r"&&|\|", line)
]
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
NOT_HERE = {"lms", "ollama", "llama-cli", "llama-server", "mkdir", "cp", "printf"}  # asked for help where they are


@pytest.mark.parametrize("line", sorted({line for line in SHELL if line.startswith("safetrain ")}))
def test_a_command_of_ours_takes_what_is_written(line: str) -> None:
    words = shlex.split(line.partition(">")[0])[1:]
    group = typer.main.get_command(app)
    context = typer.Context(group)
    command = group.get_command(context, words[0])  # type: ignore[attr-defined]
    if command is None and words[0] == "export":
        pytest.skip("this version has no export")
    assert command is not None
    while hasattr(command, "get_command"):
        words = words[1:]
        command = command.get_command(context, words[0])
        assert command is not None
    command.make_context(words[0], words[1:], resilient_parsing=False)


@pytest.mark.parametrize("line", sorted({line for line in SHELL if line.startswith("hf ")}))
def test_the_hub_s_own_command_takes_what_is_written(line: str) -> None:
    words = shlex.split(line)
    command = [str(Path(sys.executable).with_name("hf")), *(word for word in words[1:3] if word.islower()), "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert all(option in told for option in words if option.startswith("--"))


def test_every_other_command_is_known_here_or_somebody_else_s() -> None:
    others = {shlex.split(line)[0] for line in SHELL} - {"safetrain", "hf"}
    assert {name for name in others if name not in NOT_HERE and not find_spec(name.partition(".")[0])} == set()
    for name in sorted(NOT_HERE - {"printf"}):
        if shutil.which(name):
            subprocess.run([name, "--help"], capture_output=True, check=True)


@pytest.mark.parametrize("code", PYTHON)
def test_the_python_can_be_read(code: str) -> None:
    compile(code, "use_it.md", "exec")
