"""A split may have shards, a packed file or a folder: all of them are compared as that split, and none as train."""

import gzip
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from safetrain.core.errors import DataError
from safetrain.core.records.reports import DataReport
from safetrain.data.findings import Severities
from safetrain.data.folders import named_files
from tests.data.reading import by_id, gate

NEAR = "The river follows the old road to the harbour and from there it is not far to the northern station of"
OTHERS = ("Which metal is it?", "Who was it?", "How far is it?", "When did it end?", "Where is that?", "Why is it so?")


def table(path: Path, questions: Sequence[str]) -> Path:
    """A file of questions and answers, packed where its name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "question,answer\n" + "".join(f'"{question}",It is {len(question)}.\n' for question in questions)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def gated(source: Path, into: Path, severities: Severities = Severities()) -> DataReport:  # noqa: B008 frozen
    return gate(source, into, (0.2, 0.2), severities=severities)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.jsonl", "train"), ("val.csv.gz", "valid"), ("Validation.JSON", "valid"), ("dev.tsv", "valid"),
        ("test-00000-of-00002.parquet", "test"), ("test.1.jsonl.zst", "test"), ("valid.jsonl", "valid"),
        ("testing.jsonl", "train"), ("latest.jsonl", "train"), ("gsm8k_test.jsonl", "test"), ("devices.csv", "train"),
    ],
)  # fmt: skip
def test_the_split_that_a_name_says(tmp_path: Path, name: str, split: str) -> None:
    (tmp_path / name).write_text("{}")
    assert named_files([tmp_path / name]).names == (split,)


def test_rows_of_every_shard_of_train_are_dealt(tmp_path: Path) -> None:
    """The first shard is nothing but near-duplicates; the second is not, so that no copy needs to cross."""
    data = tmp_path / "data"
    table(data / "train-00000-of-00002.csv", [f"{NEAR} {word}?" for word in ("it", "all", "old")])
    table(data / "train-00001-of-00002.csv", OTHERS)
    report = gated(data, tmp_path)
    assert "near-duplicates of each other" not in report.split
    assert not {"SPLITS-OVERLAP"} & set(by_id(report.findings))
    assert (report.train.rows + report.valid.rows + report.test.rows, report.test.rows > 0) == (9, True)


def test_a_test_row_is_compared_with_every_shard_of_train(tmp_path: Path) -> None:
    data = tmp_path / "data"
    table(data / "train" / "00000.csv", OTHERS[:3])
    table(data / "train" / "00001.csv", OTHERS[3:])
    table(data / "valid.csv", [f"{NEAR} it?"])
    table(data / "test" / "0.csv", ["Nobody asks this?"])
    asked = table(data / "test" / "1.csv", [OTHERS[5]])
    place = f"{asked}, row 1 (line 2) matches {data}/train/00001.csv, row 3 (line 4)"
    with pytest.raises(DataError, match=rf"{re.escape(place)}: 1 row in test with .*\[QUESTION-IN-TEST\]"):
        gated(data, tmp_path)
    report = gated(data, tmp_path, Severities(downgrade=("QUESTION-IN-TEST",)))
    assert report.split == "using the given train, valid and test files"
    assert (report.train.rows, report.valid.rows, report.test.rows) == (6, 1, 2)
    assert by_id(report.findings)["QUESTION-IN-TEST"].where == (place,)
