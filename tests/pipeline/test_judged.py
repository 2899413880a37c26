"""The whole pipeline on classes with wrong labels: what is said is true, and a checker is a dependency."""

import json
import random

import pytest

from tests.conftest import EMBEDDED
from tests.pipeline.workspace import Workspace

NOISE = 0.25  # share of labels that are wrong, and that no model can know
RUN = (
    f"model.path={EMBEDDED}", "data.path=data/noisy.jsonl", "data.held_out_fraction=0.32", "preflight.level=quick",
    "train.max_steps=60", "train.learning_rate=2e-3", "train.eval_steps=20", "evaluate.max_examples=200",
)  # fmt: skip


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    made, source = Workspace(tmp_path_factory.mktemp("judged")), random.Random(1)
    rows = [json.loads(line) for line in (made.folder / "data/kinds.jsonl").read_text().splitlines()]
    kinds = sorted({row["label"] for row in rows})
    for row in source.sample(rows, round(NOISE * len(rows))):
        row["label"] = source.choice([kind for kind in kinds if kind != row["label"]])
    (made.folder / "data/noisy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def test_classes_with_wrong_labels_are_judged_as_what_they_are(workspace: Workspace) -> None:
    said = workspace.succeed("safetrain", "run", *RUN)
    found = workspace.json("evaluation.json")
    assert "Answers are judged as choice: completions are one of 3 texts: capital, country, element." in said
    tuned, choices, gain = found["tuned"], found["choices"], found["score_gain"]
    assert tuned["score_low"] < 1 - NOISE, "no model is right on wrong labels"
    assert tuned["score"] - found["base"]["score"] == pytest.approx(gain["mean"])
    assert gain["low"] > 0
    assert sum(map(sum, choices["confusion"])) == found["answered"] > 90
    calibration = choices["calibration"]
    assert calibration["fitted_on"] > 90
    assert calibration["error_low"] < 0.06, "after the temperature was fitted"
    assert f"Right choices on {found['answered']} test questions: base" in workspace.cli("result")
    page = (workspace.folder / "checkpoints_qlora/report.html").read_text()
    assert "What the tuned model chose, for each right option" in page
    shares = [float(line.split()[1]) for line in workspace.cli("ask", "Lisbon").splitlines()]
    assert sum(shares) == pytest.approx(100, abs=0.2)
    assert shares == sorted(shares, reverse=True)
    columns = workspace.succeed("dvc", "exp", "show", "--csv").splitlines()[0].split(",")
    assert columns[5:7] == ["tuned.score", "tuned.loss"]


def test_the_gate_compares_the_lower_end_of_the_score(workspace: Workspace) -> None:
    low, high = (workspace.json("evaluation.json")["tuned"][f"score_{end}"] for end in ("low", "high"))
    for least, code in ((low - 0.01, 0), ((low + high) / 2, 2), (min(0.99, high + 0.01), 1)):
        workspace.cli("set", f"gate.least_score={least:.3f}", "gate.most_forgotten=null")
        assert workspace.run("safetrain", "result", "--gate").returncode == code


def test_a_changed_checker_scores_again_and_trains_nothing(workspace: Workspace) -> None:
    checker = workspace.folder / "conf/score/half.py"
    line = '{"score": 0.5, "note": "half"}'
    checker.write_text(f"import sys\nfor line in sys.stdin:\n    print({line!r}, flush=True)\n")
    command = "safetrain", "run", *RUN, "evaluate.checker=half.py"
    assert "Running stage 'train'" not in workspace.succeed(*command)
    found = workspace.json("evaluation.json")
    assert (found["tuned"]["score"], found["tuned"]["mistakes"]) == (0.5, [f"half ({found['answered']})"])
    checker.write_text("raise SystemExit('broken')\n")
    failed = workspace.run(*command)
    assert failed.returncode == 3, "the changed program is seen"
    assert "Running stage 'train'" not in failed.stdout
    assert "The checker ended (exit code 1)" in failed.stderr + failed.stdout
    missing = workspace.run("safetrain", "run", *RUN, "evaluate.checker=none.py")
    assert missing.returncode == 2
    assert "evaluate.checker is not a file in conf/score" in missing.stderr + missing.stdout
