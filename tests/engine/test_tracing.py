"""train.trace=phases tells forward pass, loss and backward pass apart, and trains the very same weights."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from safetrain.core.recorder import Edge, FlightRecord, Phase, read_flight
from safetrain.core.records.settings import TrainSettings
from safetrain.engine.backend import device
from safetrain.engine.job import Job
from tests.engine.exact import SETTINGS, rows_of
from tests.engine.test_training import final_state, job_in, metrics_without_time, run, same
from tests.support.jobs import with_rows

Build = Callable[..., Path]
PARTS = [
    (Phase.FORWARD, Edge.BEFORE),
    (Phase.FORWARD, Edge.AFTER),
    (Phase.LOSS, Edge.BEFORE),
    (Phase.LOSS, Edge.AFTER),
    (Phase.BACKWARD, Edge.BEFORE),
    (Phase.BACKWARD, Edge.AFTER),
]
WORDS = ["before forward", "after forward", "before loss", "after loss", "before backward", "after backward"]
SHORT = dataclasses.replace(SETTINGS, max_steps=4)
KINDS = {
    "two micro-batches": SHORT,
    "least memory": dataclasses.replace(SHORT, gradient_checkpointing=True, dequantize_base=False),
}


def job_of(folder: Path, base: Path, settings: TrainSettings = SHORT) -> Job:
    """Rows so long that an update of 2 x 2 has two micro-batches."""
    return with_rows(job_in(folder, base, settings), train=rows_of(*range(36, 60, 2)))


def traced(folder: Path, base: Path, settings: TrainSettings = SHORT) -> tuple[list[str], list[FlightRecord]]:
    """What a traced run has said and recorded."""
    said: list[str] = []
    run(dataclasses.replace(job_of(folder, base, settings), trace=True), say=said.append)
    found = read_flight(folder / "recorder.bin")
    return said, list(found.records)


@pytest.mark.skipif(not device().on_cpu, reason="on a GPU an untraced run is compiled, which rounds otherwise")
@pytest.mark.parametrize("settings", list(KINDS.values()), ids=list(KINDS))
def test_a_traced_run_gives_the_same_bits(tiny_model: Build, tmp_path: Path, settings: TrainSettings) -> None:
    base = tiny_model(bits=4)
    run(job_of(tmp_path / "plain", base, settings))
    said, _ = traced(tmp_path / "traced", base, settings)
    assert said
    assert same(final_state(tmp_path / "traced"), final_state(tmp_path / "plain"))
    assert metrics_without_time(tmp_path / "traced") == metrics_without_time(tmp_path / "plain")


def test_each_part_of_each_micro_batch_is_recorded_in_order(tiny_model: Build, tmp_path: Path) -> None:
    _, records = traced(tmp_path, tiny_model())
    phases = {phase for phase, _ in PARTS}
    parts = [record for record in records if record.phase in phases]
    assert len(parts) % len(PARTS) == 0
    for start in range(0, len(parts), len(PARTS)):
        group = parts[start : start + len(PARTS)]
        assert [(record.phase, record.edge) for record in group] == PARTS
        assert len({record.work for record in group}) == 1
    places = [(record.work.step, record.work.micro_batch) for record in parts]
    assert places == sorted(places)
    assert set(places) == {(step, micro_batch) for step in (1, 2, 3, 4) for micro_batch in (0, 1)}
    assert all(record.work.rows and record.work.tokens and record.active_bytes for record in parts)


def test_an_untraced_run_is_silent_and_records_gradients_in_one(tiny_model: Build, tmp_path: Path) -> None:
    said: list[str] = []
    run(job_of(tmp_path, tiny_model()), say=said.append)
    found = read_flight(tmp_path / "recorder.bin")
    phases = {record.phase for record in found.records}
    assert said == []
    assert Phase.GRADIENT in phases
    assert not phases & {Phase.FORWARD, Phase.LOSS, Phase.BACKWARD}
