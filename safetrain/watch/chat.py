"""Prompts as in training, answers token by token, and a chat in a terminal or a pipe. The caller loads the models."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from signal import SIGINT
from typing import Any

from safetrain.core.errors import DataError, ModelError
from safetrain.core.formatting import EMPTY_ANSWER, print_text, printable
from safetrain.core.records.adapter_files import PromptFormat
from safetrain.core.signals import Terminated, handling
from safetrain.core.text.tokenizer import ChatTokenizer, Messages, TemplateError

HELP = "Ctrl-C stops an answer, /reset starts a new chat (if trained on single questions: before each), /exit ends it"
REMARKS = {  # by how an answer ended
    "stopped": "stopped",
    "context": "the model's context is full. /reset begins a new chat",
    "length": "cut off: raise --max-new-tokens",
}


class Prompts:
    """Writes prompts for one model. ``system`` is the system prompt of all training rows, or empty."""

    def __init__(self, tokenizer: ChatTokenizer, form: PromptFormat | None) -> None:
        form = form or PromptFormat((), "")
        self._tokenizer, self._format = tokenizer, form
        self.system = form.system
        self.stop_ids = tokenizer.stop_ids | frozenset(form.stop_ids)
        self.continues = form.documents or not tokenizer.template  # continues a text instead of answering

    def with_system(self, messages: Messages, system: str) -> list[Mapping[str, Any]]:
        """Prepend a system prompt, unless it is empty."""
        return [{"role": "system", "content": system}, *messages] if system else list(messages)

    def ids(self, messages: Messages) -> list[int]:
        """Ids of a prompt: a chat whose answer opens as in training, or its last text if the model continues texts.

        Raises ModelError if the template refuses the chat.
        """
        if self.continues:  # the end token of a document opens the next one, as in training
            end = self._tokenizer.end_id if self._format.documents else None
            return [*([] if end is None else [end]), *self._tokenizer.encode(str(messages[-1]["content"]))]
        try:
            prompt = self._tokenizer.template.write(messages, prompt=True)
        except TemplateError as error:
            raise ModelError(f"The model's chat template refuses this chat: {error}") from None
        return self._tokenizer.encode_chat(prompt.removesuffix(self._format.asked) + self._format.opening)

    def writes_system(self, system: str) -> bool:
        """Whether the template writes a system prompt; raises ModelError if it refuses one."""
        question = [{"role": "user", "content": "?"}]
        return not self.continues and self.ids(self.with_system(question, system)) != self.ids(question)


class AnswerText:
    """Decodes an answer token by token: only whole characters, without white space around the answer."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream, self._backend = DecodeStream(skip_special_tokens=True), tokenizer.backend
        self._white, self.text = "", ""

    def add(self, token: int) -> str:
        """The text that the next token adds; empty until a character is complete."""
        pending = self._white + (self._stream.step(self._backend, token) or "")
        words = pending.rstrip()
        self._white = pending[len(words) :] if words or self.text else ""
        words = words if self.text else words.lstrip()
        self.text += words
        return words


@dataclass
class Side:
    """One model and its chat. ``label`` precedes its answers; empty if it is the only side."""

    label: str
    speaker: Any  # the engine's Conversation
    messages: list[Mapping[str, Any]] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Print a remark about this side."""
        say(f"{self.label}: {text}" if self.label else text)


class Chat:
    """Reads one line at a time; answers go to stdout, everything else to stderr."""

    def __init__(
        self, tokenizer: ChatTokenizer, prompts: Prompts, sides: Sequence[Side], system: str, context: int | None
    ) -> None:
        """``context``: the model's limit in tokens, None if unknown."""
        self._tokenizer, self._prompts, self._sides = tokenizer, prompts, sides
        self._system, self._context = system, context
        self._in_terminal = sys.stdin.isatty()
        self._stopped, self._turns = False, 0

    def run(self) -> None:
        """Chat until the input ends, or /exit.

        Raises DataError for input that is not UTF-8, and in a pipe for a line that gets no answer, because the reader
        of a pipe counts the answers.
        """
        if self._in_terminal:
            with suppress(ImportError):  # some builds of Python lack it: no arrow keys and earlier lines
                import readline  # noqa: F401
        while (line := self._line()) is not None:
            word = line.strip().partition(" ")[0]
            if word == "/exit":
                return
            if word == "/reset":
                for side in self._sides:
                    side.messages.clear()
                say("new chat")
            elif word[:1] == "/" and word[1:].isalpha():  # a path has a second slash
                self._refuse(f"Unknown command {word}. {HELP}.")
            elif word:
                self._turn(line.strip())

    def _line(self) -> str | None:
        """Return the next line; None at the end."""
        try:
            line = self._typed() if self._in_terminal else sys.stdin.readline() or None
            (line or "").encode()  # in the C locale, Python lets incomplete characters through
        except UnicodeError as error:
            raise DataError(f"The input is not UTF-8: {error}", do="convert it, e.g. with iconv") from None
        return line

    def _typed(self) -> str | None:
        try:
            return input("> ")
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt as stopped:
            if isinstance(stopped, Terminated):
                raise
            print(file=sys.stderr)
            say("Ctrl-D or /exit ends the chat")
            return ""

    def _refuse(self, text: str) -> None:
        """Print a remark in a terminal; raise an error in a pipe."""
        if not self._in_terminal:
            raise DataError(f"{text} This line gets no answer.", do="correct the line, or put /reset before it")
        say(text)

    def _turn(self, question: str) -> None:
        """Ask every side that has room for the question."""
        self._stopped, self._turns = False, self._turns + 1
        message = {"role": "user", "content": question}
        prompts = [(side, self._prompt(side, message)) for side in self._sides]
        with handling({SIGINT: self._stop}) if self._in_terminal else nullcontext():
            for side, prompt in prompts:
                if prompt is not None:
                    self._answer(side, message, prompt)

    def _prompt(self, side: Side, message: Mapping[str, Any]) -> list[int] | None:
        """Return the tokens of the chat with this question; None if it cannot be asked."""
        messages = [message] if self._prompts.continues else [*side.messages, message]
        try:
            prompt = self._prompts.ids(self._prompts.with_system(messages, self._system))
        except ModelError as error:
            if not self._in_terminal:
                raise
            side.say(error.what)
            return None
        if self._context is None or len(prompt) < self._context:
            return prompt
        self._refuse(
            f"question {self._turns} was not asked: the chat would have {len(prompt)} tokens, more than the model's "
            f"context of {self._context}. /reset begins a new chat."
        )
        return None

    def _answer(self, side: Side, message: Mapping[str, Any], prompt: list[int]) -> None:
        """Print an answer and keep it in the chat, even if it was stopped early."""
        print(f"{side.label + ':':<7}" if side.label else "", end="", flush=True)
        answer = AnswerText(self._tokenizer)
        for token in side.speaker.answer(prompt, lambda: self._stopped):
            print(printable(answer.add(token)), end="", flush=True)
        print("" if answer.text or self._stopped else EMPTY_ANSWER, flush=True)
        if side.speaker.ended in REMARKS:
            side.say(REMARKS[side.speaker.ended])
        if answer.text:
            side.messages += [message, {"role": "assistant", "content": answer.text}]

    def _stop(self, _number: int) -> None:
        self._stopped = True


def say(text: str) -> None:
    """Print a remark, which is not an answer, to stderr."""
    print_text(f"[{text}]", sys.stderr)
