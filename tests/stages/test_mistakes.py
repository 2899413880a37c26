"""What people type wrong gets a clear message and an exit code, before anything is spent or written."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from safetrain.core import formatting
from safetrain.stage import composed, to_pipeline
from tests.conftest import ROOT, chat
from tests.pipeline.workspace import SMALL, Workspace

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("mistakes"))


@pytest.mark.parametrize(("override", "says"), [
    ("train.learning_rat=1", "Unknown key train.learning_rat: did you mean train.learning_rate?|the command line"),
    ("lora.xyz=1", "Unknown key lora.xyz.|one of lora.rank, lora.scale, lora.dropout"),
    ("train.batch_size=two", "train.batch_size has the wrong type.|a whole number, at least 1|two"),
    ("train.learning_rate=0", "train.learning_rate = 0.0; allowed: a number, above 0 and at most 1, or null"),
    ("lora.targets=q_proj", "lora.targets has the wrong type.|a list of texts, e.g. [a,b], or null"),
    ("data.columns.prompt=Frage", "data.columns has the wrong type.|e.g. {prompt: frage, completion: antwort}"),
    ("model.path=", "model.path is empty"),
    ("experiment=nosuch", "Could not find 'experiment/nosuch'|minimal|smoke"),
    ("train.seed=[1", "The configuration cannot be read"),
    (f"data.columns={'[' * 3000}", "it is nested too deeply"),
    ("+train.learning_rat=1", "Unknown key train.learning_rat: did you mean train.learning_rate?"),
    ("++foo.bar=1", "Unknown key foo.|one of model, data, train"),
    ("hydra.run.dir=x", "Unknown key hydra."),
    ("data=null", "data=null sets no value.|KEY=VALUE"),
    ("~train.seed", "~train.seed sets no value."),
    ("train.seed=1,2", "train.seed has several values.|safetrain run train.seed=1,2"),
    ("--multirun", "A stage has no option --multirun."),
    ("--config-dir=x", "A stage has no option --config-dir=x."),
])  # fmt: skip
def test_a_wrong_override_stops_the_first_stage(workspace: Workspace, override: str, says: str) -> None:
    done = workspace.stage("validate_data", override)
    assert (done.returncode, done.stderr[:7]) == (2, "error: ")
    assert [part for part in says.split("|") if part not in done.stderr] == []
    assert not (workspace.folder / "data/validated").exists()


def test_help_shows_the_keys_with_their_values_and_examples_that_run(workspace: Workspace) -> None:
    done = workspace.run("python", "-m", "stages.validate_data", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "near_duplicate_similarity: 0.8" in done.stdout
    assert "Hydra" not in done.stdout
    first, second = (line for line in done.stdout.splitlines() if line.startswith("  safetrain stage "))
    for example in (first, second):
        words = shlex.split(example)
        assert workspace.run(*words, "--", "--cfg", "job").returncode == 0


NAMES = (
    "${x}",
    "data/train (1).jsonl",
    "a=b,[c]",
    'data/días/$x\'s "y".csv',
    "data/x y\\\\",
    "-1",
    "#1 {a}",
    "data/100 % ~",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_path_is_taken_as_it_is_typed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = to_pipeline(composed([f"data.path={name}", f"model.path={name}", f"train.from_adapter={name}"]))
    assert (found.data.path, found.model.path, found.train.from_adapter) == (name, name, name)
    pasted = shlex.split(formatting.override("data.path", name))  # as our own messages quote it
    assert to_pipeline(composed(pasted)).data.path == name


def test_columns_with_accents_and_brackets_and_an_overlay_of_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = composed(["data.columns={prompt: Frage (DE), completion: Lösung}", "experiment=null"])
    assert found.data.columns == {"prompt": "Frage (DE)", "completion": "Lösung"}


@pytest.mark.parametrize(("old", "new", "says"), [
    ("  seed: 42", "  sede: 42", "Unknown key train.sede: did you mean train.seed?"),
    ("  seed: 42", "", "train.seed has no value.|add train.seed"),
    ("  seed: 42", "  seed: [1", "params.yaml is not valid YAML.|params.yaml:"),
])  # fmt: skip
def test_a_wrong_params_yaml_stops_the_first_stage(workspace: Workspace, old: str, new: str, says: str) -> None:
    params = workspace.folder / "params.yaml"
    text = params.read_text()
    assert old in text
    params.write_text(text.replace(old, new))
    try:
        done = workspace.stage("validate_data")
    finally:
        params.write_text(text)
    assert (done.returncode, done.stderr[:7]) == (2, "error: ")
    assert [part for part in says.split("|") if part not in done.stderr] == []


def test_bad_data_and_bad_models_have_exit_codes(workspace: Workspace, write_jsonl: Write, tmp_path: Path) -> None:
    bad = write_jsonl("bad.jsonl", [chat("q", "a"), "{"])
    (tmp_path / "empty.jsonl").touch()
    cases = {
        f"data.path={bad}": (3, f"where:    {bad}:2:2\n"),
        f"data.path={tmp_path}/empty.jsonl": (3, "has no rows"),
        f"data.path={tmp_path}/none.jsonl": (3, "does not exist"),
        f"model.path={tmp_path}": (4, "has no config.json"),
        f"model.path={tmp_path}/none": (4, "model folder does not exist"),
    }
    for override, (code, says) in cases.items():
        done = workspace.stage("validate_data", override)
        assert (done.returncode, says in done.stderr) == (code, True), done.stderr
        assert not (workspace.folder / "data/validated").exists()


def test_a_stage_out_of_order_says_what_to_run_first(workspace: Workspace) -> None:
    for stage in ("train", "recommend_config", "evaluate"):
        done = workspace.stage(stage)
        assert (done.returncode, "safetrain run" in done.stderr) == (2, True)


def test_outside_the_project_s_root_it_says_where_to_go(workspace: Workspace, tmp_path: Path) -> None:
    done = workspace.run("safetrain", "stage", "validate_data", cwd=tmp_path)
    assert done.returncode == 2
    assert "go to the project's root" in done.stderr


def test_a_python_without_the_environment_is_told_to_activate_it() -> None:
    """What `.venv/bin/dvc repro` meets in a shell that has not activated the environment."""
    code = "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]; import stages"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "source .venv/bin/activate" in done.stderr


def test_sigterm_ends_a_stage_s_children_and_removes_what_is_temporary(workspace: Workspace) -> None:
    code = (
        "import subprocess, tempfile\n"
        "from safetrain.stage import stage\n"
        "@stage\n"
        "def main(config):\n"
        "    with tempfile.TemporaryDirectory(prefix='left-', dir='.'):\n"
        "        print('ready', flush=True)\n"
        "        subprocess.run(['sleep', '100'])\n"
        "main()\n"
    )
    stage = workspace.start("python", "-c", code)
    assert stage.stdout is not None
    assert stage.stdout.readline() == "ready\n"
    while not (children := psutil.Process(stage.pid).children()) or children[0].name() != "sleep":
        time.sleep(0.05)
    time.sleep(0.2)  # until it waits
    os.kill(stage.pid, signal.SIGTERM)
    _, stderr = stage.communicate(timeout=60)
    assert (stage.returncode, stderr) == (143, "error: interrupted\n")
    assert not list(workspace.folder.glob("left-*"))
    assert not psutil.wait_procs(children, timeout=60)[1]


def test_ctrl_c_saves_and_the_same_command_continues(workspace: Workspace) -> None:
    """The first signal ends the run after its step with 130, so that DVC never records half a training as done."""
    workspace.make_small()
    few = ["train.max_steps=60", "train.num_epochs=50", "train.save_steps=1000", "train.eval_steps=60"]
    settings = [*SMALL, *few, "train.max_examples=64", "train.log_steps=1", "preflight.level=quick"]
    for stage in ("validate_data", "preflight", "recommend_config"):
        assert workspace.stage(stage, *settings).returncode == 0
    command = ["python", "-m", "stages.train", *settings]
    first = workspace.start(*command)
    output = workspace.folder / "checkpoints_qlora"
    metrics, live = (output / name for name in ("training_metrics.csv", "unfinished/training_metrics.csv"))
    deadline = time.monotonic() + 120
    while not live.exists() or live.read_text().count("\n") < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (worker,) = psutil.Process(first.pid).children()
    worker.suspend()  # it would have ended before the others have started
    second = workspace.stage("train", *settings)
    assert (second.returncode, f"process {first.pid}" in second.stderr) == (6, True)
    assert workspace.run("safetrain", "run", "experiment=smoke").returncode == 6
    worker.resume()
    os.kill(first.pid, signal.SIGINT)
    _, stderr = first.communicate(timeout=60)
    assert first.returncode == 130
    assert ("the state is saved.\n  continue with: " in stderr, "error: " in stderr) == (True, False)
    changed = workspace.stage("train", *settings, "train.learning_rate=0.5")
    assert (changed.returncode, "learning_rate" in changed.stderr) == (7, True)
    assert "remove it: safetrain discard" in changed.stderr
    finished = workspace.run(*command)
    assert finished.returncode == 0
    summary = workspace.json("training_summary.json")
    assert 0 < summary["resumed_from_step"] < summary["steps"] == 60
    assert f"continuing from step {summary['resumed_from_step']}\n" in finished.stdout
    steps = [int(line.split(",")[0]) for line in metrics.read_text().splitlines()[1:]]
    assert steps == sorted(set(steps))
    assert "removed 2 checkpoints" in workspace.cli("discard")
    assert not (workspace.folder / "checkpoints_qlora/training_state.json").exists()
