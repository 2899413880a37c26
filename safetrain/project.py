"""A project folder: what is in one, what `safetrain init` puts there, and what `update` renews after an upgrade.

A project holds only what belongs to its owner: values, data, models and overlays. The program is elsewhere, so instead
of its folders, each stage in dvc.yaml depends on a hash of the code that decides its result. These hashes are in
.safetrain/program.json, with hashes of the files that init wrote, so that update knows which the owner has changed.
"""

import functools
import hashlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tokenize
from dataclasses import dataclass
from difflib import unified_diff
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from safetrain.core.errors import ConfigError, SafetrainError, broken_yaml
from safetrain.core.foreign import told
from safetrain.core.formatting import print_text
from safetrain.core.params_file import PARAMS, read_params, values_in, with_value
from safetrain.core.records.schema import RENAMED, Pipeline
from safetrain.core.storage.files import read_record, write_record, write_text
from safetrain.core.storage.paths import shipped

if TYPE_CHECKING:
    from rich.console import Console

PROGRAM = Path(".safetrain/program.json")
CODE = ("safetrain/", "stages/")  # dependencies in the program's dvc.yaml that are code
EXAMPLE = ("data/example", "data/preferences.jsonl", "data/kinds.jsonl", "data/facts.jsonl", "models/encyclopedia-3m")
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
CHECKERS = ("conf/score/compiles.py", "conf/score/facts.json", "conf/score/last_number.py")
COPIED = (".dvc/config", ".dvc/.gitignore", ".dvc/plots/curve.json", *CHECKERS)
OVERLAY = """# @package _global_
# Several values at once, for this run only: safetrain run experiment=mine
train:
  num_epochs: 1
"""
GITIGNORE = """# Your data and models; what you track with `dvc add` leaves its .dvc file here
# ("?*": with "*", DVC would not look into the folder: dvc#10987)
/data/?*
!/data/*.dvc
!/data/example/
!/data/preferences.jsonl
!/data/kinds.jsonl
!/data/facts.jsonl
/models/?*
!/models/*.dvc
!/models/encyclopedia-3m/
# What the pipeline writes. Commit dvc.lock, and DVC finds these again in its cache
/checkpoints_qlora/
/dvc_plots/
# What export, fuse, convert and bug reports write
/fused*/
/out/
/peft-out/
*.gguf
*.gguf.json
*.Modelfile
*.Modelfile
/bug*.zip
.DS_Store
"""
README = """# A safetrain project

    safetrain run --data data/mine.csv    train, evaluate and draw: checkpoints_qlora/report.html
    safetrain fetch HUB_ID                download a model into models/; then --model models/NAME
    safetrain monitor                     watch a training run from another terminal
    safetrain chat --compare              talk with the model before and after training

`params.yaml` has every value that you decide, each with a comment; `null` means that the program recommends one.
`safetrain run train.seed=7` runs with another value once, `safetrain set train.seed=7` writes it to stay, and
`safetrain runs` lists the recorded runs: `--back NAME` brings one back. After an upgrade: `safetrain update`.
"""


# What commands need of a project


def require_project() -> None:
    """Raise ConfigError outside a project."""
    if not PARAMS.is_file():
        do = "go to the project's root, or make one: safetrain init"
        raise ConfigError("This folder is not a safetrain project.", where=Path.cwd(), do=do)


def stage_module(name: str) -> str:
    """The module of a stage: this folder's own in the program's repository, else the installed one."""
    return f"stages.{name}" if Path(f"stages/{name}.py").is_file() else f"safetrain.stages.{name}"


def params() -> Any:
    """Read params.yaml, without overlays, as the schema has it; raises ConfigError."""
    from omegaconf import OmegaConf
    from yaml import YAMLError

    require_project()
    text = read_params()
    with told("params.yaml cannot be used", PARAMS, kind=ConfigError):
        try:
            return OmegaConf.merge(OmegaConf.structured(Pipeline), OmegaConf.create(text))
        except YAMLError as error:
            raise broken_yaml(error) from None


def model_of_params() -> Path:
    """model.path of params.yaml."""
    with told("params.yaml names no model", PARAMS, kind=ConfigError):
        return Path(params().model.path)


def console() -> "Console":
    """A console for tables, which exits quietly when stdout is closed (rich exits 1)."""
    from rich.console import Console

    class QuietConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return QuietConsole(soft_wrap=True, highlight=False)


# Commands


def init(
    folder: Annotated[Path, Argument(help="project folder; created if missing")] = Path(),
    example: Annotated[bool, Option("--example", help="with the example data and the small model")] = False,
) -> None:
    """Make a project folder for your settings, data and models.

    The folder is under Git and DVC: safetrain init demo --example && cd demo && safetrain run
    """
    make_project(folder, example=example)
    steps = [shlex.join(["cd", str(folder)])] if folder != Path() else []
    steps.append("safetrain run" if example else "safetrain run --data FILE --model FOLDER")
    print_text(f"Next:  {' && '.join(steps)}")


