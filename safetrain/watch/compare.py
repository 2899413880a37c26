"""compare.html: two runs next to each other, differences first. Runs come from this folder, Git and DVC."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import duration_text, size_text
from safetrain.core.records.evaluation import Improvement
from safetrain.core.run_folder import Run, RunReader
from safetrain.core.storage import paths
from safetrain.core.storage.files import write_text
from safetrain.watch import report
from safetrain.watch.charts import comparison, rungs_of

if TYPE_CHECKING:
    from dvc.api import DVCFileSystem

UNKNOWN = "–"


def _gain_text(gain: Improvement) -> str:
    """``1.5 ± 0.25``."""
    return f"{gain.nats_per_label:.4g}" + (f" ± {gain.plus_minus:.2g}" if gain.plus_minus is not None else "")


FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (  # name, place in a Run, how to write it
    ("gain over the base, nats per label", "evaluation.improvement", _gain_text),
    ("test rows", "evaluation.rows", "{:,}".format),
    ("test loss of the tuned model", "evaluation.tuned.loss", "{:.4g}".format),
    ("test loss of the base", "evaluation.base.loss", "{:.4g}".format),
    ("exact match, 95 % interval", "evaluation.tuned", lambda score: report.exact_text(score) or UNKNOWN),
    ("forgetting, nats per token of general text", "evaluation.forgetting.nats_per_token", "{:.4g}".format),
    ("best validation loss", "summary.metrics.best_valid_loss", "{:.4g}".format),
    ("updates", "summary.metrics.steps", "{:,}".format),
    ("time of the updates", "summary.outcome.elapsed_seconds", duration_text),
    ("tokens per second", "summary.outcome.tokens_per_second", "{:,.0f}".format),
    ("peak of mlx", "summary.outcome.peak_memory_bytes", size_text),
    ("peak of the process", "summary.outcome.peak_footprint_bytes", size_text),
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


def compare(revisions: Sequence[str], target: Path) -> None:
    """Write the page about two revisions, or about one and this folder. Raises ConfigError."""
    sources = [RevisionReader(Path(), revision) for revision in revisions]
    runs = [source.read() for source in sources]
    runs += [RunReader(name="this folder").read()] if len(runs) == 1 else []
    missing = [f"{files.name}: DVC has no copy of {file}." for files in sources for file in files.missing]
    write_comparison(runs[0], runs[1], target, missing)


def write_comparison(first: Run, second: Run, target: Path, missing: Sequence[str] = ()) -> None:
    """Write the page about two runs. ``missing``: outputs that DVC may still fetch."""
    one, other = dict(_values(first)), dict(_values(second))
    rows = [(name, one.get(name, UNKNOWN), other.get(name, UNKNOWN)) for name in dict.fromkeys((*one, *other))]
    page = report.render(
        "compare.html", title=f"{first.name} and {second.name}", first=first, second=second,
        absent=[*((text, "dvc fetch --all-commits") for text in missing), *_absent(first), *_absent(second)],
        different=[row for row in rows if row[1] != row[2]], same=[row for row in rows if row[1] == row[2]],
        picture=comparison(first, second),
    )  # fmt: skip
    write_text(target, page)


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


def _values(run: Run) -> Iterator[tuple[str, str]]:
    """Results, settings, data and environment of a run, in words by name."""
    for name, path, text in FIGURES:
        value: Any = run
        for field in path.split("."):
            value = getattr(value, field, None)
        yield name, UNKNOWN if value is None else text(value)
    yield "steps down for memory", "; ".join(report.cut(text, 200) for text in rungs_of(run)) or "none"
    settings = run.summary.settings if run.summary is not None else run.plan
    values = {"model.path": report.base_of(run), **report.values_of(settings)} if settings is not None else {}
    yield from ((key, report.value_text(value)) for key, value in values.items())
    if (data := run.data) is not None:
        yield "data", report.cut(data.source, 200)
        for name, split in data.splits:
            yield f"{name}: rows, tokens, labels", f"{split.rows:,}, {split.tokens:,}, {split.trained_tokens:,}"
        yield from ((f"finding {each.id}", f"{each.severity}, {each.count:,}") for each in data.findings)
    yield from report.environment_of(run)
