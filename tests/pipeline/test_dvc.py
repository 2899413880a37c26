"""The whole pipeline as people run it, in a fresh clone: one repro, then what DVC promises about the next ones.

The tests of this file build on each other, in their order.
"""

import csv
import importlib
import io
import json
import re
import sys
from contextlib import redirect_stdout
from typing import Any

import pytest
import yaml

from safetrain.core.memory.estimate import MARGIN
from tests.pipeline.workspace import Workspace

STAGES = ["validate_data", "preflight", "recommend_config", "train", "evaluate", "plot"]
MODEL = "models/encyclopedia-3m"
# Writes down which files of the project the processes of each stage open to read.
LISTENER = """
import os, sys
root = os.getcwd() + os.sep
if os.environ.get("DVC_STAGE"):
    log = os.open(os.environ["OPENED"] + os.environ["DVC_STAGE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    def listen(event, arguments):
        if event == "open" and isinstance(arguments[0], str) and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            path = os.path.abspath(arguments[0])
            if path.startswith(root):
                os.write(log, (path.removeprefix(root) + "\\n").encode())
    sys.addaudithook(listen)
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("pipeline"))
    listener = made.folder.parent / "listener"
    listener.mkdir()
    (listener / "sitecustomize.py").write_text(LISTENER)
    made.environment |= {"PYTHONPATH": str(listener), "OPENED": f"{listener}/opened-by-"}
    return made


def stages_run(output: str) -> list[str]:
    return re.findall(r"Running stage '(\w+)'", output)


def test_a_fresh_clone_learns_to_answer(workspace: Workspace) -> None:
    assert stages_run(workspace.succeed("dvc", "repro")) == STAGES
    evaluation = workspace.json("evaluation.json")
    assert evaluation["tuned"]["score"] - evaluation["base"]["score"] >= 0.8
    assert evaluation["tuned"]["loss"] < evaluation["base"]["loss"]
    assert evaluation["questions"] == evaluation["answered"] == 220
    assert evaluation["improvement"]["nats_per_label"] > 10 * evaluation["improvement"]["plus_minus"]
    assert evaluation["forgetting"]["unsaid"][0].startswith("the base model is worse than guessing on the general text")
    columns = workspace.succeed("dvc", "exp", "show", "--csv").splitlines()[0].split(",")
    assert columns[5] == "tuned.score"
    assert columns.index("improvement.nats_per_label") < columns.index("base.loss") < columns.index("valid_loss")
    summary = workspace.json("training_summary.json")
    assert summary["resumed_from_step"] == 0
    proof = summary["proof"]
    assert proof["opened"]["divergence"] < 5e-3 < 0.1 < proof["base"]["divergence"]
    assert proof["opened"]["same_answers"] > 0.9 > proof["base"]["same_answers"]
    assert summary["peak_memory_bytes"] <= MARGIN * summary["predicted_peak_bytes"]
    for name in ("loss", "learning_rate", "memory_usage", "speed"):
        picture = workspace.folder / f"checkpoints_qlora/plots/{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
    page = (workspace.folder / "checkpoints_qlora/report.html").read_text()
    assert ("better by " in page, "Missing:" in page) == (True, False)
    with (workspace.folder / "checkpoints_qlora/training_metrics.csv").open() as file:
        losses = [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]
    assert losses[-1] < losses[0] / 10


def test_result_says_what_was_learnt_and_what_to_try(workspace: Workspace) -> None:
    """What `safetrain result` says, and that its gate passes."""
    text = workspace.cli("result", "--gate")
    text += workspace.cli("result")
    for said in ("test questions: base 0.0 %, tuned ", "safetrain ask", " nats per token: better by "):
        assert said in text


def declared(stage: dict[str, Any], *kinds: str) -> set[str]:
    """The files that dvc.yaml names for a stage."""
    entries = [entry for kind in kinds for entry in stage.get(kind, [])]
    names = {entry if isinstance(entry, str) else next(iter(entry)) for entry in entries}
    return {name.replace("${data.path}", "data/example").replace("${model.path}", MODEL) for name in names}


def under(path: str, names: set[str]) -> bool:
    return any(path == name or path.startswith(f"{name}/") for name in names)


@pytest.mark.parametrize("name", [name for name in STAGES if name != "preflight"])  # which runs every time
def test_a_stage_opens_nothing_that_it_does_not_depend_on(workspace: Workspace, name: str) -> None:
    """Of what people put in and of what stages hand on; the libraries' own code opens safetensors files unseen."""
    stages = yaml.safe_load((workspace.folder / "dvc.yaml").read_text())["stages"]
    outs = ("outs", "metrics", "plots")
    handed_on = {file for stage in stages.values() for file in declared(stage, *outs)} | {"data/example", MODEL}
    opened = set((workspace.folder.parent / f"listener/opened-by-{name}").read_text().split())
    read = {path for path in opened if under(path, handed_on) and not (workspace.folder / path).is_dir()}
    assert len(read) > 1
    unknown = {path for path in read if not under(path, declared(stages[name], "deps", "params", *outs))}
    assert unknown == set()


