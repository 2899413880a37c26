"""The import rule: stages, cli, page -> data, plan, create, guard, watch, evaluate, export -> core; siblings never.

evaluate and export stand on the engine, and these three alone import mlx.
"""

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.rules.imports import imported_modules, python_files, transitive_files

ROOMS = ("data", "plan", "create", "engine", "guard", "watch", "evaluate", "export")
ON_THE_ENGINE = ("evaluate", "export")
UNCLEAR_NAMES = ("utils.py", "common.py", "helpers.py", "misc.py")


def test_core_imports_no_other_room() -> None:
    for file in python_files("safetrain/core"):
        foreign = {name for name in imported_modules(file) if name.startswith(("safetrain.", "stages"))}
        assert all(name.startswith("safetrain.core") for name in foreign), file


def test_siblings_never_import_each_other() -> None:
    for room in ROOMS:
        below = {room, "engine"} if room in ON_THE_ENGINE else {room}
        others = tuple(f"safetrain.{other}" for other in (*ROOMS, "page") if other not in below)
        for file in python_files(f"safetrain/{room}"):
            for name in imported_modules(file):
                assert not name.startswith((*others, "stages", "safetrain.cli")), f"{file} imports {name}"


def test_the_page_stands_on_the_rooms_alone() -> None:
    above = ("safetrain.engine", "safetrain.cli_", "safetrain.search", "stages")
    for file in python_files("safetrain/page"):
        assert not [name for name in imported_modules(file) if name.startswith(above)], file


def test_only_the_engine_and_what_stands_on_it_import_mlx() -> None:
    allowed = [ROOT / "safetrain" / room for room in ("engine", *ON_THE_ENGINE)]
    for folder in ("safetrain", "stages"):
        for file in python_files(folder):
            if not set(allowed) & set(file.parents):
                mlx = {name for name in imported_modules(file) if name.split(".")[0] in ("mlx", "mlx_lm")}
                assert not mlx, f"{file} imports {mlx}"


def test_mlx_lm_has_one_door() -> None:
    files = [file for room in ("engine", *ON_THE_ENGINE) for file in python_files(f"safetrain/{room}")]
    for file in files:
        if (ROOT / "safetrain" / "engine" / "upstream") not in file.parents:
            behind = {name for name in imported_modules(file) if name.split(".")[0] == "mlx_lm"}
            assert not behind, f"{file} imports {behind}"


def test_tests_need_no_benchmark() -> None:
    """Benchmarks take from tests/support what they share."""
    for file in python_files("tests"):
        foreign = {name for name in imported_modules(file) if name.split(".")[0] == "benchmarks"}
        assert not foreign, f"{file} imports {foreign}"


def test_what_plans_and_trains_never_tokenizes() -> None:
    """Tokens are made once, by validate_data; a template, or its date, is asked nowhere else.

    Preflight, which decides no result, reads calls back from tokens.
    """
    starts = ("stages/recommend_config", "stages/train")
    for start in starts:
        reached = {file.relative_to(ROOT / "safetrain").as_posix() for file in transitive_files(ROOT / f"{start}.py")
                   if (ROOT / "safetrain") in file.parents}  # fmt: skip
        assert "core/text/tokenizer.py" not in reached, start
        assert not any(name.startswith("data/") for name in reached), start


def test_the_engine_prints_nothing_but_the_probe_s_answer() -> None:
    for file in python_files("safetrain/engine"):
        calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        printed = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
        assert not printed or file.name in ("dry_run.py", "tool_calls.py"), file  # they answer on stdout


def test_no_class_has_the_name_of_another() -> None:
    places = dict[str, list[str]]()
    for file in (*python_files("safetrain"), *python_files("stages")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_files_and_functions_stay_readable() -> None:
    for folder in ("safetrain", "stages"):
        for file in python_files(folder):
            text = file.read_text(encoding="utf-8")
            assert file.name not in UNCLEAR_NAMES, f"{file}: say what it is for"
            assert text.count("\n") <= 400, f"{file} is too long: is it two things?"
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef):
                    length = (node.end_lineno or node.lineno) - node.lineno
                    assert length <= 60, f"{file}:{node.lineno} {node.name} has {length} lines: what are its parts?"


STAGES: dict[str, Any] = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
# These decide whether a run survives and what people see of it, not what it computes: a new message, lock or verdict
# retrains nothing.
EXEMPT_ROOMS = ("safetrain/guard", "safetrain/watch", "safetrain/core/storage")
NOT_EXEMPT = {
    "plot": ("safetrain/watch",)  # the one stage whose result is what people see
}
# preflight runs every time, so its code needs no tracking.
UNTRACKED_STAGES = ("preflight",)
# Says only that the environment is missing.
UNTRACKED_FILES = ("stages/__init__.py", "safetrain/__init__.py")


def test_the_six_stages_in_their_order() -> None:
    assert list(STAGES) == ["validate_data", "preflight", "recommend_config", "train", "evaluate", "plot"]
    assert all(stage["cmd"] == f"python -m stages.{name}" for name, stage in STAGES.items())


@pytest.mark.parametrize("name", [name for name in STAGES if name not in UNTRACKED_STAGES])
def test_deps_cover_exactly_the_imported_rooms(name: str) -> None:
    reached = {
        str(file.relative_to(ROOT)) for file in transitive_files(ROOT / "stages" / f"{name}.py")
    } - set(UNTRACKED_FILES)  # fmt: skip
    code_deps = {dep for dep in map(path_of, STAGES[name]["deps"]) if dep.startswith(("safetrain", "stages"))}
    exempt = set(EXEMPT_ROOMS) - set(NOT_EXEMPT.get(name, ()))
    assert code_deps == {room for room in map(room_of, reached) if room is not None} - exempt


def room_of(file: str) -> str | None:
    """What dvc.yaml calls it: a stage's own file, a room, or a room of core; nothing for what all of core shares."""
    parts = Path(file).parts
    if parts[:2] == ("safetrain", "core"):
        return "/".join(parts[:3]) if len(parts) > 3 else None
    return "/".join(parts[:2])


def test_every_stage_that_opens_the_model_depends_on_it() -> None:
    for name, stage in STAGES.items():
        opens = "model.path" in (ROOT / "stages" / f"{name}.py").read_text()
        assert ("${model.path}" in stage["deps"]) == opens, name
    assert "${data.path}" in STAGES["validate_data"]["deps"]


def test_the_machine_is_kept_between_runs() -> None:
    assert STAGES["preflight"]["always_changed"] is True
    assert STAGES["preflight"]["outs"] == [{"checkpoints_qlora/machine.json": {"persist": True}}]


def path_of(entry: str | dict[str, object]) -> str:
    return entry if isinstance(entry, str) else next(iter(entry))
