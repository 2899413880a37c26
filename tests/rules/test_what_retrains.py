"""A reworded message retrains nothing: DVC is asked, in a clone and in a project, about results that are made up."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from safetrain.core.storage.files import read_record, write_record
from safetrain.project import PROGRAM, Program, make_project, program_text
from tests.pipeline.workspace import Workspace
from tests.rules.test_layering import path_of

NUMBERS = {"engine", "core/data", "core/memory", "core/model", "core/records"}  # rooms that decide what is trained


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("clone"))


def test_only_the_stage_whose_own_result_they_are_repeats_when_messages_change(workspace: Workspace) -> None:
    finish(workspace, workspace.folder)
    assert changed_in(workspace, workspace.folder) == {}
    program = workspace.folder / "safetrain"
    rooms = {path for path in program.iterdir() if path.name != "core"} | set((program / "core").iterdir())
    for room in (room for room in rooms if room.relative_to(program).as_posix() not in NUMBERS | {"stage.py"}):
        for file in room.rglob("*.py") if room.is_dir() else [room]:
            file.write_text(file.read_text() + '\nWORDS = "another text"\n')
    assert changed_in(workspace, workspace.folder) == {
        "validate_data": {"safetrain/core/text", "safetrain/create", "safetrain/data"},
        "recommend_config": {"safetrain/plan"},
        "evaluate": {"safetrain/core/text", "safetrain/evaluate"},
        "plot": {"safetrain/watch"},
    }


def test_in_a_project_each_stage_repeats_when_its_code_has_changed(workspace: Workspace, tmp_path: Path) -> None:
    make_project(tmp_path / "mine", example=True)
    finish(workspace, tmp_path / "mine")
    made = read_record(tmp_path / "mine" / PROGRAM, Program)
    same = {name: code for name, code in made.stages.items() if name in ("preflight", "train")}
    other = {**dict.fromkeys(made.stages, "0" * 16), **same}
    write_record(tmp_path / "mine" / PROGRAM, Program(made.version, made.example, other, made.files))
    assert changed_in(workspace, tmp_path / "mine").keys() == other.keys() - same.keys()


def test_comments_docstrings_and_blank_lines_are_no_part_of_the_program() -> None:
    """The same text in every version of Python; they divide f-strings into tokens in different ways."""
    source = '''#!/usr/bin/env python
"""Module
docstring."""

import os  # why


class Kind:
    r"""Docstring with a \\\\ in it."""

    # a comment
    name = f"{os.sep!r:>{'3'}} # {{no comment}}"  # a comment


def words(text: str = "# no comment") -> str:
    """Docstring."""
    return """kept,

    # with its empty line
    """ + text
'''
    assert (
        program_text(source)
        == '''import os
class Kind:
    name = f"{os.sep!r:>{'3'}} # {{no comment}}"
def words(text: str = "# no comment") -> str:
    return """kept,

    # with its empty line
    """ + text'''
    )


def finish(workspace: Workspace, folder: Path) -> None:
    """Make up the results of all stages, with the values that other stages depend on, and tell DVC that they ran."""
    stages = list(yaml.safe_load((folder / "dvc.yaml").read_text())["stages"].values())
    names = {path_of(entry) for stage in stages for kind in ("outs", "plots") for entry in stage.get(kind, [])}
    names |= {dep for stage in stages for dep in stage["deps"] if Path(dep).parent.as_posix() in names}
    values: dict[str, Any] = {}
    for entry in (entry for stage in stages for entry in stage.get("params", []) if isinstance(entry, dict)):
        for name, keys in entry.items():
            for *parents, last in (key.split(".") for key in keys):
                section = values.setdefault(name, {})
                for parent in parents:
                    section = section.setdefault(parent, {})
                section[last] = 1
    for path in (folder / name for name in names):
        file = path if path.suffix else path / "file"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values.get(path.relative_to(folder).as_posix(), {})))
    done = workspace.run("dvc", "commit", "-f", "-q", cwd=folder)
    assert done.returncode == 0, done.stderr


def changed_in(workspace: Workspace, folder: Path) -> dict[str, set[str]]:
    """The stages that DVC would repeat besides preflight, which it always does, and what has changed for them."""
    status = json.loads(workspace.run("dvc", "status", "--json", cwd=folder).stdout)
    assert status.pop("preflight") == ["always changed"]
    return {
        stage: {name for part in parts for names in part.values() for name in names} for stage, parts in status.items()
    }
