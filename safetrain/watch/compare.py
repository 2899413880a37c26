"""compare.html: two runs next to each other, differences first. Runs come from this folder, Git and DVC."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import duration_text, size_text
from safetrain.core.records.evaluation import Sample
from safetrain.core.run_folder import Run, RunReader
from safetrain.core.storage import paths
from safetrain.core.storage.files import write_text
from safetrain.watch import report
from safetrain.watch.charts import comparison, inline_svg, rungs_of

if TYPE_CHECKING:
    from dvc.api import DVCFileSystem

UNKNOWN = "–"
SAME_BASE = 0.01  # relative difference of the base's test loss that rounding explains
MOST_TIMES = 10  # beyond this ratio a percentage says nothing
FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (  # name, place in a Run, how to write it
    ("gain over the base, nats per label", "evaluation.improvement.nats_per_label", "{:.4g}".format),
    ("test loss of the tuned model", "evaluation.tuned.loss", "{:.4g}".format),
    ("test loss of the base", "evaluation.base.loss", "{:.4g}".format),
    ("token F1", "evaluation.tuned.token_f1", "{:.4g}".format),
    ("chrF", "evaluation.tuned.chrf", "{:.4g}".format),
    ("forgetting, nats per token of general text", "evaluation.forgetting.nats_per_token", "{:.4g}".format),
    ("best validation loss", "summary.metrics.best_valid_loss", "{:.4g}".format),
    ("at step", "summary.metrics.best_step", "{:,}".format),
    ("last training loss", "summary.metrics.final_train_loss", "{:.4g}".format),
    ("updates", "summary.metrics.steps", "{:,}".format),
    ("time of the updates", "summary.outcome.elapsed_seconds", duration_text),
    ("tokens per second", "summary.outcome.tokens_per_second", "{:,.0f}".format),
    ("peak of mlx", "summary.outcome.peak_memory_bytes", size_text),
    ("predicted peak of mlx", "summary.outcome.predicted_peak_bytes", size_text),
    ("peak of the process", "summary.outcome.peak_footprint_bytes", size_text),
    ("trained parameters", "summary.outcome.trainable_parameters", "{:,}".format),
    ("continued from step", "summary.outcome.resumed_from_step", "{:,}".format),
)


class RevisionReader(RunReader):
    """Reads the run at a Git revision or in a DVC experiment. ``missing``: files whose contents DVC does not have."""

    def __init__(self, root: Path, revision: str) -> None:
        """Raises ConfigError for an unknown revision, or one without results."""
        super().__init__(None, revision)
        self.missing = list[str]()
        self._files = _open(root, revision)
        if not self._files.exists("dvc.lock"):
            raise ConfigError(
                f"{revision} has no results: DVC has recorded no training there.",
                where=f"dvc.lock of {revision}, which does not exist",
                do="commit dvc.lock after 'dvc repro', or name an experiment of 'dvc exp show'",
            )

    def file(self, name: str) -> bytes | None:
        """A file by its name in the run's folder; None where the revision lacks it, or its contents are lost."""
        path = (paths.OUTPUT / name).as_posix()
        if not self._files.exists(path):
            return None
        try:
            content: bytes = self._files.read_bytes(path)
        except FileNotFoundError:  # in no cache and no remote
            self.missing.append(path)
            return None
        return content

    def adapter(self) -> str | None:
        """Unknown: what DVC recorded together belongs together."""
        return None


def _open(root: Path, revision: str) -> "DVCFileSystem":
    from dvc.api import DVCFileSystem
    from dvc.exceptions import DvcException, NotDvcRepoError
    from dvc.repo import Repo
    from dvc.scm import RevError, SCMError, resolve_rev

    try:
        with Repo(str(root)) as repo:
            commit = resolve_rev(repo.scm, revision)
        return DVCFileSystem(str(root), rev=commit)
    except (RevError, AttributeError):
        what = f"No revision or experiment is called {revision}."
        do = "list the names with 'git log --oneline' and 'dvc exp show'"
    except NotDvcRepoError:
        what, do = "This folder is not a DVC project.", "go to its root"
    except (SCMError, DvcException) as error:
        what, do = f"{revision} cannot be read: {error}", "try 'dvc exp show'"
    raise ConfigError(what, where=str(root.resolve()), do=do)


def compare(revisions: Sequence[str], target: Path) -> str:
    """Write the page about two revisions, or about one and this folder; return the verdict. Raises ConfigError."""
    sources = [RevisionReader(Path(), revision) for revision in revisions]
    runs = [source.read() for source in sources]
    runs += [RunReader(name="this folder").read()] if len(runs) == 1 else []
    missing = [f"{files.name}: DVC has no copy of {file}." for files in sources for file in files.missing]
    return write_comparison(runs[0], runs[1], target, missing)


def write_comparison(first: Run, second: Run, target: Path, missing: Sequence[str] = ()) -> str:
    """Write the page about two runs; return the verdict. ``missing``: outputs that DVC may still fetch."""
    verdict, tone = verdict_on(first, second)
    answers = _answers(first, second)
    parts = [("Result", _results(first, second))]
    for title, values in (("Configuration", _configuration), ("Data", _data), ("Environment", report.environment_of)):
        one, other = dict(values(first)), dict(values(second))
        names = dict.fromkeys((*one, *other))
        parts.append((title, [(name, one.get(name, UNKNOWN), other.get(name, UNKNOWN), "") for name in names]))
    page = report.render(
        "compare.html", title=f"{first.name} and {second.name}", first=first, second=second, verdict=verdict, tone=tone,
        is_comparable=not obstacle(first, second), shared=len(answers),
        absent=[*((text, "dvc fetch --all-commits") for text in missing), *_absent(first), *_absent(second)],
        parts=[(title, [row for row in rows if row[1] != row[2]]) for title, rows in parts],
        same=[row[:2] for _, rows in parts for row in rows if row[1] == row[2]],
        pictures=[inline_svg(figure) for figure in comparison(first, second)],
        answers=[pair for pair in answers if pair[0].tuned != pair[1].tuned],
    )  # fmt: skip
    write_text(target, page)
    return verdict


