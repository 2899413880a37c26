"""Writes docs/reference from the code: every command, key, check, record and exit code.

usage: python -m tools.reference     (a test says when it is needed)
"""

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import click
import typer
import yaml

from safetrain.cli import app
from safetrain.core import errors, postmortem
from safetrain.core.records import evaluation, metrics, reports, search, settings
from safetrain.plan import check_report

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"
MADE = "<!-- made by python -m tools.reference: change the code, then run it again -->\n\n"
SHARED = 3  # an option of this many commands is described once
_WORDS = re.compile(r"\S+")
SAID = frozenset(
    _WORDS.findall("""
    --example --clear --into --num-layers --seed --bits --json --refresh --plain
    --once --output --batch-size --tokens --rank --method --optimizer --data --out --max-examples
    --max-questions --max-new-tokens --temperature --top-p --name --replace --project --uri --machine --memory-gb
    FOLDER HUB_ID DIR SOURCE TARGET OUT MODEL FILES… OVERRIDES… WORDS… QUESTION NAME
    """)
)  # options and arguments whose names and defaults are self-explanatory; `--help` describes them too
SAID_FIELDS = frozenset(
    _WORDS.findall("""
    step epoch steps rows labels learning_rate grad_norm labels labels_per_second peak_memory_bytes
    footprint_bytes peak_footprint_bytes elapsed_seconds base_valid_loss valid_loss needed
    source remedy status padding_share plus_minus loss disk_bytes predicted_peak_bytes
    template_date stop_tokens memory_rungs gpu_rungs verified warnings
    adapter where ended_seconds went_on rank row_ids cut_rows
    """)
)  # fields of records with self-explanatory names
RECORDS = {
    "data_report.json": (reports.DataReport, reports.SplitReport, reports.Finding),
    "preflight_report.json": (check_report.PreflightReport, check_report.Check),
    "recommended_config.json": (settings.Recommendation, settings.DryRun),
    "training_metrics.csv": (metrics.StepRecord,),
    "training_metrics.json": (metrics.TrainingMetrics,),
    "training_summary.json": (settings.TrainSettings, metrics.TrainingSummary, metrics.Proof),
    "evaluation.json": (
        evaluation.Evaluation, evaluation.Score, evaluation.ScoreGain, evaluation.Improvement, evaluation.Forgetting,
        evaluation.Choices, evaluation.Calibration, evaluation.Sample,
    ),
    "postmortem.json": (postmortem.PostMortem,),
    "search/search.json": (search.Search, search.Candidate),
}  # fmt: skip
COMMANDS = """
- `safetrain run --json`: `event` is run (with `values`, `number`, `of`), verdict (with the keys of result), or error
  (`message`, `exit_code`)
- `safetrain search --json`: `event` is planned, joined, ranked, stopped (with the fields of Search), training, step,
  rung, dropped (those of Candidate), verdict (with the keys of result, and `search`), or error
- `safetrain result --json`: `verdict` (better, not better, could not be determined, forgets), `exit_code` of `--gate`,
  `reasons`, `command` that makes this run, `training` (training_summary.json), `evaluation` (evaluation.json)
- `safetrain estimate --json`: `fits`, `may_fit` (a dry run decides), `needed_bytes`, `budget_bytes`,
  `predicted_peak_bytes`, `memory_terms`, `settings` that decide the memory, `would_fit` (changes, if it does not),
  `step_seconds` (a guess from the speed of this machine; null if that is unknown)
- `safetrain validate --json`: `count`, `noun`, `tokens`, `labels`, `rows` (`where`, `trained`, `stops`, `findings`),
  `findings` (Finding), `texts` of rows by their place
- `safetrain runs --json`: `runs` (`run`, `better_by`, `score`, `test_loss`, `values`), `unrecorded` (why, if so)
- `safetrain preflight --json`: preflight_report.json
- `safetrain diagnose --json`: postmortem.json; null if no run has died
""".strip()
SIGNALS = (
    (124, "The training process hung and was ended."),
    (130, "Ctrl-C. Training has saved its state."),
    (137, "The training process was killed (SIGKILL), for example by the system when memory ran out."),
    (141, "The output was closed, e.g. by `… \\| head`."),
    (143, "SIGTERM. Training has saved its state."),
    ("128 + n", "The training process was ended by signal n."),
    (255, "`dvc repro` and `dvc exp run`: a stage failed; the last lines have its own code."),
)


