"""Stage 3: choose the configuration for this data, model and machine, measure it, and write it with its reasons."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import numpy as np

from safetrain.core.data.store import store_path
from safetrain.core.data.training_rows import TrainingRows, load_training_rows
from safetrain.core.formatting import print_text
from safetrain.core.lock import require_no_training
from safetrain.core.model.files import ModelFiles, read_model_files
from safetrain.core.records.reports import Machine, read_data_report, read_machine, require_data_of
from safetrain.core.records.schema import PRETRAIN, Pipeline
from safetrain.core.records.settings import Recommendation
from safetrain.core.storage import paths
from safetrain.core.storage.files import write_record
from safetrain.plan.candidates import PlanInputs
from safetrain.plan.machine import assumed_tflops
from safetrain.plan.recommend import recommendation_lines
from safetrain.plan.search import DryRunner, machine_text, plan_run
from safetrain.plan.speed import flops_per_token, pretraining_lines, trained_tokens
from safetrain.stage import stage

DRY_RUN = "safetrain.engine.dry_run"


@stage
def main(config: Pipeline) -> None:
    """Recommend the settings that are null in params.yaml."""
    require_no_training(paths.OUTPUT)
    model = read_model_files(Path(config.model.path))
    data, machine = read_data_report(paths.DATA_REPORT), read_machine(paths.MACHINE)
    require_data_of(data, config.data.path)
    rows = load_training_rows(model.folder, config.train.max_examples)
    runner = DryRunner(DRY_RUN, machine_text(machine), print_text)
    recommendation = plan_run(PlanInputs(data, machine, model, rows), config.train, config.lora, runner)
    print_text("\n".join(recommendation_lines(recommendation, rows, config.train)))
    if config.train.method == PRETRAIN:
        for line in _pretraining(recommendation, model, machine, rows):
            print_text(line)
    write_record(paths.RECOMMENDED_CONFIG, recommendation)


def _pretraining(
    recommendation: Recommendation, model: ModelFiles, machine: Machine, rows: TrainingRows
) -> Iterator[str]:
    """Describe time and disk space of a pretraining run; without a dry run, compute the time from operations."""
    tokens = int(rows.train.documents.lengths.sum(dtype=np.int64))
    stores = sum(store_path(paths.VALIDATED, split).stat().st_size for split in ("train", "valid"))
    recompute, tflops = recommendation.gradient_checkpointing, assumed_tflops(machine)
    flops = flops_per_token(model, recommendation.max_seq_length, model.parameters, recompute=recompute)
    seconds = trained_tokens(recommendation, tokens) * flops / (tflops * 1e12) if tflops else None
    now = datetime.now().astimezone()
    return pretraining_lines(recommendation, model.parameters, tokens, seconds, stores, now)


if __name__ == "__main__":
    main()
