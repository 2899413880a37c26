"""From the records of two runs to a page about their differences. Pure."""

from collections.abc import Callable, Sequence

from safetrain.core.formatting import duration_text, size_text
from safetrain.core.records.evaluation import Improvement, Sample
from safetrain.core.records.metrics import StepRecord
from safetrain.core.records.reports import DataReport
from safetrain.watch.curves import points_of, smoothed
from safetrain.watch.report_page.answers_shown import cut
from safetrain.watch.report_page.charts import Line, SvgChart, curve_chart
from safetrain.watch.report_page.configuration_shown import recommended_values, settings_of
from safetrain.watch.report_page.data_shown import environment_shown
from safetrain.watch.report_page.endings_shown import rungs_of
from safetrain.watch.report_page.page import state_of
from safetrain.watch.report_page.run_records import WholeRun
from safetrain.watch.report_page.shown import (
    BAD,
    GOOD,
    OPEN,
    AbsentPart,
    ComparedAnswer,
    ComparePage,
    RunDifference,
)

MOST_ANSWERS = 20
NOTHING = "–"
EVALUATE = "python -m stages.evaluate"
Values = dict[str, str]


def compare_page_of(first: WholeRun, second: WholeRun, missing: Sequence[AbsentPart] = ()) -> ComparePage:
    """``second`` beside ``first``, what differs first."""
    verdict, tone = verdict_on_both(first, second)
    metrics = _metrics(first, second)
    parts = [
        _differences(each(first), each(second)) for each in (_configuration, _data_of_run, _environment)
    ]  # of what can only be the same or another
    answers, note = _answers(first, second)
    return ComparePage(
        title=f"{first.name} and {second.name}",
        first=first.name,
        second=second.name,
        verdict=verdict,
        verdict_tone=tone,
        missing=(*missing, *_absent(first), *_absent(second)),
        metrics=tuple(each for each in metrics if each.first != each.second),
        configuration=_others(parts[0]),
        data=_others(parts[1]),
        environment=_others(parts[2]),
        charts=_charts(first, second),
        answers=answers,
        answers_note=note,
        same=tuple(each for part in (metrics, *parts) for each in part if each.first == each.second),
    )


def verdict_on_both(first: WholeRun, second: WholeRun) -> tuple[str, str]:
    """Which of the two is better, as far as the intervals tell."""
    if first.evaluation is None or second.evaluation is None:
        return "Which one is better cannot be said: not both have been evaluated.", OPEN
    if _test_of(first) != _test_of(second) or first.evaluation.rows != second.evaluation.rows:
        return "They were measured on other test rows: their losses and answers cannot be compared.", OPEN
    one, other = first.evaluation.improvement, second.evaluation.improvement
    both = f"{_gain(one)} ({first.name}) and {_gain(other)} ({second.name}) nats per label better than their base"
    if first.evaluation.base.loss != second.evaluation.base.loss:
        return f"They have other bases; on the test rows they are {both}.", OPEN
    apart = abs(one.nats_per_label - other.nats_per_label)
    if one.plus_minus is None or other.plus_minus is None or apart <= one.plus_minus + other.plus_minus:
        return f"No difference is shown: on the test rows they are {both}, and the intervals meet.", OPEN
    better = second.name if other.nats_per_label > one.nats_per_label else first.name
    return f"{better} is better: on the test rows they are {both}.", GOOD if better == second.name else BAD


def _test_of(run: WholeRun) -> object:
    return run.data.test if run.data is not None else None


def _gain(found: Improvement) -> str:
    half = "" if found.plus_minus is None else f" ± {found.plus_minus:.3g}"
    return f"{found.nats_per_label:.3f}{half}"


def _absent(run: WholeRun) -> list[AbsentPart]:
    found = list[AbsentPart]()
    if run.evaluation is None:
        why = "its evaluation is about another adapter" if run.evaluation_is_of_another else "it has no evaluation"
        found.append(AbsentPart(f"{run.name}: {why}.", EVALUATE))
    if run.summary is None:
        found.append(AbsentPart(f"{run.name}: no training has finished ({state_of(run)[0]}).", "dvc repro"))
    unreadable = (f"{run.name}: {file} cannot be read: {why}" for file, why in run.unreadable)
    return [*found, *(AbsentPart(cut(text), "dvc repro") for text in unreadable)]


def _metrics(first: WholeRun, second: WholeRun) -> tuple[RunDifference, ...]:
    """Results, speed and memory: as text, with the change where both are numbers."""
    found = list[RunDifference]()
    for (name, one, tell), (_, other, _) in zip(_figures(first), _figures(second), strict=True):
        change = ""
        if one is not None and other is not None and one != other:
            share = f" ({100 * (other - one) / abs(one):+.1f} %)" if one else ""
            change = f"{'+' if other > one else '−'}{tell(abs(other - one))}{share}"
        told = [NOTHING if value is None else tell(value) for value in (one, other)]
        found.append(RunDifference(name, told[0], told[1], change))
    exact = [_exact_text(run) for run in (first, second)]
    found.insert(3, RunDifference("exact answers, 95 % interval", exact[0], exact[1], ""))
    rungs = ["; ".join(cut(text, 200) for text in rungs_of(run)) or "none" for run in (first, second)]
    return (*found, RunDifference("steps down, for memory or the GPU", rungs[0], rungs[1], ""))


Told = tuple[str, float | None, Callable[[float], str]]


