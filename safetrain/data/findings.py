"""The kinds of findings in data: each has an id, a severity, a message and a remedy, and is counted with its places."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from safetrain.core.errors import ConfigError, DataError
from safetrain.core.formatting import counted, printable
from safetrain.core.records.reports import Finding
from safetrain.data.containers import Place

ERROR, WARNING, NOTE = "error", "warning", "note"
ORDER = (ERROR, WARNING, NOTE)
SHOWN_PLACES, MOST_PLACES, SHOWN_DETAILS = 5, 10_000, 12
SCREEN_LINES, MOST_LETTERS = 30, 600
MOST_DETAILS, OTHERS = 50, "and others, each for a reason of its own"
OTHER_MODEL = "use a model whose template writes it, or remove it from the rows"
APPENDED = "ignore: data.append_end=true, as shipped, trains a stop token after the last answer"
CONTEXT = "shorten or split these rows, or use a model with a longer context"
DROP = "safetrain validate FILE --fix OUT --drop {id} writes a copy without these rows"


@dataclass(frozen=True)
class Kind:
    """A kind of finding. ``message`` has {rows} and {detail}. ``fixed``: an error that no key can make a warning."""

    severity: str
    message: str
    remedy: str
    fixed: bool = False
    by_detail: bool = False  # one finding for each detail
    lists: bool = False  # one finding, in which the details are listed
    has_examples: bool = False  # a detail ends with an example in brackets, which makes it no other detail
    beside: str = ""  # the verb between a row's place and that of the row it is compared with
    of_rows: bool = True  # whether its places are rows, which --drop can leave out
    is_secret: bool = False  # whether its rows stay out of the log of a repair


KINDS = {
    # files and keys
    "FILE-UNREADABLE": Kind(ERROR, "{detail}", "write its rows as JSONL", fixed=True, by_detail=True, of_rows=False),
    "FILES-UNREAD": Kind(
        WARNING, "in the data folder, {detail}",
        "rename it to a split, merge it into the file that is read, or remove it", by_detail=True, of_rows=False,
    ),
    "ROW-UNREADABLE": Kind(ERROR, "{detail}", "correct these rows, or leave them out: --fix OUT --drop-bad",
                           fixed=True, by_detail=True),
    "KEYS-IGNORED": Kind(NOTE, "unused keys in {rows}: {detail}", "ignore if intended", lists=True),
    "COLUMNS-TAKEN": Kind(
        NOTE, "keys read in {rows}: {detail}", "ignore if intended; otherwise set data.columns", by_detail=True
    ),
    "SPLIT-KEY-UNREAD": Kind(
        WARNING, "{rows} name a split in the key 'split', which is not used: {detail}",
        "write a file for each split into one folder: train.jsonl, valid.jsonl, test.jsonl",
        by_detail=True, of_rows=False,
    ),
    "EMPTY-MESSAGE": Kind(WARNING, "a message of {rows} is empty", DROP),
    "ENDS-WITH-USER": Kind(
        WARNING, "{rows} end with the user: what follows the last answer is not trained", "end them with an answer"
    ),
    # what the model cannot take
    "TEMPLATE-REFUSES": Kind(
        ERROR, "the model's chat template refuses {rows}: {detail}",
        "write these rows as the template wants them, or use another model", fixed=True, by_detail=True,
    ),
    "TEMPLATE-SANDBOX": Kind(
        ERROR, "the model's chat template cannot run in transformers' sandbox; the data is not at fault: {detail}",
        "use another copy of the model, or a corrected chat_template.jinja", fixed=True, by_detail=True,
    ),
    "NO-LABELS": Kind(ERROR, "no token to train in {rows}: {detail}", DROP, fixed=True, by_detail=True),
    "TOKEN-BEYOND-EMBEDDING": Kind(
        ERROR, "the model has no embedding for the token {detail} in {rows}: its tokenizer was enlarged, the model "
        "was not", "use the tokenizer that belongs to the model", fixed=True,
    ),
    "BEYOND-CONTEXT": Kind(WARNING, "{rows} are longer than the model's context and would be cut: {detail}", CONTEXT),
    "ANSWER-LOST": Kind(
        ERROR, "this model's chat template does not write the answers of {rows}: they would not be trained", OTHER_MODEL
    ),
    "CALL-LOST": Kind(
        ERROR, "this model's chat template does not write all tool calls of {rows}: an answer would be trained without "
        "its call", OTHER_MODEL,
    ),
    "TEXT-LOST": Kind(
        WARNING, "this model's chat template leaves out {detail}, in {rows}", OTHER_MODEL, by_detail=True
    ),
    "THINKING-LOST": Kind(
        WARNING, "this model's chat template leaves out the thinking of the {detail} answer in {rows}",
        "ignore for earlier answers: such models are used so; for the last, use a model whose template keeps it",
        by_detail=True,
    ),
    "THINKING-EMPTY": Kind(
        WARNING, "the chat template writes an empty thinking block into the answers of {rows}: training it teaches the "
        "model never to think", "set data.train_empty_thinking=false, or give the rows their thinking",
    ),
    "STOP-MISSING": Kind(
        WARNING, "the chat template closes an answer in {rows} with {detail}: no end would be learnt", APPENDED,
        by_detail=True,
    ),
    "STOP-IN-TEXT": Kind(
        WARNING, "a message in {rows} spells {detail}, which the tokenizer makes the token that ends an answer", DROP
    ),
    "OPENING-DIFFERS": Kind(
        WARNING, "the generation prompt opens an answer with {detail} in {rows}",
        "choose with data.opening: trained (prompts as in training) or prompt (training as in prompts)",
    ),
    # rows that are compared
    "QUESTION-IN-TEST": Kind(
        ERROR, "{rows} of test have exactly the question of a row of train: the result would measure memory",
        "remove them from train or from test, or give one file and let the split be made", beside="matches",
    ),
    "SPLITS-OVERLAP": Kind(
        WARNING, "{rows} of {detail}", "remove them from one, or give one file: a split made here keeps them together",
        by_detail=True, has_examples=True, beside="matches",
    ),
    "NEAR-COPIES": Kind(
        NOTE, "{rows} of train nearly repeat the question of another row", "ignore if intended", beside="is near"
    ),
    "COMPARED-IN-PART": Kind(
        NOTE, "{detail}: near copies may be on both sides of the split", "set data.near_duplicate_similarity=1 to "
        "compare equal questions alone", of_rows=False,
    ),
    "REPEATED-ROWS": Kind(WARNING, "{rows} of train repeat an earlier row", "safetrain validate FILE --fix OUT keeps "
                          "the first of each", beside="repeats"),
    "ANSWERS-DIFFER": Kind(
        WARNING, "{rows} repeat an earlier question with a different answer",
        "keep one answer of each, or ignore if several are right", beside="answers otherwise than",
    ),
    "ANSWER-DOMINATES": Kind(
        WARNING, "{rows} have {detail}; the model may collapse to it", "keep fewer of them"
    ),
    "FEW-ROWS": Kind(NOTE, "few rows {detail}", "add rows if you can", of_rows=False),
    # words of rows
    "REFUSALS": Kind(WARNING, "{rows} have a refusal or 'As an AI model' as an answer", DROP),
    "FOREIGN-MARKERS": Kind(
        WARNING, "{rows} have the literal chat marker {detail}, which would be trained as plain text",
        "make chats of these rows (messages with roles), or remove the markers", by_detail=True,
    ),
    "PLACEHOLDERS": Kind(WARNING, "{rows} have an unfilled placeholder such as {detail}", DROP),
    "CALCULATOR-MARKS": Kind(
        WARNING, "{rows} have calculator marks such as {detail}, which the model would learn to write",
        "remove them, unless a calculator reads them: sed -E 's/<<[^<>]*>>//g' FILE > OUT",
    ),
    "MOJIBAKE": Kind(
        WARNING, "{rows} have text that was decoded wrongly: {detail}",
        "safetrain validate FILE --fix OUT repairs most of it; or make the file again in UTF-8",
    ),
    "INVISIBLE-CHARACTERS": Kind(
        WARNING, "{rows} have invisible or control characters such as {detail}; they get tokenized",
        "safetrain validate FILE --fix OUT removes control characters; remove the others from the text",
    ),
    "SECRETS": Kind(
        WARNING, "{rows} have {detail}: a model may repeat it to anyone", f"revoke it if it is real. {DROP}",
        by_detail=True, has_examples=True, is_secret=True,
    ),
    # corpora of tokens
    "TOKENIZER-DIFFERS": Kind(
        ERROR, "the corpus was made with another tokenizer than the model's: {detail}",
        "use the model with its tokenizer, or tokenize the corpus with this model's", of_rows=False,
    ),
    "DOCUMENTS-OPEN": Kind(
        WARNING, "documents do not end with a stop token of the model: {detail}; the model would not learn to end",
        "tokenize the corpus with the model's end token (datatrove: eos_token)", of_rows=False,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a finding is: a file, the row's place in it, and the row that it is compared with."""

    file: str
    place: Place | None = None
    beside: "Spot | None" = None

    def text(self, verb: str = "") -> str:
        """``a.jsonl:62 is near a.jsonl:61``."""
        own = self.place.of(self.file) if self.place is not None else self.file
        return own if self.beside is None else f"{own} {verb} {self.beside.text()}"

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        value: dict[str, Any] = {"file": self.file}
        if self.place is not None:
            value |= {"line": self.place.line, **({"row": self.place.row} if self.place.row else {})}
        return value if self.beside is None else {**value, "beside": self.beside.as_json()}


