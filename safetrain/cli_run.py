"""The commands of `safetrain` that train, and keep or drop what was trained: run, set, runs, result, discard."""

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from enum import StrEnum
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from safetrain.core.errors import ConfigError, SafetrainError
from safetrain.core.formatting import RUN, Tell, counted, json_lines, print_text, similar_path
from safetrain.core.lock import locked, require_no_training, training_lock
from safetrain.core.params_file import (
    PARAMS,
    RUN_LOCK,
    lent,
    put_back,
    read_params,
    values_in,
    with_value,
    write_params,
)
from safetrain.core.records.run_state import discard_run
from safetrain.core.storage import paths
from safetrain.core.storage.files import write_record
from safetrain.core.storage.paths import POSTMORTEM
from safetrain.project import make_project, params, require_current, require_project, stage_module, start_dvc

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from safetrain.core.records.schema import Pipeline
    from safetrain.watch.run_folder import Run


def run(
    values: Annotated[list[str] | None, Argument(help="KEY=VALUE or experiment=NAME, for this run only")] = None,
    data: Annotated[str | None, Option(help="file or folder, or hub:OWNER/NAME; written into params.yaml")] = None,
    model: Annotated[str | None, Option(help="folder, or hub:OWNER/NAME; written into params.yaml")] = None,
    plan: Annotated[bool, Option("--plan", help="check and plan, and stop before training")] = False,
    name: Annotated[str, Option(help="record the run under this name; default: after its values, if it has any")] = "",
    as_json: Annotated[bool, Option("--json", help="print a JSON object per event; the last is the verdict")] = False,
) -> None:
    """Run the pipeline: stages whose inputs have changed, from data to charts.

    safetrain run train.seed=7 runs with this value once, and records the run where there is Git: safetrain runs.
    train.seed=1,2,3 runs one after another. In a folder without a project, --data and --model make one first.
    """
    from safetrain.runs import described, jobs_of, why_unrecorded
    from safetrain.stage import composed, to_pipeline

    words = values or []
    command = shlex.join(["safetrain", "run", *words, *([f"--name={name}"] if name else [])])
    with json_lines(asked=as_json) as tell:
        paths_given = _existing({"data.path": data, "model.path": model})
        require_current()
        with _own_params(command):
            if paths_given:
                _write(reduce(lambda text, pair: with_value(text, *pair), paths_given.items(), read_params()))
            _set_environment(command)
            jobs = jobs_of(words)
            for job in jobs:
                to_pipeline(composed(job))  # a wrong value is an error before the first run
            if (words or name) and (why := why_unrecorded()):
                print(f"Experiments are not recorded: {why}. All else works.")
            _run_in_turn(jobs, command, tell, "recommend_config" if plan else "", name)
    if plan:
        return
    if len(jobs) == 1:
        result()
    else:
        print_text(described())


def _run_in_turn(jobs: list[list[str]], command: str, tell: Tell | None, until: str, name: str) -> None:
    """Run the pipeline, up to the stage ``until``, with each job's values; after a failure, say which jobs remain."""
    for number, job in enumerate(jobs, 1):
        if len(jobs) > 1:
            print(f"\n== run {number} of {len(jobs)}: {' '.join(job)}", flush=True)
        if tell:
            tell({"event": "run", "values": job, "number": number, "of": len(jobs)})
        try:
            _run_once(job, command, until, name)
        except SafetrainError as error:
            if left := [shlex.join(each) for each in jobs[number:]]:
                print(f"error: the run with {' '.join(job)} failed; not run: {'; '.join(left)}", file=sys.stderr)
            raise error
        if tell and not until:
            tell({"event": "verdict", **_verdict()})


By = StrEnum("By", "loss score")


def search(
    minutes: Annotated[float, Option(min=1, help="time for the whole search, with the evaluation of its best")],
    values: Annotated[list[str] | None, Argument(help="KEY=VALUE,VALUE …; default: learning rates, then ranks")] = None,
    by: Annotated[By, Option(help="what to rank by: loss, or score of answers, on validation rows")] = By.loss,
    as_json: Annotated[bool, Option("--json", help="print a JSON object per event; the last is the verdict")] = False,
) -> None:
    """Find the best values within the minutes you have.

    safetrain search --minutes 60 train.learning_rate=1e-4,3e-4 lora.rank=8,16 trains every combination for a part of
    its run; those that are ahead go on, to the end only the best. Its values are written into params.yaml, its result
    is the project's. A search that was stopped or killed goes on with the same command.
    """
    from safetrain.core.records.search import BEST, FINISHED
    from safetrain.runs import jobs_of, reproduce
    from safetrain.search import Searching
    from safetrain.search_plan import planned_search
    from safetrain.stage import composed, to_pipeline
    from safetrain.watch.standings import Standings

    words, began = values or [], time.monotonic()
    ranking = [] if by is By.loss else ["--by", by.value]
    command = shlex.join(["safetrain", "search", "--minutes", f"{minutes:g}", *ranking, *words])
    _set_environment(command)
    with json_lines(asked=as_json) as tell:
        require_project()
        require_current()
        with _own_params(command):
            jobs = jobs_of(words)
            for job in jobs:
                to_pipeline(composed(job))
            fixed = [word for word in words if all(word in job for job in jobs)]
            _require_inputs(to_pipeline(composed(fixed)), fixed)
            with lent(_with_values(composed(fixed)), command):
                reproduce("preflight")
                planned = planned_search(words, jobs, minutes, by.value, began)
                with Standings(tell) as standings:
                    found = Searching(planned, standings.show).go()
            for each in sorted(found.candidates, key=lambda each: each.name == found.best):  # the best is the last
                if each.name == found.best:
                    _write(_with_values(composed(each.values)))
                if each.state in (FINISHED, BEST):
                    _run_once(list(each.values), command)
            write_record(paths.SEARCH / paths.STANDINGS, replace(found, is_finished=True))
        del os.environ[RUN]  # the next commands are those of its result
        if tell:
            tell({"event": "verdict", "search": asdict(found), **_verdict()})
    result()


