"""Where each assistant turn stands in what a template wrote, and what of it is to be trained."""

import itertools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.templates.conversations import Conversation, Message, Turn
from benchmarks.templates.families import Family, Model
from benchmarks.templates.writing import Template, Written

EMPTY_THINKING = re.compile(
    r"<(?:seed:|mm:)?think(?::opensource)?>\s*</(?:seed:|mm:)?think(?::opensource)?>|<\|channel>thought\n<channel\|>"
    r"|<\|START_THINKING\|><\|END_THINKING\|>|<\|open\|>think<\|sep\|><\|close\|>think<\|sep\|>|\[THINK\]\[/THINK\]"
)
CONTENT = re.compile(r"(?:Umbrik|Anfol|Thorim|Rezal|Lisbrok)\d+")
NO_THINKING = re.compile(r"\s*(?:<think>\s*)?</think>\s*")
FEW = 4  # turns of a long chat whose prompts are looked at


@dataclass(frozen=True)
class End:
    """A right end of a span: a place in the text, what is appended there, and the finding that has to go with it."""

    place: int
    appended: str = ""
    finding: str = ""


@dataclass(frozen=True)
class Piece:
    """A span to be trained: the places where it may begin, the best first, and the right ends."""

    begins: tuple[int, ...]
    ends: tuple[End, ...]

    def end_of(self, text: str, trained: str) -> End | None:
        """The end that ``trained`` has, if it is this piece of ``text``."""
        for end in self.ends:
            body = trained.removesuffix(end.appended) if end.appended else trained
            if end.appended and body == trained:
                continue
            start = end.place - len(body)
            if start in self.begins and text[start : end.place] == body:
                return end
        return None


@dataclass(frozen=True)
class Expected:
    """One assistant turn: the ways to train it, and what is true of it."""

    ways: tuple[tuple[Piece, ...], ...]  # in one piece, or in several where the template interrupts it
    thinks_empty: bool = False
    may_think_empty: bool = False

    @property
    def right(self) -> tuple[int, int, str]:
        """The first way: begin, end, and what is appended."""
        pieces = self.ways[0]
        return pieces[0].begins[0], pieces[-1].ends[0].place, pieces[-1].ends[0].appended


@dataclass(frozen=True)
class Place:
    """Where a turn stands: behind its header, its words' end, and where the next message begins."""

    header: int
    content: int  # where the message's own text begins, -1 if that is not written
    spoken: int
    following: int
    last: bool  # of the conversation's messages
    last_turn: bool  # of the assistant's
    continued: bool = False  # by the next answer, with nothing between the two


@dataclass(frozen=True)
class Prompt:
    """What a model is given when it is asked for a turn."""

    tail: str | None  # what the prompt says behind the header, None if it has none
    question: bool  # False: nothing stands before the turn
    length: int | None = None  # where it ends in the text


def expected_turns(conversation: Conversation, written: Written, template: Template, model: Model) -> list[Expected]:
    """What is to be trained of every turn whose words were written."""
    encoding = template.tokenizer(written.text, add_special_tokens=False, return_offsets_mapping=True)
    boundaries = sorted({start for start, _ in encoding["offset_mapping"]} | {len(written.text)})
    prompts = _prompts(conversation, written, template, model.family)
    turns, before = [], len(model.bos or "") * written.text.startswith(model.bos or " ")
    for number, (index, turn) in enumerate(_assistants(conversation)):
        words = [word for word in words_of(turn) if word in written.text]
        if words:
            last = number == len(conversation.turns) - 1
            place = _place(written.text, words, model.family, before, conversation.messages[index:], last)
            prompt = prompts[number] if number < len(prompts) else Prompt(prompts[-1].tail, True)
            turns.append(_expected(written.text, place, prompt, model, boundaries))
            before = turns[-1].ways[0][-1].ends[0].place
    return turns


def _prompts(conversation: Conversation, written: Written, template: Template, family: Family) -> list[Prompt]:
    """The prompts of the first turns."""
    prompts = []
    for index, _ in itertools.islice(_assistants(conversation), FEW):
        asked = template.ask(written.form, index)
        opened = list(re.finditer("|".join(family.opens), asked or "", re.DOTALL))
        tail = asked[opened[-1].end() :] if asked and opened else None
        if tail and CONTENT.search(tail):  # no header stands before the answer
            tail = None
        whole = asked is not None and written.text.startswith(asked)
        prompts.append(Prompt(tail, index > 0, len(asked or "") if whole else None))
    if prompts[0].tail is None and len(prompts) > 1:  # nothing stands before that answer
        prompts[0] = Prompt(prompts[1].tail, False)
    return prompts


def words_of(turn: Turn) -> list[str]:
    """Every word by which a turn is known."""
    return [word for word in (turn.answer, turn.thinking, *(call.value for call in turn.calls)) if word]


def _assistants(conversation: Conversation) -> Iterator[tuple[int, Turn]]:
    places = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    return zip(places, conversation.turns, strict=True)


