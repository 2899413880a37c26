"""Writes a repaired copy of a file, in the format of its name, and a log of every change."""

import collections
import csv
import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ftfy import fix_encoding

from safetrain.core.errors import ConfigError, DataError
from safetrain.core.formatting import counted
from safetrain.core.storage.files import write_atomic
from safetrain.data.checks import without_invisible
from safetrain.data.files import rows_of
from safetrain.data.findings import Findings, Severities, Spot
from safetrain.data.forms import Columns, parse_row
from safetrain.data.json_rows import Place, RowError

WORDS = {  # kinds of changes in the log, in the order of the summary
    "form": "rows converted to the usual form, without unused keys",
    "mojibake": "wrongly decoded texts repaired",
    "invisible": "texts without invisible and control characters, and terminal escapes",
    "duplicate": "exact repeats of an earlier row left out",
    "finding": "rows with the findings in --drop left out",
    "dropped": "DROPPED: rows that cannot be read, or have nothing to train on",
}
FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


def repair(
    source: Path,
    into: Path,
    columns: Columns | None = None,
    dropped: Mapping[Place, str] | None = None,
    *,
    drop_bad: bool = False,
) -> "Repair":
    """Write the log of ``into`` and then ``into``, without the ``dropped`` rows, each dropped for a finding.

    Rows that cannot be read are an error, unless ``drop_bad``. Raises ConfigError if ``into`` or its log already exists
    or its suffix is unknown; DataError.
    """
    copy = Repair(source, into, columns, dropped or {}, drop_bad=drop_bad)
    do = f"choose another name; a log without {into.name} was left by an interrupted repair: remove it"
    for path in (into, copy.log):
        if path.exists() or path.is_symlink():
            raise ConfigError("The output file already exists.", where=str(path), do=do)
    try:
        write_atomic(into, copy.write, over=False)
    except OSError as error:
        raise DataError(f"The repaired copy cannot be written: {error.strerror}.", where=str(into), do=do) from None
    return copy


class Repair:
    """Repairs a file row by row, counts the changes and logs each."""

    def __init__(
        self, source: Path, into: Path, columns: Columns | None, dropped: Mapping[Place, str], *, drop_bad: bool
    ) -> None:
        """Raises ConfigError for an unknown suffix."""
        if into.suffix not in FORMATS:
            expected = f"a name that ends in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
            raise ConfigError("A copy cannot be written in the format of this name.", got=str(into), expected=expected)
        self.source, self.into, self.log = source, into, into.with_name(f"{into.name}.log.jsonl")
        self.read, self.written = 0, 0  # rows
        self.changes = collections.Counter[str]()
        self._columns, self._dropped, self._drop_bad = columns, dropped, drop_bad
        self._findings = Findings(Severities())
        self._rows: TextIO = io.StringIO()
        self._log_file: TextIO = io.StringIO()
        self._first_places: dict[bytes, str] = {}  # of the first row with each digest

    def summary(self) -> str:
        """A summary of the changes for a terminal."""
        lines = [f"{self.into}: wrote {self.written} of {counted(self.read, 'row')}; {self.source} is unchanged"]
        lines += [f"  {self.changes[kind]:>8,}  {words}" for kind, words in WORDS.items() if self.changes[kind]]
        if self._columns is not None:
            lines.append("  the copy has the usual keys: set data.columns=null for it")
        return "\n".join([*lines, f"  every change, with before and after: {self.log}"])

    def write(self, target: Path) -> None:
        """Write the log and the repaired rows; raises DataError if rows cannot be read, or none are left."""
        write_atomic(self.log, lambda log: self._write(target, log), over=False)

    def _write(self, target: Path, log: Path) -> None:
        with (
            target.open("w", encoding="utf-8", newline="\n") as self._rows,
            log.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as self._log_file,
        ):
            for place, value in rows_of(self.source):
                self._add(place, value)
        if not self._drop_bad:
            self._findings.refuse_errors()
        if not self.written:
            raise DataError("No row is left to write.", where=str(self.source), do="check it: safetrain validate FILE")
        if self.into.suffix != FORMATS[0]:
            with target.open(encoding="utf-8", newline="\n") as written:
                rows = [json.loads(line) for line in written]
            _write_rows(rows, target, self.into.suffix)

    def _add(self, place: Place, before: object) -> None:
        """Write a row, unless it is to be dropped, cannot be read, or repeats an earlier one."""
        spot, self.read = Spot(str(self.source), place), self.read + 1
        where = spot.text()
        finding = self._dropped.get(place)
        if finding is not None:
            self._log(where, "finding", None if finding == "SECRETS" else before, None, reason=finding)
            return
        try:
            row = parse_row(before, self._columns)
            value = row.as_json()
            mended = self._mended(value, where)
            row = row if mended == value else parse_row(mended)
        except RowError as error:
            self._findings.add_unreadable(spot, error)
            self._log(where, "dropped", None if isinstance(before, RowError) else before, None, reason=str(error))
            return
        if value != before:
            self._log(where, "form", before, value)
        digest = hashlib.blake2b(row.identity().encode("utf-8"), digest_size=16).digest()
        first = self._first_places.setdefault(digest, where)
        if first != where:
            self._log(where, "duplicate", mended, None, reason=f"repeats {first}")
            return
        self._rows.write(json.dumps(row.as_json(), ensure_ascii=False) + "\n")
        self.written += 1

    def _log(self, where: str, what: str, before: object, after: object, **more: str) -> None:
        """Write a line of the log."""
        record = {"where": where, "what": what, "before": before, "after": after, **more}
        self._log_file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self.changes[what] += 1

    def _mended(self, value: object, where: str, key: str = "") -> object:
        """Repair every text in a value."""
        if isinstance(value, str):
            for what, mend in (("mojibake", fix_encoding), ("invisible", without_invisible)):
                before, value = value, mend(value)
                if value != before:
                    self._log(where, what, before, value, key=key)
            return value
        if isinstance(value, dict):
            return {name: self._mended(item, where, f"{key}.{name}".lstrip(".")) for name, item in value.items()}
        if isinstance(value, list):
            return [self._mended(item, where, f"{key}[{place}]") for place, item in enumerate(value)]
        return value


def _write_rows(rows: list[dict[str, Any]], target: Path, suffix: str) -> None:
    """Write all rows in the format of ``suffix``. In a CSV or TSV cell, lists and objects become JSON."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist([{key: row.get(key) for key in columns} for row in rows]), target)
        return
    with target.open("w", encoding="utf-8", newline="") as file:
        if suffix in (".csv", ".tsv"):
            table = csv.writer(file, delimiter="\t" if suffix == ".tsv" else ",", lineterminator="\n")
            table.writerows([columns, *([_cell(row.get(key)) for key in columns] for row in rows)])
        else:
            file.write("[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n")


def _cell(value: object) -> object:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value
