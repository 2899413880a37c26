"""The commands of `safetrain` that train or explain a run: run, stage, repro, exp, result, diagnose and discard."""

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from safetrain.core.errors import AlreadyRunningError, ConfigError
from safetrain.core.formatting import RUN, counted, print_text, ran_by
from safetrain.core.storage import paths
from safetrain.core.storage.paths import POSTMORTEM
from safetrain.project import PARAMS, make_project, params, require_current, require_project, stage_module, with_value

STAGES = ("validate_data", "preflight", "recommend_config", "train", "evaluate", "plot")


def run(
    overrides: Annotated[list[str] | None, Argument(help="Hydra overrides, e.g. experiment=minimal")] = None,
    data: Annotated[str | None, Option(help="file or folder, or hub:OWNER/NAME; written into params.yaml")] = None,
    model: Annotated[str | None, Option(help="folder, or hub:OWNER/NAME; written into params.yaml")] = None,
) -> None:
    """Run the whole pipeline once, from data to charts.

    Runs the six stages in order, without DVC: safetrain run experiment=minimal. In a folder without a project, --data
    and --model make one first.
    """
    from safetrain.plan.child import run_to_its_end

    if data is not None or model is not None:
        _set_values({"data.path": data, "model.path": model})
    params()  # an unreadable file is reported once
    require_current()
    os.environ[RUN] = shlex.join(["safetrain", "run", *(overrides or [])])  # messages after a crash name this command
    for name in STAGES:
        print(f"\n== {name}", flush=True)
        code = run_to_its_end([sys.executable, "-m", stage_module(name), *(overrides or [])])
        if code != 0:
            print(f"error: the {name} stage ended with exit code {code}", file=sys.stderr)
            sys.exit(code)
    result()


def _set_values(values: dict[str, str | None]) -> None:
    """Write values into params.yaml; without a project, make one here if no value is None."""
    from safetrain.core.storage.files import write_text
    from safetrain.data.folders import FROM_HUB
    from safetrain.plan.hub import DATA_SET, fetch

    given = {key: value for key, value in values.items() if value is not None}
    for key, value in given.items():
        if not Path(value).exists() and FROM_HUB.fullmatch(value) is None:
            raise ConfigError(f"--{key.partition('.')[0]} names a path that does not exist.", where=value)
    if not PARAMS.is_file() and given:
        if given.keys() != values.keys():
            do = "name both --data and --model, or make a project: safetrain init"
            raise ConfigError("There is no project here, and a new one needs data and a model.", do=do)
        make_project(Path(), example=False)
    require_project()
    text = PARAMS.read_text(encoding="utf-8")
    for key, value in given.items():
        if not Path(value).exists() and (on_hub := FROM_HUB.fullmatch(value)):
            kind, folder = (DATA_SET, "data") if key == "data.path" else ("", "models")
            value = str(fetch(kind + on_hub[1], Path(folder)))
        text = with_value(text, key, value)
        print(f"params.yaml: {key} is {value}")
    write_text(PARAMS, text)


def stage(
    name: Annotated[str, Argument(help=", ".join(STAGES))],
    overrides: Annotated[list[str] | None, Argument(help="Hydra overrides, e.g. train.seed=7")] = None,
) -> None:
    """Run one stage of the pipeline, as dvc.yaml does."""
    if name not in STAGES:
        raise ConfigError(f"Unknown stage {name}.", expected=f"one of {', '.join(STAGES)}")
    require_current()
    os.execv(sys.executable, [sys.executable, "-m", stage_module(name), *(overrides or [])])


def repro(words: Annotated[list[str] | None, Argument(help="options of dvc repro")] = None) -> None:
    """Rerun what has changed, and keep the results: dvc repro."""
    from safetrain.core.model.files import read_model_files
    from safetrain.data.folders import data_files_of

    config = params()
    data, model = Path(config.data.path), Path(config.model.path)
    if not data.exists() and not Path(f"{data}.dvc").is_file():
        data_files_of(data)  # raises an error with a remedy, which DVC's own error lacks
    if not model.exists() and not Path(f"{model}.dvc").is_file() and config.model.create is None:
        read_model_files(model)
    _start_dvc("repro", words)


