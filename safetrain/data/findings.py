"""The kinds of findings in data, each with id, severity, message and remedy, and a counter of findings."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from safetrain.core.errors import ConfigError, DataError
from safetrain.core.formatting import counted, printable
from safetrain.core.records.reports import Finding
from safetrain.data.rows import RowError

ERROR, WARNING, NOTE = "error", "warning", "note"
ORDER = (ERROR, WARNING, NOTE)
SHOWN_PLACES, MOST_PLACES, SHOWN_DETAILS = 5, 10_000, 12
SCREEN_FINDINGS, MOST_LETTERS = 9, 600
MOST_DETAILS, OTHERS = 50, "and others, for different reasons"
FIX = "safetrain validate FILE --fix OUT.jsonl"
DROP = FIX + " --drop {id} writes a copy without these rows"
IGNORE = "ignore if intended"


@dataclass(frozen=True)
class Kind:
    """A kind of finding. In ``message``, {rows} becomes "1 row" or "3 rows"."""

    severity: str
    message: str
    remedy: str
    fixed: bool = False  # an error that cannot be downgraded
    by_detail: bool = False  # one finding for each detail
    lists: bool = False  # one finding that lists all details


KINDS = {
    # files and keys
    "FILE-UNREADABLE": Kind(ERROR, "{detail}", "write its rows as JSONL", fixed=True, by_detail=True),
    "FILES-UNREAD": Kind(
        WARNING, "in the data folder, {detail}",
        "name it after a split (train, valid, test), merge it into a file that is read, or remove it", by_detail=True),
    "ROW-UNREADABLE": Kind(
        ERROR, "{rows} cannot be read: {detail}",
        f"correct these rows, or leave them out: {FIX} --drop-bad",
        fixed=True, by_detail=True),
    "KEYS-IGNORED": Kind(NOTE, "unused keys in {rows}: {detail}", IGNORE, lists=True),
    "COLUMNS-TAKEN": Kind(NOTE, "keys read in {rows}: {detail}", f"{IGNORE}; else set data.columns", by_detail=True),
    "ARGUMENTS-NOT-JSON": Kind(
        WARNING, "the arguments of a tool call in {rows} are text, not a JSON object: {detail}",
        "write them as a JSON object; ignore if the tool takes plain text"),
    "EMPTY-MESSAGE": Kind(WARNING, "a message is empty in {rows}", DROP),
    "ENDS-WITH-USER": Kind(WARNING, "the user's last message in {rows} has no answer", "end these rows with an answer"),
    # limits of the model and its template
    "TEMPLATE-REFUSES": Kind(
        ERROR, "the model's chat template refuses {rows}: {detail}",
        "change these rows to what the template accepts, or use another model", fixed=True, by_detail=True),
    "NO-LABELS": Kind(ERROR, "no token to train on in {rows}: {detail}", DROP, fixed=True, by_detail=True),
    "TOKEN-BEYOND-EMBEDDING": Kind(
        ERROR, "the model has no embedding for the token {detail} in {rows}: only its tokenizer was enlarged",
        "use the tokenizer that belongs to the model", fixed=True),
    "BEYOND-CONTEXT": Kind(
        WARNING, "the model's context would cut {rows}: {detail}",
        "shorten or split these rows, or use a model with a longer context"),
    "ANSWER-LOST": Kind(
        ERROR, "the model's chat template does not write {detail} in {rows}: the model would not learn it",
        "use a model whose template writes it, or remove these rows", by_detail=True),
    "TEXT-LOST": Kind(
        WARNING, "the model's chat template leaves out {detail} in {rows}",
        "use a model whose template writes it, or remove it; ignore for thinking in earlier answers", by_detail=True),
    "THINKING-EMPTY": Kind(
        WARNING, "the chat template writes empty thinking into answers of {rows}: the model would learn not to think",
        "give the rows their thinking; ignore if the model should not think"),
    "STOP-MISSING": Kind(
        WARNING, "the chat template closes an answer in {rows} with {detail}: the model would not learn to stop",
        "ignore: safetrain adds a stop token after the last answer", by_detail=True),
    "STOP-IN-TEXT": Kind(WARNING, "a message in {rows} contains the text {detail}, which becomes a stop token", DROP),
    # comparisons of rows
    "QUESTION-IN-TEST": Kind(
        ERROR, "{rows} in test with the same question as a row in train: the result would measure memorization",
        "remove them from train or from test, or give one file and let safetrain split it"),
    "SPLITS-OVERLAP": Kind(
        WARNING, "{rows} in {detail}",
        "remove them from one split, or give one file: safetrain then keeps them together", by_detail=True),
    "NEAR-COPIES": Kind(NOTE, "{rows} in train with nearly the same question as another row{detail}", IGNORE),
    "SPLIT-SIZE": Kind(
        WARNING, "{detail}: rows that ask nearly the same stay together",
        "set data.near_duplicate_similarity=1 (only equal questions stay together), or change data.held_out_fraction",
        by_detail=True),
    "REPEATED-ROWS": Kind(
        WARNING, "{rows} in train identical to an earlier row", f"{FIX} keeps one of each"),
    "ANSWERS-DIFFER": Kind(
        WARNING, "an earlier question is repeated with a different answer in {rows}",
        "keep one answer for each question, or ignore if several are right"),
    "ANSWER-DOMINATES": Kind(WARNING, "{rows} share {detail}: the model may say little else", "keep fewer of these"),
    # preference pairs
    "NO-PREFERENCE": Kind(
        ERROR, "the chosen and rejected answers of {rows} are identical{detail}: there is nothing to prefer",
        DROP, by_detail=True),
    "PAIRS-OPPOSED": Kind(
        WARNING, "the same two answers are preferred the other way round in {rows}", "keep one of the two pairs"),
    # text of rows
    "REFUSALS": Kind(WARNING, "an answer in {rows} is a refusal, or speaks 'as an AI model'", DROP),
    "FOREIGN-MARKERS": Kind(
        WARNING, "the literal chat marker {detail} in {rows} would be trained on as plain text",
        "turn these rows into chats (messages with roles), or remove the markers", by_detail=True),
    "PLACEHOLDERS": Kind(WARNING, "an unfilled placeholder such as {detail} in {rows}", DROP),
    "MOJIBAKE": Kind(
        WARNING, "text that was decoded wrongly in {rows}: {detail}",
        f"{FIX} repairs most; characters that became U+FFFD are lost: export the file again"),
    "INVISIBLE-CHARACTERS": Kind(
        WARNING, "invisible or control characters such as {detail} in {rows}; they get tokenized",
        f"{FIX} writes a copy without them"),
    "SECRETS": Kind(
        WARNING, "{detail} in {rows}: a model may repeat it to anyone", f"revoke it if it is real. {DROP}", lists=True),
    "PERSONAL-DATA": Kind(NOTE, "personal data in answers of {rows}: {detail}", f"{IGNORE}. {DROP}", lists=True),
    "ANSWERS-CUT": Kind(
        NOTE, "an answer breaks off within a sentence in {rows}, where nearly all others end: a model may learn this",
        f"export these answers in full. {DROP}"),
}  # fmt: skip


class Place(NamedTuple):
    """The line in which a row begins, and its number in an array or table; both from 1, or 0 if there is none."""

    line: int = 0
    row: int = 0

    def of(self, name: str, column: int = 0) -> str:
        """Format as ``a.jsonl:3`` (editors open this), ``a.csv, row 2 (line 3)``, ``a.parquet, row 2`` or ``a.csv``."""
        if self.row:
            return f"{name}, row {self.row}{f' (line {self.line})' if self.line else ''}"
        return ":".join([name, *(str(number) for number in (self.line, column) if number)])


class Spot(NamedTuple):
    """The place of a finding: a file, the row in it, and the row that it matches (``beside``)."""

    file: str
    place: Place = Place()
    beside: "Spot | None" = None
    column: int = 0  # position in the line, if known

    def text(self) -> str:
        """Format as ``a.jsonl:62:14``, or with the matching row: ``a.jsonl:62 matches a.jsonl:61``."""
        own = self.place.of(self.file, self.column)
        return own if self.beside is None else f"{own} matches {self.beside.text()}"


def checked_downgrade(names: Iterable[str]) -> tuple[str, ...]:
    """Check data.downgrade, which turns errors into warnings and warnings into notes.

    Raises ConfigError for an unknown name, and for an error that cannot be downgraded.
    """
    names = tuple(names)
    require_kinds("data.downgrade", names)
    if fixed := [name for name in names if KINDS[name].fixed]:
        raise ConfigError(f"data.downgrade: training is impossible with {', '.join(fixed)}.", do="correct the data")
    return names


def require_kinds(where: str, names: Iterable[str]) -> None:
    """Raise ConfigError for a name that is not a kind of finding."""
    unknown = ", ".join(name for name in names if name not in KINDS)
    if unknown:
        expected = f"one of {', '.join(sorted(KINDS))}"
        raise ConfigError(
            f"{where}: unknown finding {unknown}.", expected=expected, do="correct the name, or remove it"
        )


@dataclass
class _Tally:
    """The count of one finding, its details and its first places."""

    count: int = 0
    details: dict[str, None] = field(default_factory=dict)  # the first MOST_DETAILS, each once
    where: list[Spot] = field(default_factory=list)
    last: Sequence[Spot] = ()
    remedy: str = ""

    def finding(self, identifier: str, severity: str) -> Finding:
        kind, more = KINDS[identifier], ", …" if len(self.details) > SHOWN_DETAILS else ""
        detail = ", ".join(sorted(self.details)[:SHOWN_DETAILS]) + more if kind.lists else next(iter(self.details))
        message = kind.message.format(rows=counted(self.count, "row"), detail=detail)
        where, remedy = tuple(spot.text() for spot in self.where), self.remedy or kind.remedy.format(id=identifier)
        return Finding(identifier, severity, self.count, where, message, remedy)


@dataclass
class Findings:
    """Collects findings row by row, with the first ``most_places`` places of each."""

    downgrade: Sequence[str] = ()  # the kinds that are one severity lower
    most_places: int = SHOWN_PLACES
    may_refuse: bool = True  # whether refuse_errors raises
    tallies: dict[tuple[str, str], _Tally] = field(default_factory=dict)

    def add(
        self, identifier: str, detail: str = "", count: int = 1, where: Sequence[Spot] = (), remedy: str = ""
    ) -> None:
        """Count a finding in ``count`` rows, the first at ``where``; ``remedy`` replaces the usual one."""
        key = (identifier, detail if KINDS[identifier].by_detail else "")
        if key not in self.tallies and sum(other == identifier for other, _ in self.tallies) >= MOST_DETAILS:
            key, detail, remedy = (identifier, OTHERS), OTHERS, ""
        tally = self.tallies.setdefault(key, _Tally())
        if len(tally.details) < MOST_DETAILS:
            tally.details[detail] = None
        if where and tally.last == where:
            return  # a row counts once, even with several details
        tally.last = where
        tally.count += count
        tally.where += where[: self.most_places - len(tally.where)]
        tally.remedy = remedy or tally.remedy

    def add_error(self, spot: Spot, error: RowError) -> None:
        """Count a row that cannot be read or rendered."""
        self.add(error.id, str(error), where=[spot._replace(column=error.column)], remedy=error.do)

    def found(self) -> dict[Finding, list[Spot]]:
        """All findings with their places, sorted by severity and id, so that equal data gives equal reports."""
        grades = {name: ORDER.index(kind.severity) + (name in self.downgrade) for name, kind in KINDS.items()}
        keys = sorted((min(grades[key[0]], 2), key) for key in self.tallies)
        return {self.tallies[key].finding(key[0], ORDER[grade]): self.tallies[key].where for grade, key in keys}

    def refuse_errors(self) -> None:
        """Raise one DataError that lists all errors, if there are any and ``may_refuse`` is set."""
        errors = [finding for finding in self.found() if finding.severity == ERROR]
        if errors and self.may_refuse:
            what = f"The data has errors:\n{summary(errors, 'correct these first')}"
            raise DataError(what, do="see above; nothing was written")


def summary(findings: Sequence[Finding], all_in: str) -> str:
    """Errors and warnings for a terminal, worst first, and the number of notes; ``all_in`` says where to find all."""
    grave = [finding for finding in findings if finding.severity != NOTE]
    grave.sort(key=lambda finding: (ORDER.index(finding.severity), -finding.count))
    lines = list[str]()
    for finding in grave[:SCREEN_FINDINGS]:
        lines.append(_one_line(f"{finding.severity}: {finding.message} [{finding.id}]"))
        where, more = "; ".join(finding.where[:3]), "; …" if finding.count > 3 else ""
        lines += [_one_line(f"  where:    {where}{more}")] if where else []
        lines.append(f"  do:       {printable(finding.remedy)}")
    if len(grave) > SCREEN_FINDINGS:
        lines.append(f"and {counted(len(grave) - SCREEN_FINDINGS, 'more finding')} ({all_in})")
    notes = sorted({finding.id for finding in findings if finding.severity == NOTE})
    if notes:
        lines.append(f"{counted(len(notes), 'note')}: {', '.join(notes)} ({all_in})")
    return "\n".join(lines)


def _one_line(text: str) -> str:
    """Shorten text from data to one printable line, without terminal escapes."""
    safe = printable(text).replace("\n", r"\n").replace("\t", r"\t")
    return safe if len(safe) <= MOST_LETTERS else f"{safe[: MOST_LETTERS - 1]}…"