def obstacle(first: Run, second: Run) -> str:
    """Why the results of two runs cannot be compared; empty if they can."""
    one, other = first.evaluation, second.evaluation
    if one is None or other is None:
        return "At least one has not been evaluated"
    tests = [run.data.test if run.data is not None else None for run in (first, second)]
    if tests[0] != tests[1] or one.rows != other.rows:
        return "They were measured on different test rows"
    if one.cut_rows != other.cut_rows:
        return "Their test rows were truncated to different lengths"
    names = {PurePath(report.base_of(run)).name for run in (first, second)}
    apart = abs(one.base.loss - other.base.loss) > SAME_BASE * abs(one.base.loss)
    return "They have different base models" if len(names) > 1 or apart else ""


def verdict_on(first: Run, second: Run) -> tuple[str, str]:
    """Which of the two is better, as far as the intervals tell, and a colour for it."""
    reason = obstacle(first, second)
    if reason or first.evaluation is None or second.evaluation is None:
        return f"{reason}: their results cannot be compared.", report.OPEN
    one, other = first.evaluation.improvement, second.evaluation.improvement
    halves = ["" if gain.plus_minus is None else f" ± {gain.plus_minus:.2g}" for gain in (one, other)]
    gains = f"{one.nats_per_label:.3f}{halves[0]} ({first.name}), {other.nats_per_label:.3f}{halves[1]} ({second.name})"
    gap = other.nats_per_label - one.nats_per_label
    text, tone = f"{second.name if gap > 0 else first.name} is better.", report.GOOD if gap > 0 else report.BAD
    if one.plus_minus is None or other.plus_minus is None or abs(gap) <= one.plus_minus + other.plus_minus:
        text, tone = "No clear difference: the intervals overlap.", report.OPEN
    text += f" Gain over the base in nats per label: {gains}."
    notes = [(run.name, report.empty_answers(run.evaluation)) for run in (first, second)]
    empty = [f" {name}: {note}." for name, note in notes if note]
    return text + "".join(empty), report.OPEN if empty else tone


def _absent(run: Run) -> list[tuple[str, str]]:
    """Parts that a run lacks, each with the command that makes it."""
    parts = list[tuple[str, str]]()
    if run.evaluation is None:
        why = "its evaluation measured another adapter" if run.has_stale_evaluation else "it has no evaluation"
        parts.append((f"{run.name}: {why}.", "safetrain stage evaluate"))
    if run.summary is None:
        parts.append((f"{run.name}: no training has finished ({report.status_of(run)[0]}).", "dvc repro"))
    unreadable = [report.cut(f"{run.name}: {file} is unreadable: {why}.") for file, why in run.unreadable]
    return parts + [(text, "dvc repro") for text in unreadable]


def _results(first: Run, second: Run) -> list[report.Row]:
    """Name, both values and, where both are numbers, the change, with a percentage up to MOST_TIMES."""
    rows = list[report.Row]()
    for name, path, text in FIGURES:
        one, other = _number(first, path), _number(second, path)
        change = ""
        if one is not None and other is not None and one != other:
            change = f"{'+' if other > one else '−'}{text(abs(other - one))}"
            if one > 0 and 1 / MOST_TIMES <= other / one <= MOST_TIMES:
                change += f" ({100 * (other / one - 1):+.1f} %)".replace("-", "−")
        values = [UNKNOWN if value is None else text(value) for value in (one, other)]
        rows.append((name, values[0], values[1], change))
    exact = [report.exact_text(run.evaluation.tuned) if run.evaluation is not None else "" for run in (first, second)]
    rungs = ["; ".join(report.cut(text, 200) for text in rungs_of(run)) or "none" for run in (first, second)]
    rows.insert(3, ("exact match, 95 % interval", exact[0] or UNKNOWN, exact[1] or UNKNOWN, ""))
    return [*rows, ("steps down for memory", rungs[0], rungs[1], "")]


def _number(run: Run, path: str) -> Any:
    """The field at a dotted path; None where a part of the path is missing."""
    start: Any = run
    return functools.reduce(lambda part, field: getattr(part, field, None), path.split("."), start)


def _configuration(run: Run) -> dict[str, str]:
    settings = run.summary.settings if run.summary is not None else run.plan
    values = {"model.path": report.base_of(run), **report.values_of(settings)} if settings is not None else {}
    return {key: report.value_text(value) for key, value in values.items()}


def _data(run: Run) -> dict[str, str]:
    data = run.data
    if data is None:
        return {}
    values = {"source": report.cut(data.source, 200), "format": data.format, "split": data.split}
    values |= {"stop tokens": ", ".join(data.stop_tokens), "prompts": report.cut(data.opening, 200)}
    for name, split in data.splits:
        counts = split.rows, split.tokens, split.trained_tokens, split.lengths.max
        for key, count in zip(("rows", "tokens", "labels", "longest row"), counts, strict=True):
            values[f"{name}: {key}"] = f"{count:,}"
    return values | {f"finding {each.id}": f"{each.severity}, {each.count:,}" for each in data.findings}


def _answers(first: Run, second: Run) -> list[tuple[Sample, Sample]]:
    """Samples of both runs that ask the same and expect the same."""
    one, other = ({each.question: each for each in report.samples_of(run.evaluation)} for run in (first, second))
    pairs = [(one[question], other[question]) for question in one if question in other]
    return [pair for pair in pairs if pair[0].expected == pair[1].expected]
