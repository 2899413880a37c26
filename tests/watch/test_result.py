"""The closing words are about the adapter that is there, and can be typed as they stand."""

import json
from pathlib import Path

import pytest

from safetrain.core.again import ran_by
from safetrain.core.errors import ConfigError
from safetrain.core.records.adapter_files import fingerprint
from safetrain.core.records.forgetting import Forgetting, PartForgotten
from safetrain.core.records.metrics import StepRecord
from safetrain.core.records.record_files import write_record
from safetrain.core.records.reports import (
    DataReport,
    Evaluation,
    Improvement,
    LengthHistogram,
    LengthQuantiles,
    Sample,
    Score,
    SplitReport,
)
from safetrain.core.records.scoring import Thresholds
from safetrain.watch.long_runs import MetricsRead
from safetrain.watch.plots import draw_learning_rate, draw_loss, draw_memory, draw_row_lengths
from safetrain.watch.progress import EvaluationProgress
from safetrain.watch.result import describe_result, gate, unmeasured


def written(folder: Path, question: str) -> tuple[Path, Path, Path]:
    """An evaluation, a summary and an adapter that belong together."""
    adapter = folder / "adapters"
    adapter.mkdir()
    (adapter / "adapters.safetensors").write_bytes(b"weights")
    score = Score(1.0, 2.7, 0.5, 0.1, 0.9, *[0.5] * 6)
    sample = Sample(question, "yes", "no " * 100, "yes", "test.jsonl:1", 2.0, 1.0)
    samples, gain = (sample,), Improvement(0.75, 0.25, 2)
    print_of = fingerprint(adapter)
    part = PartForgotten(0.1, 0.02, 3.0, 24)
    forgotten = Forgetting(0.1, 0.02, 3.0, 3.1, 60, 0, part, part, part, "")
    evaluation = Evaluation(score, score, gain, 2, 0, 2, 2, print_of, samples, samples, samples, (), forgotten)
    write_record(folder / "evaluation.json", evaluation)
    (folder / "summary.json").write_text(json.dumps({"steps": 3, "train_rows": 4, "elapsed_seconds": 5}))
    return folder / "evaluation.json", folder / "summary.json", adapter


def test_it_shortens_what_is_long_and_quotes_what_can_be_typed(tmp_path: Path) -> None:
    text = describe_result(*written(tmp_path, "Why?"))
    assert "Of 2 test questions, base answers 50.0 % exactly, tuned 50.0 %." in text
    assert "The tuned model is better than base by 0.75 ± 0.25 nats per label, n = 2." in text
    assert "General text costs 0.10 ± 0.02 nats per token more than the base's (English +0.10 ± 0.02, " in text
    assert 'safetrain ask "Why?" --base' in text
    assert max(map(len, text.splitlines())) < 160


@pytest.mark.parametrize("question", ['say "x"', "$HOME?", "`id`", "long " * 40])
def test_a_question_that_a_shell_would_change_is_not_offered(tmp_path: Path, question: str) -> None:
    assert 'safetrain ask "..." --base' in describe_result(*written(tmp_path, question))


def test_another_adapter_than_the_measured_one_is_told(tmp_path: Path) -> None:
    evaluation, summary, adapter = written(tmp_path, "Why?")
    (adapter / "adapters.safetensors").write_bytes(b"other weights")
    with pytest.raises(ConfigError, match="has not been evaluated"):
        describe_result(evaluation, summary, adapter)
    with pytest.raises(ConfigError, match="no finished run yet"):
        describe_result(tmp_path / "none.json", summary, adapter)


@pytest.mark.parametrize(
    ("finished", "same", "said"),
    [
        (True, True, ""),
        (None, True, ""),  # no training since it was checked out
        (True, False, "this adapter has not been evaluated: 'python -m stages.evaluate' measures it"),
        (False, False, "this adapter has not been evaluated: its training is not finished"),
        (False, True, "a training is not finished: this is the adapter of the one before"),
    ],
)
def test_whoever_asks_is_told_whether_the_adapter_was_measured(
    tmp_path: Path, finished: bool | None, same: bool, said: str
) -> None:
    evaluation, _, adapter = written(tmp_path, "Why?")
    state = tmp_path / "training_state.json"
    if finished is not None:
        state.write_text(json.dumps({"finished": finished}))
    if not same:
        (adapter / "adapters.safetensors").write_bytes(b"other weights")
    assert unmeasured(evaluation, adapter, state) == said


