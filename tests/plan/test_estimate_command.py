"""`safetrain estimate` about pretraining and ranks: what is said for a machine that is only described."""

import dataclasses
import io
import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import Console

from safetrain.core.errors import ConfigError
from safetrain.core.model.files import read_model_plan
from safetrain.core.records.settings import write_recommendation
from safetrain.core.storage import paths
from safetrain.core.storage.files import write_record
from safetrain.plan.creation.shapes import PRESETS
from safetrain.plan.estimate_command import Where, refuse_contradictions, tell_pretraining, tell_ranks
from safetrain.plan.pretraining_estimate import TrainingPlace, estimate_pretraining, model_to_pretrain
from safetrain.plan.rank_times import Link
from safetrain.plan.training_speed import Speed, speed_here, speed_of_profile
from safetrain.plan.what_if import PROFILES, default_run, machine_of, profile_names, read_profile
from tests.conftest import ROOT
from tests.core.test_model_shapes import BIG
from tests.plan.test_recommend import plan as recommended

LINK = Link(10)


@pytest.fixture(autouse=True)
def in_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "machine").symlink_to(ROOT / PROFILES)
    monkeypatch.chdir(tmp_path)


def place(name: str, ranks: int = 1) -> TrainingPlace:
    profile = read_profile(name)
    speed = speed_of_profile(profile)
    return TrainingPlace(name, machine_of(profile), speed, profile.watts, profile.usd_per_hour, ranks, LINK)


def pretraining_text(model: str, where: Where, *, everywhere: bool = False) -> tuple[str, bool]:
    console = Console(file=io.StringIO(), width=200)
    fits = tell_pretraining(console, model, where, 20, 2, everywhere=everywhere)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue(), fits


def ranks_text(where: Where) -> str:
    path = Path("config.json")
    path.write_text(json.dumps(BIG["Qwen2.5-7B"][0]))
    model, console = read_model_plan(path), Console(file=io.StringIO(), width=200)
    machine = where.machine()
    tell_ranks(console, where, model, machine, default_run(model, machine.backend), 1, 512)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(("name", "days"), [("85m", 1.3), ("400m", 26), ("800m", 105)])
def test_a_preset_on_the_machine_whose_speed_was_measured(name: str, days: float) -> None:
    """20 tokens a parameter, 6 operations each and attention, at the 9.9 TFLOP/s of an M3 Max."""
    model = model_to_pretrain(name)
    found = estimate_pretraining(model, place("m3-64gb"), 20, 2)
    assert model.parameters == pytest.approx(PRESETS[name], rel=0.02)
    assert found.fits
    assert found.tokens == 20 * model.parameters
    assert found.flops >= 6 * model.parameters * found.tokens
    assert found.seconds == pytest.approx(days * 86_400, rel=0.1)
    assert found.kwh == pytest.approx(140 * days * 24 / 1000, rel=0.1)
    assert found.checkpoint_bytes > 4 * 4 * 4 * model.parameters  # weights, two moments and the best, kept


def test_more_than_one_rank_takes_less_time_but_no_less_energy() -> None:
    model = model_to_pretrain("85m")
    one, four = (estimate_pretraining(model, place("m3-64gb", ranks), 20, 2) for ranks in (1, 4))
    assert one.seconds is not None
    assert four.seconds is not None
    assert one.seconds / 4 < four.seconds < one.seconds
    assert one.kwh is not None
    assert four.kwh is not None
    assert four.kwh > one.kwh
    assert four.needed_bytes == one.needed_bytes


def test_what_is_not_known_of_a_machine_stays_unknown() -> None:
    found = estimate_pretraining(model_to_pretrain("10m"), place("linux-16gb"), 20, 2)
    assert (found.tokens_per_second, found.seconds, found.kwh, found.usd) == (None, None, None, None)
    text, fits = pretraining_text("10m", Where("linux-16gb", False, None, None, LINK))
    assert fits
    assert "not known: no tflops" in text


def test_a_model_that_does_not_fit_is_said_not_to() -> None:
    text, fits = pretraining_text("800m", Where("m1-8gb", False, None, None, LINK))
    assert not fits
    assert "it does not fit" in text


