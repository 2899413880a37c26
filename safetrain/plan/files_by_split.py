"""Files of a folder and of all folders below it by their split: corpora of tokens, and of plain text."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from safetrain.core.data.plain_text import PLAIN
from safetrain.core.data.strict_json import shown
from safetrain.core.errors import DataError
from safetrain.plan.sources import (
    OF_DATASETS,
    SPLIT_NAMES,
    SPLITS,
    SUFFIXES,
    DataFiles,
    files_of,
    natural_order,
    suffix_of,
)


def files_by_split(source: Path, suffixes: Sequence[str], *, links: bool = True) -> dict[str, tuple[Path, ...]]:
    """The files of ``source`` that end so by split; the split is empty where no name says one.

    A file is of a split whose name stands in its own name or that of a folder below ``source``, the nearest first.
    With ``links``, folders that are links are followed; it raises DataError where some files are found, and others may
    be where nothing can be read.
    """
    if source.is_file():
        return {"": (source,)} if suffix_of(source) in suffixes else {}
    found, dead, unreadable = dict[str, list[Path]](), list[Path](), list[OSError]()
    for path in _files_below(source, unreadable, links=links):
        if suffix_of(path) in suffixes:
            found.setdefault(_split_of(path.relative_to(source)), []).append(path)
        if path.is_symlink() and not path.exists():
            dead.append(path)
    if found and links:
        _require_whole(dead, unreadable)
    return {split: tuple(found[split]) for split in ("", *SPLITS) if split in found}


def data_files_of(source: Path, *, documents: bool) -> DataFiles:
    """The files of a data set, as ``files_of`` gives them; raises DataError.

    Of ``documents``, a folder of plain text is a data set too, where it has no files of rows by their splits.
    Names of texts say splits where those of all of them do: else a book named a test would be one.
    """
    try:
        return files_of(source)
    except DataError:
        found = files_by_split(source, PLAIN) if documents else {}
        if not found:
            raise
    if "" in found or "train" not in found:
        found = {"train": tuple(sorted((path for paths in found.values() for path in paths), key=natural_order))}
    pairs = [(split, path) for split, paths in found.items() for path in paths]
    paths = tuple(path for _, path in pairs)
    names = tuple(split for split, _ in pairs)
    return DataFiles(names, paths, rows_beside(source), followed=links_followed(source, paths))


def rows_beside(source: Path) -> tuple[str, ...]:
    """The names of all files of rows in a folder and below; links, which rows are not read by, are not followed."""
    found = (path for paths in files_by_split(source, SUFFIXES, links=False).values() for path in paths)
    return tuple(sorted(path.relative_to(source).as_posix() for path in found if path.name not in OF_DATASETS))


def links_followed(source: Path, paths: Iterable[Path]) -> tuple[str, ...]:
    """The folders below ``source`` that are links, and by which some of ``paths`` were found."""
    above = {parent for path in paths for parent in path.parents if source in parent.parents}
    return tuple(sorted(parent.relative_to(source).as_posix() for parent in above if parent.is_symlink()))


def _files_below(source: Path, unreadable: list[OSError], *, links: bool) -> Iterator[Path]:
    """All that is no folder. A folder is looked at once, however many links lead to it, and not by a link if it can."""
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


def _require_whole(dead: Sequence[Path], unreadable: Sequence[OSError]) -> None:
    """Raise DataError for links that lead to nothing, and for folders that cannot be read."""
    for path in dead:
        raise DataError(
            "A link in the data folder leads to nothing.",
            where=str(path),
            got=f"a link to {shown(str(path.readlink()))}",
            do="mount the disk that it leads to, or take the link away",
        )
    for error in unreadable:
        raise DataError(
            f"A folder of the data cannot be read: {error.strerror}.",
            where=str(error.filename),
            do="allow it to be read, or name the folder with the data alone: data.path",
        )


def _ordered(names: Sequence[str]) -> list[Path]:
    """Those that are not hidden, shard 2 before shard 10."""
    return sorted((Path(name) for name in names if not name.startswith(".")), key=natural_order)


def _split_of(path: Path) -> str:
    for part in (path.name, *reversed(path.parts[:-1])):
        words = re.split(r"[-_.]", part.casefold())
        for split, names in SPLIT_NAMES.items():
            if any(name in words for name in names):
                return split
    return ""
