"""The memory estimate learns from this machine, predicts what it has not measured, and survives probes that die."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.random_models import build_model
from safetrain.core.data.token_rows import token_row
from safetrain.core.job import Survival, TrainJob
from safetrain.core.memory_budget import MemoryBudget
from safetrain.core.memory_terms import Coefficients, Shape, parts_at_once
from safetrain.core.model_files import ModelFiles, read_model_files
from safetrain.core.probes import Measured, ProbePoint, ProbeRequest
from safetrain.core.settings import LoraSettings
from safetrain.plan.calibration import (
    Mode,
    Speed,
    fit,
    limit_bytes,
    predict,
    probe_points,
    remember,
    remembered,
    shape_of,
    shortened,
)
from safetrain.plan.child import Cap, run_lines
from safetrain.plan.measure import Bench, calibration_for, cap_of, certify, run_probes, template
from tests.stores import write_stores

MODULE = "safetrain.engine.calibrate"
LORA = LoraSettings(8, 2.0, 0.0, 6, ("all-linear",))
KEPT = Mode(checkpointing=False, dequantize_base=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFETRAIN_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> ModelFiles:
    return read_model_files(
        build_model(
            tmp_path / "model",
            bits=4,
            bfloat16=True,
            hidden_size=128,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def test_a_calibrated_machine_predicts_shapes_that_it_has_not_measured(model: ModelFiles) -> None:
    said: list[str] = []
    bench, settings = Bench(MODULE, "chip", said.append), template("lora", LORA)
    calibration = calibration_for(bench, model, settings, KEPT)
    assert calibration is not None
    assert calibration.probes == 9
    assert "measuring a shortened model" in said.pop()
    unseen = [
        ProbePoint(6, tokens, dataclasses.replace(settings, batch_size=rows, dequantize_base=True))
        for rows, tokens in ((2, 256), (6, 96), (3, 200))
    ]
    limited = [dataclasses.replace(p, mlx_limit_bytes=limit_bytes(model, calibration, p)) for p in unseen]
    measured, ended = run_probes(MODULE, ProbeRequest(str(model.folder), False, tuple(limited)), 120)
    assert (len(measured), ended) == (3, "")
    for each in measured:
        assert each.peak_bytes == pytest.approx(predict(model, calibration, each.point), rel=0.06)
    assert calibration_for(bench, model, settings, KEPT) == calibration
    assert said == []  # remembered, not measured again


def test_the_training_itself_is_rehearsed_under_its_limits_and_remembered(
    model: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    bench = Bench(MODULE, "chip", said.append, "safetrain.engine.rehearse")
    validated = tmp_path / "project" / "data" / "validated"
    lengths = [12 + 3 * (1 + i % 30) for i in range(40)]
    rows = [token_row(range(5, 5 + n), [place >= 10 for place in range(n)]) for n in lengths]
    write_stores(validated, model.folder, rows[:32], rows[32:])
    monkeypatch.chdir(tmp_path / "project")
    settings = dataclasses.replace(
        template("lora", LORA), batch_size=2, gradient_accumulation=4, dequantize_base=True, max_seq_length=128
    )
    job = TrainJob(
        str(model.folder), settings, False, MemoryBudget(2**40), None, Survival(True, False, 2, 0.0, None), (), 2**40
    )
    found = certify(bench, model, job, "rows")
    assert found.ended == ""
    assert found.measured is not None
    assert 0 < model.static_bytes < found.measured.peak_bytes < found.measured.footprint_bytes
    assert found.measured.update_seconds > 0
    assert certify(bench, model, job, "rows") == found
    assert [text.split()[0] for text in said] == ["certifying", "passed:"]
    assert [path.name for path in (tmp_path / "project").iterdir()] == ["data"]  # nothing else is left
    lost = certify(bench, model, dataclasses.replace(job, base="nowhere"), "rows")
    assert lost.measured is None
    assert lost.ended == "exit code 4: The model folder does not exist."
    assert not lost.ran_out_of_memory
    starved = dataclasses.replace(job, survival=dataclasses.replace(job.survival, memory_limit_bytes=300 * 2**20))
    died = certify(bench, model, starved, "rows")
    assert died.measured is None
    assert died.ran_out_of_memory


def test_a_dry_run_is_watched_where_nothing_bounds_metal_s_memory(
    model: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On macOS; what passed its cap is remembered as too large, with or without a limit of its own."""
    job = TrainJob(
        str(model.folder),
        template("lora", LORA),
        False,
        MemoryBudget(2**33),
        None,
        Survival(True, False, 2, 0.0, None),
        (),
    )
    assert cap_of(2**33, 2**32, "linux") is cap_of(0, None, "darwin") is None
    free = cap_of(2**33, None, "darwin")
    assert free is not None
    assert 1.1 < free.most_bytes / 2**33 < 1.2
    assert cap_of(2**33, 2**32, "darwin") == Cap(2**32)
    (tmp_path / "swelling.py").write_text("import time\nkept = bytearray(2**28)\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("safetrain.plan.measure.cap_of", lambda *_: Cap(2**26))
    said: list[str] = []
    found = certify(Bench(MODULE, "chip", said.append, "swelling"), model, job, "rows")
    assert (found.measured, found.ran_out_of_memory) == (None, True)
    assert found.ended == "its memory passed 64.0 MiB"
    assert certify(Bench(MODULE, "chip", said.append, "swelling"), model, job, "rows") == found
    assert len(said) == 1  # the second time it is remembered


def test_what_a_dying_probe_said_before_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dying.py").write_text("import os\nprint('one', flush=True)\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_lines("dying", [], 60) == (["one"], "killed by signal 6")
    (tmp_path / "slow.py").write_text("import time\nprint('one', flush=True)\ntime.sleep(60)\n")
    assert run_lines("slow", [], 3) == (["one"], "no end after 3 s")


def made(model: ModelFiles, point: ProbePoint, coefficients: Coefficients, speed: Speed) -> Measured:
    """A measurement of a machine whose coefficients are known."""
    exact = fit_of(model, [point], coefficients)
    settings = point.settings
    seconds = speed.seconds(point.num_layers, shape_of(point), parts_at_once(settings.batch_size, on_cpu=True))
    return Measured(point, 0, exact, seconds, "cpu")


def fit_of(model: ModelFiles, points: list[ProbePoint], coefficients: Coefficients) -> int:
    from safetrain.plan.calibration import Calibration

    (point,) = points
    calibration = Calibration(KEPT, coefficients, 0, Speed(0, 0, 0, 0), 0, 8)
    return predict(model, calibration, point)


def test_the_fit_finds_what_it_can_tell_apart_and_the_speed(model: ModelFiles) -> None:
    truth, speed = Coefficients(0.7, 0.8, 1.3, 0.5, 0.8, 0.9), Speed(0.01, 2e-6, 1e-6, 3e-9, 0.5)
    points = probe_points(model, template("lora", LORA), KEPT)
    found = fit(model, KEPT, [made(model, point, truth, speed) for point in points])
    assert found.worst_residual < 0.08  # the ridge holds it back where terms look alike
    far = ProbePoint(6, 1024, dataclasses.replace(points[0].settings, batch_size=4, lora=LORA))
    assert predict(model, found, far) == pytest.approx(made(model, far, truth, speed).peak_bytes, rel=0.08)
    shape = Shape(4, 1024, False)
    assert found.speed.seconds(6, shape, 2) == pytest.approx(speed.seconds(6, shape, 2), rel=0.02)
    assert found.margin >= 0.05
    with pytest.raises(ValueError, match="too few"):
        fit(model, KEPT, [])


def test_a_shortened_model_has_the_tensors_of_its_first_blocks(model: ModelFiles) -> None:
    short = shortened(model, 2)
    assert short.num_layers == 2
    blocks = {name.split("layers.")[1].split(".")[0] for name in (t.name for t in short.tensors) if "layers." in name}
    assert blocks == {"0", "1"}
    assert 0 < short.static_bytes < model.static_bytes


def test_a_broken_cache_is_measured_anew(tmp_path: Path, model: ModelFiles) -> None:
    path = tmp_path / "calibration.json"
    points = probe_points(model, template("lora", LORA), KEPT)
    measured = [made(model, point, Coefficients(), Speed(0.1, 0, 0, 0)) for point in points]
    remember(path, measured)
    assert remembered(path) == measured
    path.write_text(json.dumps([{"point": 1}]))
    assert remembered(path) == []
    path.write_text("[{")
    assert remembered(path) == []


def test_mlx_keeps_to_its_limit(model: ModelFiles) -> None:
    """The limit of a training is its predicted peak: where mlx would run ahead of it, it waits."""
    settings = dataclasses.replace(template("lora", LORA), batch_size=8, dequantize_base=True)
    free = ProbePoint(6, 128, settings)
    [natural], _ = run_probes(MODULE, ProbeRequest(str(model.folder), False, (free,)), 120)
    limit = int(0.85 * natural.peak_bytes)
    limited = dataclasses.replace(free, mlx_limit_bytes=limit)
    [kept], ended = run_probes(MODULE, ProbeRequest(str(model.folder), False, (limited,)), 120)
    assert ended == ""
    assert limit < natural.peak_bytes
    assert kept.peak_bytes < 1.15 * limit
    assert kept.peak_bytes < 0.97 * natural.peak_bytes