def main() -> None:
    """Write every page."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """Name of each file in docs/reference, and its text."""
    made = {
        "commands.md": commands(), "keys.md": keys(), "findings.md": findings(), "exit_codes.md": exit_codes(),
        "records.md": records(),
    }  # fmt: skip
    return {name: MADE + text.rstrip() + "\n" for name, text in made.items()}


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def cell(text: str) -> str:
    """Text on one line, with bars and angle brackets escaped."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def commands() -> str:
    """Every command of `safetrain`, with its arguments and options."""
    found = list(_walk(typer.main.get_command(app), "safetrain"))
    counted = Counter(_parameter(each) for _, command in found for each in command.params)
    shared = [line for line, count in counted.items() if count >= SHARED and not line.startswith("- `--help")]
    parts = [
        "# Commands",
        "`safetrain COMMAND --help` describes every option; this page explains those that are not "
        "self-explanatory. An output folder or file must not already exist. [Exit codes](exit_codes.md).",
        "Shared options:",
        "\n".join(shared),
    ]
    return "\n\n".join(parts + [_command(name, command, shared) for name, command in found])


def _walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield every command that does something, by its full name."""
    inside = getattr(command, "commands", None)
    if inside is None:
        if not command.hidden:
            yield name, command
        return
    for word in command.list_commands(click.Context(command)):
        yield from _walk(inside[word], f"{name} {word}")


def _command(name: str, command: Any, shared: Sequence[str]) -> str:
    """Describe a command: how to call it, what it does, its options."""
    parameters = [each for each in command.params if each.name != "help"]
    usage = [name, *(_name(each) for each in parameters if _is_argument(each))]
    told = [each for each in parameters if _said(each) not in SAID and _parameter(each) not in shared]
    plain = [_spelled(each) for each in parameters if each not in told and not _is_argument(each)]
    summary = cell((command.help or "").split("\n\n")[0])
    listed = "\n".join([*map(_parameter, told), *([f"- {', '.join(plain)}"] if plain else [])])
    return "\n\n".join(filter(None, [f"## {' '.join(usage)}", summary, listed]))


def _said(parameter: Any) -> str:
    """The name of an option or argument as a user types it."""
    return _name(parameter).strip("[]") if _is_argument(parameter) else str(parameter.opts[0])


def _parameter(parameter: Any) -> str:
    """An argument or option with its meaning, as an item of a list."""
    return f"- {_spelled(parameter)}" + (f": {cell(parameter.help)}" if parameter.help else "")


def _spelled(parameter: Any) -> str:
    """An argument, or every form of an option with its default."""
    if _is_argument(parameter):
        return f"`{_said(parameter)}`"
    value = "" if parameter.is_flag else f"={_value(parameter)}"
    return ", ".join(
        f"`{each}`" for each in [*(f"{each}{value}" for each in parameter.opts), *parameter.secondary_opts]
    )


def _is_argument(parameter: Any) -> bool:
    return parameter.param_type_name == "argument"


def _name(parameter: Any) -> str:
    name = str(parameter.metavar or parameter.name).upper() + ("…" if parameter.nargs == -1 else "")
    return name if parameter.required else f"[{name}]"


def _value(parameter: Any) -> str:
    """The default of an option, or a word for its value."""
    value = parameter.default.value if isinstance(parameter.default, Enum) else parameter.default
    if isinstance(value, (str, int, float, Path)) and str(value):
        return str(value)
    annotation = parameter.type_descriptor.annotation
    kind = next((each for each in get_args(annotation) if each is not type(None)), annotation)
    return {int: "N", float: "N", Path: "PATH"}.get(kind, "TEXT")


def keys() -> str:
    """Every key of params.yaml: its shipped value, its meaning, and the stages that run again when it changes."""
    shipped = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    comments = _comments()
    parts = [
        "# Keys of params.yaml",
        "In brackets: the shipped value. Unless the key says otherwise, `null` means the recommended value, which "
        "`recommended_config.json` gives with its reason. `8..` is 8 or more, `(0, 1]` is above 0, up to 1.",
        "On the command line: `train.learning_rate=1e-4` after `safetrain run`, for one run, or after `safetrain set`, "
        "to stay; also after `safetrain preflight`. A changed value reruns the stages named below and those that need "
        "their results.",
    ]
    for section, values in shipped.items():
        readers = {key: ", ".join(_stages_of(section, key)) or "nothing" for key in values}
        usual = Counter(readers.values()).most_common(1)[0][0]
        lines, others = [], dict[str, list[str]]()
        for key, value in values.items():
            ships = yaml.safe_dump(value).splitlines()[0]
            lines.append(f"- **{key}** (`{ships}`): {cell(comments[section, key])}")
            if readers[key] != usual:
                others.setdefault(readers[key], []).append(f"`{key}`")
        told = [f"Reruns {usual}{', except:' if others else '.'}"]
        told += [f"{', '.join(named)}: {which}." for which, named in others.items()]
        parts += [f"## {section}", "  \n".join(told), "\n".join(lines)]
    return "\n\n".join(parts)


def _comments() -> dict[tuple[str, str], str]:
    """The comment of each key in params.yaml."""
    _, *parts = re.split(r"^(\w+):", (ROOT / "params.yaml").read_text(encoding="utf-8"), flags=re.M)
    entries = [(section, re.findall(r"^  (\w+):[^#]*# (.*)$", text, re.M)) for section, text in pairwise(parts)]
    return {(section, key): comment for section, found in entries[::2] for key, comment in found}


def _stages_of(section: str, key: str) -> list[str]:
    """The stages of dvc.yaml that a changed value runs again."""
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    return [
        name for name, stage in stages.items() if {section, f"{section}.{key}"} & set(map(str, stage.get("params", [])))
    ]


def findings() -> str:
    """Every check of preflight; the findings in data have a page that people write."""
    lines = [f"- `{name}`{f': {cell(remedy)}' if remedy else ''}" for name, remedy in check_report.CHECKS.items()]
    return "\n\n".join([
        "# Findings and checks",
        "**Findings in the data**, from `validate_data` and `safetrain validate`, are "
        "[listed with their remedies](../data.md).",
        "**Checks** of the machine, model and project, by `safetrain preflight`. A check prints its reading, the "
        "requirement and the remedy. `preflight.downgrade=[ID]` turns that check's failure into a warning.",
        "\n".join(lines),
    ])  # fmt: skip


def exit_codes() -> str:
    """Exit codes of stages and commands."""
    found = [(0, "Success.")]
    kinds = [
        each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, errors.SafetrainError)
    ]
    seen = dict[int, str]()
    for kind in kinds:  # the first one of a code is the general one
        seen.setdefault(kind.exit_code, cell((kind.__doc__ or "").split("\n")[0]))
    seen[1] = "An unexpected error, or a failed preflight check."
    rows = [*found, *sorted(seen.items()), *SIGNALS]
    own = [
        ("`safetrain validate`", "the data has no errors", "it has errors", "could not be determined"),
        ("`safetrain preflight`", "no check failed", "a check failed", "a check could not be run, or a key is wrong"),
        ("`safetrain result --gate`", "better than its base", "not better", "it forgets, or could not be determined"),
        ("`safetrain estimate`", "it fits", "it does not fit", "a key or an option is wrong"),
    ]
    return "\n\n".join([
        "# Exit codes",
        table(["code", "meaning"], rows),
        "Four commands answer a question:",
        table(["command", "0", "1", "2"], own),
    ])  # fmt: skip


def records() -> str:
    """The fields of every file that other programs may want to read."""
    parts = [
        "# Fields of the records",
        "For programs that read the files in `checkpoints_qlora/` ([what each file is for](files.md)). A value that "
        "was not measured is null, or empty in the CSV file. Losses are in nats per label, intervals 95 %. Settings "
        "are named as in [params.yaml](keys.md).",
    ]
    for name, classes in RECORDS.items():
        parts.append(f"## {name}")
        for kind in classes:
            told = "" if kind is classes[0] else ": " + cell(kind.__doc__ or "").partition(". ")[0].rstrip(".") + "."
            parts += [f"**{kind.__name__}**{told}", _fields(kind)]
    parts += ["## JSON of the commands", COMMANDS]
    return "\n\n".join(parts)


def _fields(kind: Any) -> str:
    """The fields of a dataclass as a list; those without a comment, and the settings, share a line."""
    comments = dict(re.findall(r"^    (\w+): [^#\n]*#\s*(.*)$", inspect.getsource(kind), re.M))
    configured = kind is settings.TrainSettings
    shipped = set(yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))["train"]) if configured else set()
    shown = {each.__name__ for classes in RECORDS.values() for each in classes}
    plain, lines = list[str](), list[str]()
    inherited = {each.name for base in kind.__bases__ if is_dataclass(base) for each in fields(base)}
    for each in [each for each in fields(kind) if each.name not in shipped | inherited]:
        typed = each.type if isinstance(each.type, str) else inspect.formatannotation(each.type)
        inner = "".join(f" ({name})" for name in re.findall(r"\w+", typed) if name in shown)
        if each.name in comments and each.name not in SAID_FIELDS:
            lines.append(f"- `{each.name}`{inner}: {cell(comments[each.name])}")
        else:
            plain.append(f"`{each.name}`{inner}")
    plain += ["settings"] if configured else []
    return "\n".join([*([f"- {', '.join(plain)}"] if plain else []), *lines])


if __name__ == "__main__":
    main()
