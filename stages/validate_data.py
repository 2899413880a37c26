"""Stage 1: read every row, name the bad ones, write data/validated and data_report.json."""

from pathlib import Path

from safetrain.core import paths
from safetrain.core.data.jsonl import write_rows
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.lock import require_no_training
from safetrain.core.model_files import read_model_files
from safetrain.core.reports import write_record
from safetrain.core.schema import Pipeline
from safetrain.plan.dataset import check_dataset, load_splits, rows_of
from stages.config import stage


@stage
def main(config: Pipeline) -> None:
    """Validate ``data.path`` with the tokenizer of ``model.path``."""
    require_no_training(paths.OUTPUT)
    source, model = Path(config.data.path), Path(config.model.path)
    splits = load_splits(source, config.data.valid_fraction, config.data.test_fraction)
    files = read_model_files(model)
    report = check_dataset(splits, ChatTokenizer(model), source, files.max_positions)
    for name, rows in splits.named():
        write_rows(paths.VALIDATED / f"{name}.jsonl", rows_of(rows))
    write_record(paths.DATA_REPORT, report)
    lengths = report.train.lengths
    print(
        f"{source}: {report.train.rows} train, {report.valid.rows} valid, {report.test.rows} test rows "
        f"({report.format}; {report.split})\n"
        f"training rows: {report.train.tokens} tokens, {report.train.trained_tokens} of them trained; "
        f"length {lengths.p50} median, {lengths.p95} at 95 %, {lengths.max} longest"
    )
    for warning in report.warnings:
        print(f"warning: {warning}")


if __name__ == "__main__":
    main()
