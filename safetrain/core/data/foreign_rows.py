"""Rows in forms that other programs write: each is recognised, and refused with the command that converts it."""

from typing import Any

from safetrain.core.data.messages import MEDIA_KEYS, OLD_CALLS
from safetrain.core.data.strict_json import RowError, shown

FORMATS = "chat {messages}, tools {messages, tools}, completions {prompt, completion}, text {text}"
FILES = "old.jsonl > new.jsonl"
QUESTIONS = ("instruction", "prompt", "question", "query", "problem", "input", "user", "human", "source")
CONTEXTS = ("input", "context")
ANSWERS = ("completion", "response", "answer", "output", "solution", "assistant", "reply", "target")
PREFERENCES = (
    *("chosen", "rejected", "chosen_messages", "rejected_messages", "chosen_response", "rejected_response"),
    *("preferred_output", "non_preferred_output"),
)
MARKS = ("label", "kto_tag")
MEANINGS = frozenset((*PREFERENCES, *MARKS, *MEDIA_KEYS, "functions", "input_ids", "weight"))
TURN = '{role: ({"human": "user", "gpt": "assistant", "observation": "tool"}[.from] // .from), content: .value, weight}'
CALL_OR_TURN = (
    'if .from == "function_call" then {role: "assistant", content: null, tool_calls:'
    f' [.value | fromjson | if type == "array" then .[] else . end]}} else {TURN} end'
)


def refuse_other_meanings(value: dict[str, Any]) -> None:
    """Raise RowError for a key that changes what the row means: to pass over it would train something else."""
    if MEANINGS.isdisjoint(value):
        return
    if any(value.get(key) is not None for key in PREFERENCES):
        raise RowError(_preferences(value))
    for key in MARKS:
        if value.get(key) is not None:
            raise RowError(_mark(value, key))
    for key in MEDIA_KEYS:
        if value.get(key):
            only = _jq(f"select(.{key} == null or .{key} == [])")
            raise RowError(f"{key}: only text can be trained here; to keep the rows without it: {only}")
    if value.get("functions"):
        raise RowError(f"functions is OpenAI's old form: write tools, all at once with {OLD_CALLS}")
    if value.get("input_ids") is not None:
        raise RowError(f"input_ids: these rows are tokens of one model already; give the texts, as one of: {FORMATS}")
    if value.get("weight") is not None:
        raise RowError(
            "weight: rows cannot be weighted, only single answers left out (weight: 0 in an assistant message);"
            f" without it: {_jq('del(.weight)')}"
        )


def foreign_row(value: dict[str, Any]) -> str | None:
    """What form the row has and the command that converts it, or None where it is not known."""
    return _conversation(value) or _seed_task(value) or _gemini(value) or _pair(value)


def unknown_row(value: dict[str, Any]) -> RowError:
    """The error for a row that is in none of the formats."""
    names, known = ", ".join(map(shown, value)) or "none", foreign_row(value)
    if known is not None:
        return RowError(f"unknown keys ({names}); this is {known}")
    for needed in (("messages",), ("prompt", "completion"), ("text",)):
        if all(key in value for key in needed):
            return RowError(f"{next(key for key in needed if value[key] is None)} is null")
    for key, item in value.items():
        if key.isidentifier() and isinstance(item, list) and item and isinstance(item[0], dict):
            rows = f"if the rows are in {key}: {_jq(f'.{key}[]')}"
            return RowError(f"unknown keys ({names}); {rows}; expected one of: {FORMATS}")
    return RowError(f"unknown keys ({names}); expected one of: {FORMATS}")


def _jq(program: str) -> str:
    return f"jq -c '{program}' {FILES}"


def _first(value: dict[str, Any], names: tuple[str, ...], kinds: type | tuple[type, ...] = str) -> str | None:
    return next((name for name in names if isinstance(value.get(name), kinds)), None)


def _preferences(value: dict[str, Any]) -> str:
    names = ", ".join(key for key in PREFERENCES if value.get(key) is not None)
    chosen = next((key for key in PREFERENCES[::2] if value.get(key) is not None), None)
    told = f"preference data ({names}): answers are learnt here, not choices between two"
    if chosen is None:
        return f"{told}; there is no chosen answer to train"
    question, better = _first(value, ("prompt", *QUESTIONS), (str, list)), value[chosen]
    if isinstance(value.get("conversations"), list):
        program = f"{{messages: [.conversations[], .{chosen} | {TURN}]}}"
    elif chosen == "preferred_output" and isinstance(value.get("input"), dict):
        program = f"{{messages: (.input.messages + .{chosen}), tools: .input.tools}}"
    elif isinstance(better, list) and (question is None or (isinstance(value[question], str) and len(better) > 1)):
        program = f"{{messages: .{chosen}}}"
    elif question is not None:
        program = f"{{prompt: {_asked(value, question)}, completion: .{chosen}}}"
    else:
        program = f"{{text: .{chosen}}}"
    return f"{told}; to train the chosen ones: {_jq(program)}"


