"""A training row (messages, a pair or bare text): from OpenAI's or ShareGPT's format to OpenAI's current format.

JSON is read strictly: no NaN, no repeated keys, no half surrogate pairs. A row that cannot be read is a RowError.
"""

import collections
import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
ROLE_NAMES = {  # other names of the roles, in lower case
    **{name: name for name in ROLES},
    **dict.fromkeys(("human", "prompter", "customer", "client", "instruction", "question"), "user"),
    **dict.fromkeys(("gpt", "bot", "model", "ai", "chatbot", "chatgpt", "agent", "answer", "response"), "assistant"),
    **dict.fromkeys(("observation", "ipython", "environment", "function_response", "tool_result"), "tool"),
    **dict.fromkeys(("tool_results", "tool_response", "tool_output", "function"), "tool"),
}
WEIGHT_KEYS = ("weight", "loss_weight", "loss", "loss_scale", "train", "training", "train_on_turn", "trainable",
               "train_detail")  # fmt: skip
MASK_KEYS = ("masked", "mask")  # torchtune's: true keeps a turn out of training
MEDIA_KEYS = ("images", "image", "audio", "audios", "video", "videos")
ONLY_TEXT = "only text can be trained on: leave the row out"
CALL = '{"type": "function", "function": {"name": …, "arguments": {…}}}'
TOOL = '{"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}'
MOST_SHOWN, MOST_NAMES = 60, 12  # characters of a value, and keys, in an error
KINDS = {bool: "true or false", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object",
         type(None): "null or an empty cell"}  # fmt: skip
WHITE = " \t\r\n"
PAIRS = "pairs"  # the format of preference data
DEEP = "brackets are nested hundreds of levels deep"


class RowError(ValueError):
    """An error in one row; the reader adds the file and line.

    ``id`` names the finding; ``column`` is the error's position in its line; ``do`` replaces the finding's remedy.
    """

    def __init__(self, message: str, *, id: str = "ROW-UNREADABLE", column: int = 0, do: str = "") -> None:
        super().__init__(message)
        self.id, self.column, self.do = id, column, do


def object_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object with these keys and values; raises RowError if a key occurs twice."""
    value = dict(pairs)
    if len(value) != len(pairs):
        ((twice, _),) = collections.Counter(key for key, _ in pairs).most_common(1)
        raise RowError(f"the key '{shown(twice)}' occurs twice in one object: remove one")
    return value


def _constant(name: str) -> None:
    raise RowError(f"{name} is not valid JSON: write null, or omit the key")


_STRICT = json.JSONDecoder(object_pairs_hook=object_of, parse_constant=_constant)


def value_at(text: str, start: int) -> tuple[object, int]:
    """Decode the JSON value that begins at ``start``; returns the value, or a RowError, and where its text ends.

    Raises JSONDecodeError if the text is not JSON or the value is incomplete, ValueError, RecursionError.
    """
    try:
        return _STRICT.raw_decode(text, start)
    except RowError as error:
        return error, json.JSONDecoder().raw_decode(text, start)[1]


def load(text: str) -> object:
    """Decode one line of JSON to its value or a RowError."""
    try:
        value, end = value_at(text, len(text) - len(text.lstrip(WHITE)))
        if text[end:].strip(WHITE):
            raise json.JSONDecodeError("Extra data", text, end)
    except (ValueError, RecursionError) as error:
        return RowError(said_of(error), column=getattr(error, "colno", 0))
    return value


def said_of(error: ValueError | RecursionError) -> str:
    """Describe why json cannot read a text, with the usual cause in brackets if one is known."""
    if isinstance(error, RecursionError):
        return DEEP
    if not isinstance(error, json.JSONDecodeError):  # from int(), beyond 4,300 digits
        return "a number has too many digits: write it as a string, in quotes"
    rest, hint = error.doc[error.pos : error.pos + MOST_SHOWN].lstrip(), ""
    if not rest or error.msg.startswith("Unterminated"):
        hint = " (it is cut off here; JSON lines need one object per line)"
    elif error.msg == "Extra data" and rest == ",":
        hint = " (a comma ends the line: remove it)"
    elif rest.startswith(("'", "None", "True", "False")):
        hint = " (this is how Python prints it: write the file with json.dumps)"
    return f"not valid JSON: {error.msg.removesuffix(' at')}{hint}"


def dump(value: object, place: str) -> str:
    """Encode a value as JSON text that ``load`` can read; ``place`` names it in errors."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:  # such as 1e999, which Python reads as infinity
        raise RowError(f"{place} contains NaN, or a number that is too large for most JSON readers") from None
    require_unicode(text, place)
    return text


