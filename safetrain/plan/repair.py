"""`safetrain validate FILE --fix OUT`: a repaired copy of a file, and a log that tells every change. FILE stays."""

import collections
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

from ftfy import fix_encoding

from safetrain.core.data.foreign_rows import Columns
from safetrain.core.data.forms import Container, FileForm, recognised
from safetrain.core.data.jsonl import bad_rows, decoded, located
from safetrain.core.data.row_blocks import Raw, Value, blocks_of
from safetrain.core.data.rows import RowError, parse_row
from safetrain.core.data.strict_json import DEEP
from safetrain.core.errors import ConfigError, DataError
from safetrain.core.formatting import counted
from safetrain.core.storage.files import write_atomic

FORM, FILE, MOJIBAKE, CONTROLS, DUPLICATE, DROPPED = (
    "form", "file", "mojibake", "control-characters", "duplicate", "dropped",
)  # fmt: skip
WORDS = {  # in the order of the summary
    FILE: "the file itself: another container, compression, encoding or byte order mark",
    FORM: "brought to the usual form, without keys that nothing reads",
    MOJIBAKE: "text that was decoded wrongly before, read rightly",
    CONTROLS: "control characters and terminal escapes taken out",
    DUPLICATE: "exact repeats of an earlier row left out",
    DROPPED: "DROPPED: they cannot be read, or nothing can be learnt in them",
}
ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"
)  # whole sequences, then single characters
MOST_FAULTS = 10_000
BROKEN_OFF = "it is of a repair that was broken off: remove it"


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


def repair(
    source: Path,
    into: Path,
    columns: Columns | None = None,
    encoding: str | None = None,
    *,
    drop_bad: bool = False,
    keep_mojibake: bool = False,
) -> Repaired:
    """Write the log of ``into`` and then ``into``; raises ConfigError where one exists, DataError.

    Rows that cannot be read are an error, unless ``drop_bad`` says to leave them out.
    """
    if not into.name:
        raise ConfigError("The file to write has no name.", got=str(into), do="name a file that does not exist yet")
    log = into.with_name(f"{into.name}.log.jsonl")
    for path, do in ((into, "choose another name"), (log, f"choose another name; without {into.name}, {BROKEN_OFF}")):
        if path.exists() or path.is_symlink():
            raise ConfigError("The file to write exists already.", where=str(path), do=do)
    form = recognised(source, encoding)
    made, states = list[Repaired](), list[str]()

    def write_both(text: Path) -> None:
        write_log = partial(_write, source, form, text, columns, encoding, drop_bad, keep_mojibake)
        write_atomic(log, lambda told: made.append(write_log(told)), over=False)
        states.append("logged")

    try:
        write_atomic(into, write_both, over=False)
        states.append("written")
    except FileExistsError as error:
        where = str(error.filename2 or error.filename)
        raise ConfigError("The file to write has come into being meanwhile.", where=where) from None
    except OSError as error:
        raise DataError(f"The repaired copy cannot be written: {error.strerror}.", where=str(into)) from None
    finally:
        if states == ["logged"]:
            log.unlink(missing_ok=True)
    return Repaired(source, into, log, made[0].read, made[0].written, made[0].changes, columns is not None)


def summary(done: Repaired) -> str:
    """What was done, for a terminal."""
    lines = [f"{done.into}: {done.written} of {counted(done.read, 'row')} of {done.source}, which is as it was"]
    lines += [f"  {done.changes[kind]:>8,}  {words}" for kind, words in WORDS.items() if done.changes.get(kind)]
    if done.by_columns:
        lines.append("  its keys are the usual ones: set data.columns=null for it")
    return "\n".join([*lines, f"  every change, with before and after: {done.log}"])


def _write(
    source: Path,
    form: FileForm,
    into: Path,
    columns: Columns | None,
    encoding: str | None,
    drop_bad: bool,
    keep_mojibake: bool,
    log: Path,
) -> Repaired:
    with (
        into.open("w", encoding="utf-8", newline="\n") as out,
        log.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as told,
    ):
        writer = _Writer(source, out, told, columns, keep_mojibake)
        if form != FileForm(Container.LINES):
            writer.tell(str(source), FILE, str(form), str(Container.LINES))
        for block in blocks_of(source, encoding):
            for number, raw in block.rows:
                writer.add(number, raw)
    if writer.faults and not drop_bad:
        error = bad_rows(writer.faults, writer.changes[DROPPED])
        raise DataError(error.what, do="correct them, or leave them out: --drop-bad; nothing was written")
    if not writer.written:
        raise DataError("No row is left to write.", where=str(source), do="see what validation says of the file")
    return Repaired(source, into, log, writer.read, writer.written, dict(writer.changes))


class _Writer:
    """Repairs one row after the other."""

    def __init__(self, source: Path, out: TextIO, log: TextIO, columns: Columns | None, keep: bool) -> None:
        self.faults: list[str] = []
        self.read = self.written = 0
        self.changes = collections.Counter[str]()
        self._source, self._out, self._log, self._columns = source, out, log, columns
        self._keep_mojibake = keep
        self._seen: dict[bytes, int] = {}

    def add(self, number: int, raw: Raw) -> None:
        """Write a row, unless it cannot be read or stands there already; tell what was changed."""
        self.read += 1
        where = f"{self._source}:{number}"
        before: object = raw.value if isinstance(raw, Value) else raw if isinstance(raw, str) else None
        try:
            before = decoded(raw)
            row = parse_row(before, self._columns)
            value = row.as_json()
            mended = self._mended(value, where)
            if mended is not value:
                row = parse_row(mended)
        except RowError as error:
            if len(self.faults) < MOST_FAULTS:
                self.faults.append(located(where, error))
            self.tell(where, DROPPED, before, None, reason=str(error))
            return
        if value != before:
            self.tell(where, FORM, before, value)
        digest = hashlib.blake2b(row.identity().encode("utf-8"), digest_size=16).digest()
        first = self._seen.setdefault(digest, number)
        if first != number:
            self.tell(where, DUPLICATE, mended, None, reason=f"stands in {self._source}:{first}")
            return
        self._out.write(json.dumps(mended, ensure_ascii=False) + "\n")
        self.written += 1

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
