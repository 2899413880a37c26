"""Every command of README and docs: its words are understood, and it is run, here or by a test of its own.

A block that nobody runs says why above it: ``<!-- not run: … -->``.
"""

import re
import shutil
import tomllib
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from dvc.cli import DvcParserError, parse_args
from hydra import compose, initialize_config_dir

from safetrain.cli import app
from safetrain.core.storage import paths
from safetrain.core.storage.files import write_record
from safetrain.plan.machine import machine_named
from safetrain.stage import to_pipeline
from tests.conftest import EMBEDDED, ROOT
from tests.pipeline.workspace import Workspace
from tests.support.documented import Block, Command, all_blocks, commands_in, commands_of, inline_commands, pages, spans

# What tests of its own run.
RUN_ELSEWHERE = (
    "dvc repro", "dvc exp run", "dvc metrics", "python -m stages.train", "safetrain ask",
    "safetrain chat", "safetrain diagnose",
    "safetrain discard", "safetrain export gguf", "safetrain export peft",
    "safetrain fetch", "safetrain fuse", "safetrain init", "safetrain preflight",
    "safetrain report", "safetrain result", "safetrain run", "safetrain runs", "safetrain selftest", "safetrain set",
    "safetrain update", "mlx_lm.generate",
)  # fmt: skip
HERE = Path(__file__)
THIRD_PARTY = {"hf", "uv", "llama-cli", "llama-quantize", "llama-server", "lms", "nvidia-smi", "ollama", "ssh"}
OF_A_RUN = {"source", "tail"}  # the tests' environment is there already; the file of a training that runs
SHELL = {"cat", "cd", "cp", "ls", "mkdir", "nohup", "printf", "rm", "rsync", "sed", "split", "tar", "%cd", *OF_A_RUN}
OVERRIDE = re.compile(r"(?:model|data|train|lora|evaluate|gate|preflight|watch)\.\w+=\S.*|experiment=\w+")
BLOCKS = [block for block in all_blocks() if block.language == "sh"]
OWN = [block for block in BLOCKS if not block.why_not]
COMMANDS = list(dict.fromkeys([*inline_commands(), *(command for block in BLOCKS for command in commands_of(block))]))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.place} {command}")
def test_the_words_of_a_command_are_understood(command: Command) -> None:
    understood(list(command.words))


def understood(words: list[str]) -> None:
    """Fails where the program does not take ``words``; of programs that are not ours, where nobody knows them."""
    program, rest = Path(words[0]).name, words[1:]
    if program == "safetrain":
        our_own(rest)
    elif program == "dvc":
        told = StringIO()
        try:
            with redirect_stderr(told):
                parse_args(rest)
        except DvcParserError:
            pytest.fail(told.getvalue())
    elif program == "python":
        assert rest[0] == "-m" or rest[0].startswith("data/"), "neither a module nor a file that the page writes"
        assert rest[0] != "-m" or find_spec(rest[1])
    elif program == "make":
        targets = re.findall(r"^([\w ]+):(?!=)", (ROOT / "Makefile").read_text(), re.M)
        assert {word for word in rest if "=" not in word} <= {name for line in targets for name in line.split()}
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"\.\[([\w,]+)\]", " ".join(rest))[0].split(",")) <= set(extras)
    elif program == "git":
        assert rest[0] in {"add", "checkout", "clone", "commit", "init"}
    elif program == "nohup":
        understood(rest)
    else:
        assert program in THIRD_PARTY | SHELL or find_spec(program.partition(".")[0]), "nobody knows this program"


def our_own(words: list[str]) -> None:
    """Fails where `safetrain` has no such command, or the command no such option."""
    command: Any = typer.main.get_command(app)
    while words and hasattr(command, "get_command"):
        found = command.get_command(typer.Context(command), words[0])
        assert found is not None, f"no command {words[0]}"
        command, words = found, words[1:]
    command.make_context("safetrain", words, resilient_parsing=not words)


def overrides() -> list[tuple[str, ...]]:
    """What the pages set by KEY=VALUE, together as it stands together; of several values each."""
    written = [span.split() for page, text in pages().items() for span in spans(page, text) if "{" not in span]
    found = set[tuple[str, ...]]()
    for words in [*written, *(command.words for command in COMMANDS)]:
        keys = tuple(word.strip("'") for word in words if OVERRIDE.fullmatch(word.strip("'")) and "[ID]" not in word)
        first = tuple(word if set("[{") & set(word) else word.partition(",")[0] for word in keys)
        found |= {first, *((word,) for word in several(keys))} - {()}
    return sorted(found)