@pytest.mark.parametrize("everywhere", [True, False])
def test_without_a_machine_there_are_dates_for_all(everywhere: bool) -> None:
    """Also by default, where no preflight has been run."""
    text, fits = pretraining_text("85m", Where(None, False, None, None, LINK), everywhere=everywhere)
    assert fits
    assert all(name in text for name in profile_names())
    assert str(datetime.now().astimezone().year) in text
    assert "assumed" in text


def test_an_unknown_preset_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="400m"):
        model_to_pretrain("huge")


def test_ranks_are_told_with_traffic_time_and_how_many_pay() -> None:
    text = ranks_text(Where("m3-64gb", False, None, 4, LINK))
    assert [line.split()[0] for line in text.splitlines() if line.strip()[:1].isdigit()] == ["1", "2", "4"]
    assert "ranks pay" in text
    assert "assumed: 9.9 TFLOP/s" in text
    unknown = ranks_text(Where("linux-16gb", False, None, 4, LINK))
    assert "each sends and receives" in unknown
    assert "speed-up" not in unknown


def test_a_dry_run_of_this_model_here_counts_and_no_other() -> None:
    Path("config.json").write_text(json.dumps(BIG["Qwen2.5-7B"][0]))
    model = read_model_plan(Path("config.json"))
    machine = machine_of(read_profile("linux-16gb"))
    write_recommendation(paths.RECOMMENDED_CONFIG, recommended())
    assert speed_here(model, machine, "lora").step_seconds is None
    mine = dataclasses.replace(recommended(), planned_model=str(model.folder), step_seconds=2.5)
    write_recommendation(paths.RECOMMENDED_CONFIG, mine)
    found = speed_here(model, machine, "lora")
    assert (found.step_seconds, found.rows) == (2.5, mine.batch_size * mine.gradient_accumulation)
    assert "measured" in found.source
    assert speed_here(model, machine, "full").step_seconds is None


def test_a_cpu_without_a_dry_run_is_assumed_to_train_at_half_of_its_matrix_products() -> None:
    machine = machine_of(read_profile("linux-16gb"))
    faster = dataclasses.replace(machine, gemm_gflops=200.0)
    found = speed_here(model_to_pretrain("10m"), faster, "pretrain")
    assert found.tflops == pytest.approx(0.1)
    assert "assumed" in found.source
    write_record(paths.MACHINE, faster)
    assert Where(None, False, None, None, LINK).machine() == faster
    assert speed_here(model_to_pretrain("10m"), machine, "pretrain") == Speed(
        None, "not known; to measure it: python -m stages.recommend_config"
    )


@pytest.mark.parametrize(
    ("model", "machine", "pretrain", "tokens", "all_machines"),
    [
        (Path("models/m"), None, "85m", None, False), (None, "m1-8gb", "85m", None, True),
        (None, None, None, None, True), (None, None, None, 20.0, False),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other_are_refused(
    model: Path | None, machine: str | None, pretrain: str | None, tokens: float | None, all_machines: bool
) -> None:
    with pytest.raises(ConfigError):
        refuse_contradictions(model, machine, pretrain, tokens, all_machines=all_machines)


def test_dates_of_several_of_each_machine_are_earlier() -> None:
    one, eight = (
        pretraining_text("400m", Where(None, False, None, ranks, LINK), everywhere=True)[0] for ranks in (None, 8)
    )
    assert "8 of it" in eight
    assert "25.9 days" in one
    assert "25.9 days" not in eight


def test_the_command_says_by_its_exit_code_whether_it_fits() -> None:
    def code(*words: str) -> int:
        command = [sys.executable, "-m", "safetrain.cli", "estimate", *words]
        return subprocess.run(command, capture_output=True, cwd=ROOT, check=False).returncode

    assert code("--pretrain", "10m", "--machine", "m1-8gb") == 0
    assert code("--pretrain", "10m", "models/encyclopedia-3m") == 2  # named twice
    assert code("models/encyclopedia-3m", "--machine", "m1-8gb", "--ranks", "4", "--link-gbps", "10") == 0
