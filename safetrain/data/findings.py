"""The kinds of findings in data, each with id, severity, message and remedy; a counter of findings; checks of texts."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from safetrain.core.data.template import Controls
from safetrain.core.errors import ConfigError, DataError
from safetrain.core.formatting import counted, printable
from safetrain.core.records.reports import Finding
from safetrain.data.json_rows import Place, RowError
from safetrain.data.rows import Row

ERROR, WARNING, NOTE = "error", "warning", "note"
ORDER = (ERROR, WARNING, NOTE)
SHOWN_PLACES, MOST_PLACES, SHOWN_DETAILS = 5, 10_000, 12
SCREEN_FINDINGS, MOST_ERRORS, MOST_LETTERS = 9, 20, 600
MOST_DETAILS, OTHERS = 50, "and others, for different reasons"
FIX = "safetrain validate FILE --fix OUT.jsonl"
DROP = FIX + " --drop {id} writes a copy without these rows"
IGNORE = "ignore if intended"
WHOLE_FILE = Place()


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
        "rename it to a split, merge it into the file that is read, or remove it", by_detail=True),
    "ROW-UNREADABLE": Kind(
        ERROR, "{rows} cannot be read: {detail}",
        f"correct these rows, or leave them out: {FIX} --drop-bad",
        fixed=True, by_detail=True),
    "KEYS-IGNORED": Kind(NOTE, "unused keys in {rows}: {detail}", IGNORE, lists=True),
    "COLUMNS-TAKEN": Kind(NOTE, "keys read in {rows}: {detail}", f"{IGNORE}; else set data.columns", by_detail=True),
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
        "use a model whose template writes it, or remove it; ignore for earlier answers' thinking", by_detail=True),
    "THINKING-EMPTY": Kind(
        WARNING, "the chat template writes empty thinking into answers of {rows}: the model would learn not to think",
        "give the rows their thinking; ignore if the model should not think"),
    "STOP-MISSING": Kind(
        WARNING, "the chat template closes an answer in {rows} with {detail}: the model would not learn to stop",
        "ignore: a stop token is trained on after the last answer", by_detail=True),
    "STOP-IN-TEXT": Kind(WARNING, "a message in {rows} spells the stop token {detail}, and would become one", DROP),
    "OPENING-DIFFERS": Kind(
        WARNING, "the generation prompt begins an answer with {detail} in {rows}",
        "ignore: ask, chat and serve leave it out, as training does"),
    # comparisons of rows
    "QUESTION-IN-TEST": Kind(
        ERROR, "{rows} in test with the same question as a row in train: the result would measure memorization",
        "remove them from train or from test, or give one file and let safetrain split it"),
    "SPLITS-OVERLAP": Kind(
        WARNING, "{rows} in {detail}",
        "remove them from one, or give one file: a split made here keeps them together", by_detail=True),
    "NEAR-COPIES": Kind(NOTE, "{rows} in train with nearly the same question as another row{detail}", IGNORE),
    "REPEATED-ROWS": Kind(
        WARNING, "{rows} in train identical to an earlier one", f"{FIX} keeps one of each"),
    "ANSWERS-DIFFER": Kind(
        WARNING, "an earlier question has a different answer in {rows}",
        "keep one answer for each question, or ignore if several are right"),
    "ANSWER-DOMINATES": Kind(WARNING, "{rows} share {detail}: the model may say little else", "keep fewer of them"),
    # text of rows
    "REFUSALS": Kind(WARNING, "an answer in {rows} is a refusal, or speaks 'as an AI model'", DROP),
    "FOREIGN-MARKERS": Kind(
        WARNING, "the literal chat marker {detail} in {rows} would be trained on as plain text",
        "turn these rows into chats (messages with roles), or remove the markers", by_detail=True),
    "PLACEHOLDERS": Kind(WARNING, "an unfilled placeholder such as {detail} in {rows}", DROP),
    "CALCULATOR-MARKS": Kind(
        WARNING, "calculator marks such as {detail} in {rows}: the model would learn to write them",
        "remove them, unless a calculator reads them: sed -E 's/<<[^<>]*>>//g' FILE > OUT"),
    "MOJIBAKE": Kind(
        WARNING, "text that was decoded wrongly in {rows}: {detail}",
        f"{FIX} repairs most; characters that became U+FFFD are lost: export the file again"),
    "INVISIBLE-CHARACTERS": Kind(
        WARNING, "invisible or control characters such as {detail} in {rows}; they get tokenized",
        f"{FIX} writes a copy without them"),
    "SECRETS": Kind(
        WARNING, "{detail} in {rows}: a model may repeat it to anyone", f"revoke it if it is real. {DROP}", lists=True),
    # tokenized corpora
    "TOKENIZER-DIFFERS": Kind(
        ERROR, "the corpus was made with a different tokenizer from the model's: {detail}",
        "use the model with this tokenizer, or tokenize the corpus with this model's"),
    "DOCUMENTS-OPEN": Kind(
        WARNING, "documents do not end with a stop token of the model: {detail}; the model would not learn to stop",
        "tokenize the corpus with the model's end token (datatrove: eos_token)"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spot:
    """The place of a finding: a file, the row in it, and the row that it matches (``beside``)."""

    file: str
    place: Place = WHOLE_FILE
    beside: "Spot | None" = None
    column: int = 0  # position in the line, if known

    def text(self) -> str:
        """``a.jsonl:62 matches a.jsonl:61``; ``a.jsonl:62:14``."""
        own = self.place.of(self.file, self.column)
        return own if self.beside is None else f"{own} matches {self.beside.text()}"


def checked_downgrade(names: Iterable[str]) -> tuple[str, ...]:
    """data.downgrade, which makes an error a warning and a warning a note.

    Raises ConfigError for an unknown name, and for an error that cannot be downgraded.
    """
    names = tuple(names)
    require_kinds("data.downgrade", names)
    fixed = [name for name in names if KINDS[name].fixed]
    if fixed:
        raise ConfigError(f"data.downgrade: training is impossible with {', '.join(fixed)}.", do="correct the data")
    return names


def require_kinds(where: str, names: Iterable[str]) -> None:
    """Raise ConfigError for a name that is not a kind of finding."""
    unknown = ", ".join(name for name in names if name not in KINDS)
    if unknown:
        raise ConfigError(f"{where}: unknown finding {unknown}.", expected=f"one of {', '.join(sorted(KINDS))}")


@dataclass
class _Tally:
    """The count of one finding, its details and its first places."""

    count: int = 0
    details: dict[str, None] = field(default_factory=dict)  # the first MOST_DETAILS, each once
    where: list[Spot] = field(default_factory=list)
    last: Sequence[Spot] = ()
    remedy: str = ""


class Findings:
    """Collects findings row by row, with the first ``most_places`` of each."""

    def __init__(self, downgrade: Sequence[str] = (), most_places: int = SHOWN_PLACES) -> None:
        """``downgrade``: the kinds that are one severity lower."""
        self.most_places = most_places
        self._downgrade = downgrade
        self._tallies: dict[tuple[str, str], _Tally] = {}

    def add(
        self, identifier: str, detail: str = "", count: int = 1, where: Sequence[Spot] = (), remedy: str = ""
    ) -> None:
        """Count a finding in ``count`` rows, the first at ``where``; ``remedy`` replaces the usual one."""
        key = (identifier, detail if KINDS[identifier].by_detail else "")
        if key not in self._tallies and sum(other == identifier for other, _ in self._tallies) >= MOST_DETAILS:
            key, detail, remedy = (identifier, OTHERS), OTHERS, ""
        tally = self._tallies.setdefault(key, _Tally())
        if len(tally.details) < MOST_DETAILS:
            tally.details[detail] = None
        if where and tally.last == where:
            return  # a row counts once, even with several details
        tally.last = where
        tally.count += count
        tally.where += where[: self.most_places - len(tally.where)]
        tally.remedy = remedy or tally.remedy

    def listed(self) -> tuple[Finding, ...]:
        """List the findings: errors, warnings, then notes, each by name, so that equal data gives an equal report."""
        return tuple(finding for finding, _ in self.with_places())

    def with_places(self) -> list[tuple[Finding, list[Spot]]]:
        """All findings in the same order, each with its places."""
        grades = {name: ORDER.index(kind.severity) + (name in self._downgrade) for name, kind in KINDS.items()}
        tallies = sorted((min(grades[key[0]], 2), key) for key in self._tallies)
        found = [(ORDER[grade], key, self._tallies[key]) for grade, key in tallies]
        return [(_finding(key[0], severity, tally), tally.where) for severity, key, tally in found]

    def add_unreadable(self, spot: Spot, error: RowError) -> None:
        """Count a row that cannot be read."""
        self.add("ROW-UNREADABLE", str(error), where=[replace(spot, column=error.column)], remedy=error.do)

    def add_unreadable_file(self, error: DataError) -> None:
        """Count a file that cannot be read completely."""
        self.add("FILE-UNREADABLE", error.what, where=[Spot(error.where)], remedy=error.do)

    def refuse_errors(self) -> None:
        """Raise one DataError that lists all errors, if there are any."""
        errors = [finding for finding in self.listed() if finding.severity == ERROR]
        lines = [f"  {_places(each)}: {each.message} [{each.id}]\n    do: {each.remedy}" for each in errors]
        lines[MOST_ERRORS:] = [f"  and {len(errors) - MOST_ERRORS} more"] if len(errors) > MOST_ERRORS else []
        if errors:
            what = "The data has errors:\n" + "\n".join(lines)
            raise DataError(what, do="see above; nothing was written")


def _finding(identifier: str, severity: str, tally: _Tally) -> Finding:
    kind = KINDS[identifier]
    more = ", …" if len(tally.details) > SHOWN_DETAILS else ""
    detail = ", ".join(sorted(tally.details)[:SHOWN_DETAILS]) + more if kind.lists else next(iter(tally.details))
    message = kind.message.format(rows=counted(tally.count, "row"), detail=detail)
    where = tuple(spot.text() for spot in tally.where)
    return Finding(identifier, severity, tally.count, where, message, tally.remedy or kind.remedy.format(id=identifier))


def summary(findings: Sequence[Finding], all_in: str) -> str:
    """Errors and warnings for a terminal, worst first, and the number of notes; ``all_in`` says where to find all."""
    grave = [finding for finding in findings if finding.severity != NOTE]
    grave.sort(key=lambda finding: (ORDER.index(finding.severity), -finding.count))
    texts = [described(finding) for finding in grave[:SCREEN_FINDINGS]]
    if len(grave) > SCREEN_FINDINGS:
        texts.append(f"and {counted(len(grave) - SCREEN_FINDINGS, 'more finding')} ({all_in})")
    notes = sorted({finding.id for finding in findings if finding.severity == NOTE})
    if notes:
        texts.append(f"{counted(len(notes), 'note')}: {', '.join(notes)} ({all_in})")
    return "\n".join(texts)


def described(finding: Finding) -> str:
    """A finding for a terminal."""
    where = [one_line(f"  where:    {_places(finding)}")] if finding.where else []
    headline = one_line(f"{finding.severity}: {finding.message} [{finding.id}]")
    return "\n".join([headline, *where, f"  do:       {printable(finding.remedy)}"])


def one_line(text: str) -> str:
    """Shorten text from data to one printable line, without terminal escapes."""
    safe = printable(text).replace("\n", r"\n").replace("\t", r"\t")
    return safe if len(safe) <= MOST_LETTERS else f"{safe[: MOST_LETTERS - 1]}…"


def _places(finding: Finding) -> str:
    """The first three places of a finding; empty if none is known."""
    places = finding.where[:3]
    return "; ".join(places) + ("; …" if 0 < len(places) < finding.count else "")


# Checks of a row's text: each first looks for a character or two that its pattern needs, which is much faster.

MARKER = re.compile(  # not in quotation marks
    r"""(?:(["'`*])|(?<!["'`*]))(<(?:\|[a-z][a-z0-9_]{1,30}\|>|｜[^｜\n]{2,40}｜>|</?SYS>>|/s>|(?:start|end)_of_turn>"""
    r"|[be]os>)|\[/?INST\])(?(1)(?!\1))"
)
FENCE = re.compile(r"^[ \t]*```.*?^[ \t]*```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^### ?(?:Instruction|Response|Human|Assistant):", re.MULTILINE)
ASKING, ANSWERING = re.compile(r"^(?:Human|User): ", re.MULTILINE), re.compile(r"^(?:Assistant|AI): ", re.MULTILINE)

BRACES = re.compile(r"(?<!\w)\{\{ ?[A-Za-z_][\w-]{0,30} ?\}\}")
CODE = ("`", "{%", "</", "\\", "=", "{{#", "${", '"{{', "'{{")  # with one of these in the text, double braces are code
TEMPLATING = re.compile(r"jinja|mustache|handlebars|ansible|angular|django|liquid|twig|vue|helm", re.IGNORECASE)
BRACKETS = re.compile(
    r"(?<![\w\])\\])\[(?:(?:[Yy]our|[Ii]nsert|Seu|Sua|[Ii]nsira) [^\[\]\n]{2,40}|seu nome|[Nn]ome d[ao] \w{2,20}"
    r"|(?:Company|Recipient|Client|Customer|First|Last|Full) (?:Name|Address|Email|Phone)|Name|Nome)\](?![(\[])"
    r"|<no ?(?:in|out)put>"
)

BROKEN = re.compile(r"[ÂÃâÅÄÐÑ√├][^\x00-\x7f]")  # occurs in all wrongly decoded text
INVISIBLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff\u180e\u00ad\ufff9-\ufffb]"
    "|(?<=[ -~])[\u200c\u200d](?=[ -~])"
    "|(?<![\U0001f3f4\U000e0000-\U000e007f])[\U000e0000-\U000e007f]"  # tags; after a black flag they name a region
)
ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")  # complete terminal escape sequences
LAYING_OUT = re.compile("[\u200b\u202a-\u202e\u2066-\u2069]")  # word breaks and writing direction
LAID_OUT = re.compile("[\u0590-\u08ff\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\ufb1d-\ufdff\ufe70-\ufefe]")  # scripts

