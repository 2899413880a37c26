"""The result of a finished run: sentences, the gate's verdict, the next commands, and a model card for the Hub.

The card has no rows, and no paths on this machine.
"""

import json
import math
import os
import shlex
import shutil
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import counted, duration_text, printable, run_again, size_text, written_again
from safetrain.core.lock import is_locked
from safetrain.core.model.files import hub_id_of, license_of
from safetrain.core.records.adapter_files import PromptFormat, adapter_method, base_of, fingerprint, read_prompt_format
from safetrain.core.records.evaluation import (
    EXPORT_REPORT,
    GGUF_ADAPTER,
    REPORT,
    SURE,
    Choices,
    Evaluation,
    ExportReport,
    Forgetting,
    Improvement,
    Preference,
    Sample,
    Score,
)
from safetrain.core.records.metrics import TrainingSummary
from safetrain.core.records.reports import DataReport
from safetrain.core.records.run_state import checkpoints_in
from safetrain.core.records.schema import CHECKER, CHOICE, JSON, PAIRED, PRETRAIN, TEXT, TOOLS, Gate
from safetrain.core.storage import paths
from safetrain.core.storage.files import json_object, read_result, write_text
from safetrain.watch.progress import MEASURE, coverage_of
from safetrain.watch.run_folder import Run

if TYPE_CHECKING:
    from jinja2 import Environment

EXAMPLE = "data/example"  # ships with the project
CARD = "README.md"
SCORES = {
    TEXT: "Exact match",
    CHOICE: "Right choices",
    JSON: "JSON fields right",
    TOOLS: "Right calls of tools",
    CHECKER: "Score of the checker",
}
PART_NAMES = {
    "token_f1": "token F1",
    "macro_f1": "macro F1",
    "brier": "Brier score",
    "is_json": "is JSON",
    "calls": "right where calls are due",
    "no_call": "right where no call is due",
}
MOST_PARTS = 6  # in a line; the report has all
AGAIN = "fuse or export it again, into another folder"
Verdict = tuple[int, str, list[str]]  # exit code: 0 better, 1 not, 2 forgets or undecided; a title; reasons


def describe_result(run: Run) -> str:
    """Describe the result for a terminal; raises ConfigError without an evaluated run."""
    summary, scores = _measured(run)
    rows, spent = coverage_of(summary).partition(";")[0], duration_text(summary.elapsed_seconds)
    steps = counted(summary.steps, "step")
    headline = f"Trained {steps} on {rows}, in {spent}, learning rate {summary.learning_rate:g}."
    lines = ["", headline, *filter(None, [run.newer_run]), *describe_evaluation(scores)]
    if bits := summary.best_valid_bits_per_byte:
        lines.append(f"Validation loss: {bits:.3f} bits per byte of text.")
    sample = next((each for each in scores.samples if _can_be_typed(each.question)), next(iter(scores.samples), None))
    texts = [describe_sample(sample.question, sample.base, sample.tuned)] if sample else []
    commands = _next(sample, run.data, summary)
    listed = [f"{line:<45} # {note}" if note else line for line, note in commands]
    return "\n".join([*lines, *(["", *texts] if texts else []), "", "Next:  " + "\n       ".join(listed)])


def gate(run: Run, thresholds: Gate) -> Verdict:
    """Whether the run is better than its base; raises ConfigError without a finished and evaluated run."""
    _, scores = _measured(run)
    return judge(scores.improvement, scores.tuned, scores.forgetting, thresholds)


def unmeasured(run: Run) -> str:
    """Why the adapter's quality is unknown, in a line; empty if it was evaluated."""
    if run.newer_run:
        return run.newer_run
    if run.summary is None and run.steps:
        return "the training is not finished: this is its best adapter so far"
    return "" if run.evaluation is not None else f"this adapter has not been evaluated: '{MEASURE}' measures it"


