"""A repaired copy of a file or a folder, in the format of its name, and a log of every change.

The original is not touched. Rows of chosen findings can be left out.
"""

import collections
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from ftfy import fix_encoding

from safetrain.core.errors import ConfigError, DataError, NoRowsError
from safetrain.core.formatting import counted
from safetrain.core.storage.files import write_atomic, write_folder
from safetrain.data.containers import Place
from safetrain.data.files import FileForm, recognised, rows_of
from safetrain.data.findings import Spot
from safetrain.data.folders import files_of, name_as_lines
from safetrain.data.forms import Columns, as_setting, key_names, parse_row
from safetrain.data.row_files import require_format, row_writer
from safetrain.data.strict_json import DEEP, RowError
from safetrain.data.tokenize import MOST_FAULTS, Fault, bad_rows

WORDS = {  # of the log and the summary, in its order
    "file": "a file: its format, compression, encoding or keys around its rows",
    "form": "rows brought to the usual form, without unused keys",
    "mojibake": "texts that were decoded wrongly before, repaired",
    "control-characters": "texts without control characters and terminal escapes",
    "duplicate": "exact repeats of an earlier row left out",
    "finding": "rows of the findings in --drop left out",
    "dropped": "DROPPED: rows that cannot be read, or have nothing to learn",
}
ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"
)  # whole sequences, then single characters
BROKEN_OFF = "it is of an interrupted repair: remove it"
Dropped = Mapping[tuple[str, Place], str]  # rows to leave out, by file and place, and the finding of each


@dataclass(frozen=True)
class RepairOptions:
    """How to read, and what to leave out."""

    columns: Columns | None = None
    encoding: str | None = None
    drop_bad: bool = False
    keep_mojibake: bool = False
    dropped: Dropped = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """A file to repair, its split, and its name in the folder that is written; empty where it is a file alone."""

    source: Path
    split: str
    name: str = ""


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
    left_out: tuple[str, ...] = ()  # what lies in the folder and is not of a split

    def summary(self) -> str:
        """What was done, for a terminal."""
        lines = [f"{self.into}: wrote {self.written} of {counted(self.read, 'row')}; {self.source} is unchanged"]
        lines += [f"  {self.changes[kind]:>8,}  {words}" for kind, words in WORDS.items() if self.changes.get(kind)]
        lines += ["  its keys are the usual ones: set data.columns=null for it"] if self.by_columns else []
        lines += [f"  not copied, because it is of no split: {name}" for name in self.left_out]
        return "\n".join([*lines, f"  every change, with before and after: {self.log}"])


def repair(source: Path, into: Path, options: RepairOptions = RepairOptions()) -> Repaired:
    """Write the log of ``into`` and then ``into``, in the format of its name; of a folder its splits as JSONL.

    Rows that cannot be read are an error, unless ``options`` say to leave them out. Raises ConfigError where ``into``
    or its log is there already or has a name of no format, DataError.
    """
    parts, left_out = _parts(source) if source.is_dir() else ([Part(source, "train")], ())
    log = _require_new(source, into)
    made, states = list[_RowRepair](), list[str]()

    def write_both(target: Path) -> None:
        write_atomic(log, lambda text: made.append(_write(parts, target, into, text, options)), over=False)
        states.append("logged")

    try:
        if source.is_dir():
            write_folder(into, write_both)
        else:
            require_format(into)
            write_atomic(into, write_both, over=False)
        states.append("written")
    except FileExistsError as error:
        where = str(error.filename2 or error.filename)
        raise ConfigError("What is to be written has appeared meanwhile.", where=where) from None
    except OSError as error:
        raise DataError(f"The repaired copy cannot be written: {error.strerror}.", where=str(into)) from None
    finally:
        if states == ["logged"]:
            log.unlink(missing_ok=True)
    (rows,) = made
    written = sum(rows.written.values())
    return Repaired(
        source, into, log, rows.read, written, dict(rows.changes), options.columns is not None, left_out
    )  # fmt: skip


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
            where = f"{part.source}; {by_name[part.name]}"
            raise DataError(f"Two files would be written as {part.name}.", where=where, do="rename one of them")
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