REFUSAL = re.compile(  # at the beginning of a sentence or clause
    r"(?:^[\s\"“*(]*|[.!?,]\s)(?:unfortunately |but |and )?(?:"
    r"(?:as|i am|i'm) (?:just |only )?an? (?:(?:large |ai )?language model\b|(?:ai|artificial intelligence)"
    r"(?:[,.!]|$| (?:and|but|(?:language )?model|assistant|chatbot)\b))"
    r"|(?:como|(?:eu )?sou) (?:apenas )?uma? (?:modelo de linguagem\b|(?:ia|inteligência artificial)[,.!])"
    r"|(?:i'm|i am|we're) (?:very |really |so )?sorry,? (?:but )?(?:i|we) (?:can't|cannot|am (?:not |un)able|won't)\b"
    r"|i (?:can't|cannot|am unable to|am not able to) (?:assist|comply|fulfill?|answer that|do that"
    r"|help (?:you|with)\b|provide (?:you|that|this|instructions|information|advice|assistance)\b)"
    r"|(?:sinto muito|desculpe|lamento),? (?:mas )?(?:eu )?não posso\b"
    r"|(?:eu )?não posso (?:ajudar|fornecer|responder|atender)\b)"
)
HEAD = 160  # characters of an answer that are searched for a refusal

