"""Stage 1: read every row, name the bad ones, write data/validated (rows and their tokens) and data_report.json."""

from pathlib import Path

from safetrain.core.data.foreign_rows import checked_columns
from safetrain.core.formatting import counted
from safetrain.core.lock import require_no_training
from safetrain.core.model.files import read_model_files
from safetrain.core.records.record_files import write_record
from safetrain.core.records.reports import SplitReport
from safetrain.core.records.schema import Pipeline
from safetrain.core.storage import paths
from safetrain.plan.creation.create import TokenizerOfText, create_model
from safetrain.plan.creation.shapes import AskedShape, parameters_named
from safetrain.plan.dataset import Source, validate
from safetrain.plan.findings import SCREEN_LINES, summary
from safetrain.plan.tokenizing import Limits, rules_of
from safetrain.watch.progress import say_on_terminal
from stages.config import stage


@stage
def main(config: Pipeline) -> None:
    """Validate ``data.path`` with the tokenizer of ``model.path``."""
    require_no_training(paths.OUTPUT)
    data, model = config.data, Path(config.model.path)
    if config.model.create is not None and not model.exists():
        _create(config, model, config.model.create)
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
        say_on_terminal,
    )
    write_record(paths.DATA_REPORT, report)
    lines = [
        f"{data.path}: {report.format}; {report.split}",
        *(_described(name, split) for name, split in report.splits),
        f"an answer ends at {' '.join(report.stop_tokens)}; it is asked for {report.opening}",
    ]
    if report.findings:
        lines.append(summary(report.findings, SCREEN_LINES - len(lines)))
    print("\n".join(lines))


def _create(config: Pipeline, folder: Path, preset: str) -> None:
    """A new model where there is none, with a tokenizer of the training rows' texts."""
    source = TokenizerOfText((Path(config.data.path),), checked_columns(config.data.columns))
    asked = AskedShape(parameters_named(preset))
    made = create_model(folder, asked, source, config.train.seed, say=say_on_terminal)
    shape = made.shape
    print(
        f"{folder} is new: {shape.parameters:,} untrained parameters, {shape.layers} blocks of width {shape.hidden}, "
        f"{shape.vocabulary:,} tokens (model.create={preset})"
    )


def _described(name: str, split: SplitReport) -> str:
    """A split in one line."""
    lengths = split.lengths
    return (
        f"{name + ':':6} {counted(split.rows, 'row')}, {split.tokens} tokens, {split.trained_tokens} of them trained; "
        f"tokens of a row: median {lengths.p50}, 90 % {lengths.p90}, 99 % {lengths.p99}, longest {lengths.max}"
    )


if __name__ == "__main__":
    main()
