"""Files of a folder and of all folders below it by their split: corpora of tokens, and of plain text."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from safetrain.core.data.plain_text import PLAIN
from safetrain.core.errors import DataError
from safetrain.plan.sources import SPLIT_NAMES, SPLITS, DataFiles, files_of, natural_order, suffix_of


def files_by_split(source: Path, suffixes: Sequence[str]) -> dict[str, tuple[Path, ...]]:
    """The files of ``source`` that end so by split; the split is empty where no name says one.

    A file is of a split whose name stands in its own name or that of a folder below ``source``, the nearest first.
    """
    if source.is_file():
        return {"": (source,)} if suffix_of(source) in suffixes else {}
    found: dict[str, list[Path]] = {}
    for folder, folders, names in os.walk(source):
        folders[:] = [path.name for path in _ordered(folders)]
        for path in (Path(folder) / name for name in _ordered(names)):
            if suffix_of(path) in suffixes:
                found.setdefault(_split_of(path.relative_to(source)), []).append(path)
    return {split: tuple(found[split]) for split in ("", *SPLITS) if split in found}


def data_files_of(source: Path, *, documents: bool) -> DataFiles:
    """The files of a data set, as ``files_of`` gives them; raises DataError.

    Of ``documents``, a file of plain text is a data set too, and a folder of such files, where it has no other data.
    Their names say splits where those of all of them do: else a book named a test would be one.
    """
    if not documents:
        return files_of(source)
    found = files_by_split(source, PLAIN)
    try:
        return files_of(source) if not (source.is_file() and found) else DataFiles(("train",), (source,))
    except DataError:
        if not found:
            raise
    if "" in found or "train" not in found:
        found = {"train": tuple(sorted((path for paths in found.values() for path in paths), key=natural_order))}
    pairs = [(split, path) for split, paths in found.items() for path in paths]
    return DataFiles(tuple(split for split, _ in pairs), tuple(path for _, path in pairs))


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
