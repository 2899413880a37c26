"""Computes again the micro-batch that a training died in, phase by phase: `python -m safetrain.engine.replay`.

`safetrain diagnose` starts it under the training's supervision and memory limit. It may die, which is the answer.
"""

import dataclasses
import sys
from pathlib import Path

from safetrain.core.data.token_rows import TokenRow, TokenRows
from safetrain.core.errors import DataError
from safetrain.core.protocol.events import EventPipe, Said
from safetrain.core.protocol.flight import NOTHING, Edge, Phase, Recorder, Work
from safetrain.core.records.job import Batch, TrainJob
from safetrain.core.records.loaded_job import load_job, memory_of
from safetrain.core.records.record_files import read_record
from safetrain.core.records.settings import updates_per_epoch
from safetrain.core.storage.run_files import BATCH, JOB, RECORDER
from safetrain.engine.blas import load_fast_blas
from safetrain.engine.child_process import set_up_child


def main(arguments: list[str]) -> int:
    """``arguments``: the flight folder, the descriptor of the event pipe, the supervisor's process id."""
    flight, pipe = Path(arguments[0]), EventPipe(int(arguments[1]))
    job, batch = read_record(flight / JOB, TrainJob), read_record(flight / BATCH, Batch)
    set_up_child(int(arguments[2]), flight, job.survival.memory_limit_bytes)
    recorder = Recorder(flight / RECORDER)
    with recorder.phase(Phase.LOAD_DATA):
        loaded = load_job(job, lambda: recorder.write(Phase.LOAD_DATA, Edge.BEFORE, NOTHING))
    with recorder.phase(Phase.LOAD_MODEL):
        load_fast_blas()  # before anything imports mlx
        from safetrain.core.data.row_order import Cursor, rows_at
        from safetrain.engine.backend import allocator, device
        from safetrain.engine.batches import fill, make_batch
        from safetrain.engine.layout import training_layout
        from safetrain.engine.tracing import Tracer
        from safetrain.engine.trainable import optimizer_of, prepare
        from safetrain.engine.update import Gradients, apply_gradient, measure, update_from

        settings = loaded.settings
        recorder.read_allocator = allocator
        recorder.predicted_peak_bytes = memory_of(loaded, device().name).peak_bytes
        model, traced = prepare(
            Path(job.base), settings, recorder, Tracer(recorder, lambda text: pipe.send(Said(text)))
        )
        optimizer = optimizer_of(settings)
        optimizer.init(model.module.trainable_parameters())
    data = loaded.rows.train
    layout = training_layout(model, settings.batch_size, data.shapes())
    epoch, window = divmod(max(0, batch.step - 1), updates_per_epoch(len(data), settings.rows_per_update))
    found = rows_at(data, Cursor(epoch, window), settings.seed, settings.rows_per_update)
    whole_batch = list(fill(found.data, found.rows, layout))[batch.micro_batch]
    if not set(batch.row_ids) <= {row + 1 for row in found.data.numbers(whole_batch)}:
        raise DataError("The data is not that of the training that died.", do="run the training again instead")
    chosen = whole_batch[: batch.most_rows]
    short = TokenRows.of([cut(found.data[row], batch.most_tokens) for row in chosen])
    order = range(len(short))
    together = dataclasses.replace(layout, shards=1)  # all rows in one shard, which then holds what all of them hold
    update = update_from(make_batch(short, order, layout), short)
    model.module.train()
    measure(
        *traced.of(update_from(make_batch(short, order, together), short), batch.step - 1)
    )  # piece by piece, to give the death a name
    whole = Gradients(model, settings.seed, recorder=recorder)
    loss, gradient = whole.of(update, batch.step - 1)  # as in training: the shards of a micro-batch side by side
    result = measure(loss, gradient)
    with recorder.phase(Phase.OPTIMIZER, Work(batch.step)):
        apply_gradient(model, optimizer, gradient, result.grad_norm, 0.0, settings.max_grad_norm)
    return 0


def cut(row: TokenRow, most_tokens: int) -> TokenRow:
    """The beginning of a row; if it has no label, its last token becomes one, so that there is a loss."""
    ids, trained = row.ids[:most_tokens], row.trained[:most_tokens]
    if not trained[1:].any():
        trained = trained.copy()
        trained[-1] = True
    return TokenRow(ids, trained)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
