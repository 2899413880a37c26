"""A project folder: what `safetrain init` puts into one, and what `safetrain update` updates after an upgrade.

A project holds only what belongs to its owner: values, data, models, overlays. The program is elsewhere, so instead of
the program's folders, each stage in dvc.yaml depends on a hash of the code that decides its result. These hashes are in
.safetrain/program.json, with hashes of the files that init wrote, so that update knows which the owner has changed.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from safetrain.core.errors import ConfigError
from safetrain.core.storage.files import read_record, write_record, write_text
from safetrain.core.storage.paths import shipped

PROGRAM = Path(".safetrain/program.json")
PLAIN = re.compile(r"[A-Za-z_][\w./-]*")  # text that YAML reads without quotes
EXAMPLE = ("data/example", "models/encyclopedia-3m")
COPIED = (".dvc/config", ".dvc/plots_page.html", ".dvc/plots/curve.json")
OVERLAY = """# @package _global_
# Several values at once, for this run only: safetrain run experiment=mine
train:
  num_epochs: 1
"""
GITIGNORE = """# Your data and models; what you track with `dvc add` leaves its .dvc file here
/data/*
!/data/*.dvc
!/data/example/
/models/*
!/models/*.dvc
!/models/encyclopedia-3m/
# What the pipeline writes. Commit dvc.lock, and DVC finds these again in its cache
/checkpoints_qlora/
/dvc_plots/
.DS_Store
"""
README = """# A safetrain project

    safetrain run --data data/mine.csv    train, evaluate and draw: checkpoints_qlora/report.html
    safetrain fetch HUB_ID                download a model into models/; then --model models/NAME
    safetrain monitor                     watch a training from another terminal
    safetrain chat --compare              talk with the model before and after

`params.yaml` has every value that you decide, each with a comment; `null` means that the program recommends one.
DVC keeps every run, to compare and to come back to: `safetrain repro`, `safetrain exp run -S train.seed=7`,
`safetrain exp show`. After an upgrade of safetrain: `safetrain update`.
"""


@dataclass(frozen=True)
class Program:
    """.safetrain/program.json: the program that made this project's files."""

    version: str
    example: bool  # whether the project began with the example
    stages: dict[str, str]  # hash of the code that decides a stage's result
    files: dict[str, str]  # hash of each file as init or update made it


def make_project(folder: Path, *, example: bool) -> str:
    """Make a project in ``folder``, next to existing files, with Git and DVC and one commit.

    Return what could not be set up, or an empty text. Raise ConfigError if one of its files exists.
    """
    texts = project_files(example=example)
    shipped_folders = EXAMPLE if example else ()
    if (folder / "params.yaml").is_file() and (folder / "dvc.yaml").is_file():
        what = "This folder is a safetrain project already."
        raise ConfigError(what, where=str(folder), do="safetrain update updates the project's files")
    for name in (*texts, *shipped_folders):
        if (folder / name).exists():
            do = "choose another folder, or move it away"
            raise ConfigError(f"{name} already exists.", where=str(folder / name), do=do)
    folder.mkdir(parents=True, exist_ok=True)
    left_out = _start_version_control(folder)
    for name, text in texts.items():
        write_text(folder / name, text)
    for name in shipped_folders:
        shutil.copytree(shipped(name), folder / name)
    for name in ("data", "models"):
        (folder / name).mkdir(exist_ok=True)
    write_record(folder / PROGRAM, _program(texts, example=example))
    return left_out or _commit(folder, [*texts, ".dvc/.gitignore", str(PROGRAM), *shipped_folders])


def project_files(*, example: bool) -> dict[str, str]:
    """The text of each file in a new project, by name."""
    params = shipped("params.yaml").read_text(encoding="utf-8")
    if not example:
        params = with_value(with_value(params, "data.path", "data/mine.jsonl"), "model.path", "models/mine")
    texts = {"params.yaml": params, "dvc.yaml": pipeline_text(), "README.md": README, ".gitignore": GITIGNORE}
    texts |= {".dvcignore": ".DS_Store\n", "conf/experiment/mine.yaml": OVERLAY}
    return texts | {name: shipped(name).read_text(encoding="utf-8") for name in COPIED}


def pipeline_text() -> str:
    """dvc.yaml of a project: the program's own, with a hash of the code in place of the code."""
    lines, stage = ["# The pipeline; safetrain update updates this file. Your values are in params.yaml."], ""
    for line in shipped("dvc.yaml").read_text(encoding="utf-8").splitlines():
        if line.startswith("#") or line.startswith(("    - safetrain/", "    - stages/")):
            continue
        if command := re.fullmatch(r"    cmd: python -m stages\.(\w+)", line):
            stage = command[1]
            line = f"    cmd: safetrain stage {stage}"
        lines.append(line)
        if line == "    params:":
            lines += [f"    - {PROGRAM}:", f"      - stages.{stage}"]
    return "\n".join(lines) + "\n"


def stage_hashes() -> dict[str, str]:
    """For each stage, a hash of the code that the program's dvc.yaml names: it can change the stage's result."""
    pipeline = yaml.safe_load(shipped("dvc.yaml").read_text(encoding="utf-8"))["stages"]
    return {name: _hash_of_code(stage["deps"]) for name, stage in pipeline.items()}


def _hash_of_code(deps: list[Any]) -> str:
    digest = hashlib.sha256()
    for file in _files_of(dep for dep in deps if isinstance(dep, str) and dep.startswith(("safetrain/", "stages/"))):
        if file.suffix != ".pyc" and file.is_file():
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _files_of(deps: Iterator[str]) -> Iterator[Path]:
    package = Path(__file__).resolve().parent
    for dep in deps:
        path = package / dep.removeprefix("safetrain/")
        path = path if path.exists() else package.parent / dep  # the stages, in the repository
        yield from sorted(path.rglob("*.*")) if path.is_dir() else [path]


def _program(texts: Mapping[str, str], *, example: bool) -> Program:
    digests = {name: _digest(text) for name, text in texts.items()}
    return Program(version("safetrain"), example, stage_hashes(), digests)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def require_current() -> None:
    """Raise ConfigError if another version of the program made this project's files."""
    if not PROGRAM.is_file():
        return
    program = _read_program()
    if program.stages != stage_hashes():
        what = f"This project was made by safetrain {program.version}, whose code was different."
        raise ConfigError(what, where=str(PROGRAM), do="safetrain update")


def update_project() -> list[str]:
    """Update the files that the owner has not changed; for a changed file whose original is new, write NAME.new.

    params.yaml.new has the owner's values. Returns what was done, a line each. Raises ConfigError outside a project.
    """
    before, lines = _read_program(), list[str]()
    texts = project_files(example=before.example)
    for name, original in texts.items():
        path = Path(name)
        mine = path.read_text(encoding="utf-8") if path.is_file() else ""
        text = _with_own_values(original, mine) if name == "params.yaml" and mine else original
        if mine == text:
            continue
        if not mine or _digest(mine) == before.files.get(name):
            write_text(path, text)
            lines.append(f"{name}: updated")
        elif _digest(original) != before.files.get(name):
            write_text(Path(f"{name}.new"), text)
            lines.append(f"{name}: you have changed it; the new version is {name}.new")
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
        raise ConfigError(what, where=str(PROGRAM), got=str(error), do=do) from None


def _with_own_values(text: str, mine: str) -> str:
    """The new params.yaml with the owner's values of the keys that it has."""
    own, new = yaml.safe_load(mine), yaml.safe_load(text)
    for section, values in new.items():
        for name, value in values.items():
            if (own_value := own.get(section, {}).get(name, value)) != value:
                text = with_value(text, f"{section}.{name}", own_value)
    return text


def with_value(text: str, key: str, value: object) -> str:
    """Set ``section.key`` in the text of params.yaml; comments stay. Raise ConfigError if it has no such key."""
    section, _, name = key.partition(".")
    pattern = rf"^{section}:.*\n(?:[ #].*\n|\n)*?  {name}: *(?P<value>[^\n]*?)(?= *(?: #|$))"
    place = re.search(pattern, text, re.MULTILINE)
    if place is None:
        raise ConfigError(f"params.yaml has no {key}.", where="params.yaml", do="safetrain update adds missing keys")
    in_yaml = value if isinstance(value, str) and PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)
    return text[: place.start("value")] + str(in_yaml) + text[place.end("value") :]


def _start_version_control(folder: Path) -> str:
    """Set up Git and DVC. Return why that failed; empty on success."""
    if shutil.which("git") is None:
        return "Git is not installed, so no run is kept to compare with; safetrain run works without it"
    if _git(folder, "rev-parse", "--is-inside-work-tree").returncode:
        _git(folder, "init", "--quiet")
    top = _git(folder, "rev-parse", "--show-toplevel").stdout.strip()
    below = [] if Path(top) == folder.resolve() else ["--subdir"]
    command = [sys.executable, "-m", "dvc", "init", "--quiet", *below]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return f"DVC could not be set up: {done.stderr.strip()}" if done.returncode else ""


def _commit(folder: Path, names: list[str]) -> str:
    """Commit only these files. Return why that failed; empty on success."""
    nobody = ["-c", "user.name=safetrain", "-c", "user.email=safetrain@localhost"]
    identity = nobody if _git(folder, "config", "user.email").returncode else []
    added = _git(folder, "add", "--", *names)
    done = _git(folder, *identity, "commit", "--quiet", "-m", "A safetrain project", "--", *names)
    message = (added.stderr + done.stderr).strip()
    return f"Git could not commit: {message}" if added.returncode or done.returncode else ""


def _git(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