def _run_once(words: list[str], command: str, until: str = "", name: str = "") -> None:
    """Run the pipeline, with values that params.yaml has meanwhile, and record it; or only up to a stage."""
    from safetrain.runs import record, reproduce, why_unrecorded
    from safetrain.stage import composed, to_pipeline

    config = composed(words)
    _require_inputs(to_pipeline(config), words)
    if until or not (words or name):
        with lent(_with_values(config), command) if words else nullcontext():
            reproduce(*[until] * bool(until))
        return
    text = _with_values(config)
    with lent(text, command):
        if composed([]) != config:
            what = "conf/config.yaml sets values that differ from params.yaml and from this command."
            raise ConfigError(what, where="conf/config.yaml", do="remove them there; set them in params.yaml")
        reproduce()
        if why_unrecorded():
            return
        try:
            if read_params() != text:
                raise ConfigError("params.yaml was edited during the run.")
            print_text(f"recorded as {record(words, name)}: safetrain runs")
        except SafetrainError as error:  # the result is there
            print_text(f"not recorded as an experiment: {error}", sys.stderr)


def _set_environment(command: str) -> None:
    os.environ[RUN] = command  # messages after a crash name this command
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def _with_values(config: "DictConfig") -> str:
    """The text of params.yaml with the values of ``config``."""
    from omegaconf import OmegaConf

    from safetrain.stage import composed

    text = read_params()
    before, after = (OmegaConf.to_container(each, resolve=True) for each in (composed([]), config))
    for section, values in after.items():  # type: ignore[union-attr]
        for key, value in values.items():
            if value != before[section][key]:  # type: ignore[index]
                text = with_value(text, f"{section!s}.{key}", value)
    return text


def _require_inputs(config: "Pipeline", words: list[str]) -> None:
    """Raise an error with a remedy, which DVC's own lacks, if data or model is missing.

    If the model is to be created, the first stage creates it here: DVC needs the folder before it starts that stage.
    """
    from safetrain.core.model.files import read_model_files
    from safetrain.data.folders import data_files_of
    from safetrain.plan.child import run_to_its_end

    data, model = Path(config.data.path), Path(config.model.path)
    if not data.exists() and not Path(f"{data}.dvc").is_file():
        data_files_of(data)
    if model.exists() or Path(f"{model}.dvc").is_file():
        return
    if config.model.create is None:
        read_model_files(model)
    elif code := run_to_its_end([sys.executable, "-m", stage_module("validate_data"), *words]):
        raise SafetrainError(f"The validate_data stage ended with exit code {code}.", exit_code=code)


@contextmanager
def _own_params(command: str = "") -> Iterator[None]:
    """Have params.yaml for this process alone, without the values of a run that was killed."""
    from safetrain.runs import wait_for_stages

    start_dvc()
    with locked(RUN_LOCK, "Another run uses this project"):
        wait_for_stages()
        if killed := put_back():
            then = "this run continues it" if killed == command else f"to continue it: {killed}"
            print_text(f"params.yaml had the values of '{killed}', which was killed; they were put back; {then}")
        yield


def set_(values: Annotated[list[str], Argument(help="KEY=VALUE, or experiment=NAME for its values")]) -> None:
    """Write values into params.yaml, to stay; comments stay too."""
    from safetrain.stage import composed, to_pipeline

    require_project()
    with _own_params():
        config = composed(values)
        to_pipeline(config)  # raises for a value out of its range
        _write(_with_values(config))


def _write(text: str) -> None:
    """Write params.yaml, and say what has changed."""
    before = values_in(read_params())
    write_params(text)
    changes = [f"params.yaml: {key} is {value}" for key, value in values_in(text).items() if before.get(key) != value]
    print_text("\n".join(changes) or "params.yaml has these values already.")


