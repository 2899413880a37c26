"""One rank of a small group that does what a test asks: `python -m tests.support.rank_child FOLDER SCENARIO…`.

The ranks meet as mlx.launch lets them, on this machine. What a rank has found goes to FOLDER/SCENARIO_RANK.json.
"""

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetrain.engine.cpu.blas import load_fast_blas

load_fast_blas()  # before mlx
import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from safetrain.core.data.training_rows import Cursor  # noqa: E402
from safetrain.core.errors import InterruptedRun, SafetrainError  # noqa: E402
from safetrain.core.recorder import Recorder, read_flight  # noqa: E402
from safetrain.core.records.metrics import append_csv, csv_of  # noqa: E402
from safetrain.core.records.run_state import RunIdentity  # noqa: E402
from safetrain.core.records.settings import TrainSettings  # noqa: E402
from safetrain.core.storage.files import write_text  # noqa: E402
from safetrain.engine.adapters import adapter_weights, set_adapter_weights  # noqa: E402
from safetrain.engine.batches import BatchLayout, update_at  # noqa: E402
from safetrain.engine.job import Job  # noqa: E402
from safetrain.engine.ranks import Ranks, facts_of, join, require_same_weights  # noqa: E402
from safetrain.engine.run import Watcher  # noqa: E402
from safetrain.engine.training import Result, train  # noqa: E402
from tests.engine.exact import STILL, flat, prepared, rows_of  # noqa: E402
from tests.support.jobs import job_of  # noqa: E402

LENGTHS = (40, 33, 29, 21, 17, 12, 9, 9, 7, 6, 31, 8, 11)  # 13 rows, 4 in an update: one in the last
VALID = (23, 14, 8)
SHORT = dataclasses.replace(STILL, num_epochs=2, save_steps=3, eval_steps=4)  # 8 updates
LAYOUT = BatchLayout(64)


def job_in(folder: Path, base: Path, settings: TrainSettings = SHORT) -> Job:
    identity = RunIdentity("base", "train", "valid", json.dumps(dataclasses.asdict(settings), sort_keys=True))
    return job_of(folder, base, rows_of(*LENGTHS), rows_of(*VALID), settings, identity)


def watcher_in(folder: Path, rank: int, stop_at: int | None = None) -> Watcher:
    """Writes metrics on rank 0; ``stop_at`` plays a Ctrl-C after that many records."""
    log, recorder = folder / f"metrics_{rank}.csv", Recorder(folder / f"recorder_{rank}.bin")

    def stop() -> int:
        return signal.SIGINT if stop_at is not None and recorder_step(folder, rank) >= stop_at else 0

    return Watcher(
        lambda old, *_: write_text(log, csv_of(old)), lambda records: append_csv(log, records[-1]), stop, recorder
    )


def recorder_step(folder: Path, rank: int) -> int:
    """The update that a rank is at."""
    found = read_flight(folder / f"recorder_{rank}.bin")
    return max((record.work.step for record in found.records), default=0)


def gradient(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Of two updates, the last of which has one row."""
    _, gradients = prepared(folder / "model", SHORT)
    found = []
    for window in (0, 3):
        update = update_at(rows_of(*LENGTHS), Cursor(0, window), SHORT.seed, 4, LAYOUT, ranks.rank, ranks.size)
        loss, tree = gradients.of(update, window)
        if ranks.together:
            tree = ranks.sum_gradient(tree, window)
            loss = mx.array(ranks.total(0, window, float(np.array(loss)))[0])
        rows = sum(len(batch.rows) for batch in update.micro_batches)
        found.append((float(np.array(loss)), update.labels, rows, flat(tree).tolist()))
    return {"updates": found}


def training(ranks: Ranks, folder: Path) -> dict[str, Any]:
    return _trained(ranks, folder / f"whole_{ranks.size}", folder / "model")


def on_disk(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Several ranks read the base from disk; one has it in memory. The last update of an epoch has one row."""
    settings = dataclasses.replace(SHORT, dequantize_base=False, stream_base=ranks.together)
    return _trained(ranks, folder / f"on_disk_{ranks.size}", folder / "model", settings=settings)


def pretraining(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The whole model, on pieces of windows."""
    from tests.engine.test_pretraining import PRETRAIN
    from tests.engine.test_pretraining import job_in as pretraining_job

    run = folder / f"pretrained_{ranks.size}"
    run.mkdir(exist_ok=True)
    job = pretraining_job(run, folder / "float", dataclasses.replace(PRETRAIN, num_epochs=1))
    result = train(job, watcher_in(run, ranks.rank), ranks)
    return _found(result)


def goes_on(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """A run that others have stopped."""
    return _trained(ranks, folder / "stopped", folder / "model")


def stops(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Asked of the last rank alone, in the third update."""
    return _trained(ranks, folder / "stopped", folder / "model", 3 if ranks.rank == ranks.size - 1 else None)


def broken(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """A run that is stopped and goes on with as many ranks."""
    with suppress(InterruptedRun):
        _trained(ranks, folder / "broken", folder / "model", 5 if ranks.rank == 0 else None)
    return _trained(ranks, folder / "broken", folder / "model")


def is_bad(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Far too high a learning rate."""
    wild = dataclasses.replace(SHORT, learning_rate=1e30, warmup_steps=0, max_grad_norm=1e30)
    return _trained(ranks, folder / "bad", folder / "model", settings=wild)


def differs(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The last rank has other rows."""
    identity = RunIdentity("base", f"rows of {ranks.rank == ranks.size - 1}", "valid", "{}")
    ranks.require_same(facts_of(identity))
    return {}


def drifts(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The weights of the last rank are others than those of the rest."""
    model = prepared(folder / "model", SHORT)[0]
    name, weight = next(iter(adapter_weights(model).items()))
    other = weight + (ranks.rank == ranks.size - 1)
    set_adapter_weights(model, adapter_weights(model) | {name: other})
    require_same_weights(ranks, model, 7)
    return {}


def dies(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The last rank is killed; what do the others see? Nothing can be exchanged after it."""
    if ranks.rank == ranks.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        ranks.total(0, 3, 1.0)


def _trained(
    ranks: Ranks, run: Path, model: Path, stop_at: int | None = None, settings: TrainSettings = SHORT
) -> dict[str, Any]:
    run.mkdir(exist_ok=True)
    result = train(job_in(run, model, settings), watcher_in(run, ranks.rank, stop_at), ranks)
    flight = read_flight(run / f"recorder_{ranks.rank}.bin")
    phases = sorted({record.phase.label for record in flight.records})
    return {"phases": phases, **_found(result)}


def _found(result: Result | None) -> dict[str, Any]:
    """On rank 0 alone."""
    if result is None:
        return {}
    metrics, state = dataclasses.asdict(result.metrics), result.state
    return {"metrics": metrics, "resumed": state.resumed_from_step, "labels": state.labels}


SCENARIOS: dict[str, Callable[[Ranks, Path], dict[str, Any]]] = {
    made.__name__: made
    for made in (gradient, training, on_disk, pretraining, stops, broken, is_bad, differs, drifts, dies)
}


def main(folder: Path, names: list[str]) -> int:
    mx.set_default_device(mx.cpu)
    ranks = join("ring") if "MLX_RANK" in os.environ else Ranks()
    for name in names:
        try:
            found = SCENARIOS[name](ranks, folder)
        except SafetrainError as error:
            found = {"error": type(error).__name__, "text": str(error), "code": error.exit_code}
        (folder / f"{name}_{ranks.size}_{ranks.rank}.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
