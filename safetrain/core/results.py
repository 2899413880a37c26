"""The last evaluated result, which outlives whatever comes after it.

DVC deletes a stage's outs before the stage starts, and a stage may then be refused, fail or be killed. So each finished
result also lies in last_result, as hard links, from where the next stage or command puts back what is missing. Training
writes into unfinished; its outs replace the last ones when all are complete, and those in last_result when evaluated.
"""

import errno
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from safetrain.core.lock import is_locked
from safetrain.core.records.run_state import RunState
from safetrain.core.storage import paths
from safetrain.core.storage.files import (
    DISK_FULL,
    json_object,
    link_file,
    link_files,
    read_or_none,
    write_atomic,
    write_folder,
    write_record,
)

TRAINED = tuple(path.name for path in (paths.ADAPTERS, paths.METRICS_CSV, paths.METRICS_JSON, paths.SUMMARY))
# Outs that describe each other, one entry for each stage: they are kept and put back together.
RESULTS = (
    (paths.DATA_REPORT.name,),
    (paths.RECOMMENDED_CONFIG.name,),
    (*TRAINED, paths.EVALUATION.name),
    (paths.PLOTS.name, paths.REPORT.name),
)


def settle(output: Path = paths.OUTPUT) -> None:
    """Finish an interrupted replacement, put back results that are missing, and keep those that are new.

    On a full or read-only disk, what is missing waits for the next call. Raises OSError for a failing disk.
    """
    if not output.is_dir() or (is_complete(output) and is_locked(output)):  # its owner is replacing them
        return
    try:
        if is_complete(output):
            publish(output)
        for names in RESULTS:
            _settle(output, names)
    except OSError as error:
        if error.errno not in (*DISK_FULL, errno.EROFS, errno.EACCES):
            raise
        print(f"warning: results could not be kept or put back: {error}", file=sys.stderr)


def adapter_to_use(adapter: Path) -> Path:
    """The adapter to answer with: before the first run has finished, its best one so far."""
    is_missing = adapter == paths.ADAPTERS and not adapter.exists()
    return paths.BEST_ADAPTER if is_missing and paths.BEST_ADAPTER.is_dir() else adapter


def is_complete(output: Path) -> bool:
    """Whether a training run has written all its results, but perhaps not replaced the last ones."""
    return (output / paths.UNFINISHED / paths.SUMMARY.name).is_file()


def publish(output: Path) -> None:
    """Replace the last training by the one in unfinished, and call it finished; a second call ends a broken one."""
    finished = output / paths.UNFINISHED
    for name in TRAINED:
        _link(finished / name, output / name)
    state = read_or_none(output / paths.POINTER, RunState)
    if state is not None:
        write_record(output / paths.POINTER, replace(state, finished=True))
    doomed = output / f".{paths.UNFINISHED}.partial"
    shutil.rmtree(doomed, ignore_errors=True)
    finished.rename(doomed)  # at once: half of it would look like another run
    shutil.rmtree(doomed)


def _settle(output: Path, names: tuple[str, ...]) -> None:
    """Keep these results if all are there, and put back missing ones that belong to those that are there."""
    kept = output / paths.KEPT
    if not any((folder / names[-1]).exists() for folder in (output, kept)):
        names = names[:-1]  # never evaluated
    there = [name for name in names if (output / name).exists()]
    if len(there) == len(names):
        if paths.EVALUATION.name in names and not _is_evaluated(output, kept):
            return
        for name in names:
            _link(output / name, kept / name)
    elif all((kept / name).exists() for name in names) and all(_is_same(output / n, kept / n) for n in there):
        for name in names:
            _link(kept / name, output / name)


def _is_evaluated(output: Path, kept: Path) -> bool:
    """Whether the evaluation is about the adapter; an adapter that is kept was."""
    from safetrain.core.records.adapter_files import fingerprint

    name = paths.ADAPTERS.name
    if _is_same(output / name, kept / name):
        return True
    own = fingerprint(output / name)
    return json_object(output / paths.EVALUATION.name).get("adapter") in ([own], own)  # a text in the release before


def _is_same(one: Path, other: Path) -> bool:
    """Whether two files, or two folders, are links to the same content, or copies of it."""
    return one.exists() and other.exists() and _facts_of(one) == _facts_of(other)


def _facts_of(path: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of a file, or of the files in a folder; a link and a copy have the same."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _link(source: Path, target: Path) -> None:
    """Make ``target`` a hard link to ``source``, or a copy where the file system has none; a folder file by file."""
    if _is_same(source, target):
        return
    if source.is_dir():
        write_folder(target, partial(link_files, source))
    else:
        write_atomic(target, partial(link_file, source))
