"""Every command that the program prints for a person to type is understood, and is there to be typed.

In a project of an installed program, `safetrain` alone is on the PATH: no other program of its environment, and no
package stages. A value that only a run knows is a path with a space here, so that a missing quote is found.
"""

import ast
import builtins
import importlib
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import typer
from hydra import compose, initialize_config_dir

from safetrain.cli import app
from safetrain.stage import to_pipeline
from tests.conftest import ROOT
from tests.support.documented import commands_in
from tests.test_documented_commands import understood

SYSTEM = {"cd", "cp", "du", "git", "kill"}  # present wherever the message is printed
# Other programs, by the file that names them: why they are there, or why the message is right without.
ELSEWHERE = {
    ("safetrain/plan/check_report.py", "make"): "after the words 'in a clone'",
    ("safetrain/export/gguf_export.py", "brew"): "one of two ways to llama.cpp, which is no Python package",
    ("safetrain/watch/templates/uses.txt", "llama-cli"): "only llama.cpp and programs made from it read a GGUF file",
    ("safetrain/watch/templates/uses.txt", "ollama"): "only llama.cpp and programs made from it read a GGUF file",
    ("safetrain/watch/templates/uses.txt", "mlx_lm.generate"): "for readers on the Hub too, who have mlx-lm",
    ("safetrain/watch/templates/card.md", "mlx_lm.generate"): "for readers on the Hub, who have mlx-lm",
    ("safetrain/watch/result.py", "source"): "only in a folder that has .venv/bin/activate",
    ("stages/__init__.py", "source"): "only a clone has the package stages",
    ("safetrain/guard/keep_going.py", "dvc"): "only in a run that was started with it",
    ("safetrain/project.py", "dvc"): "a comment in .gitignore, for people who have DVC",
    ("safetrain/project.py", "python"): "never printed: a line of the clone's dvc.yaml that init replaces",
}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PROGRAM = r"safetrain(?! my )|(?:/\S+/)?python[\d.]*(?= -m )|pip3?|uv|dvc|hf|wandb|mlx(?:_lm)?\.\w+|brew|source|" \
          r"o?llama[-\w]*|ulimit(?= -)|git|(?:kill|cp|du)(?= [-/\d])|make(?= (?:[A-Z]|clean|docs|setup))"  # fmt: skip
PROSE = "adds|again|an?|and|are|as|at|before|brings|by|cannot|can|convert|ended|for|has|have|in|is|its?|keeps|lists|" \
        "needs|on|once|or|project|repairs|runs(?= )|shows|split|so|then|to|updates|with|writes|you"  # fmt: skip
PLAIN = r"""(?:[,;:.)](?=[^\s'`",;:.)])|[^\s,;:.()'"`<|])+"""
ARGUMENT = rf""" (?!(?:{PROSE})\b(?![-/=]|\.\w)|[#→\[])(?:'[^'\n]*'|"[^"\n]*"|{PLAIN})"""
COMMAND = re.compile(rf"(?<![\w./-])(?:{PROGRAM})(?:{ARGUMENT})+")
VALUE = r"""(?!my\b|\{my\b)(?:\{[^}]*\}|\[[^\]]*\]|"[^"]*"|[^\s,;:)'`"]+)"""
SECTIONS = "model|data|train|lora|evaluate|gate|preflight|watch"
KEY = re.compile(rf"(?<![\w./-])(?:(?:{SECTIONS})\.\w+={VALUE}|experiment=(?!NAME|mine|null)\w+)")
NAMED = {  # values that are no path
    "path": "owner/name", "hub_id": "owner/name", "source": "hub:owner/name", "stage": "train", "question": "Why?",
    "change": "train.seed=7", "command": "safetrain run", "killed": "safetrain run", "left[0].pid": "7",
    "process.pid": "7", "shlex.join(words)": "train.seed=7", "' '.join(words)": "status", "command[1]": "train",
    "module": "pip", "first": "", "which": "mlx",
}  # fmt: skip
PATH, QUOTES = "my models/one", ("override(", "run_again(", "shlex.", "with_python(")  # calls that quote for a shell


