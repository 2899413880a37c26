"""Writes docs/reference from the code: every command, key, finding, check, record and exit code.

usage: python -m tools.reference     (a test says when it is needed)
"""

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import click
import typer
import yaml

from safetrain.cli import app
from safetrain.core import errors
from safetrain.core.records import evaluation, fusing, metrics, postmortem, proof, reports, settings
from safetrain.core.records.schema import describe_allowed
from safetrain.data.findings import KINDS
from safetrain.plan import checks
from tools.named_checks import named_checks

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"
MADE = "<!-- made by python -m tools.reference: change the code, then run it again -->\n\n"
RECORDS = {
    "data_report.json": (reports.DataReport, reports.SplitReport, reports.LengthQuantiles, reports.Finding),
    "machine.json": (reports.Machine,),
    "preflight_report.json": (checks.PreflightReport, checks.Check),
    "recommended_config.json": (settings.Recommendation, settings.LoraSettings, settings.Reason, settings.MemoryTerm),
    "training_metrics.csv": (metrics.StepRecord,),
    "training_metrics.json": (metrics.TrainingMetrics,),
    "training_summary.json": (settings.TrainSettings, metrics.TrainingOutcome, proof.Proof, proof.ComparedWith),
    "evaluation.json": (
        evaluation.Evaluation,
        evaluation.Improvement,
        evaluation.Score,
        evaluation.Forgetting,
        evaluation.PartLoss,
        evaluation.Sample,
        evaluation.GroupScore,
    ),
    "postmortem.json": (postmortem.PostMortem,),
    "fuse_report.json": (fusing.FuseReport, fusing.Tried, fusing.Likeness),
}
SIGNALS = (
    (124, "The training process hung, and was ended. Its stacks are in `flight/stacks.txt`."),
    (130, "Ctrl-C. A training has saved its state."),
    (137, "The training process was killed (SIGKILL), for example by the system when memory ran out."),
    (141, "Nobody read the output, as in `… \\| head`."),
    (143, "SIGTERM. A training has saved its state."),
    ("128 + n", "The training process was ended by signal n."),
    (255, "`dvc repro` and `dvc exp run`: a stage has failed; its own code stands in the last lines."),
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
    """Text on one line, in which a bar ends no cell and brackets are no HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def commands() -> str:
    """Every command of `safetrain`, with its arguments and options."""
    parts = [
        "# Commands",
        "`safetrain COMMAND --help` prints the same, `safetrain --version` the version. Exit codes: "
        "[all of them](exit_codes.md).",
    ]
    parts += [_command(name, found) for name, found in _walk(typer.main.get_command(app), "safetrain")]
    return "\n\n".join(parts)


def _walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its whole name."""
    inside = getattr(command, "commands", None)
    if inside is None:
        yield name, command
        return
    for word in command.list_commands(click.Context(command)):
        yield from _walk(inside[word], f"{name} {word}")


def _command(name: str, command: Any) -> str:
    """One command: what it does, how it is called, what its options are."""
    parameters = [each for each in command.params if each.name != "help"]
    usage = [name, *(_name(each) for each in parameters if _is_argument(each))]
    usage += ["[OPTIONS]"] if any(not _is_argument(each) for each in parameters) else []
    rows = [(_spelling(each), cell(each.help or ""), _shipped(each)) for each in parameters]
    help_text = "\n\n".join(cell(part) for part in (command.help or "").split("\n\n"))
    parts = [f"## {name}", f"`{' '.join(usage)}`", help_text]
    return "\n\n".join([*parts, table(["argument or option", "meaning", "unless given"], rows)] if rows else parts)


def _is_argument(parameter: Any) -> bool:
    return parameter.param_type_name == "argument"


def _name(parameter: Any) -> str:
    name = str(parameter.metavar or parameter.name).upper() + ("…" if parameter.nargs == -1 else "")
    return name if parameter.required else f"[{name}]"


def _spelling(parameter: Any) -> str:
    if _is_argument(parameter):
        return f"`{_name(parameter).strip('[]')}`"
    names = [*parameter.opts, *parameter.secondary_opts]
    kind = "" if parameter.is_flag else f" {_kind(parameter)}"
    return ", ".join(f"`{name}{kind}`" for name in names)


def _kind(parameter: Any) -> str:
    """What stands behind an option."""
    annotation = parameter.type_descriptor.annotation
    kind = next((each for each in get_args(annotation) if each is not type(None)), annotation)
    return {int: "NUMBER", float: "NUMBER", Path: "PATH", str: "TEXT"}.get(kind, str(kind))


def _shipped(parameter: Any) -> str:
    value = parameter.default
    shown = isinstance(value, (str, int, float, Path)) and not isinstance(value, bool) and str(value)
    return f"`{value}`" if shown else ""


def keys() -> str:
    """Every key of params.yaml, as it ships, with what is allowed and which stages run again."""
    shipped = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    comments = _comments()
    parts = [
        "# Keys of params.yaml",
        "`null` means: take the recommendation (`checkpoints_qlora/recommended_config.json` has it with its reason), "
        "or that there is no such limit. A key can also stand on the command line of a stage, of `safetrain run`, of "
        "`safetrain preflight`, and behind `-S` of `dvc exp run`: `train.learning_rate=1e-4`.",
        "A changed value runs the stages again that read it, and those that depend on what they write. One that no "
        "stage is named for changes no result.",
    ]
    for section, values in shipped.items():
        parts.append(f"## {section}")
        for key, value in values.items():
            ships, readers = yaml.safe_dump(value).splitlines()[0], ", ".join(_stages_of(section, key)) or "no stage"
            facts = f"Ships as `{ships}`. Allowed: {cell(describe_allowed(section, key))}. Read by: {readers}."
            parts += [f"### {section}.{key}", f"{cell(comments[section, key])}  \n{facts}"]
    return "\n\n".join(parts)


def _comments() -> dict[tuple[str, str], str]:
    """What params.yaml says beside each key."""
    found, section = dict[tuple[str, str], str](), ""
    for line in (ROOT / "params.yaml").read_text(encoding="utf-8").splitlines():
        heading, entry = re.match(r"(\w+):", line), re.match(r"  (\w+):[^#]*# (.*)", line)
        section = heading[1] if heading else section
        if entry:
            found[section, entry[1]] = entry[2]
    return found


def _stages_of(section: str, key: str) -> list[str]:
    """The stages of dvc.yaml that a changed value runs again."""
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    return [
        name for name, stage in stages.items() if {section, f"{section}.{key}"} & set(map(str, stage.get("params", [])))
    ]


def findings() -> str:
    """Every finding of the data gate, and every check of preflight."""
    data = [
        (f"[{name}](../data.md#{name.lower()})", kind.severity + (", always" if kind.fixed else ""),
         cell(_said(kind.message)), cell(kind.remedy))
        for name, kind in KINDS.items()
    ]  # fmt: skip
    machine = [(f"`{found.id}`", found.name, cell(found.remedy)) for found in named_checks()]
    return "\n\n".join([
        "# Findings and checks",
        "## In the data",
        "By `validate_data` and `safetrain validate`. An error ends the stage. `data.downgrade=[ID]` makes it a "
        "warning (but for those that say \"always\"), `data.upgrade=[ID]` does the reverse.",
        table(["ID", "severity", "what is said", "do"], data),
        "## Of machine, model and project",
        "By `safetrain preflight`. `preflight.downgrade=[ID]` makes the failure of one check a warning. What was found "
        "and what is needed is printed with each.",
        table(["ID", "what is looked at", "do"], machine),
    ])  # fmt: skip


def _said(message: str) -> str:
    return re.sub(r"\{\{(.*?)\}\}", r"{\1}", message.replace("{rows}", "N rows").replace("{detail}", "…"))


def exit_codes() -> str:
    """What a stage or a command ends with."""
    found = [(0, "All is well.")]
    kinds = [
        each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, errors.SafetrainError)
    ]
    seen = dict[int, str]()
    for kind in kinds:  # the first one of a code is the general one
        seen.setdefault(kind.exit_code, cell((kind.__doc__ or "").split("\n")[0]))
    seen[1] = "Anything unforeseen, or a check of preflight that failed."
    rows = [*found, *sorted(seen.items()), *SIGNALS]
    own = [
        ("`safetrain validate`", "the data has no errors", "it has errors", "it could not be said"),
        ("`safetrain preflight`", "no check failed", "a check failed", "a check could not be made, or a key is wrong"),
        ("`safetrain result --gate`", "better than its base", "not better", "it forgets, or could not be determined"),
        ("`safetrain estimate`", "it fits", "it does not fit", "a key or an option is wrong"),
    ]
    return "\n\n".join([
        "# Exit codes",
        "Of the stages (`python -m stages.train`) and of `safetrain`.",
        table(["code", "meaning"], rows),
        "Four commands answer a question with their exit code:",
        table(["command", "0", "1", "2"], own),
    ])  # fmt: skip


def records() -> str:
    """The fields of every file that other programs may want to read."""
    parts = [
        "# Fields of the records",
        "The files in `checkpoints_qlora/` that programs may read. [What each file is for](files.md). A field that is "
        "not measured is null, or empty in the CSV file.",
    ]
    for name, classes in RECORDS.items():
        parts.append(f"## {name}")
        for kind in classes:
            parts += [f"**{kind.__name__}**: {cell(kind.__doc__ or '').removeprefix(f'{name}: ')}", _fields(kind)]
    return "\n\n".join(parts)


def _fields(kind: Any) -> str:
    """Names and types of a dataclass, with the comment that stands beside each."""
    comments = dict(re.findall(r"^    (\w+): [^#\n]*#\s*(.*)$", inspect.getsource(kind), re.M))
    rows = []
    for each in fields(kind):
        typed = each.type if isinstance(each.type, str) else inspect.formatannotation(each.type)
        typed = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", typed)
        rows.append((f"`{each.name}`", f"`{typed}`".replace("|", "\\|"), cell(comments.get(each.name, ""))))
    return table(["field", "type", "meaning"], rows)


if __name__ == "__main__":
    main()
