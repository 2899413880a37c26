"""`safetrain validate FOLDER --fix OUT`: every file of a split under its name, one log, all or nothing."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safetrain.core.errors import ConfigError, DataError
from safetrain.data import repair as repair_module
from safetrain.data.containers import Placed
from safetrain.data.folders import files_of
from safetrain.data.repair import RepairOptions, repair
from safetrain.data.validate import validate
from tests.conftest import EMBEDDED, chat
from tests.data.planted import arrow_stream, lines, parquet

MIXED = "FranÃ§oise Yip"


def log_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.fixture(name="source")
def source_fixture(tmp_path: Path) -> Path:
    """Shards of train of which one is blank, a packed array of valid, a table of test, and what belongs to none."""
    data = tmp_path / "set" / "data"
    data.mkdir(parents=True)
    rows = [chat("Who?", MIXED), chat("When?", "In 1911."), chat("Who?", MIXED)]
    (data / "train-0-of-3.jsonl").write_text(lines(rows), encoding="utf-8")
    (data / "train-1-of-3.jsonl").write_text("\n \n")
    (data / "train-2-of-3.jsonl").write_text(lines([chat("When?", "In 1911."), chat("Where?", "Here.")]))
    (data / "Validation.json.gz").write_bytes(gzip.compress(json.dumps([chat("When?", "In 1911.")] * 2).encode()))
    (data / "test.csv").write_text("question,answer\nWho was it?,\x1b[1mNobody\n")
    (data / "more.jsonl").write_text("{}\n")
    return tmp_path / "set"


def test_every_split_is_repaired_under_its_name_with_one_log(source: Path, tmp_path: Path) -> None:
    before = {name: (source / name).read_bytes() for name in below(source)}
    into = tmp_path / "new" / "set"
    done = repair(source, into)
    assert {name: (source / name).read_bytes() for name in below(source)} == before
    names = ["Validation.jsonl", "test.jsonl", *(f"train-{number}-of-3.jsonl" for number in range(3))]
    assert below(into) == [f"data/{name}" for name in names]
    assert [len((into / name).read_text().splitlines()) for name in below(into)] == [1, 1, 2, 0, 1]
    assert (done.read, done.written, done.changes) == (
        8, 5, {"file": 2, "form": 1, "mojibake": 2, "control-characters": 1, "duplicate": 3},
    )  # fmt: skip
    repeats = [(line["where"], line["reason"]) for line in log_of(done.log) if line["what"] == "duplicate"]
    data = source / "data"
    assert repeats == [  # of the same split, also across its shards: that valid has a row of train is no repeat
        (f"{data}/train-0-of-3.jsonl:3", f"repeats {data}/train-0-of-3.jsonl:1"),
        (f"{data}/train-2-of-3.jsonl:1", f"repeats {data}/train-0-of-3.jsonl:2"),
        (f"{data}/Validation.json.gz, row 2 (line 1)", f"repeats {data}/Validation.json.gz, row 1 (line 1)"),
    ]
    assert "data/more.jsonl" in done.summary()
    assert sorted(path.name for path in into.parent.iterdir()) == ["set", "set.log.jsonl"]


def test_the_repaired_folder_is_the_same_data_set(source: Path, tmp_path: Path) -> None:
    repair(source, tmp_path / "new")
    old, new = files_of(source), files_of(tmp_path / "new")
    assert new.names == old.names
    found = {finding.id for finding in validate([tmp_path / "new"], EMBEDDED).findings}
    assert not {"MOJIBAKE", "INVISIBLE-CHARACTERS", "REPEATED-ROWS"} & found
    again = repair(tmp_path / "new", tmp_path / "again")
    assert again.changes == {}


@pytest.mark.parametrize("folder", ["set", "set/train"])
def test_what_datasets_saved_is_found_again(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "state.json").write_text("{}")
    arrow_stream(tmp_path / folder / "data-00000-of-00001.arrow", [{"prompt": "q", "completion": "a"}])
    repair(tmp_path / "set", tmp_path / "new")
    (path,) = files_of(tmp_path / "new").paths
    assert path.read_text() == '{"prompt": "q", "completion": "a"}\n'


def test_rows_that_cannot_be_read_are_named_of_all_files_and_nothing_is_written(source: Path, tmp_path: Path) -> None:
    parquet(source / "data" / "test.parquet", [{"prompt": "q", "completion": None}])
    (source / "data" / "test.csv").unlink()
    with (source / "data" / "train-2-of-3.jsonl").open("a") as file:
        file.write("{\n")
    with pytest.raises(DataError, match=r"2 bad rows(.|\n)*train-2-of-3\.jsonl:3:2(.|\n)*test\.parquet, row 1: "):
        repair(source, tmp_path / "new")
    with pytest.raises(DataError, match=r"No row is left(.|\n)*test\.parquet"):
        repair(source, tmp_path / "new", RepairOptions(drop_bad=True))
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_nothing_is_written_over_but_an_empty_folder(source: Path, tmp_path: Path) -> None:
    for into, says in ((source, "in the folder itself"), (source / "new", "in the folder itself"), (Path(), "no name")):
        with pytest.raises(ConfigError, match=says):
            repair(source, into)
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for into in (full, tmp_path / "file"):
        with pytest.raises(ConfigError, match="exists already"):
            repair(source, into)
    (full / "mine").unlink()
    assert repair(source, full).written == 5


def test_a_folder_that_fills_meanwhile_is_left_alone(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    into, real = tmp_path / "new", repair_module.rows_of

    def slow(path: Path, encoding: str | None, ignored: list[str]) -> Iterator[Placed]:
        into.mkdir(exist_ok=True)
        (into / "mine").write_text("mine")
        return real(path, encoding, ignored)

    monkeypatch.setattr(repair_module, "rows_of", slow)
    with pytest.raises(ConfigError, match="meanwhile"):
        repair(source, into)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "set"]
    assert below(into) == ["mine"]


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "set" / "train"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_text(lines([chat("q", "a")]))
    (folder / "a.csv").write_text("prompt,completion\nq,a\n")
    with pytest.raises(DataError, match=r"Two files would be written as train/a\.jsonl"):
        repair(tmp_path / "set", tmp_path / "new")
