"""Which files a data set has: one, or those of a folder, by split; and which lie there and are not read."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.data.strict_json import shown
from safetrain.core.errors import DataError, NoRowsError
from safetrain.core.formatting import override
from safetrain.plan.findings import Findings

SPLITS = ("train", "valid", "test")
SPLIT_NAMES = {"train": ("train",), "valid": ("valid", "validation", "val", "dev"), "test": ("test",)}
SUFFIXES = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")  # the first is taken before the next
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
MOST_NESTED = 2  # data/train/00000.parquet
OF_DATASETS = ("state.json", "dataset_info.json", "dataset_dict.json", "dataset_infos.json")  # about the data
SHARD = re.compile(r"[-_.](?:data-)?(\d+)(?:[-_]of[-_](\d+))?(?:[-_.][0-9a-f]{6,})?")
SHARD_OF = re.compile(r"(\d+)[-_]of[-_](\d+)")
MOST_TOLD = 12  # numbers of shards
OTHER_LINK = "is a link that leads out of the data folder, and is not followed: copy the file, or name it itself"


@dataclass(frozen=True)
class DataFiles:
    """The files of a data set in the order of their splits. Several of one split are read as one."""

    names: tuple[str, ...]  # the split of each
    paths: tuple[Path, ...]
    unread: tuple[str, ...] = ()  # what lies there as if it were data
    links: tuple[str, ...] = ()  # of them, those that lead elsewhere
    followed: tuple[str, ...] = ()  # folders that are links and were read

    def bare(self, empty: Sequence[Path]) -> list[Path]:
        """The files of those splits of which all are ``empty``."""
        having = {name for name, path in zip(self.names, self.paths, strict=True) if path not in empty}
        return [path for name, path in zip(self.names, self.paths, strict=True) if name not in having]


def files_of(source: Path) -> DataFiles:
    """The files of ``source``, a file or a folder; raises DataError."""
    if source.is_file():
        return DataFiles(("train",), (source,))
    if not source.is_dir():
        raise DataError(
            "The data does not exist.",
            where=str(source),
            expected="a file, or a folder with train.jsonl, train.csv, train.parquet, …",
            do="correct data.path in params.yaml",
        )
    there = _Folder(source, source)
    chosen = there.splits()
    if "train" not in chosen:
        there, chosen = _nested(source, there)
    found = [(split, path) for split in SPLITS for path in chosen.get(split, ())]
    known = {path for _, path in found}
    unread = [path for path in there.data_files() if path not in known]
    return DataFiles(
        tuple(split for split, _ in found),
        tuple(path for _, path in found),
        tuple(sorted(path.relative_to(source).as_posix() for path in unread)),
        tuple(path.relative_to(source).as_posix() for path in there.all_links()),
    )


def tell_files(findings: Findings, files: DataFiles, empty: Sequence[Path]) -> None:
    """What lies in a data folder and is not read, and which files that were read have no rows."""
    for name in files.unread:
        read = [path.name for split, path in zip(files.names, files.paths, strict=True) if split == _said_split(name)]
        remedy = f"{read[0]} is read instead: merge them, or take {Path(name).name} away" if read else ""
        findings.add("FILES-UNREAD", name, remedy=remedy)
    for name in files.links:
        findings.add("LINK-UNREAD", name)
    for name in files.followed:
        findings.add("LINK-FOLLOWED", name)
    bare = files.bare(empty)
    for path in empty:
        if path in bare:
            error = NoRowsError(path)
            findings.add("FILE-UNREADABLE", error.what, where=[error.where], remedy=error.do)
        else:
            findings.add("FILE-EMPTY", where=[str(path)])


def split_named(path: Path) -> str:
    """The split that the name of a file says, ``val.csv.gz`` or ``test-00000-of-00002.parquet``; else train."""
    return _said_split(path.name) or "train"


def _said_split(name: str) -> str | None:
    stem = (_stem(Path(name)) or ("", ""))[0]
    for split, names in SPLIT_NAMES.items():
        for said in names:
            if stem == said or (stem.startswith(said) and SHARD.fullmatch(stem[len(said) :])):
                return split
    return None


def name_as_lines(path: Path) -> str:
    """The name of a file of a data folder once it is JSONL: ``train.csv.gz`` becomes ``train.jsonl``."""
    stem = (_stem(path) or (path.name.casefold(), ""))[0]
    name = path.name[: len(path.name) + len(stem) - len(path.name.casefold())]
    alone = name.startswith("data-") and _split_of(path.parent.name) is None  # of one split, which datasets saved
    return f"{'train-' if alone else ''}{name}.jsonl"


class _Folder:
    """What lies in a folder of the data set at ``root``."""

    def __init__(self, path: Path, root: Path, depth: int = 0) -> None:
        self.path = path
        self.links: list[Path] = []  # that lead out of the data set
        self.files: list[Path] = []
        self.folders: list[Path] = []
        for entry in sorted(_entries(path), key=natural_order):
            if entry.name.startswith("."):
                continue
            if entry.is_symlink() and not _may_follow(entry, root):
                self.links.append(entry)
            elif entry.is_dir():
                self.folders.append(entry)
            elif entry.is_file():
                self.files.append(entry)
        self._inside = {folder: _Folder(folder, root, depth + 1) for folder in self.folders if depth < MOST_NESTED}

    def data_files(self) -> list[Path]:
        """Its files that look like data; those of folders that are a split too."""
        found = [path for path in self.files if _stem(path) is not None and not _is_of_datasets(path.name)]
        for folder, inside in self._inside.items():
            if _split_of(folder.name) is not None:
                found += inside.data_files()
        return found

    def all_links(self) -> list[Path]:
        """Those that are not followed, here and in its folders."""
        return [*self.links, *(link for inside in self._inside.values() for link in inside.all_links())]

    def splits(self) -> dict[str, tuple[Path, ...]]:
        """The files of each split that has any; raises DataError where shards are missing."""
        found = {}
        for split, names in SPLIT_NAMES.items():
            groups = [group for name in names for group in self._groups(name)]
            if groups:
                found[split] = groups[0]
        if "train" not in found and (self.path / "state.json").is_file():  # datasets.save_to_disk of one split
            shards = tuple(path for path in self.data_files() if path.suffix == ".arrow")
            found.update({"train": shards} if shards else {})
        return found

    def inside(self) -> Iterable["_Folder"]:
        """Its folders."""
        return self._inside.values()

    def _groups(self, name: str) -> list[tuple[Path, ...]]:
        """What may be meant by ``name``: a file, shards of one kind, a folder; the likeliest first."""
        single, shards = dict[str, list[Path]](), dict[str, list[Path]]()
        for path in self.files:
            stem = _stem(path)
            if stem is None or not stem[0].startswith(name):
                continue
            if stem[0] == name:
                single.setdefault(stem[1], []).append(path)
            elif SHARD.fullmatch(stem[0][len(name) :]):
                shards.setdefault(stem[1], []).append(path)
        groups = [tuple(group[:1]) for _, group in sorted(single.items(), key=_by_suffix)]
        groups += [_whole(group, name) for _, group in sorted(shards.items(), key=_by_suffix)]
        for folder, inside in self._inside.items():
            files = inside.data_files()
            if folder.name.casefold() == name and files:
                groups.append(_whole(files, name))
        return groups


def _nested(source: Path, there: _Folder) -> tuple[_Folder, dict[str, tuple[Path, ...]]]:
    """The one folder of ``source`` that holds a data set: ``data`` of a clone from the hub, or another."""
    inside = [(folder, folder.splits()) for folder in there.inside()]
    having = [(folder, splits) for folder, splits in inside if "train" in splits]
    named = [pair for pair in having if pair[0].path.name == "data"] or having
    if len(named) == 1:
        folder, splits = named[0]
        folder.links[:0] = there.links
        return folder, splits
    if named:
        raise DataError(
            "The data folder has several data sets.",
            where=str(source),
            got=", ".join(shown(folder.path.name) for folder, _ in named),
            do=f"name one of them: {override('data.path', named[0][0].path)}",
        )
    names = sorted(path.name for path in source.iterdir() if not path.name.startswith("."))
    files = there.data_files()
    do = "put your rows there as train.jsonl, or name the file itself"
    if there.links:
        do = f"{shown(there.links[0].name)} {OTHER_LINK}"
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


def _entries(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError as error:
        raise DataError(f"The data folder cannot be read: {error.strerror}.", where=str(path)) from None


def _may_follow(link: Path, root: Path) -> bool:
    """A link inside the data set, or into the stores that DVC and the hub's cache keep files in."""
    target, home = Path(os.path.realpath(link)), Path(os.path.realpath(root))
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    in_dvc = any(target.parts[place : place + 2] == (".dvc", "cache") for place in range(len(target.parts)))
    return target.is_relative_to(home) or target.is_relative_to(blobs) or in_dvc


