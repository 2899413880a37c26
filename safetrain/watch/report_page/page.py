"""From the records of a run to the page about it. Pure."""

from pathlib import PurePath

from safetrain.core.formatting import duration_text, size_text
from safetrain.core.records.evaluation import Evaluation, Improvement, Score, describe_forgetting, describe_improvement
from safetrain.core.records.proof import describe_proof
from safetrain.core.records.schema import PRETRAIN
from safetrain.watch.report_page.answers_shown import answers_shown, category_rows, written_shown
from safetrain.watch.report_page.configuration_shown import again_shown, configuration_shown
from safetrain.watch.report_page.data_shown import data_shown, environment_shown
from safetrain.watch.report_page.endings_shown import STOPPED, death_shown, gone_on_shown, has_gone_on, rungs_of
from safetrain.watch.report_page.run_records import WholeRun
from safetrain.watch.report_page.shown import BAD, GOOD, OPEN, Fact, ReportPage
from safetrain.watch.report_page.training_shown import curves_shown, loss_shown, memory_shown


def page_of(records: WholeRun) -> ReportPage:
    """Everything that the page shows."""
    state, tone = state_of(records)
    verdict, verdict_tone = verdict_of(records)
    found = records.evaluation
    summary = records.summary
    return ReportPage(
        title=_title(records),
        subtitle=_subtitle(records),
        state=state,
        tone=tone,
        verdict=verdict,
        verdict_tone=verdict_tone,
        said=_said(found) if found is not None else (),
        proven_by=f"{'weights' if records.samples else 'adapter'} {found.adapter}" if found is not None else "",
        figures=_figures(records),
        death=None if has_gone_on(records) else death_shown(records),
        answers=answers_shown(found, of_another=records.evaluation_is_of_another),
        categories=category_rows(found.groups) if found is not None else (),
        loss=loss_shown(records),
        curves=curves_shown(records),
        memory=memory_shown(records),
        gone_on=gone_on_shown(records),
        data=data_shown(records),
        configuration=configuration_shown(records),
        proof=describe_proof(summary.outcome.proof) if summary is not None else "",
        environment=environment_shown(records),
        again=again_shown(records),
        unreadable=records.unreadable,
        written=written_shown(records.samples),
    )


def state_of(records: WholeRun) -> tuple[str, str]:
    """How far the run is, and how that is to be taken."""
    if records.summary is not None:
        rungs = len(rungs_of(records))
        return ("finished", GOOD) if not rungs else (f"finished, after {rungs} step{'s' * (rungs > 1)} down", GOOD)
    if records.begun:
        return ("running", OPEN) if records.lives else ("ended without a word: safetrain diagnose says why", BAD)
    found = records.death
    if found is not None and not has_gone_on(records):
        if found.cause != STOPPED:
            return "ended badly", BAD
        return ("stopped, saved" if found.resumes_from_step else "stopped"), OPEN
    return ("unfinished", OPEN) if records.steps else ("not trained yet", OPEN)


def verdict_of(records: WholeRun) -> tuple[str, str]:
    """What was learnt, in one sentence with its interval."""
    found = records.evaluation
    if found is not None:
        gain = found.improvement
        half = gain.plus_minus
        tone = OPEN if half is None or abs(gain.nats_per_label) <= half else GOOD if gain.nats_per_label > 0 else BAD
        return f"On the test rows, the tuned model is {describe_improvement(gain)}.", tone
    if records.evaluation_is_of_another and records.summary is not None:
        return "What was learnt is not known: the adapter that is there has not been evaluated.", OPEN
    if records.summary is not None:
        metrics, outcome = records.summary.metrics, records.summary.outcome
        losses = f"{outcome.base_valid_loss:.3f} before, {metrics.best_valid_loss:.3f} at step {metrics.best_step:,}"
        return f"What was learnt has not been measured on test rows yet; validation loss {losses}.", OPEN
    return "There is no result: no training has finished here.", OPEN


