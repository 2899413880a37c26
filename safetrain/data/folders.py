"""Finds the files of a data set and the split of each, and the files in its folder that are not read."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from safetrain.core.errors import DataError
from safetrain.core.formatting import override, similar_path
from safetrain.data.rows import shown

SPLITS = ("train", "valid", "test")
SPLIT_NAMES = {"train": ("train",), "valid": ("valid", "validation", "val", "dev"), "test": ("test",)}
SUFFIXES = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
PLAIN = (".txt", ".text", ".md")
NOT_DATA = re.compile(  # datasets' metadata, and texts about the data
    r"(?:state|dataset_(?:info|infos|dict))\.json|cache-.*\.arrow|(?:README|LICEN[CS]E|NOTICE|USE_POLICY)(?:\.\w+)?"
)
NUMBERS = re.compile(r"[-_.](?:\d+|of|data|shuffled|(?:part|shard|chunk)\d*|[0-9a-f]{6,})(?=[-_.]|$)")  # in shard names
PURPOSE = re.compile(r"[-_.](sft|prefs?|gen|dpo|orpo|kto|rm|ppo|rl)(?=[./]|$)")  # after a split: train_sft
FROM_HUB = re.compile(r"(?:hub:(?:datasets/)?|datasets/)([\w.-]+/[\w.-]+)")
SHARD_OF = re.compile(r"(\d+)[-_]of[-_](\d+)")


@dataclass(frozen=True)
class DataFiles:
    """The files of a data set in the order of their splits. Several files of one split are read as one."""

    names: tuple[str, ...]  # the split of each file
    paths: tuple[Path, ...]
    unread: tuple[str, ...] = ()  # files that look like data but are in no split


class _File(NamedTuple):
    """A file in a folder. All files of a split have one ``kind``: one file, shards of one name, or one folder."""

    path: Path
    split: str  # empty if the path names none
    folder: Path  # of the data set that the file would belong to
    kind: tuple[str, bool]  # the name without numbers, and whether it had any; or the folder of a split


def data_files_of(source: Path, *, documents: bool = False) -> DataFiles:
    """Find the files of a data set, which is a file or a folder; raises DataError.

    With ``documents``, a folder of plain text without files of rows is a data set too. Its files belong to train unless
    all of them are named after splits, so that a book whose name ends in test is not the test split.
    """
    if source.is_file():
        _require_whole("train", [_file(source, source.parent)])
        return DataFiles(("train",), (source,))
    if (source / "mix.yaml").is_file():  # earlier versions read it
        do = "write the rows of all parts into one train.jsonl, and remove mix.yaml"
        raise DataError("Data sets are not mixed by a mix.yaml.", where=str(source / "mix.yaml"), do=do)
    rows = _files_in(source, SUFFIXES)
    texts = _files_in(source, PLAIN) if documents and not any(file.split == "train" for file in rows) else []
    if texts:
        splits, unread = {file.split for file in texts}, rows
        is_named = "train" in splits and "" not in splits
        here = texts if is_named else [file._replace(split="train") for file in texts]
    elif len(rows) == 1 and not rows[0].split:  # one file, whatever its name
        here, unread = [rows[0]._replace(split="train")], []
        _require_whole("train", here)
    else:
        folder = _folder_of_rows(source, rows)
        here = [file for file in rows if file.folder == folder]
        unread = [file for file in here if not file.split]
        for split in SPLITS:
            _require_whole(split, [file for file in here if file.split == split])
    read = [file for split in SPLITS for file in here if file.split == split]
    left = sorted(file.path.relative_to(source).as_posix() for file in unread)
    return DataFiles(tuple(file.split for file in read), tuple(file.path for file in read), tuple(left))


def named_files(paths: Sequence[Path], *, documents: bool) -> DataFiles:
    """Find all files in ``paths`` (files or folders), each with the split that its folder or name gives.

    With ``documents``, plain text in a folder is read even next to files of rows. Raises DataError.
    """
    names, found, unread = list[str](), list[Path](), list[str]()
    for path in paths:
        _require_there(path)
        part = DataFiles((_split_of(Path(path.name))[0] or "train",), (path,))
        if path.is_dir():
            part = data_files_of(path, documents=documents or not _files_in(path, SUFFIXES))
        names += part.names
        found += part.paths
        unread += part.unread
    return DataFiles(tuple(names), tuple(found), tuple(unread))


def suffix_of(path: Path) -> str:
    """The last suffix in lower case, ignoring .gz and .zst."""
    return _unpacked_name(path).suffix


def _unpacked_name(path: Path) -> Path:
    name = Path(path.name.casefold())
    return Path(name.stem) if name.suffix in (".gz", ".zst") else name


def _files_in(source: Path, suffixes: Sequence[str]) -> list[_File]:
    """Find all files with these suffixes in a folder and its subfolders; raises DataError."""
    _require_there(source)
    paths = [path for path in _files_below(source) if suffix_of(path) in suffixes and not NOT_DATA.fullmatch(path.name)]
    return [_file(path, source) for path in paths]


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield files that are not hidden, shard 2 before 10; raises DataError for pipes, and for links unless to files."""
    try:
        there = [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError as error:
        what = f"A folder of the data cannot be read: {error.strerror}."
        do = "give yourself permission to read it, or set another data.path"
        raise DataError(what, where=folder, do=do) from None
    inside = sorted(there, key=lambda path: re.sub(r"\d+", lambda number: number[0].zfill(20), path.name))
    for path in inside:
        if not path.is_file() and (path.is_symlink() or not path.is_dir()):
            what, do = "A pipe or a device lies in the data folder.", "remove it"
            if path.is_symlink():
                what = "A link in the data folder is broken, or points to a folder, in which DVC sees no changes."
                do += f", or set {override('data.path', path.resolve())}"
            raise DataError(what, where=path, do=do)
    yield from (path for path in inside if path.is_file())
    for path in inside:
        if path.is_dir():
            yield from _files_below(path)


def _split_of(path: Path) -> tuple[str, Path]:
    """The split of a file, and the part of ``path`` that names it.

    The name of a file or folder ends with that of the split, before shard numbers: ``val.csv.gz``,
    ``gsm8k_train.jsonl``, ``test-00000-of-00002.parquet``, ``train/0.parquet``. The part nearest to the file decides.
    """
    for part in (path, *path.parents):
        name = _unpacked_name(part).stem if part == path else part.name.casefold()
        word = re.split(r"[-_.]", PURPOSE.sub("", NUMBERS.sub("", name)))[-1]
        for split, names in SPLIT_NAMES.items():
            if word in names:
                return split, part
    return "", path


def _require_there(source: Path) -> None:
    if not source.exists():
        expected = "a file, or a folder with train.jsonl, train.csv, train.parquet, …"
        fetch = f"safetrain run --data {source}" if FROM_HUB.fullmatch(str(source)) else ""
        do = fetch or similar_path(source) or "correct the path (for the pipeline: data.path in params.yaml)"
        raise DataError("The data does not exist.", where=source, expected=expected, do=do)


def _file(path: Path, source: Path) -> _File:
    relative = path.relative_to(source)
    split, part = _split_of(relative)
    if part != relative:
        return _File(path, split, source / part.parent, (f"{part.name}/", False))
    if not split and (path.parent / "state.json").is_file():  # one split, written by datasets.save_to_disk
        split = "train"
    series = NUMBERS.sub("", path.name.casefold())
    return _File(path, split, path.parent, (series, series != path.name.casefold()))


def _folder_of_rows(source: Path, files: Sequence[_File]) -> Path:
    """The folder that holds the data set: ``source``, or a folder in it, such as ``data`` in a clone from the Hub."""
    folders = sorted({file.folder for file in files if file.split == "train"})
    if source in folders or len(folders) == 1:
        return source if source in folders else folders[0]
    if folders:
        got = shown(", ".join(folder.relative_to(source).as_posix() for folder in folders))
        do = f"choose one: {override('data.path', folders[0])}"
        raise DataError("The data folder has several data sets.", where=source, got=got, do=do)
    names = sorted(path.name for path in source.iterdir() if not path.name.startswith("."))
    raise DataError(
        "The data folder has no file named train.",
        where=source,
        expected="train.jsonl, .json, .csv, .tsv, .parquet or .arrow, plain, compressed or in shards; "
        "or a folder named train",
        got=shown(", ".join(names)) if names else "an empty folder",
        do="name the training rows train.jsonl, put several files of them in a folder train, or name the file itself",
    )


def _require_whole(split: str, files: Sequence[_File]) -> None:
    """Raise DataError if a split exists twice, or if shards are missing, by the numbers in its file names."""
    kinds = {file.kind: file.path for file in reversed(files)}
    if len(kinds) > 1:
        names = [shown(path.relative_to(files[0].folder).as_posix()) for path in sorted(kinds.values())]
        what, do = f"The data folder has {split} more than once.", f"keep one, or put all of them in a folder {split}"
        purposes = sorted({match[1] for kind, _ in kinds if (match := PURPOSE.search(kind))})
        if purposes:
            do = f"choose one of {', '.join(purposes)}: move its files to their own folder, and set data.path to it"
        raise DataError(what, where=files[0].folder, got=" and ".join(names), do=do)
    shards = [match for file in files if (match := SHARD_OF.search(file.path.name.casefold()))]
    numbers, totals = sorted(int(match[1]) for match in shards), sorted({int(match[2]) for match in shards})
    count = len(shards)
    if shards and (totals != [count] or numbers not in (list(range(count)), list(range(1, count + 1)))):
        raise DataError(
            f"Shards of {split} are missing, or belong to two data sets.",
            where=files[0].path.parent,
            expected=f"{' or '.join(map(str, totals))} files, each number once",
            got=f"numbers {shown(', '.join(map(str, numbers)))}",
            do=f"fetch the missing shards, or remove old ones; then set {override('data.path', files[0].folder)}",
        )
