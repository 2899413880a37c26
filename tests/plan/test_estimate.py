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
from safetrain.plan.creation.shapes import PRESETS
from safetrain.plan.estimate import Estimate, estimate_of, remedies, what_would_fit
from safetrain.plan.estimate_command import (
    LENGTHS,
    estimate_pretraining,
    model_to_pretrain,
    print_pretraining,
    print_ranks,
    print_remedies,
)
from safetrain.plan.machine import (
    ANY_CPU,
    TrainingPlace,
    machine_of,
    place_of,
    profile_names,
    read_profile,
    speed_here,
)
from safetrain.plan.speed import (
    MESSAGE_BYTES,
    Link,
    SharedUpdate,
    Speed,
    exchange_seconds,
    flops_per_token,
    multiplied_weights,
    shared_update,
    update_seconds,
    wire_bytes,
)
from tests.conftest import ROOT
from tests.core.test_model_shapes import BIG
from tests.plan.test_recommend import machine as usual_machine
from tests.plan.test_recommend import plan as recommended

NO_COST = Link(gbps=1e9, latency_seconds=0)
PROFILES = ROOT / "conf" / "machine"
LINK = Link(10)


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


def place(name: str | None, ranks: int = 1) -> TrainingPlace:
    return place_of(name, ranks=ranks, link=LINK)


def screen() -> Console:
    return Console(width=200, record=True, file=io.StringIO())


def pretraining_text(model: str, *places: TrainingPlace) -> tuple[str, bool]:
    console = screen()
    fits = print_pretraining(console, model, places, 20, 2)
    return console.export_text(), fits


def ranks_text(there: TrainingPlace, model: ModelFiles) -> str:
    console = screen()
    print_ranks(console, there, estimate_of(model, there.machine))
    return console.export_text()


def test_every_profile_is_a_machine_with_less_budget_than_memory() -> None:
    assert {"m1-8gb", "m1-16gb", "m1-32gb", "t4-16gb", "h200-141gb"} <= set(profile_names(PROFILES))
    for name in profile_names(PROFILES):
        machine = machine_of(read_profile(name, PROFILES))
        assert machine.backend in ("metal", "cuda", "cpu")
        assert 0.5 < machine.memory_budget_bytes / machine.total_memory_bytes < 1


def test_a_typo_names_the_nearest_machine() -> None:
    with pytest.raises(ConfigError, match="did you mean m1-8gb"):
        read_profile("m1-8g", PROFILES)


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


def test_what_the_remedy_says_fits(qwen_7b: ModelFiles) -> None:
    """On CPU a 4-bit base may fit quantized only, which is shown; if blocks must be recomputed too, both are said."""
    machine = dataclasses.replace(ANY_CPU, memory_budget_bytes=20 * 2**30)
    run = estimate_of(qwen_7b, machine)
    assert (run.dequantize, run.as_planned.dequantize, run.as_planned.fits) == (True, False, True)
    console, large = screen(), run.but(rows=8, tokens=2048)
    print_remedies(console, large)
    steps = remedies(large)
    keys = ["train.batch_size=1", "train.dequantize_base=false", "train.gradient_checkpointing=true"]
    assert f"do: set {' '.join(keys)}" in console.export_text()
    assert set(keys) <= {key for key, _ in steps}
    assert [found.fits for _, found in steps] == [False] * (len(steps) - 1) + [True]
    sizes = [found.needed_bytes for _, found in steps]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("name", "days"), [("85m", 1.3), ("400m", 26), ("800m", 105)])
def test_a_preset_on_the_machine_whose_speed_was_measured(name: str, days: float) -> None:
    """20 tokens a parameter, 6 operations each and attention, at the 9.9 TFLOP/s of an M3 Max."""
    model, there = model_to_pretrain(name), place("m3-64gb")
    found = estimate_pretraining(model, there, 20, 2)
    assert model.parameters == pytest.approx(PRESETS[name], rel=0.02)
    assert found.fits
    assert found.tokens == 20 * model.parameters
    assert found.flops >= 6 * model.parameters * found.tokens
    assert found.seconds == pytest.approx(days * 86_400, rel=0.1)
    assert found.kwh == pytest.approx(140 * days * 24 / 1000, rel=0.1)
    assert found.checkpoint_bytes > 4 * 4 * 4 * model.parameters  # weights, two moments and the best, kept


