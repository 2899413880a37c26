"""Stage 3: choose the configuration for this data, model and machine, measure it, and write it with its reasons."""

from pathlib import Path

import numpy as np

from safetrain.core.data.training_rows import TrainingRows, load_training_rows
from safetrain.core.formatting import duration_text
from safetrain.core.lock import require_no_training
from safetrain.core.model.files import read_model_files
from safetrain.core.records.reports import read_data_report, read_machine, require_data_of
from safetrain.core.records.schema import Pipeline
from safetrain.core.records.settings import Recommendation, write_recommendation
from safetrain.core.storage import paths
from safetrain.plan.choose import PlanInputs, machine_text, plan_by_dry_runs
from safetrain.plan.dry_run import DryRunner
from stages.config import stage

DRY_RUN = "safetrain.engine.dry_run"
GIB = 2**30


@stage
def main(config: Pipeline) -> None:
    """Recommend what params.yaml leaves open."""
    require_no_training(paths.OUTPUT)
    model = read_model_files(Path(config.model.path))
    data, machine = read_data_report(paths.DATA_REPORT), read_machine(paths.MACHINE)
    require_data_of(data, config.data.path)
    rows = load_training_rows(Path(config.model.path), config.train.max_examples)
    runner = DryRunner(DRY_RUN, machine_text(machine), say)
    recommendation = plan_by_dry_runs(PlanInputs(data, machine, model, rows), config.train, config.lora, runner)
    write_recommendation(paths.RECOMMENDED_CONFIG, recommendation)
    show(recommendation)
    if data.longest_row > recommendation.max_seq_length:
        tell_of_cut_rows(rows, recommendation.max_seq_length)


def tell_of_cut_rows(rows: TrainingRows, length: int) -> None:
    """How many rows, tokens and labels the length costs."""
    for name, whole in (("train", rows.train), ("valid", rows.valid)):
        cut = whole.cut(length)
        if not cut.cut_rows:
            continue
        tokens, left = (int(each.lengths.sum(dtype=np.int64)) for each in (whole, cut))
        labels = int(whole.label_counts.sum(dtype=np.int64))
        say(
            f"{name}: {length} tokens cut {cut.cut_rows} of {len(whole)} rows, {100 * (1 - left / tokens):.2f} % of "
            f"the tokens, {100 * cut.lost_labels / max(1, labels):.2f} % of those that are trained on"
        )


def show(recommendation: Recommendation) -> None:
    """Every value with its reason, and what it will take."""
    for reason in recommendation.reasons:
        section, _, key = reason.key.rpartition(".")
        value = getattr(recommendation.lora if section else recommendation, key)
        shown = ", ".join(value) if isinstance(value, tuple) else "null" if value is None else value
        say(f"{reason.key:<22} {shown!s:<12} {reason.text}")
    peak, budget = recommendation.predicted_peak_bytes / GIB, recommendation.memory_budget_bytes / GIB
    whole = peak + recommendation.process_memory_bytes / GIB
    say(f"predicted: mlx {peak:.2f} GiB, the process {whole:.2f} of {budget:.1f} GiB (closed form)")
    if recommendation.measured_peak_bytes is not None:
        measured = recommendation.measured_peak_bytes
        above = 100 * (recommendation.predicted_peak_bytes / measured - 1)
        say(f"measured in a dry run: mlx {measured / GIB:.2f} GiB; the closed form says {above:+.0f} %")
    else:
        say("not measured: no dry run was made")
    if recommendation.total_seconds is not None:
        in_all = duration_text(recommendation.total_seconds)
        say(f"about {recommendation.step_seconds:.2f} s an update, {in_all} in all")


def say(text: str) -> None:
    """To the terminal, at once."""
    print(text, flush=True)


if __name__ == "__main__":
    main()
