"""dvc.yaml is true: a stage depends on the code that it runs, and on no code that cannot change its result."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.rules.imports import transitive_files

STAGES: dict[str, Any] = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
# These decide whether a run survives and what people see of it, not what it computes (DESIGN: the import rule).
EXEMPT_ROOMS = ("guard", "watch")
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
    rooms = {"/".join(Path(file).parts[:2]) for file in reached}
    expected = {room for room in rooms if not room.startswith(tuple(f"safetrain/{r}" for r in EXEMPT_ROOMS))}
    if name == "plot":  # the one stage whose result is what people see
        expected |= {room for room in rooms if room == "safetrain/watch"}
    assert code_deps == expected


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
