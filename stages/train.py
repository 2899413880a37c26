"""Stage 4: fine-tune the base model on data/validated with the recommended configuration and a person's pins.

The training itself runs in a process of its own that may die; this one watches it and never loads mlx.
"""

import dataclasses
import sys
from pathlib import Path

from safetrain.core.lock import training_lock
from safetrain.core.memory.budget import own_limit_bytes
from safetrain.core.memory.run import PlannedMemory
from safetrain.core.protocol.events import Begun, Event, Failed, Finished, Recorded, Said
from safetrain.core.records.job import Survival, TrainJob
from safetrain.core.records.metrics import StepRecord
from safetrain.core.records.reports import read_data_report, require_data_of
from safetrain.core.records.schema import Pipeline
from safetrain.core.records.settings import (
    Recommendation,
    TrainSettings,
    read_recommendation,
    require_plan_for,
    resolve,
)
from safetrain.core.storage import paths
from safetrain.core.storage.run_files import BAD_UPDATES
from safetrain.guard.keep_going import RunOptions, keep_going
from safetrain.guard.memory_left import PlannedUpdate
from stages.config import stage

WORKER = (sys.executable, "-m", "safetrain.engine.worker")
GIB = 2**30


@stage
def main(config: Pipeline) -> None:
    """Train, or continue an unfinished run of the same settings."""
    with training_lock("default", paths.OUTPUT) as locks:
        recommendation = read_recommendation(paths.RECOMMENDED_CONFIG)
        require_plan_for(recommendation, config.train.method, config.model.path)
        train = config.train
        survival = Survival(
            restart=train.restart,
            trace=train.trace == "phases",
            keep_checkpoints=train.keep_checkpoints,
            disk_wait_minutes=train.disk_wait_minutes,
            memory_limit_bytes=own_limit_bytes(train.memory_limit_gb),
            oversize=train.oversize,
        )
        data = read_data_report(paths.DATA_REPORT)
        require_data_of(data, config.data.path)
        settings = resolve(train, config.lora, recommendation)
        job = TrainJob(
            base=config.model.path,
            settings=settings,
            warmup_is_recommended=train.warmup_steps is None,
            memory_budget=recommendation.memory_budget,
            planned=planned_memory(settings, recommendation),
            survival=survival,
            rungs=(),
        )
        largest = dataclasses.replace(recommendation.largest_update, longest=data.longest_row - 1)
        planned = PlannedUpdate(recommendation.planned_backend, largest)
        options = RunOptions(
            WORKER, paths.OUTPUT, locks, 60 * train.hang_minutes, train.oom_may_shorten, planned, train.keep_awake
        )
        finished = keep_going(job, options, show, say)
    print_result(finished)


def planned_memory(settings: TrainSettings, recommendation: Recommendation) -> PlannedMemory | None:
    """What the plan has measured with the model itself, within its budget."""
    peak = recommendation.measured_peak_bytes
    if peak is None or not recommendation.verified or peak > recommendation.memory_budget_bytes:
        return None
    shape = ("batch_size", "gradient_accumulation", "max_seq_length", "dequantize_base", "gradient_checkpointing")
    kept = {key: getattr(recommendation, key) for key in (*shape, "compute_dtype", "lora")}
    planned = dataclasses.replace(
        settings, method=recommendation.planned_method, optimizer=recommendation.planned_optimizer,
        optimizer_state_bits=recommendation.planned_optimizer_state_bits, **kept,
    )  # fmt: skip
    return PlannedMemory(planned, recommendation.largest_update, peak, recommendation.mlx_limit_bytes)


def show(event: Event) -> None:
    """Tell what the training process does."""
    match event:
        case Begun():
            say(event.description)
            if event.resumed_from_step:
                say(f"continuing from step {event.resumed_from_step}")
        case Recorded():
            say(line_of(event.record))
        case Said():
            say(event.text)
        case Failed() | Finished():
            pass  # told at the end


def say(text: str) -> None:
    """Print; a terminal that is gone must not end the run."""
    try:
        print(text, flush=True)
    except (OSError, UnicodeError):
        sys.stdout = Path("/dev/null").open("w", encoding="utf-8")  # noqa: SIM115 for the rest of the process


def line_of(step: StepRecord) -> str:
    """One line for the terminal."""
    parts = [f"step {step.step:>5}"]
    parts += [f"loss {step.train_loss:.4f}"] if step.train_loss is not None else []
    parts += [f"valid {step.valid_loss:.4f}"] if step.valid_loss is not None else []
    parts += [f"lr {step.learning_rate:.2e}"] if step.step else []
    parts += [f"{step.labels_per_second:,.0f} labels/s"] if step.labels_per_second is not None else []
    return "  ".join([*parts, f"process {step.footprint_bytes / GIB:.2f} GiB"])


def print_result(finished: Finished) -> None:
    """The last lines of a training."""
    if finished.skipped_updates:
        say(f"{finished.skipped_updates} updates were skipped, see {paths.OUTPUT / BAD_UPDATES}")
    if finished.stopped_early:
        say(f"stopped early at step {finished.steps} of {finished.total_steps}: validation no longer improved")
    say(f"done: best validation loss {finished.best_valid_loss:.4f} at step {finished.best_step}, in {paths.ADAPTERS}")


if __name__ == "__main__":
    main()