def _measured(run: Run) -> tuple[TrainingSummary, Evaluation]:
    if run.summary is not None and run.evaluation is not None:
        return run.summary, run.evaluation
    damage = "; ".join(f"{name}: {reason}" for name, reason in run.unreadable)
    if any(name in (str(paths.SUMMARY), str(paths.EVALUATION)) for name, _ in run.unreadable):
        raise ConfigError("The results of this run cannot be read.", got=damage, do=written_again())
    if run.summary is None:
        what, do = "Nothing has been trained here yet.", "safetrain run"
        if is_locked(paths.OUTPUT):
            what, do = "This run is still training.", "watch it: safetrain monitor"
        elif checkpoints_in(paths.OUTPUT):
            what = "This run has not finished."
            do = "repeat the command that started it, such as 'safetrain run': it continues"
        elif Path("dvc.lock").is_file():
            what = "The results of the last run are not here."
            do = "safetrain run brings them back, or makes them again"
        raise ConfigError(what, where=paths.SUMMARY, got=damage, do=do)
    got = damage or ("scores of another adapter" if run.has_stale_evaluation else "")
    do = f"{MEASURE}; after 'git checkout' it brings the results back from DVC's cache"
    raise ConfigError("The last training run has not been evaluated.", where=paths.EVALUATION, got=got, do=do)


def _next(sample: Sample | None, data: DataReport | None, summary: TrainingSummary) -> list[tuple[str, str]]:
    """Return commands to run next, each with its purpose."""
    must_activate = Path(".venv/bin/activate").is_file() and "VIRTUAL_ENV" not in os.environ
    lines = [("source .venv/bin/activate", "")] if must_activate else []
    if summary.method == PRETRAIN:
        lines += [('safetrain ask "The "', "it continues a text")]
        fuse = "safetrain fuse models/mine", "then set model.path to it"
        change = f"train.max_steps={2 * summary.steps}"
    else:
        question = sample.question if sample and _can_be_typed(sample.question) else "..."
        lines += [(f'safetrain ask "{question}" --base', ""), ("safetrain chat --compare", "talk with both models")]
        change = "train.beta=0.2" if summary.method in PAIRED else "train.learning_rate=2e-3"
        fuse = "safetrain fuse fused", "merge adapter into base"
    lines += [("safetrain report", "a page with everything"), fuse]
    lines += [(f"{run_again()} {change}", "another run"), ("safetrain runs", "compare the runs")]
    if data is None or PurePath(data.source).is_relative_to(EXAMPLE):
        lines.append(("safetrain run --data FILE", "your data; also --model"))
    return lines


def _can_be_typed(question: str) -> bool:
    """Whether the question fits on a command line, and a shell does not change it inside double quotes."""
    return len(question) <= 50 and not set(question) & set('"$`\\!\n')


# The evaluation in sentences


def describe_evaluation(evaluation: Evaluation) -> list[str]:
    lines = [describe_loss(evaluation), *describe_preference(evaluation.preference)]
    if evaluation.answered:
        lines += describe_score(evaluation)
    lines.append(describe_forgetting(evaluation.forgetting))
    if not evaluation.questions:
        lines.append("Answers not measured: the test file has no questions")
    elif evaluation.answered < evaluation.questions:
        lines.append(f"{evaluation.answered} of {evaluation.questions} questions answered (random sample, seed 0)")
    return [f"{line}." for line in lines]


def describe_score(evaluation: Evaluation) -> list[str]:
    """Sentences about the answers, such as ``Exact match on 64 test questions: base 2.0 %, tuned 93.0 % (95 %: …)``."""
    base, tuned, gain = evaluation.base, evaluation.tuned, evaluation.score_gain
    if tuned.score is None or base.score is None or gain is None:
        return []
    name, interval = SCORES[evaluation.scorer[0]], span(tuned.score_low, tuned.score_high)
    shares = f"base {100 * base.score:.1f} %, tuned {100 * tuned.score:.1f} % (95 %: {interval})"
    word = "better by" if gain.low > 0 else "worse by" if gain.high < 0 else "no clear difference,"
    mean, low, high = gain.mean, gain.low, gain.high
    mean, low, high = (-mean, -high, -low) if high < 0 else (mean, low, high)
    points = f"{word} {100 * mean:.1f} points ({100 * low:.0f} to {100 * high:.0f})"
    lines = [f"{name} on {counted(evaluation.answered, 'test question')}: {shares}, {points}"]
    parts = [f"{part_name(key)} {base.parts.get(key, 0.0):.3f} → {part:.3f}" for key, part in tuned.parts.items()]
    lines += [f"Parts of the score: {', '.join(parts[:MOST_PARTS])}"] if parts else []
    lines += [f"Mistakes of the tuned model: {', '.join(tuned.mistakes)}"] if tuned.mistakes else []
    answers = f"of {evaluation.answered} answers of the tuned model"
    if tuned.cut_answers:
        lines.append(f"{tuned.cut_answers} {answers} reached the limit of evaluate.max_new_tokens")
    if tuned.endless_answers:
        lines.append(f"{tuned.endless_answers} {answers} ended while it was thinking")
    return [*lines, *describe_choices(evaluation.choices)]