def _existing(paths_given: dict[str, str | None]) -> dict[str, str]:
    """The paths that were given, fetched from the Hub if asked to; without a project, make one if none is missing."""
    from safetrain.data.folders import FROM_HUB
    from safetrain.plan.hub import DATA_SET, fetch

    given = {key: value for key, value in paths_given.items() if value is not None}
    for key, value in given.items():
        if not Path(value).exists() and FROM_HUB.fullmatch(value) is None:
            what, do = f"--{key.partition('.')[0]} names a path that does not exist.", _instead(key, value)
            raise ConfigError(what, where=value, do=do)
    if not PARAMS.is_file() and given:
        if given.keys() != paths_given.keys():
            do = "name both --data and --model, or make a project: safetrain init"
            raise ConfigError("There is no project here, and a new one needs data and a model.", do=do)
        make_project(Path(), example=False)
    require_project()
    for key, value in given.items():
        if not Path(value).exists() and (on_hub := FROM_HUB.fullmatch(value)):
            kind, folder = (DATA_SET, "data") if key == "data.path" else ("", "models")
            given[key] = str(fetch(kind + on_hub[1], Path(folder)))
    return given


def _instead(key: str, value: str) -> str:
    """What may have been meant by a path that does not exist."""
    from safetrain.plan.hub import HUB_ID

    folder = Path("data" if key == "data.path" else "models")
    if hint := similar_path(Path(value)) or similar_path(folder / Path(value).name):
        return hint
    if HUB_ID.fullmatch(value) and not Path(value).parent.is_dir():
        return f"for the Hub: hub:{value}"
    return f"correct the path; here is {Path.cwd()}"


def runs(
    back: Annotated[str | None, Option(metavar="NAME", help="bring back the values and the result of this run")] = None,
    as_json: Annotated[bool, Option("--json", help="print one JSON object")] = False,
) -> None:
    """List the recorded runs, or go back to one.

    A run with values of its own is recorded as an experiment of DVC, if the project is under Git.
    """
    from safetrain.runs import described, go_back, listed, why_unrecorded

    params()  # an unreadable file is an error with its line
    if back is not None:
        require_no_training(paths.OUTPUT)
        with _own_params():
            go_back(back)
        print_text(f"params.yaml and checkpoints_qlora are those of {back}: safetrain result")
        return
    if as_json:
        print(json.dumps({"runs": listed(), "unrecorded": why_unrecorded()}, ensure_ascii=False, indent=2))
        return
    print_text(described())
    if why := why_unrecorded():
        print_text(f"Experiments are not recorded: {why}.")


def stage(name: Annotated[str, Argument()], values: Annotated[list[str] | None, Argument()] = None) -> None:
    """Run one stage, as a project's dvc.yaml does."""
    require_current()
    os.execv(sys.executable, [sys.executable, "-m", stage_module(name), *(values or [])])


def result(
    gate: Annotated[bool, Option("--gate", help="only judge whether the run beats its base model")] = False,
    as_json: Annotated[bool, Option("--json", help="print one JSON object; with --gate, exit as that does")] = False,
) -> None:
    """Show what the run learned, and what to try next.

    With --gate, exit 0: the tuned model is better than its base; 1: not better; 2: it forgets too much, or this could
    not be determined. The gate section of params.yaml has the thresholds.
    """
    from safetrain.watch.result import describe_result
    from safetrain.watch.run_folder import read_evaluated, read_run

    require_project()
    if gate or as_json:
        verdict = _verdict(read_run() if gate else read_evaluated())
        if as_json:
            print(json.dumps(verdict, ensure_ascii=False, indent=2))
        else:
            print_text("\n".join([verdict["verdict"], *verdict["reasons"]]))
        sys.exit(verdict["exit_code"] if gate else 0)
    from safetrain.runs import run_of_result

    os.environ.setdefault(RUN, run_of_result())  # for the commands to type next
    print_text(describe_result(read_evaluated()))


def _verdict(run: "Run | None" = None) -> dict[str, Any]:
    """The gate's verdict on a run, its command and its records, for programs."""
    from safetrain.runs import run_of_result
    from safetrain.stage import composed, to_pipeline
    from safetrain.watch import result as results
    from safetrain.watch.run_folder import read_evaluated

    run = run or read_evaluated()
    code, title, reasons = results.gate(run, to_pipeline(composed([])).gate)
    facts = {"verdict": title, "exit_code": code, "reasons": reasons, "command": run_of_result()}
    return {**facts, "training": asdict(run.summary), "evaluation": asdict(run.evaluation)}  # type: ignore[arg-type]


def discard() -> None:
    """Discard an interrupted run, and the candidates of a search; finished results are kept.

    This removes its checkpoints, training_state.json, and unfinished/ with its best adapter so far; also search/, and
    what queued experiments keep in .dvc/tmp/safetrain.
    """
    from safetrain.guard.postmortem import close_marker

    require_project()
    with locked(RUN_LOCK, "Another run uses this project"), training_lock(paths.OUTPUT):
        removed, candidates = discard_run(paths.OUTPUT, damaged_too=True), len([*paths.SEARCH.glob("*/")])
        close_marker(paths.OUTPUT)
        for folder in (paths.KEPT_RUNS, paths.SEARCH):
            shutil.rmtree(folder, ignore_errors=True)
        (paths.OUTPUT / POSTMORTEM).unlink(missing_ok=True)  # it names a checkpoint that is gone
    searched = f" and {counted(candidates, 'candidate')} of a search" if candidates else ""
    print(f"removed {counted(removed, 'checkpoint')}{searched}; the next training run starts over")