def _write(parts: Sequence[Part], target: Path, into: Path, log: Path, options: RepairOptions) -> "_RowRepair":
    """The repaired rows of all parts into ``target``; raises DataError where some cannot be read, or none are left."""
    with log.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as told:
        rows = _RowRepair(told, options)
        for part in parts:
            path = target / part.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with row_writer(path, path if part.name else into) as write:
                _write_part(part, rows, options, write)
    if rows.faults and not options.drop_bad:
        error, is_all = rows.faults[0].error, rows.changes["dropped"] == rows.read
        ways = "".join(f"\n{'':12}{as_setting(columns)}" for columns in error.columns) if is_all else ""
        do = f"name the keys, as --columns PART=KEY:{ways}" if ways else "correct them, or leave them out: --drop-bad"
        raise bad_rows(rows.faults, rows.changes["dropped"], f"nothing was written; {do}")
    for part in parts:
        if not rows.written[part.split]:
            raise DataError("No row is left to write.", where=str(part.source), do="see what validation says of it")
    return rows


def _write_part(
    part: Part, rows: "_RowRepair", options: RepairOptions, write: Callable[[dict[str, object]], None]
) -> None:
    try:
        form = recognised(part.source, options.encoding)
    except NoRowsError:
        if not part.name:
            raise
        return  # a shard without rows
    if form != FileForm("lines"):
        rows.tell(str(part.source), "file", str(form), "rows in the usual form")
    ignored = list[str]()
    for place, value in rows_of(part.source, options.encoding, ignored):
        rows.add(part, place, value, write)
    if ignored:
        rows.tell(str(part.source), "file", f"keys beside the rows: {key_names(ignored)}", None)


class _RowRepair:
    """Repairs one row after the other, of one file after the other, and tells every change in a log."""

    def __init__(self, log: TextIO, options: RepairOptions) -> None:
        self.faults: list[Fault] = []
        self.read = 0
        self.written = collections.Counter[str]()  # by split
        self.changes = collections.Counter[str]()
        self._log, self._options = log, options
        self._seen: dict[str, dict[bytes, str]] = {}  # of each split: where the first row is that says it

    def add(self, part: Part, place: Place, before: object, write: Callable[[dict[str, object]], None]) -> None:
        """Write a row, unless it is to be left out, cannot be read, or its split has it already."""
        spot, self.read = Spot(str(part.source), place), self.read + 1
        where = spot.text()
        finding = self._options.dropped.get((spot.file, place))
        if finding is not None:
            shown = None if finding == "SECRETS" else before
            self.tell(where, "finding", shown, None, reason=finding)
            return
        try:
            if isinstance(before, RowError):
                raise before
            row = parse_row(before, self._options.columns)
            value = row.as_json()
            mended = self._mended(value, where)
            row = row if mended is value else parse_row(mended)
        except RowError as error:
            if len(self.faults) < MOST_FAULTS:
                self.faults.append(Fault(spot, error))
            shown = None if isinstance(before, RowError) else before
            self.tell(where, "dropped", shown, None, reason=str(error))
            return
        if value != before:
            self.tell(where, "form", before, value)
        digest = hashlib.blake2b(row.identity().encode("utf-8"), digest_size=16).digest()
        first = self._seen.setdefault(part.split, {}).setdefault(digest, where)
        if first != where:
            self.tell(where, "duplicate", mended, None, reason=f"repeats {first}")
            return
        write(row.as_json())
        self.written[part.split] += 1

    def tell(self, where: str, what: str, before: object, after: object, **more: str) -> None:
        """Write a line of the log."""
        record = {"where": where, "what": what, "before": before, "after": after, **more}
        try:
            line = json.dumps(record, ensure_ascii=False)
        except RecursionError:  # it stands here one level deeper than it was read
            line = json.dumps({**record, "before": DEEP}, ensure_ascii=False)
        self._log.write(line + "\n")
        self.changes[what] += 1

    def _mended(self, value: object, where: str, key: str = "") -> object:
        """The value with every text repaired; itself, where none had to be."""
        if isinstance(value, str):
            if not self._options.keep_mojibake:
                value = self._mended_text(value, fix_encoding, where, key, "mojibake")
            return self._mended_text(value, _without_controls, where, key, "control-characters")
        if isinstance(value, dict):
            items = {name: self._mended(item, where, f"{key}.{name}" if key else name) for name, item in value.items()}
            return items if any(items[name] is not value[name] for name in items) else value
        if isinstance(value, list):
            parts = [self._mended(item, where, f"{key}[{place}]") for place, item in enumerate(value)]
            return parts if any(new is not old for new, old in zip(parts, value, strict=True)) else value
        return value

    def _mended_text(self, text: str, mend: Callable[[str], str], where: str, key: str, what: str) -> str:
        mended = mend(text)
        if mended == text:
            return text
        self.tell(where, what, text, mended, key=key)
        return mended


def _without_controls(text: str) -> str:
    """Vertical tabs and form feeds end a line: what they part must not be joined."""
    return ESCAPES.sub(lambda found: "\n" if found[0] in "\v\f" else "", text)
