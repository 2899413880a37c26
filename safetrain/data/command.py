"""The command `safetrain validate`: prints findings as text or JSON, or writes a repaired copy and a log of changes."""

import collections
import itertools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TextIO

from ftfy import fix_encoding

from safetrain.core.errors import ConfigError, DataError
from safetrain.core.formatting import counted, print_text, printable
from safetrain.core.storage.files import write_atomic
from safetrain.data.checks import without_invisible
from safetrain.data.compare import plain_digest
from safetrain.data.files import rows_of, texts_at
from safetrain.data.findings import (
    ERROR,
    MOST_LETTERS,
    MOST_PLACES,
    SHOWN_PLACES,
    Findings,
    Place,
    Spot,
    require_kinds,
    summary,
)
from safetrain.data.forms import Columns, parse_row
from safetrain.data.rows import Row, RowError
from safetrain.data.tokenize import DataSettings, ReadRow
from safetrain.data.validate import Validation, validate

OPEN, CLOSE = "⟦", "⟧"  # around labels
EVERY_PLACE = 2**62
CHANGES = {  # in the log, in the order of the summary
    "form": "rows converted to the usual form, without unused keys",
    "mojibake": "wrongly decoded texts repaired",
    "invisible": "texts cleared of invisible characters, control characters and terminal escapes",
    "duplicate": "exact repeats of an earlier row left out",
    "finding": "rows with a finding named by --drop left out",
    "dropped": "DROPPED: rows that cannot be read, or have nothing to train on",
}


def pieces_of(row: ReadRow) -> list[tuple[str, str | None]]:
    """Split a row's text: each answer comes with its stop token (or ""), other text with None."""
    if row.rendered is None or row.tokens is None:
        return []
    text, pieces, start = row.rendered.text, list[tuple[str, str | None]](), 0
    for span in row.rendered.spans:
        pieces += [(text[start : span.start], None), (text[span.start : span.end], span.closing)]
        start = span.end
    return [*pieces, (text[start:], None)]


def report(paths: Sequence[Path], model: Path, settings: DataSettings, show_mask: int | None, *, as_json: bool) -> int:
    """Validate all files of ``paths`` and print the findings; returns the exit code. Raises SafetrainError."""
    shown_rows, most_places = 3 if show_mask is None else show_mask, MOST_PLACES if as_json else SHOWN_PLACES
    validation = validate(paths, model, settings, shown_rows=shown_rows, most_places=most_places)
    if as_json:
        print(_as_json(validation))
    else:
        file = shlex.quote(str(paths[0])) if len(paths) == 1 and not paths[0].is_dir() else "FILE"
        _print(validation, model, file, show_mask=show_mask is not None)
    return int(any(finding.severity == ERROR for finding in validation.findings))


def fix(paths: Sequence[Path], into: Path, model: Path, settings: DataSettings, drop: str, *, drop_bad: bool) -> int:
    """Write a repaired copy of the file in ``paths`` and print the changes; returns the exit code.

    The copy leaves out rows with the findings in ``drop`` and, with ``drop_bad``, rows that cannot be read. Raises
    ConfigError for an unknown finding.
    """
    if len(paths) != 1 or paths[0].is_dir():
        got = ", ".join(map(str, paths))
        raise ConfigError("--fix repairs one file.", got=got, do="repair one file at a time, each in its own command")
    names = [name.strip().upper() for name in drop.split(",") if name.strip()]
    require_kinds("--drop", names)
    found = validate(paths, model, settings, most_places=EVERY_PLACE).found if names else {}
    dropped = {spot.place: finding.id for finding, spots in found.items() if finding.id in names for spot in spots}
    print_text(Repair(paths[0], into, settings.columns, dropped, drop_bad=drop_bad).summary())
    return 0


def refuse_idle(options: Mapping[str, object], when: str) -> None:
    """Raise ConfigError if an option is set: it has no effect with or without --fix (``when``: "With" or "Without")."""
    idle = [name for name, value in options.items() if value]
    if idle:
        raise ConfigError(f"{when} --fix, {', '.join(idle)} does nothing.", do="leave it out")


def _as_json(validation: Validation) -> str:
    """The sampled rows and all findings, with the texts at the first places of each, as one JSON object."""
    rows = [
        {
            "where": row.spot.text(),
            "trained": [text for text, stop in pieces_of(row) if stop is not None],
            "stops": [stop for _, stop in pieces_of(row) if stop is not None],
            "findings": row.findings,
        }
        for row in validation.rows
    ]
    places = dict[str, dict[Place, str]]()
    for spot in itertools.chain.from_iterable(spots[:SHOWN_PLACES] for spots in validation.found.values()):
        places.setdefault(spot.file, {})[spot.place] = spot.text()
    texts = dict[str, str]()
    for file, named in places.items():
        with suppress(DataError, OSError):  # a finding says why the file cannot be read
            texts |= {named[place]: text for place, text in texts_at(Path(file), named, MOST_LETTERS).items()}
    facts = {"count": validation.count, "noun": validation.noun, "tokens": validation.tokens}
    found = {"labels": validation.labels, "findings": list(map(asdict, validation.findings)), "texts": texts}
    return json.dumps({**facts, **found, "rows": rows}, ensure_ascii=False, indent=2)