def part_name(key: str) -> str:
    """The name of a part of a score, for people."""
    return PART_NAMES.get(key, key)


def describe_choices(choices: Choices | None) -> list[str]:
    """Sentences about the probabilities of options, and about a model that always chooses the same."""
    if choices is None:
        return []
    found, lines = choices.calibration, list[str]()
    if choices.majority:
        lines.append(f"The tuned model chooses {shortened(choices.majority, 60)!r} for every question")
    error = "not measured (it needs 100 questions)"
    if found.error is not None:
        error = f"{100 * found.error:.1f} % (95 %: {span(found.error_low, found.error_high)})"
    fitted = f"temperature {found.temperature:.2f}, fitted on {counted(found.fitted_on, 'validation question')}"
    fitted = fitted if found.fitted_on else "no temperature: too few validation questions"
    lines.append(f"Error of the probabilities: {error}; {fitted}")
    if found.sure_right is not None:
        right = f"{100 * found.sure_right:.1f} % right (95 %: {span(found.sure_low, found.sure_high)})"
        lines.append(f"Probability {SURE} or more: {100 * found.sure_share:.0f} % of the questions, {right}")
    return lines


def span(low: float | None, high: float | None) -> str:
    """An interval of shares, such as ``81 to 97 %``."""
    return f"{100 * (low or 0.0):.0f} to {100 * (1.0 if high is None else high):.0f} %"


def describe_preference(preference: Preference | None) -> list[str]:
    """A text such as ``The chosen answer is preferred in 92.0 % of the pairs (95 %: 81 to 97 %), margin 1.2 ± 0.2``."""
    if preference is None:
        return []
    low, high, half = 100 * preference.accuracy_low, 100 * preference.accuracy_high, preference.plus_minus
    margin = f"margin {preference.margin:.2f}" + ("" if half is None else f" ± {half:.2f}")
    share = f"{100 * preference.accuracy:.1f} % of the pairs (95 %: {low:.0f} to {high:.0f} %)"
    return [f"The chosen answer is preferred in {share}, {margin}"]


def describe_loss(evaluation: Evaluation) -> str:
    """A text such as ``Test loss 2.677 → 0.014 nats per token: better by 2.66 ± 0.09 (95 %, 220 rows)``."""
    gain, half = evaluation.improvement.nats_per_label, evaluation.improvement.plus_minus
    term, unit = ("token", "row") if evaluation.preference is None else ("pair", "pair")
    places, word = _places(half), "better" if gain > 0 else "worse"
    losses = f"{evaluation.base.loss:.{places + 1}f} → {evaluation.tuned.loss:.{places + 1}f}"
    of = f" of {evaluation.rows_available:,}" if evaluation.rows < evaluation.rows_available else ""
    interval = f"± {half:.{places}f} (95 %, {evaluation.improvement.rows:,}{of} {unit}s)" if half is not None else ""
    size = f"{word} by {abs(gain):.{places}f} {interval or f'on one {unit}: no confidence interval'}"
    unclear = "no clear difference, " if half is not None and abs(gain) <= half else ""
    return f"Test loss {losses} nats per {term}: {unclear}{size}"


