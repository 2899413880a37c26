"""What the sections of the page show: the records of a run, params.yaml, and what the page's commands have printed."""

import dataclasses
import itertools
import json
import math
import re
import shlex
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from stat import S_ISDIR
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from safetrain.core.errors import SafetrainError
from safetrain.core.lock import is_held
from safetrain.core.params_file import PARAMS, RUN_LOCK, read_params, values_in
from safetrain.core.storage import paths
from safetrain.core.storage.paths import FLIGHT, UNFINISHED
from safetrain.data.findings import ERROR
from safetrain.data.forms import KNOWN_KEYS
from safetrain.page import commands
from safetrain.page.commands import ESTIMATES, FOLDER, RUN, SETTABLE, printed, read, running_process
from safetrain.plan.machine import described_machines
from safetrain.runs import listed, name_after, run_of_result, why_unrecorded
from safetrain.watch.charts import WIDE, points_of
from safetrain.watch.monitor import MonitorView, State, look_at, place_lines, rows_of
from safetrain.watch.report import configuration_of, templates, value_text, verdict_of
from safetrain.watch.result import describe_evaluation
from safetrain.watch.run_folder import RunReader, read_evaluated, read_run

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = Path(__file__).parent
STAGES = ("validate_data", "preflight", "recommend_config", "train", "evaluate", "plot")
WIDTH, HEIGHT, MOST_POINTS = 640, 200, 300  # of the curve
SHOWN_FINDINGS, SHOWN_ROWS, SHOWN_COMMANDS = 60, 5, 12
OF_A_RUN = re.compile(r"\..*|checkpoint_.*|run\.log|training_state\.json")  # what only live sections show
UNREADABLE = "ROW-UNREADABLE"
Facts = dict[str, Any]


class Tongue:
    """Says a text of the page in the reader's language; one that is not in the table stays English."""

    def __init__(self, language: str) -> None:
        self.language = "pt" if language == "pt" else "en"
        self._table = portuguese() if self.language == "pt" else {}

    def __call__(self, text: str) -> str:
        return self._table.get(text, text)


@cache
def portuguese() -> dict[str, str]:
    """Every text of the page, English and Portuguese."""
    found: dict[str, str] = json.loads((HERE / "portuguese.json").read_text(encoding="utf-8"))
    return found


@cache
def pages() -> "Environment":
    """The templates of the page, which use parts of the report's."""
    found = templates(HERE / "templates")
    found.filters["quoted"] = shlex.quote
    return found


def render(section: str, tongue: Tongue) -> str:
    """The HTML of a section, as it is now."""
    facts: Facts = {"t": tongue, "language": tongue.language, "section": section, "values": {}}
    try:
        values = _values_in(read_params()) if PARAMS.is_file() else {}
        facts |= {"values": values, **(SECTIONS[section](values) if values or section == "stages" else {})}
    except (SafetrainError, OSError) as error:  # such as a typing error in params.yaml
        section, facts["broken"] = "broken", str(error)
    return pages().get_template(f"{section}.html").render(facts)


@lru_cache(maxsize=1)
def _values_in(text: str) -> Facts:
    return values_in(text)


def changes(*, live: bool) -> tuple[object, ...]:
    """Differs from before if a section may look different: times and sizes of files, and whether something runs."""
    folders = [Path(), paths.OUTPUT, Path("data"), Path("models"), FOLDER, ESTIMATES]
    if live:
        folders += [paths.OUTPUT / FLIGHT, paths.OUTPUT / UNFINISHED]
    files = itertools.chain.from_iterable(folder.glob("*") for folder in folders)
    stats = [(file.name, _stamp(file)) for file in files if live or not OF_A_RUN.fullmatch(file.name)]
    return tuple(sorted(stats)), is_held(RUN_LOCK), running_process()


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
        return (0, 0) if S_ISDIR(found.st_mode) else (found.st_mtime_ns, found.st_size)
    except OSError:
        return 0, 0


def _now() -> MonitorView:
    return look_at(RunReader(paths.OUTPUT))