def test_more_than_one_rank_takes_less_time_but_no_less_energy() -> None:
    model, places = model_to_pretrain("85m"), [place("m3-64gb", ranks) for ranks in (1, 4)]
    one, four = (estimate_pretraining(model, each, 20, 2) for each in places)
    assert one.seconds is not None
    assert four.seconds is not None
    assert one.seconds / 4 < four.seconds < one.seconds
    assert (four.kwh or 0) > (one.kwh or 0) > 0
    assert four.needed_bytes == one.needed_bytes


def test_what_is_not_known_of_a_machine_stays_unknown() -> None:
    found = estimate_pretraining(model_to_pretrain("10m"), place("linux-16gb"), 20, 2)
    assert (found.tokens_per_second, found.seconds, found.kwh, found.usd) == (None, None, None, None)
    text, fits = pretraining_text("10m", place("linux-16gb"))
    assert fits
    assert "unknown: no tflops" in text


def test_a_model_that_does_not_fit_is_said_not_to() -> None:
    text, fits = pretraining_text("800m", place("m1-8gb"))
    assert not fits
    assert "it does not fit" in text


def test_all_machines_have_dates_and_several_of_each_have_earlier_ones() -> None:
    text, fits = pretraining_text("400m", *map(place, profile_names()))
    assert fits
    assert all(name in text for name in profile_names())
    assert str(datetime.now().astimezone().year) in text
    assert "25.9 days" in text
    eight, _ = pretraining_text("400m", *(place(name, 8) for name in profile_names()))
    assert "8 of each" in eight
    assert "25.9 days" not in eight


def test_an_unknown_preset_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="400m"):
        model_to_pretrain("huge")


def test_ranks_are_told_with_traffic_time_and_how_many_pay(qwen_7b: ModelFiles) -> None:
    text = ranks_text(place("m3-64gb", 4), qwen_7b)
    assert [line.split()[0] for line in text.splitlines() if line.strip()[:1].isdigit()] == ["1", "2", "4"]
    assert "assumed: 9.9 TFLOP/s" in text
    unknown = ranks_text(place("linux-16gb", 4), qwen_7b)
    assert "each sends and receives" in unknown
    assert "speed-up" not in unknown


def test_a_dry_run_of_this_model_here_counts_and_no_other(qwen_7b: ModelFiles) -> None:
    machine = machine_of(read_profile("linux-16gb"))
    write_record(paths.RECOMMENDED_CONFIG, recommended())
    assert speed_here(qwen_7b, machine, "lora").step_seconds is None
    mine = dataclasses.replace(recommended(), planned_model=str(qwen_7b.folder), step_seconds=2.5)
    write_record(paths.RECOMMENDED_CONFIG, mine)
    found = speed_here(qwen_7b, machine, "lora")
    assert (found.step_seconds, found.rows) == (2.5, mine.batch_size * mine.gradient_accumulation)
    assert "measured" in found.source
    assert speed_here(qwen_7b, machine, "full").step_seconds is None


def test_a_cpu_without_a_dry_run_is_assumed_to_train_at_half_of_its_matrix_products(qwen_7b: ModelFiles) -> None:
    machine = machine_of(read_profile("linux-16gb"))
    faster = dataclasses.replace(machine, gemm_gflops=200.0)
    write_record(paths.MACHINE, faster)
    here = place(None)
    found = here.speed(qwen_7b, "pretrain")
    assert here.machine == faster
    assert found.tflops == pytest.approx(0.1)
    assert "assumed" in found.source
    unknown = Speed(None, "unknown; to measure it: safetrain stage recommend_config")
    assert speed_here(qwen_7b, machine, "pretrain") == unknown


