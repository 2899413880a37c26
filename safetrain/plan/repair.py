"""`safetrain validate FILE --fix OUT`: a repaired copy of a file or a folder, and a log that tells every change.

What is repaired stays as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.data.foreign_rows import Columns, key_names
from safetrain.core.data.forms import Container, FileForm, recognised
from safetrain.core.data.jsonl import bad_rows
from safetrain.core.data.row_blocks import blocks_of
from safetrain.core.errors import ConfigError, DataError, NoRowsError
from safetrain.core.formatting import counted
from safetrain.core.storage.files import write_atomic, write_folder
from safetrain.plan.repair_rows import CONTROLS, DROPPED, DUPLICATE, FILE, FORM, MOJIBAKE, RowRepair
from safetrain.plan.shared_reasons import remedy_for_all
from safetrain.plan.sources import files_of, name_as_lines

WORDS = {  # in the order of the summary
    FILE: "a file itself: another container, compression, encoding, byte order mark, or keys around its rows",
    FORM: "brought to the usual form, without keys that nothing reads",
    MOJIBAKE: "text that was decoded wrongly before, read rightly",
    CONTROLS: "control characters and terminal escapes taken out",
    DUPLICATE: "exact repeats of an earlier row left out",
    DROPPED: "DROPPED: they cannot be read, or nothing can be learnt in them",
}
BROKEN_OFF = "it is of a repair that was broken off: remove it"


@dataclass(frozen=True)
class Part:
    """A file to repair, its split, and its name in the folder that is written; empty where it is a file alone."""

    source: Path
    split: str
    name: str = ""


@dataclass(frozen=True)
class How:
    """How to read, and what to do with what cannot be read."""

    columns: Columns | None
    encoding: str | None
    drop_bad: bool
    keep_mojibake: bool


@dataclass(frozen=True)
class Repaired:
    """What a repair has done."""

    source: Path
    into: Path
    log: Path
    read: int  # rows of the source
    written: int
    changes: dict[str, int]  # by kind
    by_columns: bool = False  # whether data.columns named the keys of the source
    left_out: tuple[str, ...] = ()  # what lies in the folder and is no data of a split


def repair(
    source: Path,
    into: Path,
    columns: Columns | None = None,
    encoding: str | None = None,
    *,
    drop_bad: bool = False,
    keep_mojibake: bool = False,
) -> Repaired:
    """Write the log of ``into`` and then ``into``: a file of JSONL, or of a folder all that it has of the splits.

    ``columns`` and ``encoding`` are those of all files. Rows that cannot be read are an error, unless ``drop_bad`` says
    to leave them out. Raises ConfigError where ``into`` or its log is there already, DataError.
    """
    parts, left_out = _parts(source) if source.is_dir() else ([Part(source, "train")], ())
    log = _require_new(source, into)
    how, made, states = How(columns, encoding, drop_bad, keep_mojibake), list[RowRepair](), list[str]()

    def write_both(target: Path) -> None:
        write_atomic(log, lambda text: made.append(_write(parts, target, text, how)), over=False)
        states.append("logged")

    try:
        if source.is_dir():
            write_folder(into, write_both)
        else:
            write_atomic(into, write_both, over=False)
        states.append("written")
    except FileExistsError as error:
        where = str(error.filename2 or error.filename)
        raise ConfigError("What is to be written has come into being meanwhile.", where=where) from None
    except OSError as error:
        raise DataError(f"The repaired copy cannot be written: {error.strerror}.", where=str(into)) from None
    finally:
        if states == ["logged"]:
            log.unlink(missing_ok=True)
    (rows,) = made
    written = sum(rows.written.values())
    return Repaired(source, into, log, rows.read, written, dict(rows.changes), columns is not None, left_out)


def summary(done: Repaired) -> str:
    """What was done, for a terminal."""
    lines = [f"{done.into}: {done.written} of {counted(done.read, 'row')} of {done.source}, which is as it was"]
    lines += [f"  {done.changes[kind]:>8,}  {words}" for kind, words in WORDS.items() if done.changes.get(kind)]
    if done.by_columns:
        lines.append("  its keys are the usual ones: set data.columns=null for it")
    lines += [f"  not copied, because no split has it: {name}" for name in done.left_out]
    return "\n".join([*lines, f"  every change, with before and after: {done.log}"])


def _parts(folder: Path) -> tuple[list[Part], tuple[str, ...]]:
    """The files of a folder under their names as JSONL, and what is left out; raises DataError."""
    files = files_of(folder)
    parts = [
        Part(path, split, (path.parent.relative_to(folder) / name_as_lines(path)).as_posix())
        for split, path in zip(files.names, files.paths, strict=True)
    ]
    by_name = {part.name: part.source for part in parts}
    for part in parts:
        if by_name[part.name] != part.source:
            raise DataError(
                f"Two files would be written as {part.name}.",
                where=f"{part.source}; {by_name[part.name]}",
                do="rename one of them",
            )
    return parts, (*files.unread, *files.links)


def _require_new(source: Path, into: Path) -> Path:
    """The log beside ``into``; raises ConfigError where one of them is there already, or would be in the source."""
    if not into.name:
        raise ConfigError("What is to be written has no name.", got=str(into), do="name what does not exist yet")
    log = into.with_name(f"{into.name}.log.jsonl")
    if source.is_dir() and into.resolve().is_relative_to(source.resolve()):
        raise ConfigError("The repaired copy would lie in the folder itself.", where=str(into), do="name another place")
    is_free = source.is_dir() and into.is_dir() and not into.is_symlink() and not any(into.iterdir())
    taken = [] if is_free else [(into, "choose another name")]
    for path, do in (*taken, (log, f"choose another name; without {into.name}, {BROKEN_OFF}")):
        if path.exists() or path.is_symlink():
            raise ConfigError("What is to be written exists already.", where=str(path), do=do)
    return log


def _write(parts: Sequence[Part], target: Path, log: Path, how: How) -> RowRepair:
    """The repaired rows of all parts into ``target``; raises DataError where some cannot be read, or none are left."""
    with log.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as told:
        rows = RowRepair(told, how.columns, keep_mojibake=how.keep_mojibake)
        for part in parts:
            _write_part(part, target / part.name, rows, how)
    if rows.faults and not how.drop_bad:
        remedy = rows.guess.remedy() if rows.guess.rows == rows.read else ""
        remedy = remedy or (remedy_for_all(rows.faults, how.columns) if rows.changes[DROPPED] == rows.read else "")
        do = remedy or "correct them, or leave them out: --drop-bad"
        raise bad_rows(rows.faults, rows.changes[DROPPED], f"nothing was written; {do}")
    for part in parts:
        if not rows.written[part.split]:
            raise DataError("No row is left to write.", where=str(part.source), do="see what validation says of it")
    return rows


def _write_part(part: Part, into: Path, rows: RowRepair, how: How) -> None:
    into.parent.mkdir(parents=True, exist_ok=True)
    with into.open("w", encoding="utf-8", newline="\n") as out:
        try:
            form = recognised(part.source, how.encoding)
        except NoRowsError:
            if not part.name:
                raise
            return  # a shard of none: it is one of so many
        if form != FileForm(Container.LINES):
            rows.tell(str(part.source), FILE, str(form), str(Container.LINES))
        for block in blocks_of(part.source, how.encoding):
            for place, raw in block.rows:
                rows.add(part.source, part.split, place, raw, out)
            if block.beside:
                rows.tell(str(part.source), FILE, f"keys beside the rows: {key_names(block.beside)}", None)
