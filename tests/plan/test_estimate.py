"""`safetrain estimate`: what fits and how long it takes, here and on a machine that is only described."""

import dataclasses
import io
import json
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.errors import ConfigError
from safetrain.core.model.files import ModelFiles, read_model_plan
from safetrain.core.records.settings import LoraSettings
from safetrain.core.storage import paths
from safetrain.core.storage.files import write_record
from safetrain.plan.candidates import Estimate
from safetrain.plan.estimate import (
    LENGTHS,
    estimate_of,
    model_to_pretrain,
    print_estimate,
    print_pretraining,
    training_speed,
)
from safetrain.plan.machine import ANY_CPU, machine_of, place_of, profile_names, read_profile
from safetrain.plan.model_shape import PRESETS
from safetrain.plan.remedies import what_would_fit
from tests.conftest import ROOT
from tests.core.test_model_files import BIG
from tests.plan.test_recommend import machine as usual_machine
from tests.plan.test_recommend import plan as recommended

PROFILES = ROOT / "conf" / "machine"


@pytest.fixture(autouse=True)
def in_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "machine").symlink_to(PROFILES)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def qwen_7b(tmp_path: Path) -> ModelFiles:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**BIG["Qwen2.5-7B"][0], "quantization": {"group_size": 64, "bits": 4}}))
    return read_model_plan(path)


def pretraining_text(model: str, *names: str) -> tuple[str, bool]:
    console = Console(width=200, record=True, file=io.StringIO())
    fits = print_pretraining(console, model_to_pretrain(model), [place_of(name) for name in names], 2)
    return console.export_text(), fits


def test_every_profile_is_a_machine_with_less_budget_than_memory() -> None:
    assert {"m1-8gb", "m1-16gb", "m1-32gb", "t4-16gb", "h200-141gb"} <= set(profile_names(PROFILES))
    for name in profile_names(PROFILES):
        machine = machine_of(read_profile(name, PROFILES))
        assert machine.backend in ("metal", "cuda", "cpu")
        assert 0.5 < machine.memory_budget_bytes / machine.total_memory_bytes < 1
    with pytest.raises(ConfigError, match="did you mean m1-8gb"):
        read_profile("m1-8g", PROFILES)
    with pytest.raises(ConfigError, match="400m"):
        model_to_pretrain("huge")


def test_more_memory_and_recomputing_fit_more_and_longer_rows_fit_less(qwen_7b: ModelFiles) -> None:
    small, large = (machine_of(read_profile(name)) for name in ("m1-16gb", "m3-64gb"))
    run = estimate_of(qwen_7b, small)
    for tokens in LENGTHS:
        kept, recomputed = (each.but(tokens=tokens).largest_batch for each in (run, run.cheapest))
        assert kept <= recomputed
        assert kept <= run.but(machine=large, tokens=tokens).largest_batch
    batches = [run.cheapest.but(tokens=tokens).largest_batch for tokens in LENGTHS]
    assert batches == sorted(batches, reverse=True)
    assert batches[0] > 0


def test_a_base_that_only_fits_quantized_on_a_cpu_is_estimated_so(qwen_7b: ModelFiles) -> None:
    machine = dataclasses.replace(ANY_CPU, memory_budget_bytes=20 * 2**30)
    run = estimate_of(qwen_7b, machine)
    assert (run.dequantize, run.fits) == (True, False)
    console = Console(width=200, record=True, file=io.StringIO())
    assert print_estimate(console, run, "here")
    assert "base left quantized" in console.export_text()


def test_changes_that_cost_only_time_come_first_and_fit(qwen_7b: ModelFiles) -> None:
    machine = dataclasses.replace(ANY_CPU, memory_budget_bytes=20 * 2**30)
    (change,) = what_would_fit(estimate_of(qwen_7b, machine, rows=8, tokens=2048))
    assert change.startswith("train.batch_size=1 train.dequantize_base=false train.gradient_checkpointing=true (")


@pytest.mark.parametrize(("name", "days"), [("85m", "31.7 h"), ("400m", "25.9 days"), ("800m", "101.1 days")])
def test_a_preset_on_the_machine_whose_speed_was_measured(name: str, days: str) -> None:
    """20 tokens a parameter, 6 operations each and attention, at the 9.9 TFLOP/s of an M3 Max."""
    assert model_to_pretrain(name).parameters == pytest.approx(PRESETS[name][0], rel=0.02)
    text, fits = pretraining_text(name, "m3-64gb")
    assert fits
    assert days in text
    assert "assumed, 9.9 TFLOP/s" in text


