"""Stage 3: choose the configuration for this data, model and machine, measure it, and write it with its reasons."""

import functools
from datetime import datetime
from pathlib import Path

from safetrain.core.data.training_rows import load_training_rows
from safetrain.core.lock import require_no_training
from safetrain.core.model.files import read_model_files
from safetrain.core.records.reports import read_data_report, read_machine, require_data_of
from safetrain.core.records.schema import PRETRAIN, Pipeline
from safetrain.core.records.settings import write_recommendation
from safetrain.core.storage import paths
from safetrain.plan.choose import PlanInputs, machine_text, plan_by_dry_runs
from safetrain.plan.dry_run import DryRunner
from safetrain.plan.pretraining_plan import pretraining_lines, pretraining_of, require_consent
from safetrain.plan.recommendation_text import recommendation_lines
from stages.config import stage

DRY_RUN = "safetrain.engine.dry_run"


@stage
def main(config: Pipeline) -> None:
    """Recommend what params.yaml leaves open."""
    require_no_training(paths.OUTPUT)
    model = read_model_files(Path(config.model.path))
    data, machine = read_data_report(paths.DATA_REPORT), read_machine(paths.MACHINE)
    require_data_of(data, config.data.path)
    rows = load_training_rows(model.folder, config.train.max_examples)
    say = functools.partial(print, flush=True)
    runner = DryRunner(DRY_RUN, machine_text(machine), say)
    recommendation = plan_by_dry_runs(PlanInputs(data, machine, model, rows), config.train, config.lora, runner)
    for line in recommendation_lines(recommendation, rows):
        say(line)
    if config.train.method == PRETRAIN:
        plan = pretraining_of(recommendation, model.parameters, data.train.tokens, config.train)
        for line in pretraining_lines(plan, datetime.now().astimezone()):
            say(line)
        require_consent(plan.seconds, config.train.max_days)
    write_recommendation(paths.RECOMMENDED_CONFIG, recommendation)


if __name__ == "__main__":
    main()
