"""The kinds of findings in data: each has an id, a severity, a message and a remedy, and is counted."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import counted, printable
from safetrain.core.records.reports import Finding
from safetrain.plan.kinds import CORPUS_KINDS, ERROR, FIX, NOTE, QUALITY_KINDS, SOURCE_KINDS, WARNING, Kind

__all__ = [
    "ERROR",
    "KINDS",
    "MOST_PLACES",
    "NOTE",
    "SHOWN_PLACES",
    "WARNING",
    "Findings",
    "Kind",
    "Severities",
    "described",
    "summary",
]

ORDER = (ERROR, WARNING, NOTE)
SHOWN_PLACES, MOST_PLACES, SHOWN_DETAILS = 5, 10_000, 12
SCREEN_LINES, MANY = 30, 8  # of a summary; findings above which notes are told in a line
MOST_LETTERS = 600
OF_ONE = {"ask": "asks", "are": "is", "have": "has", "say": "says"}
ONE_ROW = re.compile(rf"\b(1 row(?: of \w+)?) ({'|'.join(OF_ONE)})\b")
MOST_DETAILS, OTHERS = 50, "and others, each for a reason of its own"
OTHER_MODEL = "use a model whose template writes it, or remove it from the rows"


KINDS = SOURCE_KINDS | CORPUS_KINDS | QUALITY_KINDS | {
    "ROW-UNREADABLE": Kind(ERROR, "{detail}", "correct or remove these rows", fixed=True, by_detail=True),
    "FILE-UNREADABLE": Kind(ERROR, "{detail}", "write its rows as JSONL", fixed=True, by_detail=True),
    "TEMPLATE-MISSING": Kind(
        ERROR, "the model's tokenizer has no chat template, and chats need one: {rows}",
        "use an instruct model, or rows of bare text", fixed=True,
    ),
    "TEMPLATE-REFUSES": Kind(
        ERROR, "the model's chat template refuses {rows}: {detail}",
        "write these rows as the template wants them, or use another model", fixed=True, by_detail=True,
    ),
    "TEMPLATE-SANDBOX": Kind(
        ERROR, "the model's chat template needs what transformers' sandbox forbids; the data is not at fault: {detail}",
        "use another copy of the model, or a chat_template.jinja without it", fixed=True, by_detail=True,
    ),
    "TEMPLATE-BROKEN": Kind(
        ERROR, "the model's chat template is no valid Jinja; the data is not at fault: {detail}",
        "fetch the model again, or correct its chat_template.jinja", fixed=True, by_detail=True,
    ),
    "TEMPLATE-CHANGES": Kind(
        ERROR, "the chat template changes the words of {rows}, so that their answers cannot be found in what it writes",
        "use another model, or rows of bare text", fixed=True,
    ),
    "NO-LABELS": Kind(
        ERROR, "no token to train in {rows}: {detail}", "correct or remove them", fixed=True, by_detail=True
    ),
    "ANSWER-BEYOND-CONTEXT": Kind(
        ERROR, "the answer of {rows} begins beyond the model's context ({detail} tokens)",
        "shorten the question, or remove them", fixed=True,
    ),
    "TOKEN-BEYOND-EMBEDDING": Kind(
        ERROR, "the model has no embedding for the token {detail} in {rows}: its tokenizer was enlarged, the "
        "model was not", "use the tokenizer that belongs to the model", fixed=True,
    ),
    "ANSWER-LOST": Kind(
        ERROR, "this model's chat template does not write the answers of {rows}: they would not be trained", OTHER_MODEL
    ),
    "CALL-LOST": Kind(
        ERROR, "this model's chat template does not write all tool calls of {rows}: an answer would be trained without "
        "its call", OTHER_MODEL,
    ),
    "SYSTEM-LOST": Kind(WARNING, "this model's chat template leaves out the system message of {rows}", OTHER_MODEL),
    "TEXT-LOST": Kind(
        WARNING, "this model's chat template leaves out a {detail} message of {rows}", OTHER_MODEL, by_detail=True
    ),
    "TOOLS-LOST": Kind(
        WARNING, "this model's chat template does not write the tools offered in {rows}: calls are trained "
        "without them", OTHER_MODEL,
    ),
    "THINKING-LOST": Kind(
        WARNING, "this model's chat template leaves out the thinking of the {detail} answer in {rows}: that answer is "
        "trained without it",
        "for earlier answers that is how such models are used; for the last, use a model whose template keeps it",
        by_detail=True,
    ),
    "STOP-UNKNOWN": Kind(
        WARNING, "{detail} closes an answer in {rows}, and is none of the model's stop tokens",
        "nothing: data.append_end=true, as shipped, trains an end token behind the last answer",
    ),
    "STOP-MISSING": Kind(
        WARNING, "the chat template closes an answer in {rows} with nothing: no end would be learnt",
        "nothing: data.append_end=true, as shipped, trains an end token behind the last answer",
    ),
    "STOP-IN-TEXT": Kind(
        WARNING, "a message in {rows} spells {detail}, which the tokenizer makes the token that ends an answer",
        "take it out of the text, unless the rows are about it",
    ),
    "OPENING-DIFFERS": Kind(
        WARNING, "asked for an answer, the chat template opens it with {detail} in {rows}",
        "data.opening decides: trained asks as is trained, prompt trains as the template asks",
    ),
    "THINKING-EMPTY": Kind(
        WARNING, "the chat template writes an empty thinking block into the answers of {rows}: to train it "
        "teaches the model never to think",
        "data.train_empty_thinking=false leaves these tokens out of the labels; or give the rows their thinking",
    ),
    "GENERATION-MASK-DIFFERS": Kind(
        NOTE, "the template's own {{% generation %}} blocks name other text as the assistant's in {rows}: {detail}",
        "nothing: trained are contents, calls and thinking of the assistant, and the token that closes each turn",
        by_detail=True,
    ),
    "ARGUMENTS-TEXT": Kind(
        WARNING, "the arguments of a tool call are a text and no JSON object in {rows}", "write them as an object"
    ),
    "EMPTY-MESSAGE": Kind(WARNING, "a message of {rows} is empty", "correct or remove it"),
    "ENDS-WITH-USER": Kind(
        WARNING, "no answer at the end of {rows}: what follows the last answer is not trained", "end them with one"
    ),
    "CONTROL-CHARACTERS": Kind(WARNING, "control characters such as NUL in {rows}", f"take them out: {FIX}"),
    "BEYOND-CONTEXT": Kind(
        WARNING, "longer than the model's context ({detail} tokens), to be cut: {rows}", "shorten or split them"
    ),
    "REPEATED-ROWS": Kind(WARNING, "repeats of an earlier row in train: {rows}", "remove them, if that is not meant: "
                          "safetrain validate FILE --fix OUT keeps the first of each"),
}  # fmt: skip


@dataclass
class Tally:
    """How often something was found, and where first."""

    count: int = 0
    where: list[str] = field(default_factory=list)

    def add(self, count: int, where: Sequence[str], most: int) -> None:
        """More of it; ``most`` places are kept."""
        self.count += count
        self.where += where[: most - len(self.where)]


@dataclass(frozen=True)
class Severities:
    """A person's choices: data.downgrade makes an error a warning and a warning a note, data.upgrade the reverse."""

    downgrade: tuple[str, ...] = ()
    upgrade: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise ConfigError for a name that no finding has, and for an error that cannot be a warning."""
        for key, names in (("downgrade", self.downgrade), ("upgrade", self.upgrade)):
            unknown = [name for name in names if name not in KINDS]
            if unknown:
                raise ConfigError(
                    f"data.{key} names no finding: {', '.join(unknown)}.", expected=f"of {', '.join(sorted(KINDS))}"
                )
        fixed = [name for name in self.downgrade if KINDS[name].fixed]
        if fixed:
            raise ConfigError(f"data.downgrade: with {', '.join(fixed)} nothing can be trained.", do="correct the data")

    def of(self, identifier: str) -> str:
        """How grave a finding is."""
        order = [NOTE, WARNING, ERROR]
        place = order.index(KINDS[identifier].severity)
        place += (identifier in self.upgrade) - (identifier in self.downgrade)
        return order[max(0, min(place, 2))]


class Findings:
    """Collects what is found, row by row, with the first ``most_places`` of each finding."""

    def __init__(self, severities: Severities, most_places: int = SHOWN_PLACES) -> None:
        self.most_places = most_places
        self._severities = severities
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._details: dict[tuple[str, str], str] = {}
        self._remedies: dict[tuple[str, str], str] = {}
        self._listed: dict[str, dict[str, int]] = {}  # rows that have each detail
        self._last_row: dict[str, list[str]] = {}  # that counts once however many of the details it has

    def add(
        self, identifier: str, detail: str = "", count: int = 1, where: Iterable[str] = (), remedy: str = ""
    ) -> None:
        """Found in ``count`` rows, of which ``where`` are the first; ``remedy`` where the usual one does not do.

        Where each detail is a finding, what it has in brackets is an example: that of the first row is shown.
        """
        kind, where = KINDS[identifier], list(where)
        key = (identifier, detail.partition(" (")[0] if kind.has_examples else detail)
        if not kind.by_detail:
            key = (identifier, "")
        if kind.lists:
            details = self._listed.setdefault(identifier, {})
            if detail in details or len(details) < MOST_DETAILS:
                details[detail] = details.get(detail, 0) + count
        elif key not in self._tallies and sum(known == identifier for known, _ in self._tallies) >= MOST_DETAILS:
            key = (identifier, OTHERS)
        if kind.lists or key[1] is OTHERS:
            detail = key[1]
            if where and self._last_row.get(identifier) == where:
                return
            self._last_row[identifier] = where
        self._tallies.setdefault(key, Tally()).add(count, where, self.most_places)
        self._details.setdefault(key, detail)
        if remedy:
            self._remedies[key] = remedy

    def listed(self) -> tuple[Finding, ...]:
        """All of them: errors, then warnings, then notes; by name, so that equal data gives an equal record."""
        found = [(self._severities.of(key[0]), key, tally) for key, tally in self._tallies.items()]
        found.sort(key=lambda item: (ORDER.index(item[0]), item[1]))
        return tuple(self._finding(key, tally) for _, key, tally in found)

    def has_errors(self) -> bool:
        """Whether one of them ends the validation."""
        return any(self._severities.of(identifier) == ERROR for identifier, _ in self._tallies)

    def _finding(self, key: tuple[str, str], tally: Tally) -> Finding:
        kind = KINDS[key[0]]
        detail = _list_of(self._listed[key[0]], tally.count) if kind.lists else self._details[key]
        message = kind.message.format(rows=counted(tally.count, "row"), detail=detail)
        if tally.count == 1:
            message = ONE_ROW.sub(lambda found: f"{found[1]} {OF_ONE[found[2]]}", message, count=1)
        severity = self._severities.of(key[0])
        remedy = self._remedies.get(key, kind.remedy)
        return Finding(key[0], severity, tally.count, tuple(tally.where), message, remedy)


def _list_of(details: dict[str, int], rows: int) -> str:
    """What most of ``rows`` have first; in brackets how many have it, where that is not all."""
    named = sorted(details, key=lambda detail: (-details[detail], detail))
    told = [name if details[name] == rows else f"{name} ({details[name]})" for name in named[:SHOWN_DETAILS]]
    others = f"; and {'' if len(named) < MOST_DETAILS else 'at least '}{len(named) - len(told)} more"
    return ", ".join(told) + (others if len(named) > len(told) else "")


def places_text(finding: Finding) -> str:
    """Where it was found, the first three; empty where no place is known."""
    shown = finding.where[:3]
    return "; ".join(shown) + ("; …" if 0 < len(shown) < finding.count else "")


def summary(findings: Sequence[Finding], lines: int = SCREEN_LINES) -> str:
    """What a terminal shows of them, worst first: whole while there is room, then a line each, then how many more."""
    shown: list[str] = []
    left = lines
    for number, finding in enumerate(sorted(findings, key=lambda item: (ORDER.index(item.severity), -item.count))):
        waiting = len(findings) - number - 1
        text = described(finding)
        if text.count("\n") + 1 + min(waiting, 1) > left or (finding.severity == NOTE and len(findings) > MANY):
            text = one_line(f"{finding.severity}: {finding.message} [{finding.id}]")
        if 1 + min(waiting, 1) > left:
            shown.append(f"and {counted(waiting + 1, 'more finding')}: see data_report.json")
            break
        shown.append(text)
        left -= text.count("\n") + 1
    return "\n".join(shown)


def one_line(text: str) -> str:
    """What comes from data, as it can be printed: on one line, without what would steer a terminal, shortened."""
    safe = printable(text).replace("\n", r"\n").replace("\t", r"\t")
    return safe if len(safe) <= MOST_LETTERS else f"{safe[: MOST_LETTERS - 1]}…"


def described(finding: Finding) -> str:
    """A finding for a terminal."""
    places = places_text(finding)
    lines = [one_line(f"{finding.severity}: {finding.message} [{finding.id}]")]
    lines += [one_line(f"  where:    {places}")] if places else []
    return "\n".join([*lines, f"  do:       {printable(finding.remedy)}"])