def test_what_is_not_known_of_a_machine_stays_unknown() -> None:
    text, fits = pretraining_text("10m", "linux-16gb")
    assert (fits, "unknown, no tflops" in text) == (True, True)
    text, fits = pretraining_text("800m", "m1-8gb")
    assert (fits, "it does not fit" in text) == (False, True)


def test_all_machines_have_a_line_with_a_date() -> None:
    text, fits = pretraining_text("400m", *profile_names())
    assert fits
    assert all(name in text for name in profile_names())
    assert str(datetime.now().astimezone().year) in text


def test_a_dry_run_of_this_model_here_counts_and_no_other(qwen_7b: ModelFiles) -> None:
    machine = machine_of(read_profile("linux-16gb"))
    write_record(paths.RECOMMENDED_CONFIG, recommended())
    unknown = (None, "unknown; to measure it: safetrain stage recommend_config")
    assert training_speed(qwen_7b, machine, None, 1e9) == unknown
    plan = dataclasses.replace(
        recommended(), planned_model=str(qwen_7b.folder), planned_method="pretrain", step_seconds=2.5
    )
    write_record(paths.RECOMMENDED_CONFIG, plan)
    per_second, source = training_speed(qwen_7b, machine, None, 1e9)
    assert per_second == plan.batch_size * plan.gradient_accumulation * plan.max_seq_length / 2.5
    assert "measured" in source


def test_a_cpu_without_a_dry_run_is_assumed_to_train_at_half_of_its_matrix_products(qwen_7b: ModelFiles) -> None:
    faster = dataclasses.replace(machine_of(read_profile("linux-16gb")), gemm_gflops=200.0)
    write_record(paths.MACHINE, faster)
    assert place_of(None) == (faster, None)
    per_second, source = training_speed(qwen_7b, faster, None, 1e9)
    assert per_second == pytest.approx(100)
    assert "assumed" in source


def test_the_command_says_by_its_exit_code_whether_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)

    def code(*words: str) -> int:
        return CliRunner().invoke(app, ["estimate", *words], catch_exceptions=False).exit_code

    assert code("--pretrain", "10m", "--machine", "m1-8gb") == 0
    assert code("models/encyclopedia-3m", "--machine", "m1-8gb") == 0
    assert code("models/encyclopedia-3m", "--memory-gb", "0.15", "--machine", "m1-8gb", "--batch-size", "64") == 1
    for words, why in {
        ("--pretrain", "10m", "models/encyclopedia-3m"): "given twice",
        ("--all-machines",): "only to pretraining",
    }.items():
        with pytest.raises(ConfigError, match=why):
            code(*words)


def shortage(folder: Path, bits: int | None, gib: float, length: int = 1024) -> Estimate:
    """A 7B on a machine that has too little memory for it."""
    quantization = {"quantization": {"group_size": 64, "bits": bits}} if bits else {}
    (folder / "config.json").write_text(json.dumps({**BIG["Qwen2.5-7B"][0], **quantization}))
    model = read_model_plan(folder)
    lora = LoraSettings(16, 2.0, 0.0, model.num_layers, ("all-linear",))
    return Estimate(model, usual_machine(gib, "metal"), lora, checkpointing=True, tokens=length)


def test_where_nothing_fits_what_would_is_named_with_its_memory(tmp_path: Path) -> None:
    (on_disk,) = what_would_fit(shortage(tmp_path, 4, 7.0, 4096))
    assert on_disk.startswith("train.stream_base=true (")
    asked = shortage(tmp_path, 4, 3.0, 4096).but(stream=True)
    found = what_would_fit(asked)
    assert not asked.fits
    assert found[0].startswith("train.max_seq_length=")
    assert all(text.endswith("GiB)") for text in found)
    length = int(found[0].split("=")[1].split(" ")[0])
    assert (asked.but(tokens=length).fits, asked.but(tokens=length + 32).fits) == (True, False)
    assert [text[:16] for text in what_would_fit(asked.but(rows=4, tokens=length))] == ["train.batch_size"]
    assert any("--bits 4" in text for text in what_would_fit(shortage(tmp_path, None, 2.5)))
    (smaller,) = what_would_fit(shortage(tmp_path, 2, 0.6, 256))
    assert smaller.startswith("a base model with about ")