def _figures(run: WholeRun) -> list[Told]:
    """The same names for every run; None where it has no such number."""
    e, s = run.evaluation, run.summary
    outcome, metrics = (s.outcome, s.metrics) if s is not None else (None, None)
    number, whole = (lambda value: f"{value:.4g}"), (lambda value: f"{value:,.0f}")
    return [
        ("gain over the base, nats per label", e.improvement.nats_per_label if e else None, number),
        ("test loss of the tuned model", e.tuned.loss if e else None, number),
        ("test loss of the base", e.base.loss if e else None, number),
        ("token F1", e.tuned.token_f1 if e else None, number),
        ("chrF", e.tuned.chrf if e else None, number),
        ("general text, nats per token more than the base", e.forgetting.nats_per_token if e else None, number),
        ("best validation loss", metrics.best_valid_loss if metrics else None, number),
        ("at step", metrics.best_step if metrics else None, whole),
        ("last training loss", metrics.final_train_loss if metrics else None, number),
        ("updates", metrics.steps if metrics else None, whole),
        ("time of the updates", outcome.elapsed_seconds if outcome else None, duration_text),
        ("tokens per second", outcome.tokens_per_second if outcome else None, whole),
        ("peak of mlx", outcome.peak_memory_bytes if outcome else None, size_text),
        ("predicted peak of mlx", outcome.predicted_peak_bytes if outcome else None, size_text),
        ("process, highest", outcome.peak_footprint_bytes if outcome else None, size_text),
        ("trained parameters", outcome.trainable_parameters if outcome else None, whole),
        ("continued from step", outcome.resumed_from_step if outcome else None, whole),
    ]


def _exact_text(run: WholeRun) -> str:
    tuned = run.evaluation.tuned if run.evaluation is not None else None
    if tuned is None or tuned.exact_match is None or tuned.exact_match_low is None or tuned.exact_match_high is None:
        return NOTHING
    return f"{100 * tuned.exact_match:.1f} % ({100 * tuned.exact_match_low:.1f} to {100 * tuned.exact_match_high:.1f})"


def _configuration(run: WholeRun) -> Values:
    if run.summary is not None:
        return {"model.path": run.summary.outcome.base_model, **settings_of(run.summary.settings)}
    return {"model.path": run.plan.planned_model, **recommended_values(run.plan)} if run.plan is not None else {}


def _data_of_run(run: WholeRun) -> Values:
    return _data(run.data) if run.data is not None else {}


def _data(data: DataReport) -> Values:
    found = {"source": cut(data.source, 200), "format": data.format, "split": data.split}
    found |= {"answers end with": ", ".join(data.stop_tokens), "answers are asked for": cut(data.opening, 200)}
    for name, split in data.splits:
        counts = {"rows": split.rows, "tokens": split.tokens, "labels": split.trained_tokens}
        counts["longest row"] = split.lengths.max
        found |= {f"{name}: {of}": f"{count:,}" for of, count in counts.items()}
    return found | {f"finding {each.id}": f"{each.severity}, {each.count:,}" for each in data.findings}


def _environment(run: WholeRun) -> Values:
    shown = environment_shown(run)
    return {} if isinstance(shown, AbsentPart) else {fact.name: fact.value for fact in shown}


def _differences(first: Values, second: Values) -> tuple[RunDifference, ...]:
    names = [*first, *(name for name in second if name not in first)]
    return tuple(RunDifference(name, first.get(name, NOTHING), second.get(name, NOTHING), "") for name in names)


def _others(found: Sequence[RunDifference]) -> tuple[RunDifference, ...]:
    return tuple(each for each in found if each.first != each.second)


def _charts(first: WholeRun, second: WholeRun) -> tuple[SvgChart, ...]:
    wanted: tuple[tuple[str, str, Callable[[StepRecord], float | None]], ...] = (
        ("Validation loss", "nats per label", lambda record: record.valid_loss),
        ("Training loss", "nats per label", lambda record: record.train_loss),
        ("Learning rate", "", lambda record: record.learning_rate),
        ("Speed", "labels per second", lambda record: record.labels_per_second),
    )
    found = list[SvgChart]()
    for title, unit, value_of in wanted:
        lines = list[Line]()
        for style, run in enumerate((first, second)):
            points = smoothed(run.recorded, value_of) or points_of(run.steps, value_of)
            lines.append(Line(cut(run.name, 40), points, style, dotted=title == "Validation loss"))
        if any(line.points for line in lines):
            found.append(curve_chart(title, unit, lines))
    return tuple(found)


def _answers(first: WholeRun, second: WholeRun) -> tuple[tuple[ComparedAnswer, ...], str]:
    """Questions that both have kept and answer differently."""
    one, other = _kept(first), _kept(second)
    shared = [question for question in one if question in other and one[question].expected == other[question].expected]
    apart = [question for question in shared if one[question].tuned != other[question].tuned]
    found = tuple(
        ComparedAnswer(
            cut(question),
            cut(one[question].expected),
            cut(one[question].tuned),
            cut(other[question].tuned),
            one[question].tuned == one[question].expected,
            other[question].tuned == other[question].expected,
        )
        for question in apart[:MOST_ANSWERS]
    )
    return found, f"Of {len(shared)} questions that both records keep, {len(apart)} are answered otherwise."


def _kept(run: WholeRun) -> dict[str, Sample]:
    found = run.evaluation
    samples = (*found.samples, *found.worst, *found.most_changed) if found is not None else ()
    return {each.question: each for each in samples}