def require_unicode(text: str, place: str) -> None:
    r"""Raise RowError for half a surrogate pair (a single ``\ud83d``): JSON can contain it, no tokenizer accepts it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RowError(f"{place} contains half a surrogate pair, which is not a character") from None


def shown(value: object) -> str:
    """A value from the data, shortened and escaped for one line of a terminal."""
    text = value if isinstance(value, str) and value.isprintable() else ascii(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def plain(item: object) -> str:
    """A string or number, stripped of white space; empty for any other value."""
    return str(item).strip() if isinstance(item, str | int | float) and not isinstance(item, bool) else ""


def names_of(keys: Collection[str]) -> str:
    """The first few keys as text, for an error."""
    return ", ".join(map(shown, list(keys)[:MOST_NAMES])) + (", …" if len(keys) > MOST_NAMES else "")


def kind(value: object) -> str:
    """The JSON type of ``value`` in words, such as "a list"."""
    return KINDS.get(type(value), type(value).__name__)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. ``details`` is the JSON text of its other keys (tool_calls, name), or empty.

    ``trained`` is False for an assistant turn with weight 0.
    """

    role: str
    content: str
    details: str = ""
    trained: bool = True

    @property
    def calls_tools(self) -> bool:
        return '"tool_calls"' in self.details

    @property
    def keys(self) -> dict[str, Any]:
        """The turn's keys other than role and content."""
        return json.loads(self.details) if self.details else {}

    def for_template(self) -> dict[str, Any]:
        """The message as a mapping for chat templates."""
        return {"role": self.role, "content": self.content, **self.keys}

    def as_json(self) -> dict[str, Any]:
        """The message as JSON, from which ``parse_messages`` reads it again."""
        value = self.for_template()
        return value if self.trained else {**value, "weight": 0}


@dataclass(frozen=True, slots=True)
class Row:
    """A training example: messages (chat, tools, completions, pairs) or bare text. ``tools`` is JSON text or empty.

    ``messages`` of a pair are prompt and chosen answer, ``rejected`` the prompt again and the rejected answer.
    ``options`` are the answers to choose from, if the row has its own.
    ``ignored_keys`` are the unused keys. ``taken`` names the keys that were read, if they are not the usual ones.
    """

    format: str
    messages: tuple[Message, ...] = ()
    tools: str = ""
    text: str = ""
    rejected: tuple[Message, ...] = ()
    options: tuple[str, ...] = ()
    ignored_keys: tuple[str, ...] = field(default=(), compare=False)
    taken: str = field(default="", compare=False)

    def as_json(self) -> dict[str, Any]:
        """The row as JSON for data/validated, in its own format."""
        if self.format == "text":
            return {"text": self.text}
        if self.format == "completions":
            pair = {"prompt": self.messages[-2].content, "completion": self.messages[-1].content}
            options = {"options": list(self.options)} if self.options else {}
            return {**({"system": self.system} if self.system else {}), **pair, **options}
        tools = {"tools": json.loads(self.tools)} if self.tools else {}
        if self.rejected:
            end = shared_turns(self.messages, self.rejected)
            parts = {"prompt": self.messages[:end], "chosen": self.messages[end:], "rejected": self.rejected[end:]}
            return {**{name: [each.for_template() for each in part] for name, part in parts.items()}, **tools}
        return {"messages": [message.as_json() for message in self.messages], **tools}

    @property
    def system(self) -> str:
        """The system prompt; empty if there is none."""
        return self.messages[0].content if self.messages and self.messages[0].role == "system" else ""

    @property
    def is_rejected(self) -> bool:
        """Whether this is the second of the rows that a pair is divided into."""
        return self.format == PAIRS and not self.rejected

    def divided(self) -> "tuple[Row, ...]":
        """The rows that are stored: itself, and for a pair also prompt and rejected answer."""
        return (self, replace(self, messages=self.rejected, rejected=())) if self.rejected else (self,)

    def identity(self) -> str:
        """A text that is equal for equal rows, in any order of keys. Most rows are plain chats and need no JSON."""
        if self.tools or self.rejected or any(message.details or not message.trained for message in self.messages):
            return json.dumps(self.as_json(), sort_keys=True, ensure_ascii=False)
        return "\0".join([self.format, self.text, *(f"{each.role}\1{each.content}" for each in self.messages)])


