"""Which files a data set has: one, or those of a folder, by split; and which lie there and are not read."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.errors import DataError
from safetrain.core.formatting import override
from safetrain.data.files import PLAIN
from safetrain.data.strict_json import shown

SPLITS = ("train", "valid", "test")
SPLIT_NAMES = {"train": ("train",), "valid": ("valid", "validation", "val", "dev"), "test": ("test",)}
SUFFIXES = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")  # the first is taken before the next
PACKED = (".gz", ".zst", ".bz2", ".xz")
MOST_NESTED = 2  # data/train/00000.parquet
OF_DATASETS = ("state.json", "dataset_info.json", "dataset_dict.json", "dataset_infos.json")  # about the data
SHARD = re.compile(r"[-_.](?:data-)?(\d+)(?:[-_]of[-_](\d+))?(?:[-_.][0-9a-f]{6,})?")
SHARD_OF = re.compile(r"(\d+)[-_]of[-_](\d+)")
MOST_NAMES = 12  # that an error lists


@dataclass(frozen=True)
class DataFiles:
    """The files of a data set in the order of their splits. Several of one split are read as one."""

    names: tuple[str, ...]  # the split of each
    paths: tuple[Path, ...]
    unread: tuple[str, ...] = ()  # what lies there as if it were data
    links: tuple[str, ...] = ()  # links that lead out of the folder, and are not followed
    followed: tuple[str, ...] = ()  # folders that are links and were read

    def without_rows(self, empty: Sequence[Path]) -> list[Path]:
        """The files of those splits of which all are ``empty``."""
        having = {name for name, path in zip(self.names, self.paths, strict=True) if path not in empty}
        return [path for name, path in zip(self.names, self.paths, strict=True) if name not in having]

    def read_instead_of(self, name: str) -> str:
        """The name of the file that is read as the split of an unread file; empty where none is."""
        pairs = zip(self.names, self.paths, strict=True)
        return next((path.name for split, path in pairs if split == _named_split(name)), "")


def files_of(source: Path) -> DataFiles:
    """The files of ``source``, a file or a folder; raises DataError."""
    if source.is_file():
        return DataFiles(("train",), (source,))
    if not source.is_dir():
        expected = "a file, or a folder with train.jsonl, train.csv, train.parquet, …"
        do = "correct data.path in params.yaml"
        raise DataError("The data does not exist.", where=str(source), expected=expected, do=do)
    there = _Folder(source, source)
    chosen = there.splits()
    if "train" not in chosen:
        there, chosen = _nested(source, there)
    found = [(split, path) for split in SPLITS for path in chosen.get(split, ())]
    known = {path for _, path in found}
    unread = sorted(path.relative_to(source).as_posix() for path in there.data_files() if path not in known)
    links = tuple(path.relative_to(source).as_posix() for path in there.all_links())
    return DataFiles(tuple(split for split, _ in found), tuple(path for _, path in found), tuple(unread), links)


def data_files_of(source: Path, *, documents: bool) -> DataFiles:
    """The files of a data set; raises DataError.

    With ``documents``, a folder of plain text is a data set too, where it has no files of rows by their splits.
    Names of texts say splits where those of all of them do: else a book named a test would be one.
    """
    try:
        return files_of(source)
    except DataError:
        found = files_by_split(source, PLAIN) if documents else {}
        if not found:
            raise
    if "" in found or "train" not in found:
        found = {"train": tuple(sorted((path for paths in found.values() for path in paths), key=_natural_order))}
    pairs = [(split, path) for split, paths in found.items() for path in paths]
    paths = tuple(path for _, path in pairs)
    followed = links_followed(source, paths)
    return DataFiles(tuple(split for split, _ in pairs), paths, rows_beside(source), followed=followed)


def named_files(paths: Sequence[Path], *, documents: bool = False) -> DataFiles:
    """All files of ``paths``, files or folders, each with its split: as it lies in its folder, or by its name.

    With ``documents`` a folder of plain text is read as one, also where files of rows stand in it. Raises DataError.
    """
    parts = list[DataFiles]()
    for path in paths:
        if not path.exists():
            raise DataError("The data file does not exist.", where=str(path), do="name a file or a folder")
        if path.is_dir():
            parts.append(data_files_of(path, documents=documents or not rows_beside(path)))
        else:
            parts.append(DataFiles((_named_split(path.name) or "train",), (path,)))
    return DataFiles(
        names=tuple(name for part in parts for name in part.names),
        paths=tuple(path for part in parts for path in part.paths),
        unread=tuple(name for part in parts for name in part.unread),
        links=tuple(name for part in parts for name in part.links),
        followed=tuple(name for part in parts for name in part.followed),
    )


def files_by_split(source: Path, suffixes: Sequence[str], *, links: bool = True) -> dict[str, tuple[Path, ...]]:
    """The files of ``source`` and of all folders below it by split; the split is empty where no name says one.

    A file is of a split whose name stands in its own name or that of a folder below ``source``, the nearest first.
    With ``links``, folders that are links are followed. Raises DataError where some files are found, and others may be
    where nothing can be read.
    """
    if source.is_file():
        return {"": (source,)} if suffix_of(source) in suffixes else {}
    found, dead, unreadable = dict[str, list[Path]](), list[Path](), list[OSError]()
    for path in _files_below(source, unreadable, links=links):
        if suffix_of(path) in suffixes:
            found.setdefault(_split_in(path.relative_to(source)), []).append(path)
        if path.is_symlink() and not path.exists():
            dead.append(path)
    if found and links and dead:
        do, got = "mount the disk that it leads to, or remove the link", f"a link to {shown(str(dead[0].readlink()))}"
        raise DataError("A link in the data folder leads to nothing.", where=str(dead[0]), got=got, do=do)
    if found and links and unreadable:
        what = f"A folder of the data cannot be read: {unreadable[0].strerror}."
        raise DataError(what, where=str(unreadable[0].filename), do="allow it to be read, or name another data.path")
    return {split: tuple(found[split]) for split in ("", *SPLITS) if split in found}


def rows_beside(source: Path) -> tuple[str, ...]:
    """The names of all files of rows in a folder and below; links are not followed."""
    found = (path for paths in files_by_split(source, SUFFIXES, links=False).values() for path in paths)
    return tuple(sorted(path.relative_to(source).as_posix() for path in found if path.name not in OF_DATASETS))


def links_followed(source: Path, paths: Iterable[Path]) -> tuple[str, ...]:
    """The folders below ``source`` that are links, and by which some of ``paths`` were found."""
    above = {parent for path in paths for parent in path.parents if source in parent.parents}
    return tuple(sorted(parent.relative_to(source).as_posix() for parent in above if parent.is_symlink()))


def suffix_of(path: Path) -> str:
    """The last suffix in small letters, without that of a compression."""
    name = path.name.casefold()
    return Path(name.removesuffix(next((packing for packing in PACKED if name.endswith(packing)), ""))).suffix


def name_as_lines(path: Path) -> str:
    """The name of a file of a data folder once it is JSONL: ``train.csv.gz`` becomes ``train.jsonl``."""
    stem = (_stem(path) or (path.name.casefold(), ""))[0]
    name = path.name[: len(stem)]
    alone = name.startswith("data-") and _split_in(Path(path.parent.name)) == ""  # of one split, which datasets saved
    return f"{'train-' if alone else ''}{name}.jsonl"


class _Folder:
    """What lies in a folder of the data set at ``root``."""

    def __init__(self, path: Path, root: Path, depth: int = 0) -> None:
        self.path = path
        self.links: list[Path] = []  # that lead out of the data set
        self.files: list[Path] = []
        self.inside: list[_Folder] = []
        try:
            entries = sorted(path.iterdir(), key=_natural_order)
        except OSError as error:
            raise DataError(f"The data folder cannot be read: {error.strerror}.", where=str(path)) from None
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_symlink() and not _may_follow(entry, root):
                self.links.append(entry)
            elif entry.is_dir() and depth < MOST_NESTED:
                self.inside.append(_Folder(entry, root, depth + 1))
            elif entry.is_file():
                self.files.append(entry)

    def data_files(self) -> list[Path]:
        """Its files that look like data; those of folders that are a split too."""
        found = [path for path in self.files if _stem(path) is not None and not _is_of_datasets(path.name)]
        return found + [
            path for each in self.inside if _folder_split(each.path.name) is not None for path in each.data_files()
        ]

    def all_links(self) -> list[Path]:
        """Those that are not followed, here and in its folders."""
        return [*self.links, *(link for inside in self.inside for link in inside.all_links())]

    def splits(self) -> dict[str, tuple[Path, ...]]:
        """The files of each split that has any; raises DataError where shards are missing."""
        found = {}
        for split, names in SPLIT_NAMES.items():
            group = next((group for name in names for group in self._groups(name)), None)
            if group is not None:
                found[split] = group
        if "train" not in found and (self.path / "state.json").is_file():  # datasets.save_to_disk of one split
            shards = tuple(path for path in self.data_files() if path.suffix == ".arrow")
            found.update({"train": shards} if shards else {})
        return found

    def _groups(self, name: str) -> Iterator[tuple[Path, ...]]:
        """What may be meant by ``name``: a file, shards of one kind, a folder; the likeliest first."""
        single, shards = dict[str, list[Path]](), dict[str, list[Path]]()
        for path in self.files:
            stem, suffix = _stem(path) or ("", "")
            if stem == name:
                single.setdefault(suffix, []).append(path)
            elif stem.startswith(name) and SHARD.fullmatch(stem[len(name) :]):
                shards.setdefault(suffix, []).append(path)
        yield from (tuple(single[suffix][:1]) for suffix in SUFFIXES if suffix in single)
        yield from (_whole(shards[suffix], name) for suffix in SUFFIXES if suffix in shards)
        for each in self.inside:
            if each.path.name.casefold() == name and (files := each.data_files()):
                yield _whole(files, name)


def _nested(source: Path, there: _Folder) -> tuple[_Folder, dict[str, tuple[Path, ...]]]:
    """The one folder of ``source`` that holds a data set: ``data`` of a clone from the hub, or another."""
    having = [(folder, splits) for folder in there.inside if "train" in (splits := folder.splits())]
    named = [pair for pair in having if pair[0].path.name == "data"] or having
    if len(named) == 1:
        folder, splits = named[0]
        folder.links[:0] = there.links
        return folder, splits
    if named:
        got = ", ".join(shown(folder.path.name) for folder, _ in named)
        do = f"name one of them: {override('data.path', named[0][0].path)}"
        raise DataError("The data folder has several data sets.", where=str(source), got=got, do=do)
    names = sorted(path.name for path in source.iterdir() if not path.name.startswith("."))
    files, do = there.data_files(), "put your rows there as train.jsonl, or name the file itself"
    if there.links:
        do = f"{shown(there.links[0].name)} is a link that leads out of the data folder and is not followed: copy it"
    elif others := " and ".join(split for split in SPLITS if split in there.splits()):
        do = f"here is only {others}: name the training rows train.jsonl"
    elif len(files) == 1:
        do = f"name the file itself: {override('data.path', files[0])}"
    raise DataError(
        "The data folder has no file named train.",
        where=str(source),
        expected="train.jsonl, .json, .csv, .tsv, .parquet or .arrow, plain or packed; shards; or a folder train",
        got=", ".join(map(shown, names[:8])) + (", …" if len(names) > 8 else "") or "an empty folder",
        do=do,
    )


def _whole(files: Sequence[Path], name: str) -> tuple[Path, ...]:
    """The shards in their order; raises DataError where some of them are missing."""
    found = [match for path in files if (match := SHARD_OF.search(path.name.casefold()))]
    numbers, totals = sorted(int(match[1]) for match in found), {int(match[2]) for match in found}
    if found and (len(totals) > 1 or numbers[0] > 1 or numbers != list(range(numbers[0], numbers[0] + min(totals)))):
        raise DataError(
            f"Shards of {name} are missing, or of two data sets.",
            where=str(files[0].parent),
            expected=" or ".join(f"{total} files" for total in sorted(totals)) + ", each number once",
            got=", ".join(map(str, numbers[:MOST_NAMES])) + (", …" if len(numbers) > MOST_NAMES else ""),
            do="fetch the others, or remove what is old",
        )
    return tuple(sorted(files, key=_natural_order))


def _may_follow(link: Path, root: Path) -> bool:
    """A link inside the data set, or into the stores that DVC and the hub's cache keep files in."""
    target, home = Path(os.path.realpath(link)), Path(os.path.realpath(root))
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    in_dvc = any(target.parts[place : place + 2] == (".dvc", "cache") for place in range(len(target.parts)))
    return target.is_relative_to(home) or target.is_relative_to(blobs) or in_dvc


