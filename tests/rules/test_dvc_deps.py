"""dvc.yaml is true: a stage depends on the code that it runs, and on no code that cannot change its result."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.rules.imports import transitive_files

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
