"""Stage 1: check every row, report bad ones, write data/validated (rows and their tokens) and data_report.json."""

from pathlib import Path

from safetrain.core.formatting import print_text
from safetrain.core.lock import require_no_training
from safetrain.core.model.files import read_model_files
from safetrain.core.model.shapes import PRESETS
from safetrain.core.records.reports import DataReport, SplitReport
from safetrain.core.records.schema import PRETRAIN, Pipeline
from safetrain.core.storage import paths
from safetrain.core.storage.files import write_record
from safetrain.create.model import create_model, describe_shape
from safetrain.data.findings import summary
from safetrain.data.forms import checked_columns
from safetrain.data.tokenize import settings_of
from safetrain.data.validate import training_texts, validate
from safetrain.stage import stage
from safetrain.watch.progress import still_working

TABLE = "{:<6}{:>10}{:>14}{:>14}{:>12}{:>7}{:>7}{:>9}"


@stage
def main(config: Pipeline) -> None:
    """Validate ``data.path`` with the tokenizer of ``model.path``."""
    require_no_training(paths.OUTPUT)
    if config.model.create is not None:
        _create_or_use(config, Path(config.model.path), config.model.create)
    report = _validated(config)
    write_record(paths.DATA_REPORT, report)
    rows = "pairs" if report.train.pairs else "rows"
    lines = [
        f"{config.data.path}: {report.format}; {report.split}",
        TABLE.format("split", rows, "tokens", "labels", "median row", "p90", "p99", "longest"),
        *(_table_line(name, split) for name, split in report.splits),
        f"stop token: {' '.join(report.stop_tokens)}" + ("" if report.format == "text" else f"; {report.opening}"),
    ]
    if report.findings:
        lines.append(summary(report.findings, f"{paths.DATA_REPORT} lists all"))
    print_text("\n".join(lines))


def _create_or_use(config: Pipeline, folder: Path, preset: str) -> None:
    """Create the model; if the folder exists, use it, and say so."""
    if folder.exists():
        parameters = read_model_files(folder).parameters
        print_text(
            f"using the existing model {folder}: {parameters:,} parameters; to create a new one, remove this folder"
        )
        return
    texts = training_texts([Path(config.data.path)], checked_columns(config.data.columns))
    tokenizer = None if config.model.tokenizer is None else Path(config.model.tokenizer)
    shape = create_model(
        folder, PRESETS[preset], config.train.seed, texts=texts, where=config.data.path, tokenizer=tokenizer,
        say=print_text,
    )  # fmt: skip
    print_text(f"created {folder}: untrained, {describe_shape(shape)}")


def _validated(config: Pipeline) -> DataReport:
    """Validate data.path and write data/validated. Raises ConfigError, DataError, ModelError."""
    model, source, documents = Path(config.model.path), Path(config.data.path), config.train.method == PRETRAIN
    read_model_files(model)  # raises if the model is incomplete
    settings = settings_of(config.data, documents=documents)
    with still_working("reading and comparing rows"):
        return validate([source], model, settings, paths.VALIDATED).report


def _table_line(name: str, split: SplitReport) -> str:
    rows, lengths = split.pairs or split.rows, split.lengths
    counts = rows, split.tokens, split.labels, lengths.p50, lengths.p90, lengths.p99, lengths.max
    return TABLE.format(name, *(f"{count:,}" for count in counts))


if __name__ == "__main__":
    main()
