"""The training process: `python -m safetrain.engine.worker`, started and watched by a supervisor that never loads mlx.

It reads a job file, trains, writes all results and reports its progress over a pipe. It may die at any moment: the
flight recorder then shows what it was doing.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from safetrain.core.errors import ConfigError, EngineError, SafetrainError
from safetrain.core.events import Begun, EventPipe, Failed, Finished, Said, open_events
from safetrain.core.formatting import describe_proof
from safetrain.core.memory.system import most_footprint_bytes
from safetrain.core.recorder import Phase, Recorder
from safetrain.core.records.metrics import Proof, StepRecord, TrainingSummary, append_csv, csv_of, proof_passes
from safetrain.core.records.search import candidates_with
from safetrain.core.records.settings import TrainJob
from safetrain.core.results import publish
from safetrain.core.signals import StopRequest, stop_on_signal, user_error_of
from safetrain.core.storage import paths
from safetrain.core.storage.files import from_json, read_record, with_traceback, write_record, write_text
from safetrain.core.storage.paths import JOB, RECORDER, UNFINISHED, rank_folder
from safetrain.engine.child_process import limit_memory, set_up_child
from safetrain.engine.cpu.blas import Blas, load_fast_blas
from safetrain.engine.job import Job, describe, load_job, memory_of

if TYPE_CHECKING:
    from safetrain.engine.ranks import Ranks
    from safetrain.engine.run import Watcher
    from safetrain.engine.training import Result  # loads mlx

RANK = "MLX_RANK"  # set by mlx.launch


def main(arguments: list[str]) -> int:
    """Run one rank. ``arguments``: flight folder, event pipe (a descriptor or a path), the supervisor's process id.

    Process id 0 means the process that started this one, as under mlx.launch on another machine. The supervisor gets
    errors that a user can act on; all others end the process with a traceback.
    """
    rank = int(os.environ.get(RANK, "0"))
    flight = Path(arguments[0])
    if flight.name != f"rank_{rank}":  # mlx.launch gives all ranks the same folder
        flight = rank_folder(flight, rank)
    flight.mkdir(parents=True, exist_ok=True)
    pipe = open_events(arguments[1], required=rank == 0)
    job = read_record(flight / JOB, TrainJob) if rank == 0 else None  # rank 0 sends it to the others
    set_up_child(int(arguments[2]) or os.getppid(), flight, job.memory_limit_bytes if job is not None else None)
    with stop_on_signal() as stop:
        try:
            if job is None or job.ranks > 1:
                _train_with_others(job, Recorder(flight / RECORDER), pipe, stop)
            else:
                _train(job, Recorder(flight / RECORDER), pipe, stop)
            return 0
        except (SafetrainError, OSError, MemoryError) as error:
            told = EngineError(f"out of memory: {error}") if isinstance(error, MemoryError) else user_error_of(error)
            if told is None:
                raise
            pipe.send(Failed(type(told).__name__, with_traceback(told, flight), told.exit_code))
            return told.exit_code


def _train_with_others(job: TrainJob | None, recorder: Recorder, pipe: EventPipe, stop: StopRequest) -> None:
    """Connect to the other ranks and train. ``job`` is None on ranks that receive it from rank 0."""
    blas = load_fast_blas()  # before anything imports mlx
    from safetrain.engine.ranks import join, versions

    ranks = join(None if job is None else job.rank_backend, recorder)
    ranks.require_same(versions())  # first: a different version may not understand the job
    text = ranks.broadcast(json.dumps(dataclasses.asdict(job)).encode() if job is not None else b"")
    shared = from_json(TrainJob, json.loads(text))
    if shared.ranks != ranks.size:
        raise ConfigError(f"The hostfile's number of ranks is {ranks.size}.", expected=str(shared.ranks))
    if job is None:
        limit_memory(shared.memory_limit_bytes)
    _train(shared, recorder, pipe, stop, blas, ranks)


def _train(
    asked: TrainJob,
    recorder: Recorder,
    pipe: EventPipe,
    stop: StopRequest,
    blas: Blas | None = None,
    ranks: "Ranks | None" = None,
) -> None:
    with recorder.phase(Phase.LOAD_DATA):
        job = load_job(asked)
    with recorder.phase(Phase.LOAD_MODEL):
        blas = blas or load_fast_blas()  # before anything imports mlx
        from safetrain.engine.backend import device
        from safetrain.engine.ranks import ALONE, facts_of
        from safetrain.engine.training import train
        from safetrain.engine.tuned import prove
    ranks = ranks or ALONE
    if ranks.together:
        ranks.require_same(facts_of(job.identity))
    memory = memory_of(job, device().name)
    recorder.predicted_peak_bytes = memory.peak_bytes
    job = dataclasses.replace(job, mlx_limit_bytes=asked.mlx_limit_bytes or memory.mlx_limit_bytes)
    watcher = _watcher(job, recorder, pipe, stop)
    result = train(job, watcher, ranks)
    if result is None:  # rank 0 does the rest
        return
    metrics = result.metrics
    proof = prove(job, result.tuned, watcher, metrics.steps)
    watcher.say(describe_proof(proof))
    with recorder.phase(Phase.FINISH):
        write_record(job.output / UNFINISHED / paths.METRICS_JSON.name, metrics)
        summary = _summary(job, result, proof, memory.peak_bytes, blas.name)
        write_record(job.output / UNFINISHED / paths.SUMMARY.name, summary)  # the last: the results are complete
        publish(job.output)
    pipe.send(Finished(metrics.steps))


def _watcher(job: Job, recorder: Recorder, pipe: EventPipe, stop: StopRequest) -> "Watcher":
    """A watcher that passes a run's reports on to the metrics file and the supervisor."""
    from safetrain.engine.run import Watcher

    metrics = job.output / UNFINISHED / paths.METRICS_CSV.name

    def begin(records: list[StepRecord], resumed_from_step: int) -> None:
        metrics.with_name(paths.SUMMARY.name).unlink(missing_ok=True)
        write_text(metrics, csv_of(records))
        words, bits = describe(job, recorder.predicted_peak_bytes), job.bits_per_byte_of_nat
        passes = proof_passes(job.tokens, job.rows.valid.tokens)
        pipe.send(Begun(job.updates, resumed_from_step, words, job.settings.eval_steps, passes, bits))

    def record(records: list[StepRecord]) -> None:
        append_csv(metrics, records[-1])
        pipe.send(records[-1])

    return Watcher(begin, record, lambda: stop.signal_number, recorder, lambda text: pipe.send(Said(text)))