class Known(dict[str, Any]):  # the names of a module; one that only a function knows is a path
    def __missing__(self, name: str) -> str:
        if hasattr(builtins, name):
            raise KeyError(name)
        return NAMED.get(name, PATH)


def filled(node: ast.expr, known: Known) -> str:
    """An f-string, or a value in it: constants and what quotes for the shell as they are, the rest as a path."""
    if isinstance(node, ast.JoinedStr):
        return "".join(filled(part, known) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return filled(node.value, known)
    written = ast.unparse(node)
    quotes = written.startswith(QUOTES)
    if written not in NAMED and (quotes or isinstance(node, ast.Constant | ast.Name | ast.Attribute)):
        with suppress(Exception):
            return str(eval(written, {}, known))
    return NAMED.get(written, f"'{PATH}'" if quotes else PATH)


@cache
def texts() -> list[tuple[str, str]]:
    """Each text that may be printed, with its file: strings of the code, templates and help."""
    found = [("safetrain/cli.py", text) for text in helps(typer.main.get_command(app))]
    pages = sorted((ROOT / "safetrain").rglob("templates/*.*"))
    found += [(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in pages]
    for path in sorted([*(ROOT / "safetrain").rglob("*.py"), *(ROOT / "stages").rglob("*.py")]):
        place, nodes = path.relative_to(ROOT).as_posix(), list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        module = place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        known = Known(vars(importlib.import_module(module)))
        unsaid = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        joined = [node for node in nodes if isinstance(node, ast.JoinedStr)]
        unsaid |= {id(part) for node in joined for part in ast.walk(node) if part is not node}
        strings = [node for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in unsaid]
        found += [(place, filled(node, known)) for node in strings]
    return found


def helps(command: Any) -> Iterator[str]:
    """What --help prints, of a command and those below it."""
    yield from (each.help or "" for each in (command, *command.params) if hasattr(each, "help"))
    for below in getattr(command, "commands", {}).values():
        yield from helps(below)


def printed() -> list[tuple[str, tuple[str, ...]]]:
    """Every command to type, with its file."""
    lines = dict.fromkeys((place, match[0]) for place, text in texts() for match in COMMAND.finditer(text))
    return [(place, command.words) for place, line in lines for command in commands_in(line, place)]


def require_there(place: str, words: tuple[str, ...]) -> None:
    """Fails where a command cannot be typed where it is printed."""
    assert not any(word.endswith("my") for word in words), "a value is not quoted"
    if (program := words[0]) == sys.executable and words[2] not in EXTRAS:
        understood([*(["dvc"] if words[2] == "dvc" else ["python", "-m", words[2]]), *words[3:]])
    elif program in ("safetrain", "make"):
        understood(list(words))
    assert words != ("make",), "it installs the backend of another machine"
    assert {program, (place, program)} & {"safetrain", sys.executable, *SYSTEM, *ELSEWHERE}, "it need not be there"


def test_every_command_is_understood_and_there() -> None:
    faults = list[str]()
    for place, words in (found := printed()):
        try:
            require_there(place, words)
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001
            faults.append(f"{place}: {shlex.join(words)}: {error}")
    assert not faults, "\n".join([f"{len(found)} commands", *faults])
    assert len(found) > 90
    assert ELSEWHERE.keys() <= {(place, words[0]) for place, words in found}, "no message names this any more"


def test_every_key_and_value_can_be_set() -> None:
    found, faults = sorted({key[0].rstrip(".") for _, text in texts() for key in KEY.finditer(text)}), list[str]()
    with pytest.MonkeyPatch.context() as patched, initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        patched.chdir(ROOT)
        for word in found:
            try:
                to_pipeline(compose("config", overrides=[word]))
            except Exception as error:  # noqa: BLE001
                faults.append(f"{word}: {error}")
    assert not faults, "\n".join([f"{len(found)} values", *faults])
    assert len(found) > 20