def shared_turns(one: tuple[Message, ...], other: tuple[Message, ...]) -> int:
    """The number of messages with which both chats begin, without the last message of the shorter one."""
    most = min(len(one), len(other)) - 1
    return next((place for place in range(most) if one[place] != other[place]), most)


def shown_only(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return tuple(replace(each, trained=False) if each.role == "assistant" else each for each in messages)


def is_turn(value: object) -> bool:
    """Whether the value looks like one turn of a chat, with OpenAI's or ShareGPT's keys."""
    return isinstance(value, dict) and (
        ("role" in value and ("content" in value or "tool_calls" in value)) or ("from" in value and "value" in value)
    )


def turns_in(text: object) -> object:
    """The list of turns that a JSON text holds; None for any other value."""
    turns = load(text) if isinstance(text, str) and text.lstrip().startswith("[") else None
    return turns if isinstance(turns, list) and turns and all(map(is_turn, turns)) else None


def parse_messages(value: object, place: str) -> tuple[Message, ...]:
    """Read a list of turns; ``place`` names it in errors. Raises RowError."""
    if not isinstance(value, list) or not value:
        raise RowError(f"{place} must be a list with at least one message")
    return tuple([_message(item, f"{place}[{index}]") for index, item in enumerate(value)])


def _message(value: object, place: str) -> Message:
    value = decoded(value, place)
    if not isinstance(value, dict):
        raise RowError(f"{place} must be an object with role and content, not {kind(value)}")
    role, content = value.get("role"), value.get("content")
    if len(value) == 2 and role in ROLES and type(content) is str and content and not content.isspace():
        return Message(role, content)  # the fast path for nearly all messages
    turn = _usual_turn(value, place)
    role, content = turn.pop("role", None), turn.pop("content", None)
    if role not in ROLES:
        raise RowError(f"{place}.role is {shown(role)}; expected one of {', '.join(ROLES)}")
    is_trained = _is_trained(turn, role, place)
    details = _details(turn, role, place)
    calls = "tool_calls" in details
    text = "" if content is None and calls else _text_of(content, f"{place}.content")
    if role == "assistant" and not calls and not text.strip():
        raise RowError(f"{place} is an empty assistant turn")
    return Message(role, text, dump(details, place) if details else "", is_trained or role != "assistant")


def _is_trained(turn: dict[str, Any], role: str, place: str) -> bool:
    """Take out the turn's keys about training on it; whether they allow that. Raises RowError for a part or a share.

    They stay if they ask for training on another role's turn, so that they are reported as unused.
    """
    weights = {key: turn.pop(key) for key in (*WEIGHT_KEYS, *MASK_KEYS) if turn.get(key) not in (None, [])}
    for key, weight in weights.items():
        if weight not in (0, 1):
            got = f"the string '{shown(weight)}'" if isinstance(weight, str) else shown(weight)
            raise RowError(f"{place}.{key} is {got}; expected 0 or 1: a turn is trained on as a whole")
    found = {bool(weight) != (key in MASK_KEYS) for key, weight in weights.items()}
    if len(found) > 1:
        raise RowError(f"{place}: {' and '.join(weights)} contradict each other on training: keep one")
    turn |= weights if role != "assistant" and True in found else {}
    return False not in found


def _usual_turn(value: dict[str, Any], place: str) -> dict[str, Any]:
    """Convert a turn to OpenAI's role, content and tool_calls; unknown keys stay."""
    turn = dict(value)
    if turn.get("role") is None and "from" in turn:  # ShareGPT
        turn["role"] = turn.pop("from")
        if turn.get("content") is None:
            turn["content"] = turn.pop("value", None)
    if turn.get("function_call"):  # OpenAI, before tools
        turn["tool_calls"] = [{"type": "function", "function": turn.pop("function_call")}]
    name = str(turn.get("role")).strip().casefold()
    if name in ("function_call", "tool_call"):
        calls = parsed(turn.pop("content", None), place)
        turn |= {"role": "assistant", "content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}
    elif name in ROLE_NAMES:
        turn["role"] = ROLE_NAMES[name]
    return turn


def _details(turn: dict[str, Any], role: str, place: str) -> dict[str, object]:
    """The turn's remaining keys that are not null, in order (templates may print them), with tool calls in one form."""
    if media := [key for key in MEDIA_KEYS if turn.get(key)]:
        raise RowError(f"{place}.{media[0]}: {ONLY_TEXT}")
    if turn.get("tool_calls") and role != "assistant":
        raise RowError(f"{place}.tool_calls: only an assistant turn calls tools; this turn has role '{role}'")
    calls = decoded(turn.get("tool_calls"), f"{place}.tool_calls") or []
    calls = calls if isinstance(calls, list) else [calls]
    turn["tool_calls"] = [_tool_call(call, f"{place}.tool_calls[{at}]") for at, call in enumerate(calls)] or None
    return {key: item for key, item in turn.items() if item is not None}


def _text_of(content: object, place: str) -> str:
    """The content as text; a list of parts is joined."""
    texts = list[str]()
    for index, part in enumerate(content if isinstance(content, list) else [content]):
        text, got = part, kind(part)
        if isinstance(part, dict):
            text = part.get("text", part.get("value"))  # value: LLaMA-Factory
            text = text if part.get("type", "text") in ("text", "input_text", "output_text") else None
            got = f"a part of type '{shown(part.get('type'))}': {ONLY_TEXT} (thinking: use the key reasoning_content)"
        if not isinstance(text, str):
            own = f"{place}[{index}]" if isinstance(content, list) else place
            raise RowError(f'{own} must be a string or {{"type": "text", "text": "…"}}, not {got}')
        texts.append(text)
    return "".join(texts)


def _tool_call(value: object, place: str) -> dict[str, object]:
    value = decoded(value, place)
    call = {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else {}
    if "function" not in call and "name" in call:  # Hermes and mlx-lm: without the outer object
        call["function"] = {key: call.pop(key) for key in ("name", "arguments", "parameters") if key in call}
    function = _function(call.get("function"), place, CALL, "parameters")
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # OpenAI writes JSON text, and "" without arguments
        found = load(arguments) if arguments.strip() else {}
        arguments = found if isinstance(found, dict) else arguments
    elif not isinstance(arguments, dict | None):
        raise RowError(f"{place}.function.arguments must be an object or its JSON text, not {kind(arguments)}")
    call.setdefault("type", "function")
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def parse_tools(value: object) -> str:
    """The tools of a row as the JSON text of a list, each in OpenAI's form; empty without tools."""
    tools = parsed(value, "tools")
    if not tools:
        return ""
    if not isinstance(tools, list):
        raise RowError(f"tools must be a list, or the JSON text of a list, not {kind(tools)}")
    return dump([_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)], "tools")


def _tool(value: object, place: str) -> dict[str, object]:
    value = decoded(value, place)
    tool = value if isinstance(value, dict) else {}
    if "function" not in tool and "name" in tool:  # flat, as in OpenAI's Responses and in `functions`
        inner = {key: item for key, item in tool.items() if key != "type"}
        tool = {"type": tool.get("type") or "function", "function": inner}
    function = _function(tool.get("function"), place, TOOL, "input_schema")
    if isinstance(function.get("parameters"), str):
        function = {**function, "parameters": parsed(function["parameters"], f"{place}.function.parameters")}
    return {**tool, "type": tool.get("type") or "function", "function": function}


def _function(function: object, place: str, form: str, misnamed: str) -> dict[str, Any]:
    """Check the function of a call or tool: it needs a name, and no ``misnamed`` key, which templates ignore."""
    function = decoded(function, place)
    if isinstance(function, dict) and isinstance(function.get("name"), str) and misnamed not in function:
        return function
    raise RowError(f"{place} must be {form}")


def parsed(value: object, place: str) -> object:
    """Parse a JSON text; any other value is returned unchanged. Raises RowError if the text is not JSON."""
    if not isinstance(value, str) or not value.strip():
        return value
    found = load(value)
    if isinstance(found, RowError):
        raise RowError(f"{place} is a string that must be JSON: {found}")
    return found


def decoded(value: object, place: str) -> object:
    """Parse a text that begins like a JSON object or list; any other value is returned unchanged. Raises RowError."""
    return parsed(value, place) if isinstance(value, str) and value.lstrip()[:1] in ("{", "[") else value
