"""A training row, messages or bare text: read from OpenAI's and ShareGPT's forms, written in OpenAI's current one."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from safetrain.data.json_rows import RowError, dump, kind, load, require_unicode, shown

ROLES = ("system", "developer", "user", "assistant", "tool")
ROLE_NAMES = {  # other names of the roles, in lower case
    **{name: name for name in ROLES},
    **dict.fromkeys(("human", "prompter", "customer", "client", "instruction", "question"), "user"),
    **dict.fromkeys(("gpt", "bot", "model", "ai", "chatbot", "chatgpt", "agent", "answer", "response"), "assistant"),
    **dict.fromkeys(("observation", "ipython", "environment", "function_response", "tool_result"), "tool"),
    **dict.fromkeys(("tool_results", "tool_response", "tool_output", "function"), "tool"),
}
CALL_ROLES = ("function_call", "tool_call")
WEIGHT_KEYS = ("weight", "loss_weight", "train", "training")  # in OpenAI's, LLaMA-Factory's and Axolotl's formats
MEDIA_KEYS = ("images", "image", "audio", "audios", "video", "videos")
THINKING = ("thinking", "reasoning")  # types of parts
ONLY_TEXT = "only text can be trained on: leave the row out"
CALL = '{"type": "function", "function": {"name": …, "arguments": {…}}}'
TOOL = '{"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}'


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
        """Whether the turn has tool calls."""
        return '"tool_calls"' in self.details

    def for_template(self) -> dict[str, Any]:
        """The message as a mapping for chat templates."""
        return {"role": self.role, "content": self.content, **(json.loads(self.details) if self.details else {})}

    def as_json(self) -> dict[str, Any]:
        """The message as JSON, from which ``parse_messages`` reads it again."""
        value = self.for_template()
        return value if self.trained else {**value, "weight": 0}


@dataclass(frozen=True, slots=True)
class Row:
    """A training example: messages (chat, tools, completions) or bare text. ``tools`` is JSON text or empty.

    ``ignored_keys`` are the unused keys. ``taken`` names the keys that were read, if they are not the usual ones.
    """

    format: str
    messages: tuple[Message, ...] = ()
    tools: str = ""
    text: str = ""
    ignored_keys: tuple[str, ...] = field(default=(), compare=False)
    taken: str = field(default="", compare=False)

    def as_json(self) -> dict[str, Any]:
        """The row as JSON for data/validated, in its own format."""
        if self.format == "text":
            return {"text": self.text}
        if self.format == "completions":
            pair = {"prompt": self.messages[-2].content, "completion": self.messages[-1].content}
            return {**({"system": self.system} if self.system else {}), **pair}
        tools = {"tools": json.loads(self.tools)} if self.format == "tools" else {}
        return {"messages": [message.as_json() for message in self.messages], **tools}

    @property
    def system(self) -> str:
        """The system prompt; empty if there is none."""
        return self.messages[0].content if self.messages and self.messages[0].role == "system" else ""

    def identity(self) -> str:
        """A text that is equal for equal rows, in any order of keys. Most rows are plain chats and need no JSON."""
        if self.tools or any(message.details or not message.trained for message in self.messages):
            return json.dumps(self.as_json(), sort_keys=True, ensure_ascii=False)
        return "\0".join([self.format, self.text, *(f"{each.role}\1{each.content}" for each in self.messages)])


def row_of(parts: Mapping[str, Any], keys: Mapping[str, str]) -> Row:
    """Make a row from messages, from prompt and completion, or from text; ``keys``: names of these parts for errors."""
    if "text" in parts:
        return Row("text", text=_text(parts["text"], keys["text"]))
    if "messages" in parts:
        turns = parse_messages(parts["messages"], keys.get("messages", "messages"))
    else:
        turns = _pair(parts, keys)
    messages = _with_system(parts.get("system"), turns)
    for index, message in enumerate(messages):
        require_unicode(message.content, f"messages[{index}].content")
    if not any(message.trained for message in messages if message.role == "assistant"):
        raise RowError("no assistant turn to train on; turns with weight 0 or in the prompt are not trained on")
    is_plain = isinstance(parts.get("prompt"), str) and isinstance(parts.get("completion"), str)
    is_plain = is_plain and not parts.get("tools") and not parts.get("history")  # mlx-lm's completions have neither
    tools = tools_text(parts.get("tools"))
    form = "tools" if tools else "completions" if is_plain else "chat"
    return Row(form, messages, tools)


def _pair(parts: Mapping[str, Any], keys: Mapping[str, str]) -> tuple[Message, ...]:
    """The turns of a history, a prompt with its input, and a completion."""
    prompt, completion, more = parts["prompt"], parts["completion"], parts.get("input")
    if more:
        if not isinstance(prompt, str) or not isinstance(more, str):
            raise RowError(f"{keys['input']} is {kind(more)}; this key and the prompt must be strings")
        prompt = "\n\n".join(text for text in (prompt, more) if text.strip()) or prompt
    before = _earlier(parts.get("history")) + _turns(prompt, "user", keys["prompt"])
    if isinstance(prompt, list) or isinstance(completion, list):
        before = _shown_only(before)  # as in TRL
    return before + _turns(completion, "assistant", keys["completion"])


def _turns(value: object, role: str, key: str) -> tuple[Message, ...]:
    """Read a list of messages, or a text as one message with this role."""
    return parse_messages(value, key) if isinstance(value, list) else (Message(role, _text(value, key)),)


def _earlier(history: object) -> tuple[Message, ...]:
    """Earlier turns: LLaMA-Factory's pairs, which are trained on, or messages, which are not."""
    if not history:
        return ()
    if not isinstance(history, list) or not all(isinstance(item, list) and len(item) == 2 for item in history):
        return _shown_only(parse_messages(history, "history"))
    roles = ("user", "assistant")
    turns = [{"role": role, "content": text} for pair in history for role, text in zip(roles, pair, strict=True)]
    return parse_messages(turns, "history")