CALCULATOR = re.compile(r"<<[\d\s.,+\-*/()%$=]*\d[\d\s.,+\-*/()%$]*=[\d\s.,+\-/()%$]*>>")  # GSM8K

KEY_PARTS = ("AKIA", "ghp_", "gho_", "ghs_", "github_pat_", "glpat-", "sk-", "hf_", "xox", "AIza", "_live_", "npm_",
             "SG.", "PRIVATE KEY-----")  # fmt: skip
KEY = re.compile(  # from AWS, GitHub, GitLab, model providers, Hugging Face, Slack, Google, Stripe, npm, SendGrid
    r"\bAKIA[0-9A-Z]{16}\b|\bgh[ops]_[A-Za-z0-9]{36}\b|\bgithub_pat_[A-Za-z0-9_]{50,}|\bglpat-[A-Za-z0-9_-]{20}\b"
    r"|\bsk-(?=[\w-]*[A-Za-z0-9]{16})[A-Za-z0-9_-]{20,}|\bhf_[A-Za-z]{34}\b|\bxox[abeoprs]-[A-Za-z0-9-]{10,}"
    r"|\bAIza[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])|\b[sr]k_live_[A-Za-z0-9]{20,}|\bnpm_[A-Za-z0-9]{36}\b"
    r"|\bSG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}|-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----[\s\\nr]*[A-Za-z0-9+/]{20,64}"
)
EXAMPLES = ("example", "your", "xxxx", "1234567890", "abcdef", "aaaa", "0000")  # in keys from documentation


