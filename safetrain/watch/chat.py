"""A chat in a terminal or a pipe: lines in, answers out. What makes the answers is given."""

import difflib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from signal import SIGINT
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from safetrain.core.data.chatting import AnswerText, Prompts
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.errors import DataError, ModelError
from safetrain.core.formatting import counted, printable
from safetrain.core.signals import Terminated, handling

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDE = 100  # columns of a terminal in which two answers stand side by side
HELP = "Ctrl-C stops an answer. /system TEXT, /reset, /exit"
WORDS, ALIKE = ("/system", "/reset", "/exit"), 0.7  # of two words, from which one is taken for the other mistyped


class Speaker(Protocol):
    """What answers. ``ended`` says how the last answer did: stop, length, context or stopped."""

    ended: str

    def answer(self, prompt: Sequence[int], stopped: Callable[[], bool]) -> Iterator[int]:
        """Tokens of the answer, until ``stopped``."""
        ...


@dataclass
class Side:
    """One model and its chat. ``label`` stands before its answers, empty where it is the only one."""

    label: str
    speaker: Speaker
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    text: str = ""  # of the last answer


class Chat:
    """Takes one line after the other; answers go to stdout, everything else to stderr."""

    def __init__(
        self, tokenizer: ChatTokenizer, prompts: Prompts, sides: Sequence[Side], system: str, context: int | None
    ) -> None:
        """``context``: tokens that the model takes, None where it does not say."""
        self._tokenizer, self._prompts, self._sides = tokenizer, prompts, sides
        self._system, self._context = system, context
        self._asks = sys.stdin.isatty()
        self._stopped, self._turns = False, 0

    def run(self) -> None:
        """Until the input ends, or /exit.

        Raises DataError for input that is no text, and in a pipe for a question that the context has no room for.
        """
        if self._asks:
            _enable_line_editing()
        while (line := self._line()) is not None:
            word, _, rest = line.strip().partition(" ")
            if word == "/exit":
                return
            if word == "/reset":
                self._forget()
            elif word == "/system":
                self._set_system(rest.strip())
            elif self._asks and _is_command(word, alone=not rest):
                say(f"There is no {word}. {HELP}")
            elif word:
                self._turn(line.strip())

    def _line(self) -> str | None:
        """The next line; None at the end."""
        try:
            line = self._typed()
            (line or "").encode()  # half characters, which Python lets in where the locale is C
        except UnicodeError as error:
            raise DataError(f"The input is no text in UTF-8: {error}", do="convert it, as with iconv") from None
        return line

    def _typed(self) -> str | None:
        try:
            if not self._asks:
                return sys.stdin.readline() or None
            if sys.stdout.isatty():
                return input("> ")
            print("> ", end="", file=sys.stderr, flush=True)
            return input()
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt as stopped:
            if not self._asks or isinstance(stopped, Terminated):
                raise
            print(file=sys.stderr)
            say("Ctrl-D or /exit ends")
            return ""

    def _forget(self) -> None:
        for side in self._sides:
            side.messages.clear()
        say("a new chat")

    def _set_system(self, text: str) -> None:
        try:
            if text and not self._prompts.writes_system(text):
                say("this model's chat template writes no system prompt: nothing is changed")
                return
        except ModelError as error:
            say(f"{error.what} Nothing is changed.")
            return
        self._system = text
        say(f"system prompt: {text}" if text else "no system prompt")

    def _turn(self, question: str) -> None:
        """Ask every side; what it says is kept, also the beginning of an answer that was stopped."""
        self._stopped, self._turns = False, self._turns + 1
        asked = [side for side in self._sides if self._prepare(side, question)]
        with self._ctrl_c_stops():
            if len(asked) > 1 and sys.stdout.isatty() and (wide := _wide_console()):
                self._side_by_side(asked, wide)
            else:
                for side in asked:
                    self._one_after_the_other(side)
        for side in asked:
            if side.text:
                side.messages.append({"role": "assistant", "content": side.text})
            else:
                side.messages.pop()

    def _prepare(self, side: Side, question: str) -> bool:
        """Put the question into the chat, if there is room; in a terminal a refusal is told, in a pipe an error."""
        if self._prompts.continues:
            side.messages.clear()
        side.messages.append({"role": "user", "content": question})
        side.text = ""
        try:
            length = len(self._prompt(side))
        except ModelError as error:
            side.messages.pop()
            if not self._asks:
                raise
            say(error.what)
            return False
        if self._context is not None and length >= self._context:
            side.messages.pop()
            if not self._asks:
                self._refuse(side, length)
            say(f"{_of(side)}the chat with this question has {length} tokens, the model's context {self._context}; "
                "it was not asked. /reset begins anew")  # fmt: skip
            return False
        return True

    def _refuse(self, side: Side, length: int) -> NoReturn:
        """Who reads a pipe counts the answers: none may be missing among them."""
        raise DataError(
            f"{_of(side)}question {self._turns} was not asked: the chat with it does not fit into the context.",
            expected=f"fewer than {self._context} tokens",
            got=f"{length}",
            do="a line /reset before it begins a new chat, without what was said; or shorten it",
        )

    def _prompt(self, side: Side) -> list[int]:
        return self._prompts.ids(self._prompts.with_system(side.messages, self._system))

    def _pieces(self, side: Side) -> Iterator[str]:
        answer = AnswerText(self._tokenizer)
        for token in side.speaker.answer(self._prompt(side), lambda: self._stopped):
            yield answer.add(token)
            side.text = answer.text
        yield answer.rest()
        side.text = answer.text

    def _one_after_the_other(self, side: Side) -> None:
        print(f"{side.label + ':':<7}" if side.label else "", end="", flush=True)
        for piece in self._pieces(side):
            print(printable(piece), end="", flush=True)
        print(flush=True)
        self._tell_end(side)

    def _side_by_side(self, sides: Sequence[Side], console: "Console") -> None:
        from rich.live import Live

        open_ones = [self._pieces(side) for side in sides]
        with Live(console=console, transient=True, auto_refresh=False, vertical_overflow="ellipsis") as live:
            while open_ones:
                open_ones = [pieces for pieces in open_ones if next(pieces, None) is not None]
                live.update(_columns(sides), refresh=True)
        console.print(_columns(sides))
        for side in sides:
            self._tell_end(side)

    def _tell_end(self, side: Side) -> None:
        ended = side.speaker.ended
        if ended == "stopped":
            say(f"{_of(side)}stopped")
        elif ended == "context":
            say(f"{_of(side)}the model's context of {self._context} tokens is full. /reset begins anew")
        elif ended == "length":
            say(f"{_of(side)}cut: more with --max-new-tokens")
        elif not side.text:
            say(f"{_of(side)}it says nothing")

    def _ctrl_c_stops(self) -> AbstractContextManager[None]:
        """In a pipe it ends the program, as ever."""

        def stop(_number: int) -> None:
            self._stopped = True

        return handling({SIGINT: stop}) if self._asks else nullcontext()


def say(text: str) -> None:
    """A remark, beside the answers."""
    print(f"[{printable(text)}]", file=sys.stderr, flush=True)


def describe(model: str, system: str, context: int | None) -> str:
    """The lines before a chat."""
    room = f"Context: {counted(context, 'token')}. " if context else ""
    return f"{model}\n" + (f"system prompt of all training rows: {system}\n" if system else "") + room + HELP


def _is_command(word: str, *, alone: bool) -> bool:
    """Whether a word is meant as a command: a question may begin with a path."""
    like = difflib.get_close_matches(word, WORDS, 1, ALIKE)
    return word[:1] == "/" and word[1:].isalpha() and (alone or bool(like))


def _of(side: Side) -> str:
    return f"{side.label}: " if side.label else ""


def _columns(sides: Sequence[Side]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(*(side.label for side in sides), box=None, expand=True, padding=(0, 2, 0, 0))
    for column in table.columns:
        column.ratio = 1
    table.add_row(*(Text(printable(side.text)) for side in sides))
    return table


def _wide_console() -> "Console | None":
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    return console if console.width >= WIDE else None


def _enable_line_editing() -> None:
    """Arrow keys and the lines before, where Python has readline; it works by being imported."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return