def _print(validation: Validation, model: Path, file: str, *, show_mask: bool) -> None:
    """Print rows with their labels marked, then errors, warnings and a count of notes; remedies name the ``file``."""
    for row in validation.rows if show_mask else ():
        print(_masked(row))
    if validation.findings:
        text = summary(validation.findings, "--json lists all")
        print_text(re.sub(r"(?m)(^  do: .*?)\bFILE\b", lambda found: found[1] + file, text))
    rows, trained = counted(validation.count, validation.noun), validation.labels
    print_text(f"{rows}, {counted(validation.tokens, 'token')} ({counted(trained, 'label')})")
    if validation.noun == "document" and trained:
        print_text(f"{validation.label_bytes / trained:.2f} bytes per token; to train on it, set train.method=pretrain")
    if validation.tokens:
        context = f"; the model's context is {validation.context} tokens" if validation.context else ""
        print_text(f"tokenizer: {model}{context}")


def _masked(row: ReadRow) -> str:
    """A row's whole text with its labels between marks; control characters are escaped."""
    if row.tokens is None:
        return printable(f"{row.spot.text()}  cannot be trained on: {', '.join(row.findings)}\n")
    pieces = [piece if stop is None else f"{OPEN}{piece}{CLOSE}" for piece, stop in pieces_of(row)]
    side = "  rejected answer" if row.row is not None and row.row.is_rejected else ""
    return printable(f"{row.spot.text()}{side}\n{''.join(pieces)}\n")


@dataclass
class Repair:
    """Writes a repaired copy of a file as JSONL, and a log, when constructed.

    ``dropped`` maps rows to leave out to their findings. Rows that cannot be read are an error, unless ``drop_bad``.
    """

    source: Path
    into: Path
    columns: Columns | None = None
    dropped: Mapping[Place, str] = field(default_factory=dict)
    drop_bad: bool = False

    def __post_init__(self) -> None:
        """Write the log and then the copy.

        Raises ConfigError if one of them exists or ``into`` is not named .jsonl, DataError for unreadable rows.
        """
        into = self.into
        if into.suffix != ".jsonl":
            raise ConfigError("The copy is a JSONL file.", got=str(into), do="choose a name that ends in .jsonl")
        self.log = into.with_name(f"{into.name}.log.jsonl")
        do = f"choose another name; a log without {into.name} was left by an interrupted repair: remove it"
        for path in (into, self.log):
            if path.exists() or path.is_symlink():
                raise ConfigError("The output file already exists.", where=path, do=do)
        self.read, self.written, self.changes = 0, 0, collections.Counter[str]()  # rows read and written
        self._findings = Findings(may_refuse=not self.drop_bad)
        self._first_places: dict[int, str] = {}  # of the first row with each digest
        self._log_file: TextIO
        try:
            write_atomic(into, lambda rows: write_atomic(self.log, partial(self._write, rows)))
        except OSError as error:
            raise DataError(f"The repaired copy cannot be written: {error.strerror}.", where=into, do=do) from None

    def summary(self) -> str:
        """A summary of the changes for a terminal."""
        lines = [f"{self.into}: wrote {self.written} of {counted(self.read, 'row')}; {self.source} is unchanged"]
        lines += [f"  {self.changes[kind]:>8,}  {words}" for kind, words in CHANGES.items() if self.changes[kind]]
        return "\n".join([*lines, f"  every change, with before and after: {self.log}"])

    def _write(self, rows: Path, log: Path) -> None:
        with (
            rows.open("w", encoding="utf-8", newline="\n") as file,
            log.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as self._log_file,
        ):
            for place, value in rows_of(self.source, documents=True):
                self.read += 1
                row = self._repaired(Spot(str(self.source), place), value)
                if row is not None:
                    file.write(json.dumps(row.as_json(), ensure_ascii=False) + "\n")
                    self.written += 1
        self._findings.refuse_errors()
        if not self.written:
            raise DataError("No row is left to write.", where=self.source, do="check it: safetrain validate FILE")

    def _repaired(self, spot: Spot, before: object) -> Row | None:
        """Repair a row; None if it is dropped, cannot be read, or repeats an earlier one."""
        where, finding = spot.text(), self.dropped.get(spot.place)
        before = before.as_json() if isinstance(before, Row) else before
        if finding is not None:
            self._log(where, "finding", None if finding == "SECRETS" else before, None, reason=finding)
            return None
        try:
            row = parse_row(before, self.columns)
            value = row.as_json()
            mended = self._mended(value, where)
            row = row if mended == value else parse_row(mended)
        except RowError as error:
            self._findings.add_error(spot, error)
            self._log(where, "dropped", None if isinstance(before, RowError) else before, None, reason=str(error))
            return None
        if value != before:
            self._log(where, "form", before, value)
        first = self._first_places.setdefault(plain_digest(row.identity()), where)
        if first != where:
            self._log(where, "duplicate", mended, None, reason=f"repeats {first}")
        return row if first == where else None

    def _log(self, where: str, what: str, before: object, after: object, **more: str) -> None:
        record = {"where": where, "what": what, "before": before, "after": after, **more}
        self._log_file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self.changes[what] += 1

    def _mended(self, value: object, where: str, key: str = "") -> object:
        if isinstance(value, dict):
            return {name: self._mended(item, where, f"{key}.{name}".lstrip(".")) for name, item in value.items()}
        if isinstance(value, list):
            return [self._mended(item, where, f"{key}[{place}]") for place, item in enumerate(value)]
        if not isinstance(value, str):
            return value
        for what, mend in (("mojibake", fix_encoding), ("invisible", without_invisible)):
            before, value = value, mend(value)
            if value != before:
                self._log(where, what, before, value, key=key)
        return value
