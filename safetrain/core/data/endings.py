"""Which answers stop inside a sentence or in code, judged by how the words of the same file stand in its sentences.

An answer without a full stop may be a title, or its author may have left the stop out. One that was cut off ends with a
word that hardly ever ends anything ("the", "of", "which"), or inside a word. Which words these are, the file itself
says, in any language; the commonest are listed for small files.
"""

import bisect
import collections
import re
from collections.abc import Sequence
from dataclasses import dataclass

CLOSED = frozenset(".!?…。！？؟।\"'”’»)]}>`*_|~:;=+0123456789")
FENCE = re.compile(r"^[ \t>]*(?:[-*+] |\d+[.)] )?`{3,}[^`\n]*$|[ \t:]`{3,}\w*[ \t]*$", re.MULTILINE)
LIST_ITEM = re.compile(r"\s*(?:[-*•+#>|]|\d+[.)]|[a-zA-Z][.)]\s)|\t|  ")  # or a line of one, or of code
COMMAND = re.compile(r" --?[A-Za-z]")
OPEN = ",-–—("  # no text ends with one of these
OPEN_WORD = re.compile(  # nor with one of these, or with a word of two letters
    r"\w{1,2}|the|and|for|but|its|his|her|our|was|are|has|had|not|with|from|that|this|que|com|por|uma|dos|das|nos|nas"
    r"|seu|sua|para|como|und|der|die|den|les|des|une|del|los|las|con"
)
ENDED = re.compile(r"[.!?][\"'”’)]*\s+(?=[^\Wa-zß-ÿ\d_]|[\"'“(¿¡])")
UNIT = re.compile(r"\d\s?\w{1,3}$")
# a word, and a sign that something ends behind it
WORD = re.compile(r"([^\W\d_]+(?:['’][^\W\d_]+)*)(?=([.!?:;…\n)\]\"”»*`|]|\Z)?)")
LAST_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*\Z")
SENTENCE, CUT, OTHER = "sentence", "cut", "other"
TEXT, LINE, ITEM = "text", "line", "item"  # no full stop behind several sentences, behind one, behind less than one
LEAST_WORDS, LEAST_OF_ITEM, SHORT_LINE = 8, 5, 80
LETTERS = 2_000_000  # of answers whose words are counted; then every second is, then every fourth
LEAST_USES, MOST_ENDS = 50, 0.01  # a word that is used so often, and ends so few of what it stands in, asks for more
LEAST_STEM, LEAST_REST, LEAST_KNOWN = 4, 2, 3  # letters of half a word, of what it lacks; uses of the whole word
SOME_CUT = {TEXT: 0.08, LINE: 0.08, ITEM: 0.25}  # share of evident cuts in all without a full stop: below it, chance
ALL_CUT = {TEXT: 0.33, LINE: 0.33, ITEM: 2.0}  # the share from which all of them were cut
LEAST_EVIDENT = {TEXT: 1, LINE: 1, ITEM: 2}
LEAST_ANSWERS, MOST_CUT = 20, 0.3  # of all; above this share that is how this data is
MOST_KEPT = 100_000


@dataclass(frozen=True)
class End:
    """How an answer ends: as a sentence does, surely cut off, or with no full stop behind ``word``; else OTHER."""

    kind: str
    word: str = ""
    is_open: bool = False  # whether it asks for more in any file


