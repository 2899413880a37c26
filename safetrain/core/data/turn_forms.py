"""Turns of a chat as other programs write them, brought to role, content, tool_calls and weight."""

from typing import Any

from safetrain.core.data.strict_json import RowError, load

ROLES = ("system", "developer", "user", "assistant", "tool")
ROLE_NAMES = {  # what others call them, in small letters
    **{name: name for name in ROLES},
    **dict.fromkeys(("human", "prompter", "customer", "client", "instruction", "question"), "user"),
    **dict.fromkeys(("gpt", "bot", "model", "ai", "chatbot", "chatgpt", "agent", "answer", "response"), "assistant"),
    **dict.fromkeys(("observation", "ipython", "environment", "function_response", "tool_result"), "tool"),
    **dict.fromkeys(("tool_results", "tool_response", "tool_output", "function"), "tool"),
}
CALL_ROLES = ("function_call", "tool_call")
OLD_KEYS = frozenset(("from", "function_call", "train", "training", "parts"))


def is_turn(value: object) -> bool:
    """Whether it looks like one turn of a chat, in any of the forms."""
    return isinstance(value, dict) and (
        ("role" in value and ("content" in value or "parts" in value or "tool_calls" in value))
        or ("from" in value and "value" in value)
    )


def usual_turn(value: dict[str, Any], place: str) -> dict[str, Any]:
    """The turn with role, content, tool_calls and weight; what is not understood is left as it is."""
    turn = dict(value)
    if turn.get("role") is None and "from" in turn:  # ShareGPT
        turn["role"] = turn.pop("from")
        if turn.get("content") is None:
            turn["content"] = turn.pop("value", None)
    if "content" not in turn and isinstance(turn.get("parts"), list):  # Gemini
        turn["content"] = [{"type": "text", **part} if isinstance(part, dict) else part for part in turn.pop("parts")]
    for key in ("train", "training"):
        if isinstance(turn.get(key), bool):
            turn.setdefault("weight", int(turn.pop(key)))
    if turn.get("function_call"):  # OpenAI, before tools
        turn["tool_calls"] = [{"type": "function", "function": turn.pop("function_call")}]
    name = turn["role"].strip().casefold() if isinstance(turn.get("role"), str) else ""
    if name in CALL_ROLES:
        calls = turn.pop("content", None)
        found = _calls(calls, place) if isinstance(calls, str) else calls
        return {**turn, "role": "assistant", "content": None, "tool_calls": found}
    return {**turn, "role": ROLE_NAMES[name]} if name in ROLE_NAMES else turn


def _calls(text: str, place: str) -> list[object]:
    try:
        value = load(text)
    except RowError as error:
        raise RowError(f"{place} is a call whose text must be JSON: {error}") from None
    return value if isinstance(value, list) else [value]