# The pipeline


def _stages(values: Facts) -> Facts:
    history = commands.HISTORY
    typed = history.read_text("utf-8", "replace").splitlines() if history.is_file() else []
    states = _states_of(_now()) if values else []
    return {"states": states, "history": typed[-SHOWN_COMMANDS:]}


def _states_of(now: MonitorView) -> list[tuple[str, str]]:
    """Each stage, and what it says now: up to date, will run, running, failed …"""
    child, changed = read(RUN), printed(FOLDER / "status.json")
    running = now.stage or ("train" if now.state in (State.TRAINING, State.PAUSED) else "")
    said = " ".join(child.lines) if child and child.exit_code and not running else ""
    has_died = now.state in (State.DIED, State.GONE) and not running
    first = next((stage for stage in STAGES if stage in (changed or {}) and stage != "preflight"), "")
    states, is_before = list[tuple[str, str]](), True
    for stage in STAGES:
        is_before = is_before and stage not in (running or first)
        if stage == running:
            state = "running"
        elif (f"The {stage} stage ended" in said and now.state is not State.STOPPED) or (stage == "train" and has_died):
            state = "failed"
        elif running in STAGES:
            state = "done" if is_before else "waits"
        elif changed is None:
            state = "unknown"
        else:
            state = "checks every time" if stage == "preflight" else "up to date" if is_before else "will run"
        states.append((stage, state))
    return states


# Data


def _data(values: Facts) -> Facts:
    check, found = read(commands.CHECK), printed(FOLDER / "check.json")
    if check is None or check.is_running or check.exit_code == 2 or not isinstance(found, dict):
        found = None
    path = check.words[2] if check is not None else ""
    findings = found["findings"][:SHOWN_FINDINGS] if found else []
    grave = {each["id"] for each in findings if each["severity"] == ERROR}
    keys = dict.fromkeys(itertools.chain.from_iterable(map(_keys, found["texts"].values()))) if found else {}
    return {
        "report": read_run().data, "check": check, "path": path, "found": found, "findings": findings,
        "files": _data_files(), "repaired": commands.repaired_name(path) if path else "",
        "shown": SHOWN_ROWS, "is_folder": Path(path).is_dir(), "has_errors": bool(grave),
        "keys": list(keys) if UNREADABLE in grave and not keys.keys() & set(KNOWN_KEYS) else [],
    }  # fmt: skip


def _keys(text: str) -> list[str]:
    """The keys of a row."""
    try:
        return list(dict(json.loads(text)))
    except (ValueError, TypeError):
        return []


def _data_files() -> list[str]:
    """What in data/ may be a data set."""
    found = [path for path in Path("data").glob("[!.]*") if not path.name.endswith((".log.jsonl", ".dvc"))]
    return sorted(str(path) for path in found if path != paths.VALIDATED)


# Model


def _model(values: Facts) -> Facts:
    files = sorted(ESTIMATES.glob("*@*.json"))
    known = [(*map(unquote, file.stem.rsplit("@", 1)), printed(file)) for file in files]
    partial = [file.stat().st_size for file in Path("models").glob(".*.partial/**/*") if file.is_file()]
    return {
        "models": commands.models(), "known": known, "machines": sorted(described_machines()),
        "fetching": read(commands.FETCH), "partial_bytes": sum(partial), "estimating": read(commands.ESTIMATE),
    }  # fmt: skip


# Plan