class Endings:
    """Collects how the answers of a file end."""

    def __init__(self) -> None:
        self._cut = 0
        self._uses, self._ends = collections.Counter[str](), collections.Counter[str]()
        self._letters, self._stride, self._seen = 0, 1, 0
        self._last = {kind: collections.Counter[tuple[str, bool]]() for kind in (TEXT, LINE, ITEM)}
        self._kept = list[tuple[int, End]]()

    def add(self, number: int, answer: str) -> None:
        """The answer of a row."""
        self._seen += 1
        if self._seen % self._stride == 0:
            self._count(answer)
        end = end_of(answer)
        self._cut += end.kind == CUT
        if end.word:
            self._last[end.kind][end.word, end.is_open] += 1
        if (end.word or end.kind == CUT) and len(self._kept) < MOST_KEPT:
            self._kept.append((number, end))

    def cut_off(self) -> tuple[int, list[int]]:
        """How many rows have an answer that was cut off, and the first of them; none where most end so."""
        evident, whole, count = self._evident(), list[str](), self._cut
        for kind, words in self._last.items():
            shown, total = sum(words[word] for word in evident[kind]), words.total()
            if shown < max(LEAST_EVIDENT[kind], SOME_CUT[kind] * total):
                evident[kind].clear()
            elif shown >= ALL_CUT[kind] * total:
                whole.append(kind)
            count += total if kind in whole else shown if evident[kind] else 0
        if self._seen < LEAST_ANSWERS or count > MOST_CUT * self._seen:
            return 0, []
        rows = [
            number for number, end in self._kept
            if end.kind == CUT or end.kind in whole or (end.word, end.is_open) in evident[end.kind]
        ]  # fmt: skip
        return count, rows

    def _count(self, answer: str) -> None:
        for match in WORD.finditer(answer.casefold()):
            self._uses[match[1]] += 1
            self._ends[match[1]] += match[2] is not None
        self._letters += len(answer)
        if self._letters > LETTERS:
            self._letters, self._stride = 0, 2 * self._stride

    def _evident(self) -> dict[str, set[tuple[str, bool]]]:
        """The last words that show a cut, by kind."""
        known = sorted(word for word, uses in self._uses.items() if uses >= LEAST_KNOWN)
        return {
            kind: {last for last, count in words.items() if last[1] or self._shows(last[0], count, known)}
            for kind, words in self._last.items()
        }

    def _shows(self, word: str, count: int, known: Sequence[str]) -> bool:
        """Whether ``word``, with which ``count`` answers end, asks for more or is the begin of another one."""
        uses, ends = self._uses[word], self._ends[word]
        if uses >= LEAST_USES:
            return ends - 1 <= MOST_ENDS * uses
        if uses > 1 or count > 1 or len(word) < LEAST_STEM:
            return False
        place = bisect.bisect_right(known, word)
        while place < len(known) and known[place].startswith(word):
            if len(known[place]) >= len(word) + LEAST_REST:
                return True
            place += 1
        return False


def end_of(answer: str) -> End:
    """How an answer ends, as far as it says so by itself."""
    fences = list(FENCE.finditer(answer)) if "```" in answer else []
    if len(fences) % 2:
        return _unpaired(answer, fences[-1])
    text = answer.strip()
    if not text or text[-1] in ".!?…。！？؟।":
        return End(SENTENCE if text else OTHER)
    if text[-1] in CLOSED or not (text[-1].islower() or text[-1] in OPEN):
        return End(OTHER)
    rest, _, last = answer.rstrip().rpartition("\n")
    if any(sign in last for sign in "{}=<>|\\_/;()[]$") or COMMAND.search(last):
        return End(OTHER)
    if ". " not in last and len(last) < SHORT_LINE and _is_line(rest):
        return End(OTHER)
    is_item = bool(fences or LIST_ITEM.match(last)) or text[0].islower() or text.startswith(("#!", "$ "))
    return _stop(text, last, is_item=is_item)


def _unpaired(answer: str, fence: re.Match[str]) -> End:
    """A fence without its partner; it may close where it has no language, and nothing or a sentence follows it."""
    behind = answer[fence.end() :].strip()
    closes = not fence[0].strip().strip("`") and (not behind or behind[-1] in ".!?")
    return End(OTHER if closes else CUT)


def _is_line(rest: str) -> bool:
    """Whether a short line without a full stop goes before: verses, dialogues and lists are written so."""
    before = rest.rstrip().rpartition("\n")[2]
    return bool(before) and len(before) < SHORT_LINE and before[-1].isalnum()


def _stop(text: str, last: str, *, is_item: bool) -> End:
    """Of a text whose ``last`` line has no full stop; names, hashtags and addresses end nothing."""
    final = last.rsplit(None, 1)[-1]
    if (not final[0].islower() and final[-1] not in OPEN) or "." in final or "@" in final:
        return End(OTHER)
    words, broken_in = len(last.split(None, LEAST_WORDS)), ENDED.search(last) is not None
    is_long = words > LEAST_WORDS
    if final[-1] in OPEN:
        return End(CUT if (is_long or broken_in) and not is_item else OTHER)
    word = LAST_WORD.search(text.casefold())
    if word is None or words <= LEAST_OF_ITEM or UNIT.search(text):
        return End(OTHER)
    if is_item or not (is_long or broken_in):
        return End(ITEM, word[0])
    kind = TEXT if is_long and (broken_in or ENDED.search(text)) else LINE
    return End(kind, word[0], OPEN_WORD.fullmatch(final) is not None)
