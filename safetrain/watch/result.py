"""A finished run's result in a few lines, and the next commands. It takes a run's records."""

import os
from pathlib import Path, PurePath

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import counted, duration_text
from safetrain.core.records.evaluation import (
    Evaluation,
    Sample,
    Verdict,
    describe_exact_match,
    describe_forgetting,
    describe_loss,
    describe_sample,
    judge,
)
from safetrain.core.records.metrics import TrainingSummary
from safetrain.core.records.reports import DataReport
from safetrain.core.records.schema import PRETRAIN, Gate
from safetrain.core.run_folder import Run
from safetrain.core.storage import paths

EXAMPLE = "data/example"  # ships with the project
MEASURE = "safetrain stage evaluate"


def describe_result(run: Run, command: str = "dvc repro") -> str:
    """The text for a terminal after ``command`` ran the pipeline; raises ConfigError without an evaluated run."""
    summary, scores = _measured(run)
    metrics, outcome = summary.metrics, summary.outcome
    pretrained = summary.settings.method == PRETRAIN
    rows = f"{outcome.train_rows:,} {'windows' if pretrained else 'rows'}"
    headline = f"Trained {counted(metrics.steps, 'step')} on {rows} in {duration_text(outcome.elapsed_seconds)}."
    lines = ["", headline, *describe_scores(scores)]
    if bits := metrics.best_valid_bits_per_byte:
        lines.append(f"Validation loss: {bits:.3f} bits per byte of text.")
    if not pretrained or scores.forgetting.nats_per_token is not None:  # an untrained model has nothing to forget
        lines.append(f"{describe_forgetting(scores.forgetting)}.")
    sample = next((each for each in scores.samples if _can_be_typed(each.question)), next(iter(scores.samples), None))
    texts = [describe_sample(sample.question, sample.base, sample.tuned)] if sample else []
    commands = _next(sample, command, run.data, pretrained=pretrained)
    listed = [f"{line:<45} # {note}" if note else line for line, note in commands]
    return "\n".join([*lines, *(["", *texts] if texts else []), "", "Next:  " + "\n       ".join(listed)])


def describe_scores(scores: Evaluation) -> list[str]:
    """A sentence for exact match, where questions were answered, and one for the loss on the test rows."""
    lines = [describe_exact_match(scores)] if scores.answered else []
    return [f"{line}." for line in (*lines, describe_loss(scores))]


def gate(run: Run, thresholds: Gate) -> Verdict:
    """Whether the run is better than its base; raises ConfigError without a finished and evaluated run."""
    _, scores = _measured(run)
    return judge(scores.improvement, scores.tuned, scores.forgetting, thresholds)


def unmeasured(run: Run) -> str:
    """Why the adapter's quality is unknown, in a line; empty for an evaluated one."""
    if run.state is not None and not run.state.finished:
        return "the training is not finished: this is its best adapter so far, or that of the training before"
    return "" if run.evaluation is not None else f"this adapter has not been evaluated: '{MEASURE}' measures it"


def _measured(run: Run) -> tuple[TrainingSummary, Evaluation]:
    if run.summary is not None and run.evaluation is not None:
        return run.summary, run.evaluation
    damage = "; ".join(f"{name}: {reason}" for name, reason in run.unreadable)
    if run.summary is None:
        do = "repeat the command that started it ('safetrain run' or 'dvc repro'): it continues"
        raise ConfigError("No run has finished yet.", where=str(paths.SUMMARY), got=damage, do=do)
    got = damage or ("scores of another adapter" if run.has_stale_evaluation else "")
    do = f"{MEASURE}; after 'git checkout': dvc checkout"
    raise ConfigError("The last training has not been evaluated.", where=str(paths.EVALUATION), got=got, do=do)


def _next(sample: Sample | None, command: str, data: DataReport | None, *, pretrained: bool) -> list[tuple[str, str]]:
    """Commands for after a run, with or without DVC, each with its purpose."""
    must_activate = Path(".venv/bin/activate").is_file() and "VIRTUAL_ENV" not in os.environ
    lines = [("source .venv/bin/activate", "")] if must_activate else []
    if pretrained:
        lines += [('safetrain ask "The "', "it continues a text")]
        fuse, change = ("safetrain fuse models/mine", "then set model.path to it"), "train.max_steps=…"
    else:
        question = sample.question if sample and _can_be_typed(sample.question) else "..."
        lines += [(f'safetrain ask "{question}" --base', ""), ("safetrain chat --compare", "talk with both models")]
        fuse, change = ("safetrain fuse fused", "merge adapter into base"), "train.learning_rate=2e-3"
    lines += [("safetrain report", "a page with everything"), fuse]
    if command.endswith(" repro"):
        dvc = command.removesuffix("repro")
        lines += [(f"{dvc}exp run -S {change}", "another run"), (f"{dvc}exp show", "compare the runs")]
    else:
        lines += [(f"{command} {change}", "replaces these results"), ("safetrain repro", "the same with DVC, kept")]
    if data is None or PurePath(data.source).is_relative_to(EXAMPLE):
        lines.append(("safetrain run --data FILE", "your data; also --model"))
    return lines


def _can_be_typed(question: str) -> bool:
    """Whether the question fits on a command line, and a shell does not change it inside double quotes."""
    return len(question) <= 50 and not set(question) & set('"$`\\!\n')
