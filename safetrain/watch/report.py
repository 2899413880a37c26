"""report.html: a page about one run, which loads nothing. Templates lay out the records."""

import base64
import re
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from safetrain.core.events import Died
from safetrain.core.formatting import (
    counted,
    describe_proof,
    duration_text,
    printable,
    rows_text,
    size_text,
    written_again,
)
from safetrain.core.postmortem import PostMortem, describe_rows
from safetrain.core.records.schema import SET
from safetrain.core.records.settings import EXACT, MEASURED, MEMORY_ONLY, TrainSettings
from safetrain.core.storage.files import write_text
from safetrain.watch.charts import pictures, predicted_peak, rungs_of
from safetrain.watch.monitor import State, state_of
from safetrain.watch.progress import coverage_of
from safetrain.watch.result import (
    SCORES,
    describe_forgetting,
    describe_loss,
    describe_preference,
    describe_score,
    part_name,
    span,
)
from safetrain.watch.run_folder import Run
from safetrain.watch.standings import rows_of

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"
GOOD, OPEN, BAD = "good", "open", "bad"  # the colour of a verdict
MOST_LETTERS, MOST_LINES = 600, 40
Row = tuple[str, ...]


def write_report(run: Run, path: Path) -> None:
    """Write the page about a run, whole or not at all. The same records give the same bytes."""
    text = templates().get_template("report.html").render(run=run, title=title_of(run), pictures=pictures(run))
    write_text(path, re.sub(r"\n\s*\n+", "\n", text))


def templates(*more: Path) -> "Environment":
    """The templates of the report, and those in more folders. Values are text in them, never markup."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    pages = Environment(loader=FileSystemLoader([*more, TEMPLATES]), autoescape=True, undefined=StrictUndefined,
                        trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    pages.finalize = lambda value: printable(value) if type(value) is str else value  # markup is no plain str
    pages.filters |= {
        "cut": cut,
        "size": size_text,
        "duration": duration_text,
        "counted": counted,
        "day": lambda seconds: datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "answer": lambda text: cut(text) if text.strip() else "(empty answer)",
        "base64": lambda content: base64.b64encode(content).decode(),
    }
    functions = (
        configuration_of, coverage_of, death_of, describe_forgetting, describe_preference, describe_proof,
        describe_rows, describe_score, history_of, memory_sizes, part_name, rows_of, rows_text, span, status_of,
        verdict_of, written_again,
    )  # fmt: skip
    pages.globals |= {"EXACT": EXACT, "SCORES": SCORES, **{function.__name__: function for function in functions}}
    return pages


def cut(text: str, most: int = MOST_LETTERS) -> str:
    """Shorten to ``most`` characters, and say how many more there are."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more)"


def title_of(run: Run) -> str:
    """Base model and data, by the last part of their paths."""
    bases = [run.summary.base_model] if run.summary is not None else [run.plan.base] if run.plan is not None else []
    sources = [run.data.source] if run.data is not None else []
    return " on ".join(PurePath(path).name for path in bases + sources) or "A run of safetrain"


def status_of(run: Run) -> tuple[str, str]:
    """How far the run is, and a colour for it."""
    if run.summary is not None:
        rungs = len(rungs_of(run)) + len(run.summary.gpu_rungs)
        return ("finished" if not rungs else f"finished, settings lowered {counted(rungs, 'time')}", GOOD)
    state = state_of(run)
    saved = ", saved" if state is State.STOPPED and run.postmortem and run.postmortem.resumes_from_step else ""
    text = "gone: run safetrain diagnose" if state is State.GONE else state.value + saved
    return text, BAD if state in (State.DIED, State.GONE) else OPEN


def verdict_of(run: Run) -> tuple[str, str]:
    """What was learned, in one sentence with its interval, and a colour for it."""
    scores = run.evaluation
    if scores is not None:
        gain, half = scores.improvement.nats_per_label, scores.improvement.plus_minus
        tone = OPEN if half is None or abs(gain) <= half else GOOD if gain > 0 else BAD
        samples = {(each.where, each.question): each for each in (*scores.samples, *scores.worst)}
        answers = [each.tuned.strip() for each in samples.values() if each.expected.strip()]
        if 2 * answers.count("") <= len(answers):
            return f"{describe_loss(scores)}.", tone
        empty = f"{answers.count('')} of the tuned model's {len(answers)} recorded answers are empty"
        return f"{describe_loss(scores)}. But {empty}.", OPEN if tone == GOOD else tone
    if run.summary is None:
        return "No result yet: no training run has finished here.", OPEN
    summary = run.summary
    losses = f"{summary.base_valid_loss:.3f} before, {summary.best_valid_loss:.3f} at step {summary.best_step:,}"
    return f"This adapter has not been evaluated yet. Validation loss: {losses}.", OPEN


