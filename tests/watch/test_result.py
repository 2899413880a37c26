"""The closing words are about the adapter that is there, and can be typed as they stand."""

import json
from pathlib import Path

import pytest

from safetrain.core.errors import ConfigError
from safetrain.core.records.adapter_files import fingerprint
from safetrain.core.records.metrics import StepRecord
from safetrain.core.records.reports import DataReport, LengthHistogram, LengthQuantiles, SplitReport
from safetrain.watch.plots import draw_learning_rate, draw_loss, draw_memory, draw_row_lengths
from safetrain.watch.result import describe_result


def written(folder: Path, question: str) -> tuple[Path, Path, Path]:
    """An evaluation, a summary and an adapter that belong together."""
    adapter = folder / "adapters"
    adapter.mkdir()
    (adapter / "adapters.safetensors").write_bytes(b"weights")
    score = {"exact_match": 0.5, "loss": 1.0}
    sample = {"question": question, "base": "no " * 100, "tuned": "yes"}
    evaluation = {"base": score, "tuned": score, "questions": 2, "samples": [sample], "adapter": fingerprint(adapter)}
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    (folder / "summary.json").write_text(json.dumps({"steps": 3, "train_rows": 4, "elapsed_seconds": 5}))
    return folder / "evaluation.json", folder / "summary.json", adapter


def test_it_shortens_what_is_long_and_quotes_what_can_be_typed(tmp_path: Path) -> None:
    text = describe_result(*written(tmp_path, "Why?"))
    assert "Of 2 test questions, base answers 50.0 % exactly, tuned 50.0 %." in text
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


def test_pictures_are_drawn_of_short_runs_too(tmp_path: Path) -> None:
    first = StepRecord(0, 0.0, None, 2.0, 0.0, None, 0, None, 10, 20, 0.0)
    last = StepRecord(1, 1.0, 1.5, 1.0, 1e-3, 0.5, 9, 9.0, 30, 40, 1.0)
    for records in ([first], [first, last]):
        draw_loss(records, tmp_path / "loss.png")
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