def _plan(values: Facts) -> Facts:
    run, rows = read_run(), list[Facts]()
    for key, default in SETTABLE.items():
        section, _, name = key.partition(".")
        found, reason = None, ""
        if run.plan is not None:
            found = getattr(run.plan.settings.lora if section == "lora" else run.plan.settings, name, None)
            reason = run.plan.reasons.get(key if section == "lora" else name, "")
        own = value_text(values[key]) if values.get(key) != default else ""
        rows.append(
            {
                "key": key,
                "own": own,
                "without": value_text(default),
                "planned": "" if found is None else value_text(found),
                "reason": reason,
            }
        )
    planned = configuration_of(dataclasses.replace(run, steps=(), summary=None, job=None))
    changed = {"validate_data", "recommend_config"} & set(printed(FOLDER / "status.json") or ())
    return {
        "plan": run.plan, "rows": rows, "rest": [row for row in planned if row[0] not in SETTABLE],
        "planning": read(RUN) if commands.is_planning() else None, "is_old": changed,
        "is_busy": running_process() is not None and not commands.is_planning(),
    }  # fmt: skip


# Run


def _run(values: Facts) -> Facts:
    now, child, process = _now(), read(RUN), running_process()
    total = now.run.begun.total_steps if now.run.begun is not None else 0
    own = [f"{key}={values.get(key)}" for key, default in SETTABLE.items() if values.get(key) != default]
    return {
        "view": now, "child": child, "process": process, "places": place_lines(now), "facts": rows_of(now),
        "percent": round(100 * now.step / total) if total else 0, "curve": curve_of(now.run.steps),
        "continues": now.state in (State.DIED, State.STOPPED, State.GONE, State.LEFT),
        "continued": shlex.join(commands.words_to_continue(now.verdict)), "name": name_after(own) if own else "first",
        "is_busy": is_held(RUN_LOCK) or process is not None,
    }  # fmt: skip


def curve_of(steps: Sequence[Any]) -> Facts:
    """The losses as points of a picture of WIDTH x HEIGHT, with its scale; empty without two points."""
    lines = {name: points_of(steps, name) for name in ("train_loss", "valid_loss")}
    every = [point for points in lines.values() for point in points]
    if len(every) < 2:
        return {}
    last, low, high = max(x for x, _ in every) or 1.0, min(y for _, y in every), max(y for _, y in every)
    scale: Callable[[float], float] = math.log if 0.0 < WIDE * low < high else float  # logarithmic, as in the report
    size = (scale(high) - scale(low)) or 1.0

    def drawn(points: tuple[tuple[float, float], ...]) -> str:
        kept = points[:: max(1, math.ceil(len(points) / MOST_POINTS))] + points[-1:]
        return " ".join(f"{WIDTH * x / last:.1f},{HEIGHT * (scale(high) - scale(y)) / size:.1f}" for x, y in kept)

    pictured = {name: drawn(points) for name, points in lines.items() if points}
    return {"lines": pictured, "low": low, "high": high, "last": int(last), "width": WIDTH, "height": HEIGHT}


# Result


def _result(values: Facts) -> Facts:
    run, asked = read_evaluated(), read(commands.ASK)
    scores = run.evaluation
    shown = {each.where: each for each in (*scores.samples[:4], *scores.worst[:2])} if scores else {}
    exports = {kind: shlex.join(commands.export_words(kind)) for kind in commands.EXPORTS}
    return {
        "run": run, "scores": scores, "verdict": verdict_of(run), "command": run_of_result(),
        "samples": list(shown.values()),
        "lines": describe_evaluation(scores) if scores else [], "runs": listed(), "unrecorded": why_unrecorded(),
        "asked": asked, "answers": answers_of(asked), "exporting": read(commands.EXPORT),
        "exports": exports,
        "has_report": paths.REPORT.is_file(), "is_busy": is_held(RUN_LOCK) or running_process() is not None,
    }  # fmt: skip


def answers_of(child: commands.Child | None) -> list[tuple[str, str]]:
    """What both models have said so far to the last question."""
    _, label, text = ("\n".join(child.lines) if child is not None else "").partition("base:  ")
    base, second, tuned = text.rpartition("\ntuned: ")
    return [("base", base if second else text), ("tuned", tuned if second else "")] if label else []


SECTIONS: dict[str, Callable[[Facts], Facts]] = {
    "stages": _stages, "data": _data, "model": _model, "plan": _plan, "run": _run, "result": _result,
}  # fmt: skip
LIVE = ("stages", "run")  # they change with every step