def _files_below(source: Path, unreadable: list[OSError], *, links: bool) -> Iterator[Path]:
    """All files. A folder is looked at once, however many links lead to it, and not by a link if it can."""
    seen = set[str]()
    for folder, folders, names in os.walk(source, onerror=unreadable.append, followlinks=links):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        inside = [Path(folder) / path for path in _ordered(folders)]
        folders[:] = [path.name for path in sorted(inside, key=Path.is_symlink)]
        yield from (Path(folder) / name for name in _ordered(names))


def _ordered(names: Sequence[str]) -> list[Path]:
    """Those that are not hidden, shard 2 before shard 10."""
    return sorted((Path(name) for name in names if not name.startswith(".")), key=_natural_order)


def _natural_order(path: Path) -> list[tuple[int, str]]:
    parts = re.findall(r"\d+|\D+", path.name)
    return [(int(part), "") if part.isdecimal() and len(part) < 19 else (-1, part) for part in parts]


def _split_in(path: Path) -> str:
    for part in (path.name, *reversed(path.parts[:-1])):
        words = re.split(r"[-_.]", part.casefold())
        for split, names in SPLIT_NAMES.items():
            if any(name in words for name in names):
                return split
    return ""


def _named_split(name: str) -> str | None:
    """The split that the name of a file says, ``val.csv.gz`` or ``test-00000-of-00002.parquet``."""
    stem = (_stem(Path(name)) or ("", ""))[0]
    for split, names in SPLIT_NAMES.items():
        if any(stem == said or (stem.startswith(said) and SHARD.fullmatch(stem[len(said) :])) for said in names):
            return split
    return None


def _folder_split(name: str) -> str | None:
    return next((split for split, names in SPLIT_NAMES.items() if name.casefold() in names), None)


def _stem(path: Path) -> tuple[str, str] | None:
    """The name in small letters without its suffix, and the suffix; None where it is not one of data."""
    name = path.name.casefold()
    name = name.removesuffix(next((packing for packing in PACKED if name.endswith(packing)), ""))
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
    return (name.removesuffix(suffix), suffix) if suffix else None


def _is_of_datasets(name: str) -> bool:
    return name in OF_DATASETS or (name.startswith("cache-") and name.endswith(".arrow"))