@dataclass(frozen=True)
class Severities:
    """The user's choices: data.downgrade makes an error a warning and a warning a note, data.upgrade the reverse."""

    downgrade: tuple[str, ...] = ()
    upgrade: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise ConfigError for a name that no finding has, and for an error that cannot be a warning."""
        for key, names in (("downgrade", self.downgrade), ("upgrade", self.upgrade)):
            require_kinds(f"data.{key}", names)
        fixed = [name for name in self.downgrade if KINDS[name].fixed]
        if fixed:
            raise ConfigError(f"data.downgrade: with {', '.join(fixed)} nothing can be trained.", do="correct the data")

    def of(self, identifier: str) -> str:
        """How grave a finding is."""
        order = [NOTE, WARNING, ERROR]
        place = order.index(KINDS[identifier].severity)
        place += (identifier in self.upgrade) - (identifier in self.downgrade)
        return order[max(0, min(place, 2))]


def require_kinds(where: str, names: Iterable[str]) -> None:
    """Raise ConfigError for a name that no finding has."""
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        expected = f"one of {', '.join(sorted(KINDS))}"
        raise ConfigError(f"{where} names no finding: {', '.join(unknown)}.", expected=expected)


@dataclass
class Tally:
    """How often something was found, and where first."""

    detail: str
    count: int = 0
    where: list[Spot] = field(default_factory=list)
    remedy: str = ""


class Findings:
    """Collects what is found, row by row, with the first ``most_places`` of each finding."""

    def __init__(self, severities: Severities, most_places: int = SHOWN_PLACES) -> None:
        self.most_places = most_places
        self._severities = severities
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._listed: dict[str, dict[str, int]] = {}  # rows that have each detail
        self._last_row: dict[str, list[Spot]] = {}  # it counts once however many of the details it has

    def add(
        self, identifier: str, detail: str = "", count: int = 1, where: Sequence[Spot] = (), remedy: str = ""
    ) -> None:
        """Found in ``count`` rows, of which ``where`` are the first; ``remedy`` where the usual one does not do.

        Where each detail is a finding, what it has in brackets is an example: that of the first row is shown.
        """
        kind = KINDS[identifier]
        key = (identifier, "" if not kind.by_detail else detail.partition(" (")[0] if kind.has_examples else detail)
        if kind.lists:
            details = self._listed.setdefault(identifier, {})
            if detail in details or len(details) < MOST_DETAILS:
                details[detail] = details.get(detail, 0) + count
        elif key not in self._tallies and sum(known == identifier for known, _ in self._tallies) >= MOST_DETAILS:
            key, detail = (identifier, OTHERS), OTHERS
        if kind.lists or key[1] is OTHERS:
            if where and self._last_row.get(identifier) == list(where):
                return
            self._last_row[identifier] = list(where)
        tally = self._tallies.setdefault(key, Tally(detail))
        tally.count += count
        tally.where += where[: self.most_places - len(tally.where)]
        tally.remedy = remedy or tally.remedy

    def listed(self) -> tuple[Finding, ...]:
        """All of them: errors, then warnings, then notes; by name, so that equal data gives an equal record."""
        return tuple(finding for finding, _ in self.with_places())

    def with_places(self) -> list[tuple[Finding, list[Spot]]]:
        """The same with the places of each."""
        found = [(self._severities.of(key[0]), key, tally) for key, tally in self._tallies.items()]
        found.sort(key=lambda item: (ORDER.index(item[0]), item[1]))
        return [(self._finding(key[0], severity, tally), tally.where) for severity, key, tally in found]

    def has_errors(self) -> bool:
        """Whether one of them ends the validation."""
        return any(self._severities.of(identifier) == ERROR for identifier, _ in self._tallies)

    def _finding(self, identifier: str, severity: str, tally: Tally) -> Finding:
        kind = KINDS[identifier]
        detail = _list_of(self._listed[identifier], tally.count) if kind.lists else tally.detail
        message = kind.message.format(rows=counted(tally.count, "row"), detail=detail)
        if tally.count == 1:
            message = re.sub(r"\b(1 row(?: of \w+)?) (\w+)", _singular, message, count=1)
        where = tuple(spot.text(kind.beside) for spot in tally.where)
        remedy = tally.remedy or kind.remedy.format(id=identifier)
        return Finding(identifier, severity, tally.count, where, message, remedy)


def _singular(match: re.Match[str]) -> str:
    forms = {"ask": "asks", "are": "is", "have": "has", "name": "names", "repeat": "repeats", "end": "ends"}
    return f"{match[1]} {forms.get(match[2], match[2])}"


def _list_of(details: dict[str, int], rows: int) -> str:
    """What most of ``rows`` have first; in brackets how many have it, where that is not all."""
    named = sorted(details, key=lambda detail: (-details[detail], detail))
    first = [name if details[name] == rows else f"{name} ({details[name]})" for name in named[:SHOWN_DETAILS]]
    others = f"; and {'' if len(named) < MOST_DETAILS else 'at least '}{len(named) - len(first)} more"
    return ", ".join(first) + (others if len(named) > len(first) else "")


def refused(findings: Sequence[Finding]) -> DataError:
    """One error for everything that ends a validation."""
    errors = [finding for finding in findings if finding.severity == ERROR]
    lines = [f"  {_places(each)}: {each.message} [{each.id}]\n    do: {each.remedy}" for each in errors]
    return DataError("The data cannot be trained as it is:\n" + "\n".join(lines), do="see above; nothing was written")


def summary(findings: Sequence[Finding], all_in: str, lines: int = SCREEN_LINES) -> str:
    """What a terminal shows: errors and warnings, worst first, then a line that counts notes; ``all_in`` has all."""
    grave = [finding for finding in findings if finding.severity != NOTE]
    grave.sort(key=lambda finding: (ORDER.index(finding.severity), -finding.count))
    shown, left = list[str](), lines - 1
    for number, finding in enumerate(grave):
        text = described(finding)
        left -= text.count("\n") + 1
        if left < 0:
            shown.append(f"and {counted(len(grave) - number, 'more finding')}: see {all_in}")
            break
        shown.append(text)
    notes = sorted({finding.id for finding in findings if finding.severity == NOTE})
    if notes:
        shown.append(f"{counted(len(notes), 'note')}: {', '.join(notes)} ({all_in})")
    return "\n".join(shown)


def described(finding: Finding) -> str:
    """A finding for a terminal."""
    places = _places(finding)
    lines = [one_line(f"{finding.severity}: {finding.message} [{finding.id}]")]
    lines += [one_line(f"  where:    {places}")] if places else []
    return "\n".join([*lines, f"  do:       {printable(finding.remedy)}"])


def one_line(text: str) -> str:
    """What comes from data, as it can be printed: on one line, without what would steer a terminal, shortened."""
    safe = printable(text).replace("\n", r"\n").replace("\t", r"\t")
    return safe if len(safe) <= MOST_LETTERS else f"{safe[: MOST_LETTERS - 1]}…"


def _places(finding: Finding) -> str:
    """Where it was found, the first three; empty where no place is known."""
    shown = finding.where[:3]
    return "; ".join(shown) + ("; …" if 0 < len(shown) < finding.count else "")
