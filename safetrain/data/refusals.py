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
            changed, left = chat, None if NO_CALLS in chosen else tools
            for words in chosen:
                changed = CHANGES[words](changed)
            if (changed != chat or left != tools) and changed and takes(template, changed, left):
                return "it takes " + " and ".join(chosen)
    return ""


def takes(template: ChatTemplate, chat: Chat, tools: Sequence[Any] | None) -> bool:
    """Whether the template renders the chat."""
    try:
        template.write(chat, tools)
    except TemplateError:
        return False
    return True


def _without_calls(chat: Chat) -> Chat:
    others = [each for each in chat if each["role"] != "tool" and (each.get("content") or not each.get("tool_calls"))]
    changed = [{key: value for key, value in each.items() if key != "tool_calls"} for each in others]
    return _by_turns(changed) if len(changed) < len(chat) else changed


def _by_turns(chat: Chat) -> Chat:
    """The last of several messages of one role in a row."""
    return [
        each for place, each in enumerate(chat) if place + 1 == len(chat) or chat[place + 1]["role"] != each["role"]
    ]


def _one_system(chat: Chat) -> Chat:
    system = [each for each in chat if each["role"] == "system"]
    return system[:1] + [each for each in chat if each["role"] != "system"]


def _user_first(chat: Chat) -> Chat:
    first = next((place for place, each in enumerate(chat) if each["role"] != "system"), 0)
    return chat[:first] + list(itertools.dropwhile(lambda each: each["role"] == "assistant", chat[first:]))


NO_CALLS = "no tool calls or tool messages"
CHANGES: dict[str, Callable[[Chat], Chat]] = {
    "one system message alone, at the beginning": _one_system,
    "no system message": lambda chat: [each for each in chat if each["role"] not in ("system", "developer")],
    "one tool call at a time": lambda chat: [
        {**each, "tool_calls": each["tool_calls"][:1]} if each.get("tool_calls") else each for each in chat
    ],
    NO_CALLS: _without_calls,
    "user and assistant by turns": _by_turns,
    "a user's message first": _user_first,
}