def text_findings(row: Row, controls: Controls) -> list[tuple[str, str]]:
    """Run all checks on a row; returns the findings' ids and details.

    FOREIGN-MARKERS leaves out stop tokens, which are STOP-IN-TEXT, and the tokenizer's own tokens in bare text.
    """
    words = row.text or "\n\n".join([message.content for message in row.messages])
    own_markers = controls.tokens if row.format == "text" else None
    findings = [
        ("FOREIGN-MARKERS", marker)
        for marker in dict.fromkeys(foreign_markers(words))
        if marker not in controls.stops and (own_markers is None or not own_markers.fullmatch(marker))
    ]
    findings += [(identifier, detail) for identifier, check in CHECKS.items() if (detail := check(words))]
    others = [message.details for message in row.messages if message.details] + ([row.tools] if row.tools else [])
    texts = "\n\n".join([words, *(text.replace("\\n", "\n") for text in others)])  # with thinking, calls and tools
    findings += [("SECRETS", detail) for detail in secrets(texts)]
    if not all(message.content.strip() for message in row.messages if message.role in ("user", "tool")):
        findings.append(("EMPTY-MESSAGE", ""))
    if row.messages and row.messages[-1].role == "user":
        findings.append(("ENDS-WITH-USER", ""))
    if any(is_refusal(message.content) for message in row.messages if message.role == "assistant"):
        findings.append(("REFUSALS", ""))
    return findings


