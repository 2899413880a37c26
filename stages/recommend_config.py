"""Stage 3: choose the configuration for this data, model and machine, measure it, and write it with its reasons."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from safetrain.core.data.training_rows import TrainingRows, load_training_rows
from safetrain.core.formatting import duration_text, print_text, size_text
from safetrain.core.lock import require_no_training
from safetrain.core.model.files import read_model_files
from safetrain.core.records.reports import DataReport, Machine, require_data_of
from safetrain.core.records.schema import PRETRAIN, SET, Pipeline, Train
from safetrain.core.records.settings import Recommendation
from safetrain.core.storage import paths
from safetrain.core.storage.files import read_result, write_record
from safetrain.plan.candidates import PlanInputs
from safetrain.plan.recommend import plan_run
from safetrain.stage import stage
from safetrain.watch.progress import still_working


@stage
def main(config: Pipeline) -> None:
    """Recommend the settings that are null in params.yaml."""
    require_no_training(paths.OUTPUT)
    model = read_model_files(Path(config.model.path))
    data, machine = read_result(paths.DATA_REPORT, DataReport), read_result(paths.MACHINE, Machine)
    require_data_of(data, config.data.path)
    rows = load_training_rows(model.folder, config.train.max_examples)
    inputs = PlanInputs(data, machine, model, rows)
    with still_working("trying out configurations"):
        recommendation = plan_run(inputs, config.train, config.lora, "safetrain.engine.dry_run", print_text)
    print_text("\n".join(recommendation_lines(recommendation, rows, config.train)))
    write_record(paths.RECOMMENDED_CONFIG, recommendation)


def recommendation_lines(recommendation: Recommendation, rows: TrainingRows, train: Train) -> Iterator[str]:
    """Lines that `recommend_config` prints: values with reasons, memory and time, and truncated rows.

    A key that the user has set is printed with that value, even if recommended_config.json has a different one.
    """
    settings, measured = recommendation.settings, recommendation.measured
    for name, reason in recommendation.reasons.items():
        section, _, key = name.rpartition(".")
        record = settings.lora if section else settings if hasattr(settings, key) else recommendation
        value, pin = getattr(record, key), getattr(train, key, None)
        if pin is not None and not section and SET not in reason:
            value, reason = pin, SET
        text = ", ".join(value) if isinstance(value, tuple) else "null" if value is None else value
        yield f"{name:<22} {text!s:<12} {reason}"
    peak, budget = recommendation.predicted_peak_bytes, recommendation.memory_budget
    whole, most = size_text(peak + budget.process_bytes), size_text(budget.total_bytes)
    yield f"predicted peak: mlx {size_text(peak)}, process {whole} of {most} (closed form)"
    if measured is None:
        yield "not measured: no dry run was made"
    else:
        yield f"dry-run peak: mlx {size_text(measured.peak_bytes)}, process {size_text(measured.footprint_bytes)}"
        in_all = duration_text(recommendation.total_seconds or 0.0)
        yield f"about {measured.update_seconds:.2f} s per step, {in_all} in total with validations and evaluation"
    if settings.method != PRETRAIN:
        yield from cut_lines(rows, settings.max_seq_length)


def cut_lines(rows: TrainingRows, length: int) -> Iterator[str]:
    """Describe the rows and labels that the length truncates; empty if it truncates no row."""
    for name, before in (("train", rows.train.documents), ("valid", rows.valid)):
        cut = before.cut(length)
        if not cut.cut_rows:
            continue
        lost = 100 * cut.lost_labels / max(1, int(before.label_counts.sum(dtype=np.int64)))
        yield f"{name}: {cut.cut_rows} of {len(before)} rows truncated to {length} tokens; {lost:.2f} % of labels lost"
        pairs = [(cut[row].ids, cut[row + 1].ids) for row in range(0, len(cut), 2)] if cut.rows_per_pair == 2 else []
        if same := sum(np.array_equal(*pair) for pair in pairs):
            what = f"{same} of {len(pairs)} pairs have equal answers when truncated, so they teach no preference"
            yield f"{name}: {what}; raise train.max_seq_length"


if __name__ == "__main__":
    main()
