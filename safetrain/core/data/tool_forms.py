"""Tool calls and lists of tools in their several forms, brought to one: OpenAI's, with the arguments as an object."""

from safetrain.core.data.strict_json import RowError, dump, kind, load, load_object, shown

CALL = '{"type": "function", "function": {"name": …, "arguments": {…}}}'
TOOL = '{"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}'


def tool_calls(value: object, place: str) -> list[dict[str, object]]:
    """The calls of one message, each ``{"type": "function", "function": {"name", "arguments"}}``; raises RowError."""
    if not isinstance(value, list):
        raise RowError(f"{place} must be a list of calls, this is {kind(value)}; a call is written {CALL}")
    return [_call(item, f"{place}[{index}]") for index, item in enumerate(value)]


def _call(value: object, place: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise RowError(f"{place} must be an object, this is {kind(value)}; a call is written {CALL}")
    call = {key: item for key, item in value.items() if item is not None}
    if "function" not in call and "name" in call:  # Hermes and mlx-lm: the call without the object around it
        inner = {key: call.pop(key) for key in ("name", "arguments", "parameters") if key in call}
        call = {**call, "function": inner}
    call.setdefault("type", "function")
    call["function"] = _function(call.get("function"), f"{place}.function")
    return call


def _function(value: object, place: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise RowError(f"{place} must be an object, this is {kind(value)}; a call is written {CALL}")
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise RowError(f"{place}.name must be the name of the tool that is called; a call is written {CALL}")
    if "parameters" in value and value.get("arguments") is None:
        raise RowError(f"{place} has parameters: in a call they are named arguments")
    return {**value, "arguments": _arguments(value.get("arguments"), f"{place}.arguments")}


def _arguments(value: object, place: str) -> object:
    """An object, or the text where it says no object. OpenAI writes a call without arguments as ``""``."""
    if value is None:
        return {}
    if isinstance(value, str):
        if not value.strip():
            return {}
        parsed = load_object(value)
        return value if parsed is None else parsed
    if not isinstance(value, dict):
        raise RowError(f"{place} must be an object or its JSON text, this is {kind(value)}")
    return value


def tools_text(value: object) -> str:
    """The tools of a row as JSON text of a list, each in OpenAI's form; empty when there are none."""
    if isinstance(value, str):
        value = _parsed(value)
    if value is None or value == []:
        return ""
    if not isinstance(value, list):
        raise RowError(f"tools must be a list, or the JSON text of a list, this is {kind(value)}")
    return dump([_tool(item, f"tools[{index}]") for index, item in enumerate(value)], "tools")


def _parsed(text: str) -> object:
    if not text.strip():
        return None
    try:
        return load(text)
    except RowError as error:
        raise RowError(f"tools is a text that must say a JSON list: {error}") from None


def _tool(value: object, place: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise RowError(f"{place} must be an object, this is {kind(value)}; a tool is written {TOOL}")
    if "input_schema" in value:
        raise RowError(f"{place} has input_schema (Anthropic's form): name it parameters; a tool is written {TOOL}")
    if "function" not in value and "name" in value:  # flat, as in OpenAI's Responses and in `functions`
        inner = {key: item for key, item in value.items() if key != "type"}
        value = {"type": value.get("type") or "function", "function": inner}
    function = value.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        keys = ", ".join(map(shown, value)) or "none"
        raise RowError(f"{place} names no function (keys: {keys}); a tool is written {TOOL}")
    return value if value.get("type") else {**value, "type": "function"}