def test_the_tuned_model_answers_here_and_in_mlx_lm(workspace: Workspace) -> None:
    question, answer = "Qual é a capital do Brasil?", "A capital do Brasil é Brasília."
    asked = workspace.cli("ask", question, "--base")
    assert (f"tuned: {answer}" in asked, "base:  " in asked) == (True, True)
    adapters = ("--model", MODEL, "--adapter-path", "checkpoints_qlora/adapters")
    asking, fused = ("--prompt", question, "--temp", "0"), str(workspace.folder.parent / "fused")
    assert f"\n{answer}\n" in mlx_lm(workspace, "mlx_lm.generate", *adapters, *asking)
    mlx_lm(workspace, "mlx_lm.fuse", *adapters, "--save-path", fused)
    assert f"\n{answer}\n" in mlx_lm(workspace, "mlx_lm.generate", "--model", fused, *asking)


def mlx_lm(workspace: Workspace, command: str, *words: str) -> str:
    """What a command of mlx-lm prints, in this process."""
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(io.StringIO()) as out:
        patched.chdir(workspace.folder)
        patched.setattr(sys, "argv", [command, *words])
        importlib.import_module(command).main()
    return out.getvalue()


def test_a_second_repro_runs_preflight_alone_and_leaves_git_clean(workspace: Workspace) -> None:
    workspace.commit("first run")
    workspace.succeed("safetrain", "report")  # the same bytes as the stage has written
    assert stages_run(workspace.succeed("safetrain", "run")) == ["preflight"]
    assert workspace.git("status", "--short") == ""
    tracked = workspace.git("ls-files", "checkpoints_qlora", "data").split()
    assert tracked == [
        "checkpoints_qlora/README.md", "data/README.md",
        "data/example/test.jsonl", "data/example/train.jsonl", "data/example/valid.jsonl",
        "data/facts.jsonl", "data/kinds.jsonl", "data/preferences.jsonl",
        *(f"data/pretrain_example/{split}.jsonl" for split in ("test", "train", "valid")),
    ]  # fmt: skip


def test_reworded_messages_train_nothing(workspace: Workspace) -> None:
    """Of any room but engine and core: the stages upstream write the same again."""
    for room in ("create", "data", "evaluate", "export", "guard", "plan", "watch"):
        for file in (workspace.folder / "safetrain" / room).rglob("*.py"):
            file.write_text(file.read_text() + "\n# another text\n")
    output = workspace.succeed("dvc", "repro", "train")
    assert stages_run(output) == ["validate_data", "preflight", "recommend_config"]
    assert "Stage 'train' didn't change, skipping" in output
    workspace.git("checkout", "--", ".")


def test_an_evaluation_key_does_not_retrain(workspace: Workspace) -> None:
    workspace.set_values({"evaluate.max_examples": 10, "evaluate.max_new_tokens": 4})
    changed = json.loads(workspace.succeed("dvc", "status", "--json"))
    assert set(changed) - {"preflight"} == {"evaluate"}
    workspace.commit("few and short answers, from here on")


