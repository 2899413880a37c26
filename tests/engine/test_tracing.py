"""train.trace=phases tells forward pass, loss and backward pass apart, and trains the very same weights."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from safetrain.core.recorder import Edge, Phase, read_flight
from safetrain.engine.backend import device
from tests.engine.exact import SETTINGS, rows_of
from tests.engine.test_training import job_in, require_same_run, run
from tests.support.jobs import with_rows

PARTS = [(phase, edge) for phase in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD) for edge in (Edge.BEFORE, Edge.AFTER)]


@pytest.mark.skipif(not device().on_cpu, reason="on a GPU an untraced run is compiled, which rounds otherwise")
@pytest.mark.parametrize("least_memory", [False, True])
def test_a_traced_run_gives_the_same_bits_and_records_each_part(
    tiny_model: Callable[..., Path], tmp_path: Path, least_memory: bool
) -> None:
    """Rows are so long that an update of 2 x 2 has two micro-batches."""
    settings = dataclasses.replace(
        SETTINGS, max_steps=4, gradient_checkpointing=least_memory, dequantize_base=not least_memory
    )
    base, said, silent = tiny_model(bits=4), list[str](), list[str]()
    plain, traced = (
        with_rows(job_in(tmp_path / name, base, settings), train=rows_of(*range(36, 60, 2)))
        for name in ("plain", "traced")
    )
    run(plain, say=silent.append)
    run(dataclasses.replace(traced, trace=True), say=said.append)
    require_same_run(traced.output, plain.output)
    assert (bool(said), silent) == (True, [])
    found = read_flight(plain.output / "recorder.bin").records
    assert Phase.GRADIENT in {record.phase for record in found}
    phases = {phase for phase, _ in PARTS}
    assert not phases & {record.phase for record in found}
    parts = [record for record in read_flight(traced.output / "recorder.bin").records if record.phase in phases]
    groups = [parts[start : start + len(PARTS)] for start in range(0, len(parts), len(PARTS))]
    assert all([(record.phase, record.edge) for record in group] == PARTS for group in groups)
    assert all(len({record.work for record in group}) == 1 for group in groups)
    places = [(group[0].work.step, group[0].work.micro_batch) for group in groups]
    assert list(dict.fromkeys(places)) == [(step, micro_batch) for step in (1, 2, 3, 4) for micro_batch in (0, 1)]
    assert all(record.work.rows and record.work.tokens and record.active_bytes for record in parts)