def _title(records: WholeRun) -> str:
    base = records.summary.outcome.base_model if records.summary is not None else ""
    base = base or (records.plan.planned_model if records.plan is not None else "")
    data = records.data.source if records.data is not None else ""
    names = [PurePath(name).name for name in (base, data) if name]
    return " on ".join(names) or "A run of safetrain"


def _subtitle(records: WholeRun) -> str:
    if records.summary is None:
        return f"{records.steps[-1].step:,} updates recorded" if records.steps else ""
    metrics, outcome, settings = records.summary.metrics, records.summary.outcome, records.summary.settings
    unit = "windows" if settings.method == PRETRAIN else "rows"
    passes = f"{metrics.steps:,} updates of {settings.rows_per_update} {unit}"
    rows = f"{outcome.train_rows:,} {unit}"
    return f"{settings.method} on {rows}: {passes}, in {duration_text(outcome.elapsed_seconds)}"


def _said(found: Evaluation) -> tuple[str, ...]:
    lines = list[str]()
    if found.tuned.exact_match is not None:
        lines.append(
            f"Of {found.answered:,} questions, the base answers {_exact(found.base)} exactly, "
            f"the tuned model {_exact(found.tuned, interval=True)}."
        )
    said = describe_forgetting(found.forgetting)
    lines.append(f"{said[0].upper()}{said[1:]}.")
    if found.cut_rows:
        lines.append(f"{found.cut_rows:,} of {found.rows:,} test rows were cut to the length of the training.")
    return tuple(lines)


def _exact(score: Score, *, interval: bool = False) -> str:
    if score.exact_match is None:
        return "nothing"
    text = f"{100 * score.exact_match:.1f} %"
    if not interval or score.exact_match_low is None or score.exact_match_high is None:
        return text
    return f"{text} ({100 * score.exact_match_low:.1f} to {100 * score.exact_match_high:.1f})"


def _figures(records: WholeRun) -> tuple[Fact, ...]:
    found = _measured_figures(records.evaluation) if records.evaluation is not None else []
    if records.summary is not None:
        metrics, outcome = records.summary.metrics, records.summary.outcome
        found.append(Fact("validation loss", f"{outcome.base_valid_loss:.3f} → {metrics.best_valid_loss:.3f}",
                          f"best at step {metrics.best_step:,}"))  # fmt: skip
        if metrics.best_valid_bits_per_byte is not None:
            found.append(Fact("bits per byte", f"{metrics.best_valid_bits_per_byte:.3f}", "of the validation text"))
        share = 100 * outcome.peak_memory_bytes / outcome.predicted_peak_bytes if outcome.predicted_peak_bytes else 0
        found.append(Fact("peak of mlx", size_text(outcome.peak_memory_bytes), f"{share:.0f} % of the prediction"))
        found.append(
            Fact("speed", f"{outcome.tokens_per_second:,.0f} tokens/s", duration_text(outcome.elapsed_seconds))
        )
        found.append(Fact("trained", f"{outcome.trainable_parameters:,}", "parameters"))
    elif records.steps:
        last = records.steps[-1]
        losses = [record.valid_loss for record in records.steps if record.valid_loss is not None]
        found.append(Fact("last record", f"step {last.step:,}", f"{last.epoch:.2f} epochs"))
        found += [Fact("validation loss", f"{losses[0]:.3f} → {min(losses):.3f}")] if losses else []
    return tuple(found)


def _measured_figures(evaluation: Evaluation) -> list[Fact]:
    gain: Improvement = evaluation.improvement
    found = [Fact("test loss", f"{evaluation.base.loss:.3f} → {evaluation.tuned.loss:.3f}", f"{gain.rows:,} rows")]
    if evaluation.tuned.exact_match is not None:
        exact = f"{_exact(evaluation.base)} → {_exact(evaluation.tuned)}"
        found.append(Fact("exact answers", exact, f"{evaluation.answered:,} questions"))
    forgotten = evaluation.forgetting
    if forgotten.nats_per_token is not None and forgotten.plus_minus is not None:
        cost = f"{forgotten.nats_per_token:+.2f} ± {forgotten.plus_minus:.2f}"
        found.append(Fact("general text", cost, "nats per token; more is forgotten"))
    return found
