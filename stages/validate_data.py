"""Stage 1: read every row, name the bad ones, write data/validated (rows and their tokens) and data_report.json."""

import functools
from pathlib import Path

from safetrain.core.data.foreign_rows import checked_columns
from safetrain.core.lock import require_no_training
from safetrain.core.model.files import read_model_files
from safetrain.core.records.record_files import write_record
from safetrain.core.records.schema import Pipeline
from safetrain.core.storage import paths
from safetrain.plan.dataset import Source, validate
from safetrain.plan.findings import summary
from safetrain.plan.tokenizing import Limits, rules_of
from stages.config import stage


@stage
def main(config: Pipeline) -> None:
    """Validate ``data.path`` with the tokenizer of ``model.path``."""
    require_no_training(paths.OUTPUT)
    data, model = config.data, Path(config.model.path)
    files = read_model_files(model)
    report = validate(
        Source(
            Path(data.path),
            data.valid_fraction,
            data.test_fraction,
            data.near_duplicate_similarity,
            checked_columns(data.columns),
        ),
        model,
        Limits(files.vocab_size, files.max_positions),
        *rules_of(data),
        paths.VALIDATED,
        functools.partial(print, flush=True),
    )
    write_record(paths.DATA_REPORT, report)
    lengths = report.train.lengths
    print(
        f"{data.path}: {report.train.rows} train, {report.valid.rows} valid, {report.test.rows} test rows "
        f"({report.format}; {report.split})\n"
        f"training rows: {report.train.tokens} tokens, {report.train.trained_tokens} of them trained; "
        f"length {lengths.p50} median, {lengths.p95} at 95 %, {lengths.max} longest\n"
        f"an answer ends at {' '.join(report.stop_tokens)}; it is asked for {report.opening}"
    )
    if report.findings:
        print(summary(report.findings))


if __name__ == "__main__":
    main()