def _place(text: str, words: list[str], family: Family, before: int, messages: list[Message], last: bool) -> Place:
    first = min(text.find(word) for word in words)
    spoken = max(text.find(word) + len(word) for word in words)
    openings = [match.end() for match in re.finditer("|".join(family.opens), text[:first], re.DOTALL)]
    header = max((end for end in openings if end >= before), default=before)
    content = text.find(str(messages[0].get("content")).strip())
    following = re.search("|".join(family.nexts), text[spoken:])
    limit = spoken + following.start() if following else len(text)
    begun, continued = _next_message(text, spoken, messages[1:])
    if begun < limit:  # the template writes no opening between the two
        return Place(header, content, spoken, begun, False, False, continued)
    return Place(header, content, spoken, limit, len(messages) == 1, last)


def _next_message(text: str, spoken: int, later: list[Message]) -> tuple[int, bool]:
    """Where the text of the next message begins, and whether it is an assistant's."""
    contents = [(message.get("content"), message["role"] == "assistant") for message in later]
    places = [(text.find(content.strip(), spoken), same) for content, same in contents if isinstance(content, str)]
    return min(((at, same) for (at, same) in places if at >= 0), default=(len(text), False))


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _expected(text: str, place: Place, prompt: Prompt, model: Model, boundaries: list[int]) -> Expected:
    ends = tuple(_ends(text, place, model, boundaries))
    final, tail = ends[0].place, prompt.tail or ""
    given = place.header + _common(tail, text[place.header : place.following])
    differs = given - place.header < len(tail)
    unasked = prompt.length is not None and prompt.length < place.header  # the prompt ends before the header
    first, last = min(prompt.length or place.header, place.header) if unasked else given, given
    if differs:
        fixed = NO_THINKING.match(text, place.header)  # before every answer of a model that was not to think
        first, last = place.header, max(fixed.end() if fixed else place.header, _floor(boundaries, given))
    if not prompt.question:  # nobody is asked for such an answer: what stands before its text may count as its header
        last = max(last, place.content)
    whole = Piece(_begins(text, first, last, boundaries), ends)
    empty = EMPTY_THINKING.search(text, place.header, final)
    known = empty is not None and empty.end() <= given
    return Expected(
        tuple(_ways(text, whole, final, model)), thinks_empty=empty is not None and not known, may_think_empty=differs
    )


def _ways(text: str, whole: Piece, final: int, model: Model) -> Iterator[tuple[Piece, ...]]:
    """A turn in one piece, or in several where the template interrupts it."""
    begin, family = whole.begins[0], model.family
    if family.gap and (gap := re.search(family.gap, text[begin:final], re.DOTALL)):
        yield _around(text, whole, begin + gap.start(), begin + gap.end(), model)
        return
    yield (whole,)
    if family.between and (breaks := list(re.finditer(family.between, text[begin:final]))):
        begins = [whole.begins, *((begin + one.end(),) for one in breaks)]
        ends = [*((End(begin + one.start()),) for one in breaks), whole.ends]
        yield tuple(Piece(*piece) for piece in zip(begins, ends, strict=True))  # without these role openings


def _floor(boundaries: list[int], place: int) -> int:
    """Where the token at ``place`` begins."""
    return boundaries[max(bisect_right(boundaries, place) - 1, 0)]


def _begins(text: str, first: int, given: int, boundaries: list[int]) -> tuple[int, ...]:
    """The right places to begin: white space and a token across the border may go either way."""
    latest = given + len(text[given:]) - len(text[given:].lstrip())
    if given not in boundaries or given == 0:
        latest = max(latest, boundaries[min(bisect_right(boundaries, given), len(boundaries) - 1)])
    between = boundaries[bisect_left(boundaries, first) : bisect_right(boundaries, latest)]
    return tuple(dict.fromkeys((first, _floor(boundaries, first), given, *between, latest)))


def _ends(text: str, place: Place, model: Model, boundaries: list[int]) -> Iterator[End]:
    """The right ends of a turn, the best first."""
    found = [(text.find(close, place.spoken, place.following), close) for close in model.family.closes]
    closed = min(((at, close) for at, close in found if at >= 0), default=None)
    spoken = len(text[: place.following].rstrip())
    if closed:
        at, close = closed
        finding = "" if close in model.all_stops else "STOP-MISSING"
        yield End(at + len(close), finding=finding)
        if finding and place.last_turn:
            yield from _appended(text, at + len(close), place.following, model, finding)
        return
    if place.last:
        yield from _appended(text, spoken, place.following, model, "STOP-MISSING")
        return
    if place.continued:
        yield End(place.following)
    for stop in model.all_stops:
        if text.startswith(stop, place.following):
            yield End(place.following + len(stop))
    if place.last_turn:
        yield from _appended(text, spoken, place.following, model, "STOP-MISSING")
    across = boundaries[min(bisect_right(boundaries, place.following - 1), len(boundaries) - 1)]
    for end in (*range(spoken, place.following + 1), across):
        yield End(end, finding="STOP-MISSING")


def _appended(text: str, first: int, last: int, model: Model, finding: str) -> Iterator[End]:
    """The model's end token behind the turn, or behind the white space that follows it."""
    blank = last if not text[first:last].strip() else first
    for place in range(first, blank + 1):
        for stop in model.all_stops:
            yield End(place, stop, finding)


def _around(text: str, whole: Piece, start: int, end: int, model: Model) -> tuple[Piece, ...]:
    """The two pieces of a turn in whose middle the template writes another message."""
    stop = next((stop for stop in model.all_stops if text.startswith(stop, start)), "")
    return Piece(whole.begins, (End(start + len(stop)),)), Piece((end,), whole.ends)