def _shown_only(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return tuple(replace(each, trained=False) if each.role == "assistant" else each for each in messages)


def _with_system(text: object, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Prepend the system prompt that a row has next to its messages (Bedrock, LLaMA-Factory)."""
    if text is None or text == "":
        return messages
    system = Message("system", _text(text, "system"))
    if messages[0].role not in ("system", "developer"):
        return (system, *messages)
    if messages[0] != system:
        raise RowError("two different system prompts: next to messages and in messages[0]; keep one")
    return messages


def _text(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{key} must be a string, not {kind(value)}")
    if not value.strip():
        raise RowError(f"{key} is empty")
    require_unicode(value, key)
    return value


def is_turn(value: object) -> bool:
    """Whether the value looks like one turn of a chat, with OpenAI's or ShareGPT's keys."""
    return isinstance(value, dict) and (
        ("role" in value and ("content" in value or "tool_calls" in value)) or ("from" in value and "value" in value)
    )


def parse_messages(value: object, place: str) -> tuple[Message, ...]:
    """Read a list of turns; ``place`` names it in errors. Raises RowError."""
    if not isinstance(value, list) or not value:
        raise RowError(f"{place} must be a list with at least one message")
    return tuple([_message(item, f"{place}[{index}]") for index, item in enumerate(value)])


def _message(value: object, place: str) -> Message:
    if not isinstance(value, dict):
        raise RowError(f"{place} must be an object with role and content, not {kind(value)}")
    role, content = value.get("role"), value.get("content")
    if len(value) == 2 and role in ROLES and type(content) is str and content and not content.isspace():
        return Message(role, content)  # the fast path for nearly all messages
    turn = _usual_turn(value, place)
    role, content = turn.pop("role", None), turn.pop("content", None)
    if role not in ROLES:
        got = f"'{shown(role)}'" if isinstance(role, str) else "missing" if role is None else kind(role)
        raise RowError(f"{place}.role is {got}; expected one of {', '.join(ROLES)}")
    weights = [turn.pop(key, None) for key in WEIGHT_KEYS]
    weight = next((weight for weight in weights if weight is not None), 1)
    if weight not in (0, 1):
        raise RowError(f"{place}.weight is {shown(weight)}; expected 0 (not trained on) or 1 (trained on)")
    details = _details(turn, role, place) if turn else {}
    calls = "tool_calls" in details
    text = "" if content is None and calls else _text_of(content, f"{place}.content")
    if role == "assistant" and not calls and not text.strip():
        raise RowError(f"{place} is an empty assistant turn")
    return Message(role, text, dump(details, place) if details else "", bool(weight) or role != "assistant")


def _usual_turn(value: dict[str, Any], place: str) -> dict[str, Any]:
    """Convert a turn to OpenAI's role, content and tool_calls; unknown keys stay."""
    turn = dict(value)
    if turn.get("role") is None and "from" in turn:  # ShareGPT
        turn["role"] = turn.pop("from")
        if turn.get("content") is None:
            turn["content"] = turn.pop("value", None)
    if turn.get("function_call"):  # OpenAI, before tools
        turn["tool_calls"] = [{"type": "function", "function": turn.pop("function_call")}]
    name = turn["role"].strip().casefold() if isinstance(turn.get("role"), str) else ""
    if name in CALL_ROLES:
        calls = _parsed(turn.pop("content", None), place)
        turn |= {"role": "assistant", "content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}
    elif name in ROLE_NAMES:
        turn["role"] = ROLE_NAMES[name]
    return turn


def _details(turn: dict[str, Any], role: str, place: str) -> dict[str, object]:
    """The other keys that are not null, in order (templates may print them), with tool calls in one form."""
    if media := [key for key in MEDIA_KEYS if turn.get(key)]:
        raise RowError(f"{place}.{media[0]}: {ONLY_TEXT}")
    if turn.get("tool_calls") and role != "assistant":
        raise RowError(f"{place}.tool_calls: only an assistant turn calls tools; this turn has role '{role}'")
    calls = turn.get("tool_calls") or []
    calls = calls if isinstance(calls, list) else [calls]
    turn["tool_calls"] = [_tool_call(call, f"{place}.tool_calls[{at}]") for at, call in enumerate(calls)] or None
    return {key: item for key, item in turn.items() if item is not None}


def _text_of(content: object, place: str) -> str:
    """The content as text; a list of parts is joined."""
    if isinstance(content, list):
        return "".join([_part(part, f"{place}[{index}]") for index, part in enumerate(content)])
    return _part(content, place)


def _part(part: object, place: str) -> str:
    text, got = part, kind(part)
    if isinstance(part, dict):
        text = part.get("text", part.get("value"))  # value: LLaMA-Factory
        text = text if part.get("type", "text") in ("text", "input_text", "output_text") else None
        do = "write it in the message's key reasoning_content" if part.get("type") in THINKING else ONLY_TEXT
        got = f"a part of type '{shown(part.get('type'))}': {do}"
    if not isinstance(text, str):
        raise RowError(f'{place} must be a string or {{"type": "text", "text": "…"}}, not {got}')
    return text


def _tool_call(value: object, place: str) -> dict[str, object]:
    call = {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else {}
    if "function" not in call and "name" in call:  # Hermes and mlx-lm: without the outer object
        call["function"] = {key: call.pop(key) for key in ("name", "arguments", "parameters") if key in call}
    function = _function(call.get("function"), value, place, CALL, "parameters")
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # OpenAI writes JSON text, and "" without arguments
        parsed = load(arguments) if arguments.strip() else {}
        arguments = parsed if isinstance(parsed, dict) else arguments
    elif not isinstance(arguments, dict | None):
        raise RowError(f"{place}.function.arguments must be an object or its JSON text, not {kind(arguments)}")
    call.setdefault("type", "function")
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def tools_text(value: object) -> str:
    """The tools of a row as the JSON text of a list, each in OpenAI's form; empty without tools."""
    tools = _parsed(value, "tools")
    if not tools:
        return ""
    if not isinstance(tools, list):
        raise RowError(f"tools must be a list, or the JSON text of a list, not {kind(tools)}")
    return dump([_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)], "tools")


def _tool(value: object, place: str) -> dict[str, object]:
    tool = value if isinstance(value, dict) else {}
    if "function" not in tool and "name" in tool:  # flat, as in OpenAI's Responses and in `functions`
        inner = {key: item for key, item in tool.items() if key != "type"}
        tool = {"type": tool.get("type") or "function", "function": inner}
    _function(tool.get("function"), value, place, TOOL, "input_schema")
    return tool if tool.get("type") else {**tool, "type": "function"}


def _function(function: object, value: object, place: str, form: str, misnamed: str) -> dict[str, Any]:
    """Check the function of a call or tool: it needs a name, and no ``misnamed`` key, which templates ignore."""
    if isinstance(function, dict) and isinstance(function.get("name"), str) and misnamed not in function:
        return function
    inner = function if isinstance(function, dict) else value
    got = f"an object with the keys {', '.join(map(shown, inner))}" if isinstance(inner, dict) else kind(value)
    raise RowError(f"{place} is {got}; expected {form}")


def _parsed(value: object, place: str) -> object:
    """Parse a JSON text; any other value is returned unchanged."""
    if not isinstance(value, str) or not value.strip():
        return value
    parsed = load(value)
    if isinstance(parsed, RowError):
        raise RowError(f"{place} is a string that must be JSON: {parsed}")
    return parsed
