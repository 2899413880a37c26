"""What base and tuned model answer, ready to be shown. Pure."""

from collections.abc import Iterable

from safetrain.core.formatting import counted
from safetrain.core.records.evaluation import Evaluation, GroupScore, Sample
from safetrain.watch.report_page.run_records import WrittenText
from safetrain.watch.report_page.shown import AbsentPart, Answers, CategoryRow, Continuation, ShownAnswer

MOST_SAMPLES, MOST_LETTERS, MOST_STEPS = 12, 600, 6
EVALUATE = "dvc repro"


def answers_shown(found: Evaluation | None, *, of_another: bool) -> Answers | AbsentPart:
    """The samples, the worst rows and those that changed most."""
    if found is None:
        if of_another:
            return AbsentPart("The last evaluation is about another training than this one.", EVALUATE)
        return AbsentPart("Base and tuned model have not been compared yet.", EVALUATE)
    if not found.questions:
        return AbsentPart("The test rows have no questions: only their loss was measured.", "safetrain validate")
    note = f"{counted(found.answered, 'question')} of {found.questions:,} answered, greedily."
    if found.answered < found.questions:
        note += " evaluate.max_questions decides how many."
    samples = found.samples[:MOST_SAMPLES]
    worst = _without(found.worst, samples)
    changed = _without(found.most_changed, (*samples, *worst))
    if len(worst) < len(found.worst) or len(changed) < len(found.most_changed):
        note += " Each is shown once, in the first list that it belongs to."
    return Answers(_shown(samples), _shown(worst), _shown(changed), note)


def written_shown(samples: tuple[WrittenText, ...]) -> tuple[Continuation, ...]:
    """How the writing of a model changed: of few steps, evenly spread, the first and the last among them."""
    steps = sorted({each.step for each in samples})
    if len(steps) > MOST_STEPS:
        steps = [steps[round(place * (len(steps) - 1) / (MOST_STEPS - 1))] for place in range(MOST_STEPS)]
    return tuple(
        Continuation(each.step, cut(each.prompt), cut(each.text)) for each in samples if each.step in set(steps)
    )


def _without(listed: tuple[Sample, ...], shown: Iterable[Sample]) -> tuple[Sample, ...]:
    """The first of them, but for those that another list shows."""
    known = {(sample.where, sample.question) for sample in shown}
    return tuple(sample for sample in listed[:MOST_SAMPLES] if (sample.where, sample.question) not in known)


def cut(text: str, most: int = MOST_LETTERS) -> str:
    """At most so many letters, and how many more there are."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more)"


def category_rows(groups: Iterable[GroupScore]) -> tuple[CategoryRow, ...]:
    """Of each category the exact answers in percent."""
    found = list[CategoryRow]()
    for group in groups:
        gain, half = group.improvement.nats_per_label, group.improvement.plus_minus
        found.append(
            CategoryRow(
                cut(group.name, 80) or "(none)",
                group.questions,
                100 * group.base_exact_match,
                100 * group.tuned_exact_match,
                100 * group.tuned_exact_match_low,
                100 * group.tuned_exact_match_high,
                f"{gain:.2f}" if half is None else f"{gain:.2f} ± {half:.2f}",
            )
        )
    return tuple(found)


def _shown(samples: tuple[Sample, ...]) -> tuple[ShownAnswer, ...]:
    return tuple(
        ShownAnswer(
            cut(sample.question),
            cut(sample.expected),
            cut(sample.base),
            cut(sample.tuned),
            sample.base == sample.expected,
            sample.tuned == sample.expected,
            f"loss {sample.base_loss:.3f} → {sample.tuned_loss:.3f}",
            cut(sample.where, 160),
        )
        for sample in samples
    )
