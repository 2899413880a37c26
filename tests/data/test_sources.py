"""The files of a data set are found by their names in any form; what is left out is told."""

from pathlib import Path

import pytest

from safetrain.core.errors import DataError
from safetrain.data.folders import DataFiles, data_files_of


def folder(tmp_path: Path, *names: str) -> Path:
    """A folder with these files; a name with an arrow is a link."""
    for name in names:
        name, _, target = name.partition(" -> ")
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if target:
            path.symlink_to(target)
        else:
            path.write_text("{}\n")
    return tmp_path / "set"


def found(source: Path) -> dict[str, list[str]]:
    files = data_files_of(source)
    by_split: dict[str, list[str]] = {}
    for name, path in zip(files.names, files.paths, strict=True):
        by_split.setdefault(name, []).append(path.relative_to(source).as_posix())
    return by_split


@pytest.mark.parametrize(
    ("names", "files"),
    [
        ("Train.JSON val.csv.gz TEST.parquet", "Train.JSON | val.csv.gz | TEST.parquet"),
        ("train-1-of-2.parquet train-0-of-2.parquet validation-00000-of-00001.parquet",
         "train-0-of-2.parquet train-1-of-2.parquet | validation-00000-of-00001.parquet"),
        ("train.10.jsonl train.2.jsonl train_1.jsonl", "train.2.jsonl train.10.jsonl train_1.jsonl"),
        ("train-00001-of-00002.jsonl train-00002-of-00002.jsonl",
         "train-00001-of-00002.jsonl train-00002-of-00002.jsonl"),
        ("train/b.jsonl train/a.jsonl test/x.csv", "train/a.jsonl train/b.jsonl | | test/x.csv"),
        ("dataset_dict.json train/data-00000-of-00001.arrow train/state.json train/cache-0a.arrow",
         "train/data-00000-of-00001.arrow"),
        ("data-00000-of-00001.arrow state.json dataset_info.json", "data-00000-of-00001.arrow"),
        ("README.md .gitattributes data/train-0.parquet data/test-0.parquet",
         "data/train-0.parquet | | data/test-0.parquet"),
        ("mine/train.jsonl notes/a.txt", "mine/train.jsonl"),
        ("train.csv", "train.csv"),
    ],
)  # fmt: skip
def test_a_folder(tmp_path: Path, names: str, files: str) -> None:
    source = folder(tmp_path, *names.split())
    by_split = dict(zip(("train", "valid", "test"), map(str.split, files.split("|")), strict=False))
    assert found(source) == {split: paths for split, paths in by_split.items() if paths}
    assert data_files_of(source).unread == ()
    for name in ("more.csv", "test_results.json", "NOTICE.md", "dataset_infos.json"):
        (source / name).write_text("{}")
    if (source / "train.csv").exists():
        assert data_files_of(source).unread == ("more.csv", "test_results.json")


@pytest.mark.parametrize(
    "names",
    [
        ["valid.jsonl", "validation.jsonl"], ["train.csv", "train.jsonl"], ["train/x.jsonl", "train.jsonl"],
    ],
)  # fmt: skip
def test_a_split_that_is_there_twice_is_refused_with_both(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(DataError, match=f"more than once(.|\n)*{' and '.join(names)}"):
        data_files_of(folder(tmp_path, "train.jsonl", *names))


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["rows.csv", "notes.txt"], "rows.csv"),
        (["my rows.csv"], "name the file itself: 'data.path=\".*/my rows.csv\"'"),
        (["test.jsonl", "val.csv"], "test.jsonl, val.csv(.|\n)*name the training rows train.jsonl"),
        (["a/train.jsonl", "b/train.jsonl"], "several data sets(.|\n)*a, b"),
        (["train-00000-of-00003.parquet", "train-00002-of-00003.parquet"], "Shards of train are missing(.|\n)*3 files"),
        (["train-00000-of-00002-aaaaaa.parquet", "train-00000-of-00002-bbbbbb.parquet"], "each number once(.|\n)*0, 0"),
        (["train-0-of-1.jsonl", "train-1-of-2.jsonl"], "1 or 2 files"),
        (["train.jsonl", "more -> ../set"], r"points to a folder(.|\n)*data\.path="),
        (["train.jsonl", "more -> nowhere"], "is broken"),
        (["notes\x1b[2J.txt"], r"'notes\\x1b\[2J.txt'"),
    ],
)
def test_a_folder_without_train_says_what_is_there(tmp_path: Path, names: list[str], says: str) -> None:
    with pytest.raises(DataError, match=says):
        data_files_of(folder(tmp_path, *names))


def test_links_to_files_are_read_as_files(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("{}\n")
    source = folder(tmp_path, "rows/a.jsonl", "train.jsonl -> rows/a.jsonl", "data/test-0-of-1.jsonl -> ../../blob")
    assert found(source) == {"train": ["train.jsonl"]}
    (source / "train.jsonl").unlink()
    (source / "data" / "train.csv").symlink_to(source / "rows" / "a.jsonl")
    assert found(source) == {"train": ["data/train.csv"], "test": ["data/test-0-of-1.jsonl"]}


def test_a_file_and_nothing(tmp_path: Path) -> None:
    path = folder(tmp_path, "any.name") / "any.name"
    assert data_files_of(path) == DataFiles(("train",), (path,))
    with pytest.raises(DataError, match="does not exist"):
        data_files_of(tmp_path / "none")