def several(keys: tuple[str, ...]) -> list[str]:
    """KEY=VALUE for each value of a sweep."""
    swept = [word.partition("=") for word in keys if "," in word and not set("[{") & set(word)]
    return [f"{key}={value}" for key, _, values in swept for value in values.split(",")]


def test_every_key_and_value_is_one_that_can_be_set() -> None:
    written = overrides()
    assert len(written) > 40
    with pytest.MonkeyPatch.context() as patched, initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        patched.chdir(ROOT)
        for keys in written:
            to_pipeline(compose("config", overrides=list(keys)))


def test_a_command_that_is_run_elsewhere_is_run_there() -> None:
    others = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py") if path != HERE)
    assert [name for name in RUN_ELSEWHERE if not call_of(name).search(others)] == []


def call_of(name: str) -> re.Pattern[str]:
    """A test's call with the words of a command: in a process, or `safetrain` in this one."""
    program, _, rest = name.partition(" ")
    words = rest if program == "safetrain" else name
    begin = r'("safetrain", |\b(cli|invoke|run|push|command)\((\w+, )*|app, \[)' if program == "safetrain" else ""
    return re.compile(begin + ", ".join(f'"{re.escape(word)}"' for word in words.split()))


def is_run_elsewhere(line: str, place: str) -> bool:
    """Whether a line is a command that is run by a test of its own, or git's, which those tests use."""
    commands = [" ".join([Path(each.words[0]).name, *each.words[1:]]) for each in commands_in(line, place)]
    elsewhere = {words for words in commands for name in RUN_ELSEWHERE if words == name or words.startswith(f"{name} ")}
    elsewhere |= {words for words in commands if words.split()[0] in {"git", *OF_A_RUN}}
    return bool(elsewhere) and all(words in elsewhere or words.split()[0] in SHELL for words in commands)


def left_to_run(block: Block) -> str:
    """The lines of a block that no other test runs."""
    inside = re.search(r"<<'(\w+)'", block.text)  # what is fed to a command is no command
    if inside:
        return block.text
    return "\n".join(line for line in block.text.splitlines() if not is_run_elsewhere(line, block.page))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A project whose machine is known, with a table of its own."""
    made = Workspace(tmp_path_factory.mktemp("documented"))
    rows = [f"What is {number} and 1?,It is {number + 1}." for number in range(60)]
    (made.folder / "data/mine.csv").write_text("\n".join(["question,answer", *rows]) + "\n")
    (made.folder / paths.OUTPUT).mkdir(exist_ok=True)
    write_record(made.folder / paths.MACHINE, machine_named("linux-16gb"))
    return made


LEFT = sorted({left_to_run(block) for block in OWN} - {""})
LINES = sorted({line.partition(" #")[0].rstrip() for text in LEFT if "<<" not in text for line in text.splitlines()})
OURS = [line for line in LINES if line.startswith("safetrain ") and len(commands_in(line, "")) == 1]


@pytest.mark.parametrize("text", [text for text in LEFT if not set(text.splitlines()) <= set(OURS)])
def test_a_block_that_no_other_test_runs_ends_well_in_a_shell(text: str, workspace: Workspace) -> None:
    """Before the next test: some write the files that it reads."""
    lines = [line for line in text.splitlines() if line.partition(" #")[0].rstrip() not in OURS]
    workspace.succeed("sh", "-e", "-c", "\n".join(lines))
    changed = workspace.git("status", "--short").strip()
    assert changed == ("M params.yaml" if "params.yaml" in text else "")
    workspace.git("checkout", "-q", "params.yaml")


@pytest.mark.parametrize("line", OURS)
def test_a_command_that_no_other_test_runs_ends_well_here(
    line: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, where the libraries are open already."""
    monkeypatch.chdir(workspace.folder)
    (command,) = commands_in(line, "")
    with pytest.raises(SystemExit) as ended:
        app(list(command.words[1:]))
    assert not ended.value.code


def test_python_and_yaml_can_be_read() -> None:
    for block in all_blocks():
        if block.language == "python":
            compile(block.text, block.page, "exec")
        elif block.language == "yaml":
            assert isinstance(yaml.safe_load(block.text), dict), block.page


def test_the_template_of_the_page_about_chats_fits_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = {block.language: block.text for block in all_blocks() if block.page == "docs/how_to/chat_format.md"}
    shutil.copytree(EMBEDDED, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(text["jinja"])
    (tmp_path / "row.jsonl").write_text(text["json"])
    with pytest.raises(SystemExit) as ended:
        app(["validate", str(tmp_path / "row.jsonl"), "--model", str(tmp_path / "model"), "--show-mask", "1"])
    assert ended.value.code == 0
    assert "<|user|>Capital of Peru?<|end|><|assistant|>⟦Lima.<|end|>⟧" in capsys.readouterr().out