def _stem(path: Path) -> tuple[str, str] | None:
    """The name in small letters without its suffix, and the suffix; None where it is none of data."""
    name = path.name.casefold()
    compressed = next((suffix for suffix in COMPRESSED if name.endswith(suffix)), "")
    name = name.removesuffix(compressed)
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
    return (name.removesuffix(suffix), suffix) if suffix else None


def suffix_of(path: Path) -> str:
    """The last suffix in small letters, that of a compression left out."""
    name = path.name.casefold()
    packing = next((suffix for suffix in COMPRESSED if name.endswith(suffix)), "")
    return Path(name.removesuffix(packing)).suffix


def _is_of_datasets(name: str) -> bool:
    return name in OF_DATASETS or (name.startswith("cache-") and name.endswith(".arrow"))


def _split_of(name: str) -> str | None:
    return next((split for split, names in SPLIT_NAMES.items() if name.casefold() in names), None)


def _by_suffix(item: tuple[str, list[Path]]) -> int:
    return SUFFIXES.index(item[0])


def _whole(files: Sequence[Path], name: str) -> tuple[Path, ...]:
    """The shards in their order; raises DataError where some of them are missing."""
    found = [match for path in files if (match := SHARD_OF.search(path.name.casefold()))]
    numbers, totals = sorted(int(match[1]) for match in found), {int(match[2]) for match in found}
    if found and (len(totals) > 1 or numbers[0] > 1 or numbers != list(range(numbers[0], numbers[0] + min(totals)))):
        raise DataError(
            f"Shards of {name} are missing, or of two data sets.",
            where=str(files[0].parent),
            expected=" or ".join(f"{total} files" for total in sorted(totals)) + ", each number once",
            got=", ".join(map(str, numbers[:MOST_TOLD])) + (", …" if len(numbers) > MOST_TOLD else ""),
            do="fetch the others, or take away what is old",
        )
    return tuple(sorted(files, key=natural_order))


def natural_order(path: Path) -> list[tuple[int, str]]:
    """The order of people: shard 2 before shard 10."""
    parts = re.findall(r"\d+|\D+", path.name)
    return [(int(part), "") if part.isdecimal() and len(part) < 19 else (-1, part) for part in parts]