def exp(
    words: Annotated[list[str] | None, Argument(help="arguments of dvc exp, e.g. run -S train.seed=7")] = None,
) -> None:
    """Run and compare experiments: dvc exp."""
    _start_dvc("exp", words)


def _start_dvc(command: str, words: list[str] | None) -> None:
    """Run the DVC that came with safetrain; on its PATH, this safetrain comes first."""
    params()  # an unreadable file is our error, not DVC's
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    os.execve(sys.executable, [sys.executable, "-m", "dvc", command, *(words or [])], {**os.environ, "PATH": path})


def result(
    gate: Annotated[bool, Option("--gate", help="only judge whether the run beats its base model")] = False,
) -> None:
    """Show what the run learned, and what to try next.

    With --gate, exit 0: the tuned model is better than its base; 1: not better; 2: it forgets too much, or this could
    not be determined. The gate section of params.yaml has the thresholds.
    """
    from omegaconf import OmegaConf

    from safetrain.watch import result as results
    from safetrain.watch.run_folder import read_evaluated, read_run

    require_project()
    if gate:
        from safetrain.stage import composed, to_pipeline

        code, title, reasons = results.gate(read_run(), to_pipeline(composed([])).gate)
        print_text("\n".join([title, *reasons]))
        sys.exit(code)
    run, config = read_evaluated(), params()
    own = run.summary and run.data and (run.summary.method, run.summary.base_model, run.data.source)
    by_file = own == tuple(OmegaConf.select(config, key) for key in ("train.method", "model.path", "data.path"))
    print_text(results.describe_result(run, ran_by() if by_file or RUN in os.environ else ""))


def diagnose(
    as_json: Annotated[bool, Option("--json", help="print checkpoints_qlora/postmortem.json")] = False,
) -> None:
    """Explain why the last training run died, even after a reboot."""
    from safetrain.core.lock import training_lock
    from safetrain.core.postmortem import PostMortem, describe
    from safetrain.core.records.run_state import is_finished
    from safetrain.core.storage.files import read_or_none

    require_project()
    from safetrain.guard.postmortem import explain_unclosed

    path = paths.OUTPUT / POSTMORTEM
    try:
        with training_lock(paths.OUTPUT):
            death = explain_unclosed(paths.OUTPUT, ran_by()) or read_or_none(path, PostMortem)
    except AlreadyRunningError as running:
        print(running.what, "What follows is about the previous training run.", file=sys.stderr)
        death = read_or_none(path, PostMortem)
    if death is None:
        print("null" if as_json else "No training run has failed here.")
        return
    if as_json:
        print(path.read_text(encoding="utf-8"), end="")
        return
    print_text(describe(death))
    if is_finished(paths.OUTPUT) and paths.SUMMARY.is_file() and paths.SUMMARY.stat().st_mtime > death.ended_seconds:
        print("A training run has finished since then: safetrain result")


def discard() -> None:
    """Discard an interrupted run; finished results are kept.

    This removes its checkpoints, training_state.json, and unfinished/ with its best adapter so far.
    """
    from safetrain.core.lock import training_lock
    from safetrain.core.records.run_state import discard_run
    from safetrain.guard.postmortem import close_marker

    require_project()
    with training_lock(paths.OUTPUT):
        removed = discard_run(paths.OUTPUT, damaged_too=True)
        close_marker(paths.OUTPUT)
        (paths.OUTPUT / POSTMORTEM).unlink(missing_ok=True)  # it names a checkpoint that is gone
    print(f"removed {counted(removed, 'checkpoint')}; the next training run starts over")