def test_exp_run_plans_and_trains_with_the_values_that_it_records(workspace: Workspace) -> None:
    pins = ("batch_size=8", "max_steps=6", "eval_steps=6", "learning_rate=1e-4")  # from here on
    output = workspace.succeed("dvc", "exp", "run", *(word for pin in pins for word in ("-S", f"train.{pin}")))
    assert stages_run(output) == ["preflight", "recommend_config", "train", "evaluate", "plot"]
    summary = workspace.json("training_summary.json")
    assert (summary["batch_size"], summary["gradient_accumulation"], summary["steps"]) == (8, 2, 6)
    assert summary["learning_rate"] == 1e-4
    evaluation = workspace.json("evaluation.json")
    assert (evaluation["rows"], evaluation["questions"], evaluation["answered"]) == (10, 10, 10)
    workspace.commit("six steps")


def test_a_direct_override_trains_with_it_and_repro_puts_the_recorded_result_back(workspace: Workspace) -> None:
    workspace.succeed("python", "-m", "stages.train", "train.learning_rate=2e-4")
    assert workspace.json("training_summary.json")["learning_rate"] == 2e-4
    assert "This is the last evaluated run. A newer run is unfinished, at step 6" in workspace.cli("result")
    stale = workspace.run("safetrain", "result", "--gate")
    assert stale.returncode == 2
    assert "The last training run has not been evaluated" in stale.stderr
    output = workspace.succeed("dvc", "repro")
    assert "Stage 'train' is cached - skipping run, checking out outputs" in output
    assert workspace.json("training_summary.json")["learning_rate"] == 1e-4


def test_queued_experiments_run_and_everything_can_be_compared(workspace: Workspace) -> None:
    names = ["-n", "sweep"]
    workspace.succeed("dvc", "exp", "run", "--queue", *names, "-S", "train.learning_rate=1e-3")
    workspace.succeed("dvc", "exp", "run", "--run-all")
    assert "train.learning_rate" in workspace.succeed("dvc", "params", "diff", "HEAD", "sweep")
    assert "tuned.loss" in workspace.succeed("dvc", "metrics", "diff", "HEAD~1", "HEAD")
    assert "index.html" in workspace.succeed("dvc", "plots", "diff", "HEAD", "sweep")
    assert "valid_loss" in (workspace.folder / "dvc_plots/index.html").read_text()
    assert workspace.git("status", "--short") == ""


def test_run_ends_with_the_stage_that_failed(workspace: Workspace) -> None:
    failed = workspace.run("safetrain", "run", "experiment=smoke", "data.path=nowhere.jsonl")
    assert failed.returncode == 3
    assert "data/nowhere" in failed.stderr or "nowhere.jsonl" in failed.stderr


def test_a_loss_that_is_not_a_number_is_told_and_not_written(workspace: Workspace) -> None:
    before = workspace.json("evaluation.json")
    poison = (
        "import mlx.core as mx; path = 'checkpoints_qlora/adapters/adapters.safetensors'; mx.save_safetensors(path, "
        "{name: value + float('nan') for name, value in mx.load(path).items()})"
    )
    workspace.succeed("python", "-c", poison)
    failed = workspace.stage("evaluate", "experiment=smoke")
    assert failed.returncode == 7
    assert "error: The loss of the tuned model on the test rows is not a number." in failed.stderr
    assert workspace.json("evaluation.json") == before


def test_people_s_own_files_are_ignored_by_git_until_they_are_added_to_dvc(workspace: Workspace) -> None:
    mine = workspace.folder / "data/mine.jsonl"
    mine.write_text('{"text": "one"}\n')
    assert workspace.git("status", "--short", "data") == ""
    workspace.succeed("dvc", "add", "data/mine.jsonl")
    assert "data/mine.jsonl.dvc" in workspace.git("status", "--short", "-uall", "data")