def describe_forgetting(forgetting: Forgetting) -> str:
    """A text such as ``Forgetting: general text loss +0.31 ± 0.05 nats per token (English +0.12 ± 0.03, …)``."""
    more, half = forgetting.nats_per_token, forgetting.plus_minus
    if more is None or half is None:
        return f"Forgetting not measured: {' '.join(forgetting.unsaid)}"
    parts = [
        f"{part.name} not measured"
        if part.nats_per_token is None
        else f"{part.name} {part.nats_per_token:+.2f} ± {part.plus_minus:.2f}"
        for part in forgetting.parts
    ]
    size = f"{more:+.{_places(half)}f} ± {half:.{_places(half)}f} nats per token"
    return f"Forgetting: general text loss {size} ({', '.join(parts)})"


def describe_sample(question: str, base: str, tuned: str) -> str:
    """Three lines for a terminal, with shortened texts."""
    return f"  {shortened(question)}\n    base:  {shortened(base)}\n    tuned: {shortened(tuned)}"


def shortened(text: str, most: int = 140) -> str:
    """One line of at most ``most`` characters that a terminal can show."""
    text = printable(" ".join(text.split()))
    return f"{text[: most - 1]}…" if len(text) > most else text or "(empty)"


def _places(half: float | None) -> int:
    return 2 if half is None or half >= 0.005 else 4


def judge(improvement: Improvement, tuned: Score, forgotten: Forgetting, limits: Gate) -> Verdict:
    """Compare intervals with thresholds: one above its threshold passes, one below fails, one around it is undecided.

    Forgetting must stay below its threshold; it is ignored if it was not measured.
    """
    gain = improvement.nats_per_label
    half = math.inf if improvement.plus_minus is None else improvement.plus_minus
    measures = [_compare("gain in loss, nats", gain - half, gain + half, limits.least_gain)]
    if limits.least_score is not None:
        low, high = tuned.score_low or 0.0, 1.0 if tuned.score_high is None else tuned.score_high
        measures.append(_compare("score of the answers", low, high, limits.least_score))
    more, half, undecided = forgotten.nats_per_token, forgotten.plus_minus or 0.0, "could not be determined"
    if limits.most_forgotten is not None:
        if more is None:
            measures.append((0, describe_forgetting(forgotten)))
        else:
            code, reason = _compare("forgetting, nats per token", more - half, more + half, limits.most_forgotten)
            measures.append((0 if code == 1 else 2, reason))
            undecided = "forgets" if code == 0 else undecided
    code = 1 if 1 in dict(measures) else max(dict(measures))
    return code, ("better", "not better", undecided)[code], [reason for _, reason in measures]


def _compare(name: str, low: float, high: float, limit: float) -> tuple[int, str]:
    """Compare an interval with ``limit``: 0 above, 1 not above, 2 undecided; and a sentence about it."""
    code = 0 if low > limit else 1 if high <= limit else 2
    word = ("is above", "is not above", "may be above or below")[code]
    return code, f"{name}: {low:.4g} to {high:.4g} {word} {limit:g}"


# The card


def write_card(folder: Path, adapter: Path | None, base: Path | None, run: Run) -> list[str]:
    """Write README.md into ``folder``; return remarks on what is missing. Raises ConfigError, ModelError.

    ``adapter``: the one that the folder was made from; None: the folder itself or the run's adapter. ``base``: None for
    the adapter's own. The card has results if the run's evaluation is about this adapter.
    """
    path, kind = folder / CARD, _kind_of(folder)
    reports = _reports(folder, kind)
    prints = [report.adapter_fingerprint if report else "" for report in reports.values()]
    own = _adapter_of(folder, kind, adapter, prints)
    base, scores = base or base_of(own), run.evaluation
    if scores is not None and fingerprint(own) not in scores.adapter:
        scores = None
    license_of_base = license_of(base)
    is_paired = scores is not None and scores.preference is not None
    method = run.summary.method if is_paired and run.summary is not None else adapter_method(own)
    lines = describe_evaluation(scores) if scores is not None else []
    text = _templates().get_template("card.md").render(
        kind=kind, hub_id=hub_id_of(base), base_name=base.name, license=license_of_base, method=method,
        title=folder.resolve().name, prompts=read_prompt_format(own) or PromptFormat((), ""), scores=scores,
        summary=run.summary, lines=lines, reports=reports, size_text=size_text, uses=ways_to_use(folder, kind),
        quoted=json.dumps, coverage_of=coverage_of, names=SCORES,
    )  # fmt: skip
    write_text(path, text)
    remarks = [] if license_of_base else ["the card has no licence: add the base model's"]
    if scores is None:
        other = run.evaluation is not None or run.has_stale_evaluation
        why = f"{paths.EVALUATION} is about another adapter" if other else "no evaluation yet (safetrain run)"
        remarks.append(f"the card has no results: {why}")
    if not all(reports.values()):
        remarks.append("no report in the folder shows its adapter, or how much of the improvement it keeps")
    return remarks