def foreign_markers(text: str) -> list[str]:
    """Find literal markers of other chat formats, except in quotation marks or code."""
    markers = list[str]()
    if "<" in text or "INST]" in text:
        markers += [match[2] for match in MARKER.finditer(FENCE.sub("", text) if "```" in text else text)]
        if "<s>" in text and "[INST]" not in markers:
            markers = [marker for marker in markers if marker != "</s>"]  # strikethrough in HTML
    if "###" in text:
        markers += HEADING.findall(text)
    asking = ASKING.search(text) if not markers and ("Human: " in text or "User: " in text) else None
    if asking is not None and ANSWERING.search(text, asking.end()) is not None:
        markers.append("Human: … Assistant:")
    return markers


def placeholder(text: str) -> str:
    """Find the first unfilled placeholder."""
    gap = None
    if "{{" in text and not any(part in text for part in CODE) and not TEMPLATING.search(text):
        gap = BRACES.search(text)
    if gap is None and ("[" in text or "<no" in text):
        gap = BRACKETS.search(text)
    return gap[0] if gap is not None else ""


def calculator_mark(text: str) -> str:
    """Find the first calculator mark, such as those in GSM8K's answers."""
    mark = CALCULATOR.search(text) if "<<" in text else None
    return mark[0] if mark is not None else ""


def mojibake(text: str) -> str:
    """Find the first wrongly decoded word and its correction, or the text around a lost character."""
    if "\ufffd" in text:
        place = text.index("\ufffd")
        return "'" + " ".join(text[max(0, place - 15) : place + 15].split()) + "'"
    if text.isascii() or not BROKEN.search(text):
        return ""
    import ftfy  # imported only for data that may be broken
    import ftfy.badness

    for word in re.split("[ \n\t]+", text):
        if ftfy.badness.is_bad(word) and (repaired := ftfy.fix_encoding(word)) != word:
            return f"'{word}' for '{repaired}'"
    return ""


def invisible_character(text: str) -> str:
    """Find the first invisible character that the text's script does not need."""
    if text.replace("\n", "").isprintable():
        return ""
    is_laid_out = LAID_OUT.search(text) is not None
    letters = (match[0] for match in INVISIBLE.finditer(text) if not (is_laid_out and LAYING_OUT.fullmatch(match[0])))
    return next((f"U+{ord(letter):04X}" for letter in letters), "")


def without_invisible(text: str) -> str:
    """Remove what ``invisible_character`` finds; vertical tabs and form feeds become line ends."""
    is_laid_out = LAID_OUT.search(text) is not None

    def instead(match: re.Match[str]) -> str:
        is_needed = is_laid_out and LAYING_OUT.fullmatch(match[0])
        return match[0] if is_needed else "\n" if match[0] in "\v\f" else ""

    while invisible_character(text):  # a removal may create another match
        text = INVISIBLE.sub(instead, ESCAPES.sub("", text))
    return text


def secrets(text: str) -> list[str]:
    """Find API keys, except those from documentation; returns the first characters and the length of each."""
    if not any(part in text for part in KEY_PARTS):
        return []
    return [f"a key ({key[:5]}…, {len(key)} characters)" for key in KEY.findall(text) if _is_random(key)]


def is_refusal(answer: str) -> bool:
    """Whether an answer begins with a refusal, or with "as an AI model"."""
    head = answer[:HEAD].lower().replace("’", "'")
    return REFUSAL.search(head) is not None


def _is_random(key: str) -> bool:
    """Whether ``key`` looks real, not like an example or a name with dashes."""
    key = key.rpartition("-----")[2]
    is_varied = len(set(key)) >= 10 and (key.startswith("hf_") or any(map(str.isdigit, key[4:])))
    return is_varied and not any(word in key.lower() for word in EXAMPLES)


CHECKS = {
    "PLACEHOLDERS": placeholder,
    "CALCULATOR-MARKS": calculator_mark,
    "MOJIBAKE": mojibake,
    "INVISIBLE-CHARACTERS": invisible_character,
}
