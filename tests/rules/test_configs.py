"""Every configuration that ships composes; every key is documented, typed, ranged, tracked and used."""

import dataclasses
import re
import tomllib
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from packaging.requirements import Requirement

from safetrain.core.ranges import check_ranges, describe_allowed
from safetrain.core.records.schema import CHOICES, RANGE, Evaluate, Gate, Lora, Pipeline, Train
from safetrain.stage import to_pipeline
from tests.conftest import ROOT
from tests.plan.test_recommend import MACHINES, plan
from tests.rules.imports import python_files

OVERLAYS = sorted(path.stem for path in (ROOT / "conf" / "experiment").rglob("*.yaml"))
PARAMS = yaml.safe_load((ROOT / "params.yaml").read_text())
KEYS = [(section, key) for section, keys in PARAMS.items() for key in keys]
SURVIVAL = ("keep_checkpoints", "hang_minutes", "trace", "ranks")
NOT_IN_DVC = (
    {f"train.{key}" for key in ("log_steps", "save_steps", *SURVIVAL)}
    | {f"preflight.{key}" for key in ("level", "downgrade")}
    | {"gate.least_gain", "gate.least_score", "gate.most_forgotten"}
)  # change no result


def compose_with(*overrides: str) -> Pipeline:
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "conf")):
        return to_pipeline(compose("config", overrides=list(overrides)))


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_composes(overlay: str) -> None:
    assert compose_with(f"experiment={overlay}") != compose_with()


def test_minimal_and_smoke_are_what_they_promise() -> None:
    found = compose_with("data.path=./data/example/", "model.path=models//encyclopedia-3m/")
    assert (found.data.path, found.model.path) == ("data/example", "models/encyclopedia-3m"), "one folder, one name"
    minimal, smoke = compose_with("experiment=minimal").train, compose_with("experiment=smoke").train
    assert (minimal.max_examples, minimal.num_epochs, minimal.log_steps) == (100, 3, 10)
    assert (smoke.max_steps, smoke.batch_size, smoke.max_seq_length) == (1, 1, 32)


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_every_key_has_a_type_a_comment_and_a_reader(section: str, key: str) -> None:
    assert describe_allowed(section, key)
    line = next(line for line in (ROOT / "params.yaml").read_text().splitlines() if re.match(rf"  {key}:", line))
    assert "# " in line
    code = [file for folder in ("safetrain", "stages") for file in python_files(folder) if file.name != "schema.py"]
    read = rf"\b({section}|settings|limits)\.{key}\b"  # as of a section, resolved, or what the gate compares with
    assert any(re.search(read, file.read_text()) for file in code), "read by nothing"


def test_every_number_has_a_range() -> None:
    for part in (Train, Lora, Evaluate, Gate):
        for field in dataclasses.fields(part):
            if str(field.type).split(" ")[0] in ("int", "float", "<class 'int'>", "<class 'float'>"):
                assert {RANGE, CHOICES} & set(field.metadata), field.name


def test_dvc_tracks_every_key_that_changes_a_result() -> None:
    tracked: set[str] = set()
    for stage in yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"].values():
        tracked |= {entry for entry in stage.get("params", []) if isinstance(entry, str)}
    for section, key in KEYS:
        name = f"{section}.{key}"
        assert (name in tracked or section in tracked) == (name not in NOT_IN_DVC), name


def test_train_tracks_every_recommended_value_that_changes_the_result() -> None:
    unchanging = {"log_steps", "save_steps", "test_tokens", "answer_tokens", "general_tokens", *MACHINES}
    recommended = set(plan().reasons) - unchanging
    values = {f"settings.{name.partition('.')[0]}" for name in recommended}
    tracked = next(entry for entry in stage_params("train") if isinstance(entry, dict))
    assert set(tracked["checkpoints_qlora/recommended_config.json"]) == values | {"start"}


def stage_params(name: str) -> list[Any]:
    return yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"][name]["params"]


def test_ranges_are_checked_all_at_once() -> None:
    config = OmegaConf.to_object(OmegaConf.structured(compose_with()))
    assert isinstance(config, Pipeline)
    config.train.batch_size, config.lora.dropout, config.train.learning_rate = 0, 2.0, float("nan")
    with pytest.raises(Exception, match=r"train\.batch_size = 0; allowed: a whole number, at least 1") as caught:
        check_ranges(config)
    assert "lora.dropout = 2.0" in str(caught.value)
    assert "train.learning_rate = nan" in str(caught.value)


def test_what_dvc_leaves_open_is_bounded_apart_from_our_own_packages_and_the_constraints_are_within() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = [Requirement(line) for line in project["optional-dependencies"]["bounds"]]
    ours = {Requirement(line).name for line in project["dependencies"]}
    assert "safetrain" in ours, "an installation without constraints has the bounds too"
    assert not ours & {each.name for each in bounds}
    lines = [line.split(";")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    kept = dict(line.split("==") for line in lines)
    assert [each for each in bounds if kept[each.name.replace(".", "-")] not in each.specifier] == []
