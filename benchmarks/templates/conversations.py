"""The conversations that every template is given. Each piece of text has a word that occurs nowhere else."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
LONG = 300  # turns of the long chat
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "fetch_wetter",
            "description": "Gives the Dulmexa of a place.",
            "parameters": {
                "type": "object",
                "properties": {"ort": {"type": "string", "description": "A Dulmexb."}},
                "required": ["ort"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "count_vollen",
            "description": "Counts Dulmexc.",
            "parameters": {
                "type": "object",
                "properties": {"nacht": {"type": "string", "description": "A Dulmexd."}},
                "required": ["nacht"],
            },
        },
    },
]
TOOL_NEVER_CALLED = "count_vollen"


@dataclass(frozen=True)
class Call:
    """A tool call of a turn: what has to stand in its label."""

    name: str
    value: str


@dataclass(frozen=True)
class Turn:
    """The words of one assistant turn."""

    answer: str = ""
    thinking: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Conversation:
    """A row of the data, and the words by which its pieces are known."""

    letter: str
    title: str
    row: dict[str, Any]
    turns: tuple[Turn, ...]
    systems: tuple[str, ...] = ()
    others: tuple[str, ...] = ()  # of users and tools

    @property
    def messages(self) -> list[Message]:
        """The messages of the row."""
        messages: list[Message] = self.row["messages"]
        return messages

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """The tools of the row."""
        return self.row.get("tools")


class _Writer:
    """Writes messages with words of their own, and remembers the words."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.turns: list[Turn] = []
        self.systems: list[str] = []
        self.others: list[str] = []

    def system(self) -> "_Writer":
        """A system message."""
        self.systems.append(f"Sokrel{len(self.systems):03}")
        return self._say("system", f"Be brief about {self.systems[-1]} always.")

    def user(self) -> "_Writer":
        """A user's message."""
        return self._say("user", f"What is {self._other('Umbrik')} then?")

    def result(self, call: str, name: str = "fetch_wetter") -> "_Writer":
        """What a tool gave back."""
        content = json.dumps({"himmel": self._other("Rezal")})
        return self._say("tool", content, tool_call_id=call, name=name)

    def answer(self, form: str = "It is {} indeed.", inline: bool = False, reasoning: bool = False) -> "_Writer":
        """An answer, its thinking inside or beside it."""
        word, thinking = f"Anfol{len(self.turns):03}", f"Thorim{len(self.turns):03}"
        said, thought = form.format(word), f"They ask about {thinking} here."
        self.turns.append(Turn(word, thinking if inline or reasoning else ""))
        if inline:
            return self._say("assistant", f"<think>\n{thought}\n</think>\n\n{said}")
        return self._say("assistant", said, **({"reasoning_content": thought} if reasoning else {}))

    def call(
        self, *names: str, text: bool = True, content: str | None = "", reasoning: bool = False, said: bool = False
    ) -> "_Writer":
        """A turn that calls tools, with arguments as text or as objects."""
        turn, calls, written = len(self.turns), [], []
        for index, name in enumerate(names):
            calls.append(Call(name, f"Lisbrok{turn:02}{index}"))
            arguments: Any = {"ort" if name == "fetch_wetter" else "nacht": calls[-1].value}
            written.append(
                {
                    "id": call_id(turn, index),
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments) if text else arguments},
                }
            )
        word, thinking = f"Anfol{turn:03}" if said else "", f"Thorim{turn:03}" if reasoning else ""
        extra = {"reasoning_content": f"They ask about {thinking} here."} if reasoning else {}
        self.turns.append(Turn(word, thinking, tuple(calls)))
        return self._say("assistant", f"I look for {word} there." if said else content, tool_calls=written, **extra)

    def done(self, letter: str, title: str, tools: bool = False) -> Conversation:
        """The conversation."""
        row: dict[str, Any] = {"messages": self.messages} | ({"tools": TOOLS} if tools else {})
        return Conversation(letter, title, row, tuple(self.turns), tuple(self.systems), tuple(self.others))

    def _other(self, stem: str) -> str:
        self.others.append(f"{stem}{len(self.others):03}")
        return self.others[-1]

    def _say(self, role: str, content: str | None, **keys: Any) -> "_Writer":
        self.messages.append({"role": role, "content": content, **keys})
        return self


def call_id(turn: int, index: int) -> str:
    """Nine letters and digits, as Mistral's templates want them."""
    return f"call{turn:03}{index:02}"


def conversations() -> tuple[Conversation, ...]:
    """All of them: the ones of facts/real_data.md, and more."""
    return (*_plain(), *_with_tools(), *_with_thinking(), *_odd())


def _plain() -> Iterator[Conversation]:
    new = _Writer
    yield new().user().answer().done("a", "one turn")
    yield new().system().user().answer().done("b", "system")
    yield _turns(new(), 3).done("c", "three turns")
    yield _turns(new().system(), 3).done("c2", "system and three turns")
    yield new().answer().user().answer().done("d1", "assistant first")
    yield new().user().user().answer().done("d2", "two users in a row")


def _with_tools() -> Iterator[Conversation]:
    new, name = _Writer, "fetch_wetter"
    yield _called(new().user().call(name)).done("e1", "tool call, arguments as text", True)
    yield _called(new().user().call(name, text=False)).done("e2", "tool call, arguments as an object", True)
    two = new().user().call(name, TOOL_NEVER_CALLED).result(call_id(0, 0))
    yield two.result(call_id(0, 1), TOOL_NEVER_CALLED).answer().done("p", "parallel tool calls", True)
    yield new().user().call(name).result(call_id(0, 0)).done("tl", "tool result last", True)
    yield _called(new().user().call(name, content=None)).done("cn", "content null beside a call", True)
    yield _called(new().user().call(name, said=True)).done("ct", "text beside a call", True)
    yield _called(new().user().call(name, reasoning=True)).done("cr", "reasoning_content beside a call", True)
    yield _called(new().user().call(name)).done("nt", "tool call without a list of tools")


def _with_thinking() -> Iterator[Conversation]:
    new = _Writer
    yield new().user().answer(inline=True).done("f1", "thinking inside the answer")
    yield new().user().answer(inline=True).user().answer(inline=True).done("f2", "two turns of it")
    yield new().user().answer(reasoning=True).done("f3", "reasoning_content")
    yield new().user().answer(reasoning=True).user().answer(reasoning=True).done("f4", "two turns of it")


def _odd() -> Iterator[Conversation]:
    new = _Writer
    empty = new().user().answer()
    empty.messages.insert(0, {"role": "system", "content": ""})
    yield empty.done("g1", "empty system")
    yield new().user().answer("Ça vaut {} 🜨 – 鉄 и железо").done("g2", "unicode and emoji")
    yield new().user().answer("  It is {} indeed. \n").done("g3", "white space around the answer")
    yield new().user().answer("\nIt is {} indeed.").user().answer("\n\nIt is {}.").done("nl", "newline first")
    yield new().system().system().user().answer().done("s2", "two system messages")
    parts = _turns(new().system(), 2)
    for message in parts.messages:
        message["content"] = [{"type": "text", "text": message["content"]}]
    yield parts.done("cp", "content as text parts")
    yield _turns(new(), LONG).done("l", f"{LONG} turns")


def _turns(writer: _Writer, count: int) -> _Writer:
    for _ in range(count):
        writer.user().answer()
    return writer


def _called(writer: _Writer) -> _Writer:
    return writer.result(call_id(0, 0)).answer()