def with_card(folder: Path, copy: Path, run: Run, adapter: Path | None) -> Path:
    """Write a card into ``folder`` if it has none. An adapter is copied first, and the folder returned is ``copy``.

    DVC tracks the adapter, and its configuration may name the base model by a private path.
    """
    has_card, own = (folder / CARD).is_file(), copy / "adapter_config.json"
    base = base_of(folder) if (folder / "adapters.safetensors").is_file() else None
    if base is not None:
        folder = Path(shutil.copytree(folder, copy))
    if not has_card:
        write_card(folder, adapter, base, run)
    if base is not None:
        write_text(own, json.dumps({**json_object(own), "model": hub_id_of(base) or base.name}, indent=2) + "\n")
    return folder


def _kind_of(folder: Path) -> str:
    config = folder / "adapter_config.json"
    if config.is_file():
        return "peft" if "peft_type" in json_object(config) else "mlx-adapter"
    if any(folder.glob("*.gguf")):
        return "gguf"
    if any(folder.glob("*.safetensors")) and (folder / "config.json").is_file():
        return "mlx"
    expected = "a folder from 'safetrain fuse' or 'safetrain export', or an adapter folder"
    do = "safetrain fuse OUT" if paths.SUMMARY.is_file() else f"train first: {MEASURE}"
    raise ConfigError("This folder has no model.", where=folder, expected=expected, do=do)


def ways_to_use(folder: Path, kind: str, model: Path | None = None) -> str:
    """A command for each program that opens a model in a folder from fuse or export gguf; ``model``: only this one."""
    reports = _reports(folder, kind)
    pairs = {name for name, report in reports.items() if report and not report.rows}
    files = [model] if model else map(Path, reports)
    models = [(file, file.name in pairs and file.with_name(f"{file.stem}{GGUF_ADAPTER}")) for file in files]
    return _templates().get_template("uses.txt").render(kind=kind, models=models, quoted=shlex.quote)


def _templates() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("safetrain.watch"), trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )


def _reports(folder: Path, kind: str) -> dict[str, ExportReport | None]:
    """Reports on the folder's models, None for a missing one; raises ConfigError for one that cannot be read."""
    files = {"mlx": {"THIS_FOLDER": folder / REPORT}, "peft": {"THIS_FOLDER": folder / EXPORT_REPORT}}.get(kind, {})
    if kind == "gguf":  # each file has its own
        models = [path for path in sorted(folder.glob("*.gguf")) if not path.name.endswith(GGUF_ADAPTER)]
        files = {path.name: path.with_name(f"{path.name}.json") for path in models}
    return {name: read_result(path, ExportReport, AGAIN) if path.is_file() else None for name, path in files.items()}


def _adapter_of(folder: Path, kind: str, adapter: Path | None, fingerprints: list[str]) -> Path:
    """Find the adapter that the folder was made from; raises ConfigError if the folder's reports name another one."""
    if kind == "mlx-adapter":
        return folder
    if adapter is None and not all(fingerprints):
        what = "No file in this folder says which adapter it was made from."
        raise ConfigError(what, where=folder, do="name that adapter with --adapter")
    adapter = adapter or paths.ADAPTERS
    if set(fingerprints) - {"", fingerprint(adapter)}:
        what = "This folder was made from another adapter."
        raise ConfigError(what, where=folder, got=str(adapter), do="name the right adapter with --adapter")
    return adapter