def test_an_evaluation_of_an_older_version_is_told(tmp_path: Path) -> None:
    evaluation, summary, adapter = written(tmp_path, "Why?")
    now = json.loads(evaluation.read_text())
    for missing in ("improvement", "forgetting"):
        evaluation.write_text(json.dumps({key: value for key, value in now.items() if key != missing}))
        with pytest.raises(ConfigError, match="has not been evaluated"):
            describe_result(evaluation, summary, adapter)


@pytest.mark.parametrize(("least_gain", "code"), [(0.4, 0), (1.0, 1), (0.7, 2)])
def test_the_gate_is_about_the_adapter_that_is_there(tmp_path: Path, least_gain: float, code: int) -> None:
    evaluation, _, adapter = written(tmp_path, "Why?")
    asked = Thresholds(least_gain, None, 0.2)
    assert gate(evaluation, adapter, asked).exit_code == code
    (adapter / "adapters.safetensors").write_bytes(b"other weights")
    with pytest.raises(ConfigError, match="has not been evaluated"):
        gate(evaluation, adapter, asked)


def test_progress_is_told_every_ten_seconds_with_the_time_left() -> None:
    said, now = list[str](), [0.0]
    tell = EvaluationProgress(said.append, lambda: now[0])
    for second in range(31):
        now[0] = float(second)
        tell("base", "questions answered", 60, second / 2)
    tell("tuned", "questions answered", 60, 0.5)
    assert said == [
        "base   5 of 60 questions answered, about 2 min left",
        "base   10 of 60 questions answered, about 2 min left",
        "base   15 of 60 questions answered, about 90 s left",
    ]


def test_pictures_are_drawn_of_short_runs_too(tmp_path: Path) -> None:
    first = StepRecord(0, 0.0, None, 2.0, 0.0, None, 0, None, 10, 20, 0.0)
    last = StepRecord(1, 1.0, 1.5, 1.0, 1e-3, 0.5, 9, 9.0, 30, 40, 1.0)
    for records in ([first], [first, last]):
        draw_loss(MetricsRead(tuple(records), ()), tmp_path / "loss.png")
        draw_learning_rate(records, tmp_path / "rate.png")
        draw_memory(records, 50, 60, tmp_path / "memory.png")
        assert all((tmp_path / f"{n}.png").read_bytes().startswith(b"\x89PNG") for n in ("loss", "rate", "memory"))


def test_a_picture_of_the_rows_is_drawn_whatever_their_lengths(tmp_path: Path) -> None:
    for edges in ((0, 1), (8, 10, 11), (1024, 1218, 1448)):
        counts = (1,) * (len(edges) - 1)
        lengths = LengthQuantiles(*[edges[-1]] * 6)
        split = SplitReport(len(counts), 9, 9, lengths, LengthHistogram(edges, counts, counts, counts))
        data = DataReport("d", "chat", "as given", (), (), "", (), "", split, split, split)
        for max_seq_length in (1, edges[-1], 2**17):
            draw_row_lengths(data, max_seq_length, tmp_path / "rows.png")
            assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", ["safetrain run experiment=minimal", "safetrain run"])
def test_whoever_ran_it_without_dvc_is_sent_to_no_result_of_dvc(tmp_path: Path, command: str) -> None:
    text = describe_result(*written(tmp_path, "Why?"), command)
    assert f"{command} train.learning_rate=2e-3 " in text
    assert text.endswith(f"then: {command}")
    assert not [word for word in ("dvc metrics", "dvc checkout", "dvc exp") if word in text]


def test_whoever_has_data_of_their_own_is_not_told_how_to_bring_it(tmp_path: Path) -> None:
    files = written(tmp_path, "Why?")
    assert "your own data" in describe_result(*files, data="data/example")
    text = describe_result(*files, data="data/mine.jsonl")
    assert "your own data" not in text
    assert "checkpoints_qlora/report.html" in text


def test_the_command_that_ran_is_known_from_what_it_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAFETRAIN_RUN", raising=False)
    assert ran_by(tmp_path / "dvc.lock") == "safetrain run"
    (tmp_path / "dvc.lock").touch()
    assert ran_by(tmp_path / "dvc.lock") == "dvc repro"
    monkeypatch.setenv("SAFETRAIN_RUN", "safetrain run experiment=minimal")
    assert ran_by(tmp_path / "dvc.lock") == "safetrain run experiment=minimal"