def _summary(job: Job, result: "Result", proof: Proof, predicted: int, blas: str) -> TrainingSummary:
    rows, state = job.rows, result.state
    return TrainingSummary(
        **{**vars(job.settings), "threads": state.threads or None},
        **vars(result.metrics),
        base_model=job.base,
        train_rows=len(rows.train),
        cut_rows=rows.train.documents.cut_rows,
        valid_rows=len(rows.valid),
        valid_rows_available=rows.valid_rows_available,
        trainable_parameters=result.trainable_parameters,
        resumed_from_step=state.resumed_from_step,
        labels=state.labels,
        elapsed_seconds=round(state.elapsed_seconds, 3),
        tokens_per_second=round(state.input_tokens / state.elapsed_seconds, 1),
        peak_memory_bytes=state.peak_memory_bytes,
        peak_footprint_bytes=max(most_footprint_bytes(), *(record.footprint_bytes for record in state.records)),
        predicted_peak_bytes=predicted,
        blas=blas,
        padding_share=round(1 - state.input_tokens / state.computed_tokens, 4),
        stopped_early=state.step < job.updates,
        base_valid_loss=state.base_valid_loss or 0.0,
        memory_rungs=tuple(f"step {rung.at_step}: {rung.failed}: {rung.evidence}" for rung in job.rungs),
        gpu_rungs=job.gpu_rungs,
        candidates=candidates_with(job.candidate),
        proof=proof,
    )


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if code and RANK in os.environ:
        os._exit(code)  # at once: mlx may wait for a dead rank, and other ranks wait for this connection to close
    sys.exit(code)
