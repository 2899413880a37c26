"""The closing words are about the adapter that is there, and can be typed as they stand."""

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.errors import ConfigError
from safetrain.core.formatting import ran_by
from safetrain.core.records.evaluation import Improvement
from safetrain.core.run_folder import read_run
from safetrain.core.storage import paths
from safetrain.watch.result import describe_result, describe_scores, unmeasured
from tests.watch.made_run import UPDATES, change, evaluation, make_run, sample


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a finished run, in a project of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SAFETRAIN_RUN", raising=False)
    return make_run(tmp_path, found=evaluation((sample("Why?"), sample("How?"))), train_rows=1656)


def test_it_says_what_was_learned_and_what_to_type_next(output: Path) -> None:
    done = CliRunner().invoke(app, ["result"], catch_exceptions=False)
    for line in (
        f"Trained {UPDATES} steps on 1,656 rows in 30 s.",
        "Exact match on 9 test questions: base 10.0 %, tuned 10.0 %.",
        "Test loss 3.000 → 1.500 nats per token: better by 1.50 ± 0.25 (95 %, 9 rows).",
        'Next:  safetrain ask "Why?" --base',
    ):
        assert line in done.stdout.splitlines()
    assert "Forgetting: general text loss +0.10 ± 0.02 nats per token (English +0.10 ± 0.02, " in done.stdout


@pytest.mark.parametrize(
    ("gain", "half", "words"),
    [
        (-0.3, 0.1, "worse by 0.30 ± 0.10 (95 %, 9 rows)"),
        (0.01, 0.05, "no clear difference, better by 0.01 ± 0.05 (95 %, 9 rows)"),
        (0.0021, 0.0004, "better by 0.0021 ± 0.0004 (95 %, 9 rows)"),
        (0.5, None, "better by 0.50 on one row: no interval"),
    ],
)
def test_a_difference_has_its_interval(gain: float, half: float | None, words: str) -> None:
    scores = dataclasses.replace(evaluation(()), improvement=Improvement(gain, half, 9))
    assert describe_scores(scores)[-1].endswith(f"nats per token: {words}.")


@pytest.mark.parametrize("question", ['say "x"', "$HOME?", "`id`", "long " * 40])
def test_a_question_that_a_shell_would_change_is_not_offered(tmp_path: Path, question: str) -> None:
    empty = dataclasses.replace(sample(question), base="", tuned=" \n")
    output = make_run(tmp_path, found=evaluation((empty,)))
    text = describe_result(read_run(output))
    assert 'safetrain ask "..." --base' in text
    assert text.count("(empty)") == 2
    assert max(map(len, text.splitlines())) < 160


@pytest.mark.parametrize(("least_gain", "code"), [(0.4, 0), (2.0, 1), (1.4, 2)])
def test_the_gate_is_about_the_adapter_that_is_there(output: Path, least_gain: float, code: int) -> None:
    Path("params.yaml").write_text(
        f"gate: {{least_gain: {least_gain}, least_exact_match: null, most_forgotten: 0.2}}\n"
    )
    assert CliRunner().invoke(app, ["result", "--gate"]).exit_code == code
    assert unmeasured(read_run()) == ""
    (paths.ADAPTERS / "adapters.safetensors").write_bytes(b"other weights")
    for command in (["result", "--gate"], ["result"]):
        failed = CliRunner().invoke(app, command).exception
        assert isinstance(failed, ConfigError)  # exit code 2
        assert "has not been evaluated" in str(failed)
    assert "'safetrain stage evaluate' measures it" in unmeasured(read_run())
    paths.SUMMARY.unlink()
    assert "No run has finished yet" in str(CliRunner().invoke(app, ["result"]).exception)


@pytest.mark.parametrize("command", ["safetrain run experiment=minimal", "safetrain run", "dvc repro"])
def test_next_steps_fit_the_way_it_was_run(output: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change(paths.DATA_REPORT, source="data/example")
    Path("dvc.lock").touch() if command.startswith("dvc") else monkeypatch.setenv("SAFETRAIN_RUN", command)
    text = describe_result(read_run(), ran_by())
    assert "safetrain run --data FILE " in text.splitlines()[-1]
    assert ("dvc exp run" in text) == command.startswith("dvc")
    assert (f"{command} train.learning_rate=2e-3 " in text) != command.startswith("dvc")
    change(paths.DATA_REPORT, source="data/mine.jsonl")
    assert "your data" not in describe_result(read_run())
