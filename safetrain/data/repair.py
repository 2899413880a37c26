"""A repaired copy of a file, in the format of its name, and a log of every change. The original is not touched."""

import collections
import contextlib
import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ftfy import fix_encoding

from safetrain.core.errors import ConfigError, DataError
from safetrain.core.formatting import counted
from safetrain.core.storage.files import write_atomic
from safetrain.data.containers import Place
from safetrain.data.files import FileForm, recognised, rows_of
from safetrain.data.findings import KINDS, Spot
from safetrain.data.folders import suffix_of
from safetrain.data.forms import Columns, as_setting, parse_row
from safetrain.data.strict_json import DEEP, RowError
from safetrain.data.tokenize import MOST_FAULTS, Fault, bad_rows

WORDS = {  # of the log and the summary, in its order
    "file": "the file: its format, compression or encoding",
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
LINES, TABLES = ("", ".jsonl", ".ndjson", ".json"), (".csv", ".tsv")
ONE_FORM = "write .jsonl or .json, or rows of one form"
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
Row = dict[str, Any]
Write = Callable[[Row], object]


@dataclass(frozen=True)
class RepairOptions:
    """How to read, and what to leave out."""

    columns: Columns | None = None
    drop_bad: bool = False
    dropped: Mapping[Place, str] = field(default_factory=dict)  # rows to leave out, and the finding of each


def repair(source: Path, into: Path, options: RepairOptions = RepairOptions()) -> "Repair":
    """Write the log of ``into`` and then ``into``, in the format of its name.

    Rows that cannot be read are an error, unless ``options`` say to leave them out. Raises ConfigError where ``into``
    or its log is there already or has a name of no format, DataError.
    """
    done = Repair(source, into, options)
    do = f"choose a name that is free; a log without {into.name} is of an interrupted repair: remove it"
    for path in (into, done.log):
        if path.exists() or path.is_symlink():
            raise ConfigError("What is to be written exists already.", where=str(path), do=do)
    try:
        write_atomic(
            into, lambda rows: write_atomic(done.log, lambda log: done.write(rows, log), over=False), over=False
        )
    except OSError as error:
        raise DataError(f"The repaired copy cannot be written: {error.strerror}.", where=str(into), do=do) from None
    return done


class Repair:
    """Repairs one row after the other, counts the changes, and tells every one in a log."""

    def __init__(self, source: Path, into: Path, options: RepairOptions) -> None:
        """Raises ConfigError for a name of no format that is written."""
        if not into.name or suffix_of(into) not in (*LINES, *TABLES, ".parquet"):
            expected = ".jsonl, .json, .csv or .tsv, plain, .gz or .zst; or .parquet"
            raise ConfigError("The copy has no name, or one of another format.", got=str(into), expected=expected)
        self.source, self.into, self.log = source, into, into.with_name(f"{into.name}.log.jsonl")
        self.read, self.written = 0, 0  # rows
        self.changes = collections.Counter[str]()
        self._options, self._faults = options, list[Fault]()
        self._told: TextIO = io.StringIO()
        self._seen: dict[bytes, str] = {}  # where the first row is that says it

    def summary(self) -> str:
        """What was done, for a terminal."""
        lines = [f"{self.into}: wrote {self.written} of {counted(self.read, 'row')}; {self.source} is unchanged"]
        lines += [f"  {self.changes[kind]:>8,}  {words}" for kind, words in WORDS.items() if self.changes[kind]]
        if self._options.columns is not None:
            lines.append("  its keys are the usual ones: set data.columns=null for it")
        return "\n".join([*lines, f"  every change, with before and after: {self.log}"])

    def write(self, target: Path, log: Path) -> None:
        """Write the repaired rows and the log; raises DataError where some cannot be read, or none are left."""
        with log.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as self._told:
            form = recognised(self.source)
            if form != FileForm("JSON lines"):
                self._tell(str(self.source), "file", str(form), "rows in the usual form")
            with row_writer(target, self.into) as write:
                for place, value in rows_of(self.source):
                    self._add(place, value, write)
        if self._faults and not self._options.drop_bad:
            error, is_all = self._faults[0].error, self.changes["dropped"] == self.read
            do = (is_all and error.do) or "correct them, or leave them out: --drop-bad"
            if is_all and error.columns:
                do = "name the keys, as --columns PART=KEY:"
                do += "".join(f"\n{'':12}{as_setting(columns)}" for columns in error.columns)
            raise bad_rows(self._faults, self.changes["dropped"], f"nothing was written; {do}")
        if not self.written:
            raise DataError("No row is left to write.", where=str(self.source), do="see what validation says of it")

    def _add(self, place: Place, before: object, write: Write) -> None:
        """Write a row, unless it is to be left out, cannot be read, or stands there already."""
        where, self.read = place.of(str(self.source)), self.read + 1
        finding = self._options.dropped.get(place)
        if finding is not None:
            self._tell(where, "finding", None if KINDS[finding].is_secret else before, None, reason=finding)
            return
        try:
            if isinstance(before, RowError):
                raise before
            row = parse_row(before, self._options.columns)
            value = row.as_json()
            mended = self._mended(value, where)
            row = row if mended == value else parse_row(mended)
        except RowError as error:
            if len(self._faults) < MOST_FAULTS:
                self._faults.append(Fault(Spot(str(self.source), place), error))
            self._tell(where, "dropped", None if isinstance(before, RowError) else before, None, reason=str(error))
            return
        if value != before:
            self._tell(where, "form", before, value)
        digest = hashlib.blake2b(row.identity().encode("utf-8"), digest_size=16).digest()
        first = self._seen.setdefault(digest, where)
        if first != where:
            self._tell(where, "duplicate", mended, None, reason=f"repeats {first}")
            return
        write(row.as_json())
        self.written += 1

    def _tell(self, where: str, what: str, before: object, after: object, **more: str) -> None:
        """Write a line of the log."""
        record = {"where": where, "what": what, "before": before, "after": after, **more}
        try:
            line = json.dumps(record, ensure_ascii=False)
        except RecursionError:  # it stands here one level deeper than it was read
            line = json.dumps({**record, "before": DEEP}, ensure_ascii=False)
        self._told.write(line + "\n")
        self.changes[what] += 1

    def _mended(self, value: object, where: str, key: str = "") -> object:
        """The value with every text repaired."""
        if isinstance(value, str):
            for what, mend in (("mojibake", fix_encoding), ("control-characters", _without_controls)):
                before, value = value, mend(value)
                if value != before:
                    self._tell(where, what, before, value, key=key)
            return value
        if isinstance(value, dict):
            return {name: self._mended(item, where, f"{key}.{name}".lstrip(".")) for name, item in value.items()}
        if isinstance(value, list):
            return [self._mended(item, where, f"{key}[{place}]") for place, item in enumerate(value)]
        return value


def _without_controls(text: str) -> str:
    """Vertical tabs and form feeds end a line: what they part must not be joined."""
    return ESCAPES.sub(lambda found: "\n" if found[0] in "\v\f" else "", text)


# Writing rows


@contextlib.contextmanager
def row_writer(path: Path, name: Path) -> Iterator[Write]:
    """Write rows to ``path`` in the format of ``name``, one call a row; raises DataError for what it cannot hold."""
    import pyarrow

    suffix, compression = suffix_of(name), COMPRESSIONS.get(name.suffix.casefold())
    if suffix == ".parquet":
        rows = list[Row]()
        yield rows.append
        _write_parquet(path, rows)
        return
    stream: Any = pyarrow.output_stream(str(path), compression=compression)
    with io.TextIOWrapper(stream, encoding="utf-8", newline="\n") as file:
        if suffix in TABLES:
            yield _table_writer(file, "\t" if suffix == ".tsv" else ",")
        elif suffix == ".json":
            before = iter(["[\n"])
            yield lambda row: file.write(next(before, ",\n") + json.dumps(row, ensure_ascii=False))
            file.write("\n]\n")
        else:
            yield lambda row: file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _table_writer(file: TextIO, separator: str) -> Write:
    """Lists and objects become JSON in a cell, which is read again."""
    writer, header = csv.writer(file, delimiter=separator, lineterminator="\n"), list[str]()

    def write(row: Row) -> None:
        if not header:
            header.extend(row)
            writer.writerow(header)
        if not set(row) <= set(header):
            got = f"{', '.join(row)} after {', '.join(header)}"
            raise DataError("A table has the same columns in all rows.", got=got, do=ONE_FORM)
        cells = [row.get(key) for key in header]
        writer.writerow(
            [json.dumps(cell, ensure_ascii=False) if isinstance(cell, list | dict) else cell for cell in cells]
        )

    return write


def _write_parquet(path: Path, rows: list[Row]) -> None:
    """Write the rows, which are in memory, as one table; raises DataError."""
    import pyarrow
    from pyarrow import parquet

    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        table = pyarrow.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    except pyarrow.ArrowException as error:
        said = str(error).splitlines()[0]
        raise DataError(f"The rows are not a table: {said}.", where=str(path), do=ONE_FORM) from None
    parquet.write_table(table, str(path), compression="zstd")
