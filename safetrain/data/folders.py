"""Which files a data set has: one, or those of a folder, by split; and which lie there and are not read."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from safetrain.core.errors import DataError
from safetrain.core.formatting import override, similar_path
from safetrain.data.files import PLAIN
from safetrain.data.strict_json import shown

SPLITS = ("train", "valid", "test")
SPLIT_NAMES = {"train": ("train",), "valid": ("valid", "validation", "val", "dev"), "test": ("test",)}
SUFFIXES = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")  # the first is taken before the next
PACKED = (".gz", ".zst")
OF_DATASETS = re.compile(r"(?:state|dataset_(?:info|infos|dict))\.json|cache-.*\.arrow")  # about the data
NUMBERS = re.compile(r"[-_.](?:\d+|of|data|shuffled|(?:part|shard|chunk)\d*|[0-9a-f]{6,})(?=[-_.]|$)")  # of a shard
SHARD_OF = re.compile(r"(\d+)[-_]of[-_](\d+)")


@dataclass(frozen=True)
class DataFiles:
    """The files of a data set in the order of their splits. Several of one split are read as one."""

    names: tuple[str, ...]  # the split of each
    paths: tuple[Path, ...]
    unread: tuple[str, ...] = ()  # what lies there as if it were data

    def without_rows(self, empty: Sequence[Path]) -> list[Path]:
        """The files of those splits of which all are ``empty``."""
        having = {name for name, path in zip(self.names, self.paths, strict=True) if path not in empty}
        return [path for name, path in zip(self.names, self.paths, strict=True) if name not in having]


class _RowFile(NamedTuple):
    """A file of rows in a folder. Of each split those of the lowest rank are read."""

    path: Path
    split: str  # empty where no name says one
    folder: Path  # that holds the data set, if it is one
    rank: tuple[int, bool, bool, str, int]


def data_files_of(source: Path, *, documents: bool) -> DataFiles:
    """The files of a data set; raises DataError.

    With ``documents``, a folder of plain text is a data set too, where it has no files of rows by their splits.
    Names of texts say splits where those of all of them do: else a book named a test would be one.
    """
    found = files_by_split(source, PLAIN) if documents and source.is_dir() else {}
    rows = _row_paths(source) if found else []
    if not found or any(_row_file(path, source).split == "train" for path in rows):
        return files_of(source)
    if "" in found or "train" not in found:
        found = {"train": tuple(path for path in _files_below(source) if suffix_of(path) in PLAIN)}
    pairs = [(split, path) for split, paths in found.items() for path in paths]
    return _data_files(pairs, [path.relative_to(source).as_posix() for path in rows])


def files_of(source: Path) -> DataFiles:
    """The files of rows of ``source``, a file or a folder; raises DataError.

    All splits are in one folder: ``source``, or one below it. A split is a file, numbered files or a folder of files.
    """
    if source.is_file():
        return DataFiles(("train",), (source,))
    _require_there(source)
    found = [_row_file(path, source) for path in _row_paths(source)]
    folder = _folder_of_rows(source, found)
    here = [file for file in found if file.folder == folder]
    pairs = list[tuple[str, Path]]()
    for split in SPLITS:
        best = min((file.rank for file in here if file.split == split), default=None)
        paths = [file.path for file in here if (file.split, file.rank) == (split, best)]
        _require_all_shards(paths, split)
        pairs += [(split, path) for path in paths]
    read = {path for _, path in pairs}
    unread = sorted(file.path.relative_to(source).as_posix() for file in here if file.path not in read)
    return _data_files(pairs, unread)


def named_files(paths: Sequence[Path], *, documents: bool = False) -> DataFiles:
    """All files of ``paths``, files or folders, each with its split: as it lies in its folder, or by its name.

    With ``documents`` a folder of plain text is read as one, also where files of rows stand in it. Raises DataError.
    """
    pairs, unread = list[tuple[str, Path]](), list[str]()
    for path in paths:
        if path.is_dir():
            part = data_files_of(path, documents=documents or not _row_paths(path))
            pairs += zip(part.names, part.paths, strict=True)
            unread += part.unread
        elif path.exists():
            pairs.append((_split_in(Path(path.name))[0] or "train", path))
        else:
            raise DataError("The data file does not exist.", where=str(path), do="name a file or a folder")
    return _data_files(pairs, unread)


def _data_files(pairs: Sequence[tuple[str, Path]], unread: Sequence[str]) -> DataFiles:
    return DataFiles(tuple(split for split, _ in pairs), tuple(path for _, path in pairs), tuple(unread))


def files_by_split(source: Path, suffixes: Sequence[str]) -> dict[str, tuple[Path, ...]]:
    """The files of ``source`` and of all folders below it by split; the split is empty where no name says one.

    Raises DataError where a part of the folder cannot be read.
    """
    if source.is_file():
        return {"": (source,)} if suffix_of(source) in suffixes else {}
    _require_there(source)
    found: dict[str, list[Path]] = {split: [] for split in ("", *SPLITS)}
    for path in _files_below(source):
        if suffix_of(path) in suffixes:
            found[_split_in(path.relative_to(source))[0]].append(path)
    return {split: tuple(paths) for split, paths in found.items() if paths}


def suffix_of(path: Path) -> str:
    """The last suffix in small letters, without that of a compression."""
    return _stem_and_suffix(path)[1]


def _stem_and_suffix(path: Path) -> tuple[str, str]:
    name = Path(path.name.casefold())
    name = Path(name.stem) if name.suffix in PACKED else name
    return name.stem, name.suffix


def _split_in(path: Path) -> tuple[str, int, Path]:
    """The split that a file is of, which of its names is used, and which part of ``path`` says it.

    The name of a split stands at the end of the file's name, before the numbers of shards, or at that of a folder's:
    ``val.csv.gz``, ``gsm8k_train.jsonl``, ``test-00000-of-00002.parquet``, ``train/00000.ds``. The nearest says it.
    """
    for part in (path, *path.parents):
        name = _stem_and_suffix(part)[0] if part == path else part.name.casefold()
        word = re.split(r"[-_.]", NUMBERS.sub("", name))[-1]
        for split, names in SPLIT_NAMES.items():
            if word in names:
                return split, names.index(word), part
    return "", 0, path


def _files_below(source: Path) -> Iterator[Path]:
    """All files that are not hidden, shard 2 before shard 10. Raises DataError for links to folders, and dead ones."""
    for folder, folders, names in os.walk(source, onerror=_refuse_unreadable):
        folders[:] = sorted((name for name in folders if not name.startswith(".")), key=_natural_order)
        inside = [Path(folder) / name for name in folders]
        files = [Path(folder) / name for name in sorted(names, key=_natural_order) if not name.startswith(".")]
        for path in (*inside, *files):
            if path.is_symlink() and not path.is_file():
                got = f"a link to {shown(str(path.readlink()))}"
                what = "A link in the data folder leads to a folder, where DVC does not see changes."
                do = f"name the folder itself, or move its files here: {override('data.path', path.resolve())}"
                if not path.exists():
                    what, do = "A link in the data folder leads to nothing.", "mount the disk it leads to, or remove it"
                raise DataError(what, where=str(path), got=got, do=do)
        yield from (path for path in files if path.is_file())


def _require_there(source: Path) -> None:
    if not source.exists():
        expected = "a file, or a folder with train.jsonl, train.csv, train.parquet, …"
        do = similar_path(source) or "correct data.path in params.yaml"
        raise DataError("The data does not exist.", where=str(source), expected=expected, do=do)


def _refuse_unreadable(error: OSError) -> None:
    what = f"A folder of the data cannot be read: {error.strerror}."
    raise DataError(what, where=str(error.filename), do="allow it to be read, or name another data.path")


def _natural_order(name: str) -> list[tuple[int, str]]:
    parts = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdecimal() and len(part) < 19 else (-1, part) for part in parts]


def _row_paths(source: Path) -> list[Path]:
    """All files of rows in a folder and below."""
    paths = [path for path in _files_below(source) if suffix_of(path) in SUFFIXES]
    return [path for path in paths if not OF_DATASETS.fullmatch(path.name)]


def _row_file(path: Path, source: Path) -> _RowFile:
    relative = path.relative_to(source)
    split, number, part = _split_in(relative)
    if part != relative:
        return _RowFile(path, split, source / part.parent, (number, True, False, "", 0))
    if not split and (path.parent / "state.json").is_file():  # one split, as datasets.save_to_disk wrote it
        split = "train"
    stem, suffix = _stem_and_suffix(path)
    series = NUMBERS.sub("", stem)
    return _RowFile(path, split, path.parent, (number, False, series != stem, series, SUFFIXES.index(suffix)))


def _folder_of_rows(source: Path, found: Sequence[_RowFile]) -> Path:
    """The one folder that holds a data set: ``source``, ``data`` in it as in a clone from the hub, or another."""
    folders = sorted({file.folder for file in found if file.split == "train"})
    near = [folder for folder in folders if folder.parent == source]
    for chosen in ([source] if source in folders else [], [folder for folder in near if folder.name == "data"], near):
        if len(chosen) == 1:
            return chosen[0]
    if near:
        got, do = shown(", ".join(folder.name for folder in near)), f"name one: {override('data.path', near[0])}"
        raise DataError("The data folder has several data sets.", where=str(source), got=got, do=do)
    here, do = [file for file in found if file.folder == source], "name your rows train.jsonl, or name the file itself"
    if others := [split for split in SPLITS if any(file.split == split for file in here)]:
        do = f"here is only {' and '.join(others)}: name the training rows train.jsonl"
    elif len(here) == 1:
        do = f"name the file itself: {override('data.path', here[0].path)}"
    names = sorted(path.name for path in source.iterdir() if not path.name.startswith("."))
    raise DataError(
        "The data folder has no file named train.",
        where=str(source),
        expected="train.jsonl, .json, .csv, .tsv, .parquet or .arrow, plain or packed; shards; or a folder train",
        got=shown(", ".join(names)) if names else "an empty folder",
        do=do,
    )


def _require_all_shards(files: Sequence[Path], split: str) -> None:
    """Raise DataError where some shards are missing, of those whose names say how many there are."""
    found = [match for path in files if (match := SHARD_OF.search(path.name.casefold()))]
    numbers, totals = sorted(int(match[1]) for match in found), sorted({int(match[2]) for match in found})
    first, count = (numbers[0], len(numbers)) if found else (0, 0)
    if found and (first > 1 or totals != [count] or numbers != list(range(first, first + count))):
        raise DataError(
            f"Shards of {split} are missing, or of two data sets.",
            where=str(files[0].parent),
            expected=f"{' or '.join(map(str, totals))} files, each number once",
            got=shown(", ".join(map(str, numbers))),
            do="fetch the others, or remove what is old",
        )