def death_of(run: Run) -> PostMortem | None:
    """Return the post-mortem of a run that died or was stopped; None for other runs."""
    return run.postmortem if run.summary is None and state_of(run) in (State.DIED, State.STOPPED) else None


def history_of(run: Run) -> list[str]:
    """Interruptions, continuations and settings that did not fit, one line each; empty for a run without them."""
    lines = [f"{text}; continued with less memory" for text in rungs_of(run)]
    if run.summary is not None:
        lines += run.summary.gpu_rungs
        if run.summary.resumed_from_step:
            lines.append(f"the last process continued from step {run.summary.resumed_from_step:,}")
        if run.summary.stopped_early:
            lines.append(f"stopped early at step {run.summary.steps:,}: validation no longer improved")
    elif run.job is not None:
        lines += run.job.gpu_rungs
    deaths = [entry.event for entry in run.journal if isinstance(entry.event, Died)]
    lines += [f"ended at step {death.step:,}: {death.title}" for death in deaths]
    return [cut(line) for line in lines[:MOST_LINES]]


def memory_sizes(run: Run) -> list[tuple[str, int, str]]:
    """Name, bytes and note of predicted and measured memory and its limit; empty without a plan."""
    plan, predicted = run.plan, predicted_peak(run)
    if plan is None:
        return []
    basis = "closed form" if plan.measured is None else "dry run"
    peak = max((each.peak_memory_bytes for each in run.steps), default=0)
    footprint = max((each.footprint_bytes for each in run.steps), default=0)
    if run.summary is not None:
        peak, footprint = run.summary.peak_memory_bytes, run.summary.peak_footprint_bytes
    sizes = [
        ("predicted peak of mlx", predicted, f"basis: {basis}, {'' if plan.verified else 'not '}verified"),
        ("measured peak of mlx", peak, f"{100 * peak / predicted:.0f} % of the prediction" if predicted else ""),
        ("peak of the process", footprint, f"Python: {size_text(plan.memory_budget.process_bytes)} expected"),
        ("limit", plan.memory_budget.total_bytes, "for the training process"),
    ]
    return [each for each in sizes if each[1]]


def values_of(settings: TrainSettings) -> dict[str, Any]:
    """Every training setting by its key in params.yaml."""
    names = [field.name for field in fields(TrainSettings) if field.name not in ("lora", *MEASURED)]
    values = {f"train.{name}": getattr(settings, name) for name in names}
    return values | {f"lora.{name}": value for name, value in vars(settings.lora).items()}


def configuration_of(run: Run) -> list[Row]:
    """Key, value, who decided it, and why: first the values that differ from the recommendation."""
    planned = values_of(run.plan.settings) if run.plan is not None else {}
    reasons = run.plan.reasons if run.plan is not None else {}
    recommended = {key: value for key, value in planned.items() if key.removeprefix("train.") in reasons}
    ladder_keys = {f"train.{name}" for name in MEMORY_ONLY} if rungs_of(run) else set[str]()
    rows = list[Row]()
    for key, value in (values_of(run.settings) if run.settings is not None else recommended).items():
        decided, reason = "params.yaml", reasons.get(key.removeprefix("train."), "")
        if key in recommended:
            decided = "pinned" if SET in reason else "recommended"
            if value != recommended[key]:
                reason = f"recommended: {value_text(recommended[key])}"
                decided = "lowered for memory" if key in ladder_keys else "pinned"
        rows.append((key, value_text(value), decided, reason))
    return sorted(rows, key=lambda row: {"recommended": 1, "params.yaml": 2}.get(row[2], 0))


def value_text(value: Any) -> str:
    """A value as params.yaml writes it."""
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
