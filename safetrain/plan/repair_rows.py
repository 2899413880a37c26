"""Repairs rows one after the other, writes them as JSONL, and tells every change in a log."""

import collections
import hashlib
import json
import re
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from ftfy import fix_encoding

from safetrain.core.data.column_guess import ColumnGuess
from safetrain.core.data.foreign_rows import Columns, UnknownKeysError
from safetrain.core.data.jsonl import Fault, decoded, located
from safetrain.core.data.places import Place
from safetrain.core.data.row_blocks import Raw, Value
from safetrain.core.data.rows import RowError, parse_row
from safetrain.core.data.strict_json import DEEP

FORM, FILE, MOJIBAKE, CONTROLS, DUPLICATE, DROPPED = (
    "form", "file", "mojibake", "control-characters", "duplicate", "dropped",
)  # fmt: skip
ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"
)  # whole sequences, then single characters
MOST_FAULTS = 10_000


class RowRepair:
    """Repairs one row after the other, of one file after the other."""

    def __init__(self, log: TextIO, columns: Columns | None, *, keep_mojibake: bool) -> None:
        self.faults: list[Fault] = []
        self.read = 0
        self.written = collections.Counter[str]()  # by split
        self.changes = collections.Counter[str]()
        self.guess = ColumnGuess()
        self._log, self._columns, self._keep_mojibake = log, columns, keep_mojibake
        self._seen: dict[str, dict[bytes, int]] = {}  # of each split: the first row that says it
        self._sources: list[Path] = []
        self._files, self._lines, self._rows = array("I"), array("I"), array("I")  # where each row stands

    def add(self, source: Path, split: str, place: Place, raw: Raw, out: TextIO) -> None:
        """Write a row, unless it cannot be read or its split has it already; tell what was changed."""
        number = self._numbered(source, place)
        where = place.of(str(source))
        before: object = raw.value if isinstance(raw, Value) else raw if isinstance(raw, str) else None
        try:
            before = decoded(raw)
            row = parse_row(before, self._columns)
            value = row.with_group()
            mended = self._mended(value, where)
            if mended is not value:
                row = parse_row(mended)
        except RowError as error:
            if len(self.faults) < MOST_FAULTS:
                self.faults.append(located(source, place, error))
            if isinstance(error, UnknownKeysError):
                self.guess.add(error.row)
            self.tell(where, DROPPED, before, None, reason=str(error))
            return
        if value != before:
            self.tell(where, FORM, before, value)
        digest = hashlib.blake2b(row.identity().encode("utf-8"), digest_size=16).digest()
        first = self._seen.setdefault(split, {}).setdefault(digest, number)
        if first != number:
            self.tell(where, DUPLICATE, mended, None, reason=f"repeats {self._where(first)}")
            return
        out.write(json.dumps(mended, ensure_ascii=False) + "\n")
        self.written[split] += 1

    def _numbered(self, source: Path, place: Place) -> int:
        """The row's number among all that were read."""
        if source not in self._sources[-1:]:
            self._sources.append(source)
        self._files.append(len(self._sources) - 1)
        self._lines.append(place.line)
        self._rows.append(place.row)
        self.read += 1
        return self.read - 1

    def _where(self, number: int) -> str:
        return Place(self._lines[number], self._rows[number]).of(str(self._sources[self._files[number]]))

    def tell(self, where: str, what: str, before: object, after: object, **more: str) -> None:
        """One line of the log."""
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
            if not self._keep_mojibake:
                value = self._mended_text(value, fix_encoding, where, key, MOJIBAKE)
            return self._mended_text(value, _without_controls, where, key, CONTROLS)
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