def _mark(value: dict[str, Any], key: str) -> str:
    if isinstance(value[key], bool):
        keep = _jq(f"select(.{key}) | del(.{key})")
        return f"{key}: answers marked good and bad (KTO), and the bad ones would be trained; to keep the good: {keep}"
    if isinstance(value.get("text"), str):
        as_answer = _jq(f"{{prompt: .text, completion: (.{key} | tostring)}}")
        return (
            f"{key}: data for a classifier; to train it as the answer: {as_answer}, or the text alone: {_jq('{text}')}"
        )
    return f"{key} changes what the row means, and nothing here reads it; without it: {_jq(f'del(.{key})')}"


def _conversation(value: dict[str, Any]) -> str | None:
    for key, turns in value.items():
        if key == "messages" or not key.isidentifier() or not isinstance(turns, list) or not turns:
            continue
        if not all(isinstance(turn, dict) for turn in turns):
            continue
        if all("from" in turn and "value" in turn for turn in turns):
            calls = value.get("tools") or any(turn["from"] == "function_call" for turn in turns)
            turn = CALL_OR_TURN if calls else TURN
            return f"ShareGPT's form ({key}, from, value): {_jq(f'{{system, tools, messages: [.{key}[] | {turn}]}}')}"
        if all("role" in turn and "content" in turn for turn in turns):
            return f"a chat under another name: {_jq(f'{{system, tools, messages: .{key}}}')}"
    return None


def _seed_task(value: dict[str, Any]) -> str | None:
    if not isinstance(value.get("instruction"), str) or not isinstance(value.get("instances"), list):
        return None
    asked = '($q + (if (.input // "") == "" then "" else "\\n\\n" + .input end))'
    program = f".instruction as $q | .instances[] | {{prompt: {asked}, completion: .output}}"
    return f"self-instruct's seed tasks (instruction, instances): {_jq(program)}"


def _gemini(value: dict[str, Any]) -> str | None:
    turns = value.get("contents")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) and "parts" in turn for turn in turns):
        return None
    joined = '([.parts[].text] | join(""))'
    system = f"(.systemInstruction // null | if . == null then null else {joined} end)"
    turn = f'{{role: (if .role == "model" then "assistant" else .role end), content: {joined}}}'
    return f"Gemini's form (contents, parts): {_jq(f'{{system: {system}, messages: [.contents[] | {turn}]}}')}"


def _pair(value: dict[str, Any]) -> str | None:
    question, answer = _first(value, QUESTIONS), _first(value, ANSWERS, (str, int, float))
    if question is None or answer is None:
        output = value.get("output")
        if question is not None and isinstance(output, list) and len(output) == 2:
            return "preference data (two outputs): answers are learnt here, not choices between two"
        return None
    asked, answered = _asked(value, question), f".{answer}"
    if not isinstance(value[answer], str):
        answered = f"(.{answer} | tostring)"
    name = "Alpaca's form" if (question, answer) == ("instruction", "output") else "a question and its answer"
    if (question, answer) == ("instruction", "response"):
        name = "Dolly's form"
    if isinstance(value.get("history"), list):
        turns = '(.history // [])[] | {role: "user", content: .[0]}, {role: "assistant", content: .[1]}'
        last = f'{{role: "user", content: {asked}}}, {{role: "assistant", content: {answered}}}'
        program = f"{{system, messages: ([{turns}] + [{last}])}}"
    else:
        system = "system, " if "system" in value else ""
        program = f"{{{system}prompt: {asked}, completion: {answered}}}"
    used = [key for key in (question, *CONTEXTS, answer) if key in value]
    return f"{name} ({', '.join(dict.fromkeys(used))}): {_jq(program)}"


def _asked(value: dict[str, Any], question: str) -> str:
    """The jq text of the question, with the input or context behind it."""
    context = next((key for key in CONTEXTS if key in value and key != question), None)
    if context is None or not isinstance(value[question], str):
        return f".{question}"
    return f'(.{question} + (if (.{context} // "") == "" then "" else "\\n\\n" + .{context} end))'