def test_the_command_says_by_its_exit_code_whether_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)

    def code(*words: str) -> int:
        return CliRunner().invoke(app, ["estimate", *words], catch_exceptions=False).exit_code

    assert code("--pretrain", "10m", "--machine", "m1-8gb") == 0
    assert code("models/encyclopedia-3m", "--machine", "m1-8gb", "--ranks", "4", "--link-gbps", "10") == 0
    assert code("models/encyclopedia-3m", "--memory-gb", "0.15", "--machine", "m1-8gb", "--batch-size", "64") == 1
    for words, why in {
        ("--pretrain", "10m", "models/encyclopedia-3m"): "given twice",
        ("--pretrain", "10m", "--machine", "m1-8gb", "--all-machines"): "exclude each other",
        ("--all-machines",): "only to pretraining",
        ("--tokens-per-parameter", "20"): "only to pretraining",
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
    asked = shortage(tmp_path, 4, 7.0, 4096)
    found = what_would_fit(asked)
    assert not asked.fits
    assert found[0].startswith("train.max_seq_length=")
    assert all(text.endswith("GiB)") for text in found)
    length = int(found[0].split("=")[1].split(" ")[0])
    assert (asked.but(tokens=length).fits, asked.but(tokens=length + 32).fits) == (True, False)
    assert [text[:16] for text in what_would_fit(asked.but(rows=4, tokens=length))] == ["train.batch_size"]
    assert any("--bits 4" in text for text in what_would_fit(shortage(tmp_path, None, 9.0)))
    (smaller,) = what_would_fit(shortage(tmp_path, 2, 1.0, 256))
    assert smaller.startswith("a base model with about ")


def test_a_gradient_is_counted_in_the_messages_that_it_is_sent_in() -> None:
    from safetrain.engine import ranks

    assert ranks.MESSAGE_BYTES == MESSAGE_BYTES


def test_traffic_is_that_of_a_ring_and_a_second_on_the_wire_is_a_second() -> None:
    assert [wire_bytes(1000, ranks) for ranks in (1, 2, 4, 100)] == [0, 1000, 1500, 1980]
    assert exchange_seconds(125_000_000, 2, Link(1, 0)) == pytest.approx(1.0)  # 1 Gbit over 1 Gbit/s
    assert exchange_seconds(0, 4, Link(1, 0.001)) == pytest.approx(0.006)  # 2 (N - 1) steps
    assert exchange_seconds(MESSAGE_BYTES + 1, 4, Link(1e12, 0.001)) == pytest.approx(0.012)  # two messages


def test_the_largest_share_decides_and_more_ranks_than_rows_bring_nothing() -> None:
    update = SharedUpdate(16.0, 0, 0, 16)
    assert [update_seconds(update, ranks, NO_COST) for ranks in (1, 2, 5, 8, 9, 15, 16, 40)] == [
        16, 8, 4, 2, 2, 2, 1, 1,
    ]  # fmt: skip
    assert update_seconds(SharedUpdate(2.0, 0.5, 10**9, 16), 1, Link(1)) == 2.5


def test_a_measured_time_is_kept_and_a_modelled_one_is_operations_by_speed() -> None:
    measured = shared_update(Speed(None, "", 3.0, 8), 0, 10**6, "cpu", 16)
    assert measured is not None
    assert measured.compute_seconds + measured.fixed_seconds == pytest.approx(3.0)
    assert measured.rows == 8
    modelled = shared_update(Speed(10, ""), 5e12, 10**6, "metal", 16)
    assert modelled is not None
    assert modelled.compute_seconds == pytest.approx(0.5)
    assert shared_update(Speed(None, ""), 5e12, 10**6, "metal", 16) is None


def test_operations_are_six_for_a_trained_weight_and_four_for_a_frozen_one(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BIG["Llama-3.1-8B"][0]))
    model = read_model_plan(path)
    weights = multiplied_weights(model)
    assert weights / model.parameters == pytest.approx(1 - 128256 * 4096 / 8_030_261_248, rel=1e-3)  # its own head
    whole, adapter = flops_per_token(model, 1, weights), flops_per_token(model, 1, 0)
    assert whole == pytest.approx(6 * weights, rel=1e-3)
    assert adapter == pytest.approx(4 * weights, rel=1e-3)
    long = flops_per_token(model, 8192, weights)
    assert long - whole == pytest.approx(6 * 32 * 4096 * 8191)
    assert flops_per_token(model, 1, weights, recompute=True) == pytest.approx(8 * weights, rel=1e-3)
