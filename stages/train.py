"""Stage 4: fine-tune the base model on data/validated with the recommended configuration and a person's pins."""

import dataclasses
import json
from pathlib import Path

from safetrain.core import paths
from safetrain.core.lock import training_lock
from safetrain.core.memory import backend_of, check_run
from safetrain.core.metrics import StepRecord, append_csv, start_csv
from safetrain.core.model_files import read_model_files
from safetrain.core.reports import TrainingMetrics, TrainingOutcome, write_record, write_summary
from safetrain.core.schema import Pipeline
from safetrain.core.settings import (
    TrainSettings,
    read_recommendation,
    require_plan_for,
    resolve,
    total_updates,
    usual_warmup,
)
from safetrain.core.signals import stop_on_signal
from safetrain.core.tokenizer import ChatTokenizer
from safetrain.core.training_rows import LoadedRows, digest, load_rendered
from safetrain.engine.blas import load_fast_blas
from stages.config import stage


@stage
def main(config: Pipeline) -> None:
    """Train, or continue an unfinished run of the same settings."""
    with training_lock("default", paths.OUTPUT), stop_on_signal() as stop:
        recommendation = read_recommendation(paths.RECOMMENDED_CONFIG)
        require_plan_for(recommendation, config.train.method, config.model.path)
        settings = resolve(config.train, config.lora, recommendation)
        base = Path(config.model.path)
        files, tokenizer = read_model_files(base), ChatTokenizer(base)
        train_path, valid_path = (paths.VALIDATED / f"{name}.jsonl" for name in ("train", "valid"))
        loaded = load_rendered(train_path, tokenizer, settings.max_seq_length, settings.max_examples)
        train_rows, valid_rows = loaded.rows, load_rendered(valid_path, tokenizer, settings.max_seq_length).rows
        blas = load_fast_blas()  # before anything imports mlx
        from safetrain.engine.model import on_cpu
        from safetrain.engine.state import RunIdentity
        from safetrain.engine.training import Job, Watcher, finish, train

        longest = max(len(row.ids) for row in [*train_rows, *valid_rows])
        backend = backend_of(
            files,
            "cpu" if on_cpu() else "gpu",
            settings.dequantize_base,
            settings.method,
            checkpointing=settings.gradient_checkpointing,
        )
        predicted = check_run(files, settings, longest, backend, recommendation.memory_budget_bytes)
        updates = total_updates(len(train_rows), settings.rows_per_update, settings.num_epochs, settings.max_steps)
        if config.train.warmup_steps is None:  # the plan may have been for a longer run
            shorter = min(settings.warmup_steps, usual_warmup(updates))
            settings = dataclasses.replace(settings, warmup_steps=shorter)
        print(describe(settings, loaded, updates, predicted, blas.name), flush=True)
        identity = RunIdentity(files.fingerprint, digest(train_rows), digest(valid_rows), identity_of(settings))
        job = Job(base, train_rows, valid_rows, settings, identity, paths.OUTPUT, paths.ADAPTERS, config.train.restart)
        result = train(job, Watcher(begin, record, lambda: stop.signal_number, lambda text: print(text, flush=True)))
        outcome = TrainingOutcome(
            base_model=str(base),
            train_rows=len(train_rows),
            trainable_parameters=result.trainable_parameters,
            resumed_from_step=result.resumed_from_step,
            trained_tokens=result.trained_tokens,
            elapsed_seconds=round(result.elapsed_seconds, 3),
            tokens_per_second=round(result.tokens_per_second, 1),
            peak_memory_bytes=result.peak_memory_bytes,
            peak_footprint_bytes=result.peak_footprint_bytes,
            predicted_peak_bytes=predicted,
            blas=blas.name,
            padding_share=round(result.padding_share, 4),
            skipped_updates=result.skipped_updates,
            stopped_early=result.stopped_early,
        )
        write_record(paths.METRICS_JSON, result.metrics)
        write_summary(paths.SUMMARY, settings, result.metrics, outcome)
        finish(job, result)
    if result.skipped_updates:
        print(f"{result.skipped_updates} updates were skipped, see {paths.OUTPUT / 'bad_updates'}")
    if result.stopped_early:
        print(f"stopped early at step {result.metrics.steps} of {updates}: validation no longer improved")
    print_result(result.metrics)


def begin(records: list[StepRecord], resumed_from_step: int) -> None:
    """Start the metrics file with what an interrupted run already recorded."""
    start_csv(paths.METRICS_CSV, records)
    if resumed_from_step:
        print(f"continuing from step {resumed_from_step}", flush=True)


def record(step: StepRecord) -> None:
    """Append to the metrics file and print one line."""
    append_csv(paths.METRICS_CSV, step)
    parts = [f"step {step.step:>5}"]
    parts += [f"loss {step.train_loss:.4f}"] if step.train_loss is not None else []
    parts += [f"valid {step.valid_loss:.4f}"] if step.valid_loss is not None else []
    parts += [f"lr {step.learning_rate:.2e}"] if step.step else []
    parts += [f"{step.tokens_per_second:,.0f} labels/s"] if step.tokens_per_second is not None else []
    print("  ".join([*parts, f"process {step.footprint_bytes / 2**30:.2f} GiB"]), flush=True)


def identity_of(settings: TrainSettings) -> str:
    """The settings that decide what is computed, as text; how often it is logged or saved is not one of them.

    Nor is what a bad update is and what to do about it: a run that one has stopped can go on with other answers.
    """
    neutral = dataclasses.replace(settings, log_steps=1, save_steps=1, on_bad_update="stop", max_loss_jump=None)
    return json.dumps(dataclasses.asdict(neutral), sort_keys=True)


def describe(settings: TrainSettings, loaded: LoadedRows, updates: int, predicted_bytes: int, blas: str) -> str:
    """The first words of a training."""
    cut = f"{loaded.cut_rows} rows are cut to {settings.max_seq_length} tokens and lose {loaded.lost_labels} labels\n"
    window = f"{settings.batch_size} x {settings.gradient_accumulation}"
    return (cut if loaded.cut_rows else "") + (
        f"training on {len(loaded.rows)} rows: {window} rows per update, "
        f"{updates} updates, {settings.optimizer}, {settings.schedule} learning rate to {settings.learning_rate:g}, "
        f"{trained(settings)}; predicted peak of mlx {predicted_bytes / 2**30:.2f} GiB; BLAS: {blas}"
    )


def trained(settings: TrainSettings) -> str:
    """What is trained, in words."""
    layers = f"the top {settings.lora.num_layers} blocks"
    if settings.method == "full":
        return f"all weights of {layers}"
    name = {"lora": "LoRA", "dora": "DoRA"}[settings.method]
    return f"{name} rank {settings.lora.rank} on {layers}"


def print_result(metrics: TrainingMetrics) -> None:
    """The last line of a training."""
    print(f"done: best validation loss {metrics.best_valid_loss:.4f} at step {metrics.best_step}, in {paths.ADAPTERS}")


if __name__ == "__main__":
    main()
