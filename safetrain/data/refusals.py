"""Why a chat template refuses a chat: found by rendering it again without what published templates do not take."""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

from safetrain.core.data.template import ChatTemplate, TemplateError

Chat = list[dict[str, Any]]  # as a template reads it
SOME_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}},
}


def cause(template: ChatTemplate, chat: Chat, tools: Sequence[Any] | None, said: str) -> str:
    """What the template does not take, in words; empty where none of CHANGES helps. ``said`` is its own message."""
    unknown = re.search(r"'(\w+)' is undefined", said)
    if unknown:
        return f"it reads {unknown[1]}, which no row has"
    if tools is None and takes(template, chat, [SOME_TOOL]):
        return "it needs a list of tools in every row"
    for count in (1, 2, 3):
        for chosen in itertools.combinations(CHANGES, count):
            changed, left = chat, tools
            for _, change in chosen:
                changed = change(changed)
            if any(change is _without_calls for _, change in chosen):
                left = None
            if (changed != chat or left != tools) and changed and takes(template, changed, left):
                return "it takes " + " and ".join(words for words, _ in chosen)
    return ""


def takes(template: ChatTemplate, chat: Chat, tools: Sequence[Any] | None) -> bool:
    """Whether the template renders the chat."""
    try:
        template.write(chat, tools)
    except TemplateError:
        return False
    return True


def _one_system(chat: Chat) -> Chat:
    system = [message for message in chat if message["role"] == "system"]
    return [*system[:1], *(message for message in chat if message["role"] != "system")]


def _without_system(chat: Chat) -> Chat:
    return [message for message in chat if message["role"] not in ("system", "developer")]


def _one_call(chat: Chat) -> Chat:
    return [
        {**message, "tool_calls": message["tool_calls"][:1]} if message.get("tool_calls") else message
        for message in chat
    ]


def _without_calls(chat: Chat) -> Chat:
    kept = [
        {key: value for key, value in message.items() if key != "tool_calls"}
        for message in chat
        if message["role"] != "tool" and (message.get("content") or not message.get("tool_calls"))
    ]
    return _by_turns(kept) if len(kept) < len(chat) else kept


def _by_turns(chat: Chat) -> Chat:
    """The last of several messages of one role in a row."""
    return [
        message
        for message, then in zip(chat, [*chat[1:], None], strict=True)
        if not then or then["role"] != message["role"]
    ]


def _user_first(chat: Chat) -> Chat:
    first = next((place for place, message in enumerate(chat) if message["role"] != "system"), 0)
    return chat[:first] + list(itertools.dropwhile(lambda message: message["role"] == "assistant", chat[first:]))


CHANGES: tuple[tuple[str, Callable[[Chat], Chat]], ...] = (
    ("one system message alone, at the beginning", _one_system),
    ("no system message", _without_system),
    ("one tool call at a time", _one_call),
    ("no tool calls or tool messages", _without_calls),
    ("user and assistant by turns", _by_turns),
    ("a user's message first", _user_first),
)