def update() -> None:
    """Update the project's files after an upgrade.

    Files that you have changed stay as they are; their new version is written to NAME.new.
    """
    require_project()
    values_in(read_params())  # an unreadable file is an error with its line; keys may be those of an earlier version
    print("\n".join(update_project()) or "The project is up to date.")


# Its files


@dataclass(frozen=True)
class Program:
    """.safetrain/program.json: the program that made this project's files."""

    version: str
    example: bool  # whether the project began with the example
    stages: dict[str, str]  # hash of the code that decides a stage's result
    files: dict[str, str]  # hash of each file as init or update made it


def make_project(folder: Path, *, example: bool) -> None:
    """Make a project in ``folder``, next to existing files, under Git and DVC with one commit, and say so.

    Raise ConfigError if one of its files exists.
    """
    texts, folders = project_files(example=example), EXAMPLE if example else ()
    program = _program(texts, example=example)
    if (folder / "README.md").is_file():  # a repository's own, to which update offers no other
        del texts["README.md"]
    for name in (*texts, *folders):
        if (folder / name).exists():
            do = f"choose another folder, or move {name} away; to update a project: safetrain update"
            raise ConfigError(f"{name} already exists.", where=folder / name, do=do)
    for name in ("data", "models"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    remark = _start_version_control(folder)
    for name, text in texts.items():
        write_text(folder / name, text)
    for name in folders:
        copy = shutil.copytree if shipped(name).is_dir() else shutil.copyfile
        copy(shipped(name), folder / name)
    write_record(folder / PROGRAM, program)
    remark = remark or _commit(folder, [*texts, ".dvc/.gitignore", str(PROGRAM), *folders])
    print_text(f"Made a project in {folder.resolve()}. {remark}".rstrip())


def project_files(*, example: bool) -> dict[str, str]:
    """The text of each file in a new project, by name."""
    own = shipped("params.yaml")  # in a clone, a run may have lent it values
    text = git("show", "HEAD:./params.yaml", folder=own.parent) or own.read_text(encoding="utf-8")
    if not example:
        text = with_value(with_value(text, "data.path", "data/mine.jsonl"), "model.path", "models/mine")
    texts = {"params.yaml": text, "dvc.yaml": pipeline_text(), "README.md": README, ".gitignore": GITIGNORE}
    texts |= {".dvcignore": ".DS_Store\n", "conf/experiment/mine.yaml": OVERLAY}
    return texts | {name: shipped(name).read_text(encoding="utf-8") for name in COPIED}


def pipeline_text() -> str:
    """dvc.yaml of a project: the program's own, with a hash of the code in place of the code."""
    lines = ["# The pipeline; safetrain update updates this file. Your values are in params.yaml."]
    code = list[str]()
    for line in shipped("dvc.yaml").read_text(encoding="utf-8").splitlines():
        if line.startswith("#") or line.removeprefix("    - ").startswith(CODE):
            continue
        if command := re.fullmatch(r"    cmd: python -m stages\.(\w+)", line):
            line = f"    cmd: safetrain stage {command[1]}"
            code = [f"    - {PROGRAM}:", f"      - stages.{command[1]}"]
        if code and line in ("    params:", "    outs:"):  # a stage may have no params of its own
            lines += ["    params:", *code]
            code = []
            if line == "    params:":
                continue
        lines.append(line)
    return "\n".join(lines) + "\n"


def stage_hashes() -> dict[str, str]:
    """Hash, for each stage, the code that can change its result: its dependencies in the program's dvc.yaml."""
    import yaml

    stages = yaml.safe_load(shipped("dvc.yaml").read_text(encoding="utf-8"))["stages"]
    return {name: _hash_of_code(stage["deps"]) for name, stage in stages.items()}


def _hash_of_code(deps: list[str]) -> str:
    package, digest = Path(__file__).resolve().parent, hashlib.sha256()
    for dep in deps:
        path = package / dep.removeprefix("safetrain/")
        path = path if path.exists() else package.parent / dep  # the stages, in the repository
        for file in sorted(path.rglob("*.*")) if path.is_dir() else [path]:
            if dep.startswith(CODE) and file.suffix != ".pyc" and file.is_file():
                digest.update(file.name.encode() + b"\0" + _content(file))
    return digest.hexdigest()[:16]


@functools.cache  # several stages depend on the same files
def _content(file: Path) -> bytes:
    return program_text(file.read_text(encoding="utf-8")).encode() if file.suffix == ".py" else file.read_bytes()


def program_text(source: str) -> str:
    """Python source without comments, docstrings and blank lines, which change no result.

    Tokens only say which lines stay: versions of Python differ in how they divide an f-string.
    """
    lines, kept, begins = source.split("\n"), dict[int, int | None](), True
    for token, following in pairwise(tokenize.generate_tokens(io.StringIO(source).readline)):
        is_docstring = begins and token.string.lstrip("rR")[:1] in ("'", '"') and following.type == tokenize.NEWLINE
        if token.type == tokenize.COMMENT and token.start[0] in kept:
            kept[token.start[0]] = token.start[1]
        elif token.type not in LAYOUT and not is_docstring:
            kept |= dict.fromkeys(range(token.start[0], token.end[0] + 1))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            begins = token.type in LAYOUT
    return "\n".join(lines[number - 1][:end].rstrip() for number, end in sorted(kept.items()))


def _program(texts: dict[str, str], *, example: bool) -> Program:
    return Program(version("safetrain"), example, stage_hashes(), {name: _digest(text) for name, text in texts.items()})


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def require_current() -> None:
    """Raise ConfigError if another version of the program made this project's files."""
    if PROGRAM.is_file() and (program := _read_program()).stages != stage_hashes():
        what = f"This project was made by safetrain {program.version}, whose code was different."
        raise ConfigError(what, where=PROGRAM, do="safetrain update")


def update_project() -> list[str]:
    """Update the files that the owner has not changed; for a file that both owner and program changed, write NAME.new.

    params.yaml.new has the owner's values. Returns what was done, with differences, in lines. Raises ConfigError.
    """
    before, lines = _read_program(), list[str]()
    texts = project_files(example=before.example)
    for name, original in texts.items():
        path = Path(name)
        mine = path.read_text(encoding="utf-8") if path.is_file() else ""
        text = _with_own_values(original, mine) if name == str(PARAMS) and mine else original
        if mine == text:
            continue
        is_same = name == str(PARAMS) and mine and values_in(mine) == values_in(text)  # DVC writes null as nothing
        if not mine or is_same or _digest(mine) == before.files.get(name):
            write_text(path, text)
            lines.append(f"{name}: updated")
        elif _digest(original) != before.files.get(name):
            write_text(Path(f"{name}.new"), text)
            lines.append(f"{name}: you have changed it; to take the new version: mv {name}.new {name}")
            lines += unified_diff(mine.splitlines(), text.splitlines(), name, f"{name}.new", n=0, lineterm="")
    now = _program(texts, example=before.example)
    write_record(PROGRAM, now)
    stages = [name for name, code in now.stages.items() if before.stages.get(name) != code]
    return [*lines, f"the next run repeats: {', '.join(stages)}"] if stages else lines


def _read_program() -> Program:
    try:
        return read_record(PROGRAM, Program)
    except (OSError, ValueError, TypeError) as error:
        what = "This folder is not a project that safetrain init has made."
        do = "go to the project's folder, or make one: safetrain init"
        raise ConfigError(what, where=PROGRAM, got=str(error), do=do) from None


def _with_own_values(text: str, mine: str) -> str:
    """Return the new params.yaml ``text`` with the owner's values, for the keys that it still has."""
    own = {RENAMED.get(key, key): value for key, value in values_in(mine).items()}
    for key, value in values_in(text).items():
        if (own_value := own.get(key, value)) != value:
            text = with_value(text, key, own_value)
    return text


def _start_version_control(folder: Path) -> str:
    """Set up Git and DVC. Return a remark if Git is missing; empty if it is there."""
    if not is_in_git(folder) and shutil.which("git"):
        git("init", "--quiet", folder=folder)
    start_dvc(folder)
    return "" if shutil.which("git") else "Git is not installed, so experiments are not recorded; all else works."


def start_dvc(folder: Path = Path()) -> None:
    """Set up DVC, with Git or without, unless it is; raises SafetrainError."""
    if (folder / ".dvc").is_dir():
        return
    top = git("rev-parse", "--show-toplevel", folder=folder)
    how = ["--no-scm"] if top is None else [] if Path(top.strip()) == folder.resolve() else ["--subdir"]
    command = [sys.executable, "-m", "dvc", "init", "--quiet", *how]
    quiet = {**os.environ, "DVC_NO_ANALYTICS": "1"}  # the project's own .dvc/config says so, once it is there
    done = subprocess.run(command, cwd=folder, env=quiet, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SafetrainError("DVC could not be set up.", where=folder.resolve(), got=done.stderr.strip())


def _commit(folder: Path, names: list[str]) -> str:
    """Commit only these files. Return a remark if that failed; empty on success."""
    git("add", "--", *names, folder=folder)
    done = git(*identity(folder), "commit", "--quiet", "-m", "A safetrain project", "--", *names, folder=folder)
    return f"Git could not commit: run {shlex.join(['git', '-C', str(folder), 'commit'])}" if done is None else ""


def git(*words: str, folder: Path = Path(), index: str = "") -> str | None:
    """What a git command prints, with another index file if given; None if it fails, or if Git is not installed."""
    if shutil.which("git") is None:
        return None
    own = {"GIT_INDEX_FILE": index} if index else {}
    command = ["git", "-C", str(folder), *words]
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout


def identity(folder: Path = Path()) -> list[str]:
    """Options of git for a commit, where Git knows no name and address of the user."""
    if git("config", "user.name", folder=folder) and git("config", "user.email", folder=folder):
        return []
    return ["-c", "user.name=safetrain", "-c", "user.email=safetrain@localhost"]


def is_in_git(folder: Path = Path()) -> bool:
    """Whether Git is installed, and the folder is in a repository of it."""
    return git("rev-parse", "--show-toplevel", folder=folder) is not None
