"""Rows in forms that other programs write, brought to messages, or prompt and completion; with what was taken."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from safetrain.core.data.strict_json import RowError, dump, shown
from safetrain.core.data.turn_forms import is_turn
from safetrain.core.errors import ConfigError

QUESTIONS = ("instruction", "prompt", "question", "query", "problem", "input", "user", "human", "source")
CONTEXTS = ("input", "context")
ANSWERS = ("completion", "response", "answer", "output", "solution", "assistant", "reply", "target")
PARTS = ("messages", "prompt", "input", "completion", "system", "text", "tools", "history")
KNOWN_KEYS = frozenset((*QUESTIONS, *CONTEXTS, *ANSWERS, *PARTS, "conversations", "conversation"))
COLUMNS = "as {prompt: frage, completion: antwort}, or null"
MOST_NAMES = 12  # that are told
FORMATS = (
    "messages; conversations; prompt and completion; instruction, input and output; question and answer; text. "
    "Other names: data.columns={prompt: NAME, completion: NAME}"
)
Columns = Mapping[str, str]  # parts of a row, and the keys that hold them


@dataclass(frozen=True)
class Taken:
    """A row in one of the usual forms, which keys it was made of, and how, in words."""

    value: dict[str, Any]
    used: frozenset[str]
    how: str
    place: str = "messages"  # what messages are called in errors


def checked_columns(columns: object) -> Columns | None:
    """data.columns without what is null; raises ConfigError where no row can come of it."""
    if columns is None:
        return None
    if not isinstance(columns, Mapping):
        raise ConfigError("data.columns is no mapping.", expected=COLUMNS, got=shown(str(columns)))
    found = {str(part): str(key) for part, key in columns.items() if key is not None}
    unknown = [part for part in found if part not in PARTS]
    if unknown:
        raise ConfigError(
            f"data.columns names no part of a row: {', '.join(map(shown, unknown))}.", expected=f"of {', '.join(PARTS)}"
        )
    if not ("messages" in found or "text" in found or {"prompt", "completion"} <= set(found)):
        raise ConfigError("data.columns makes no row.", expected="messages, or prompt and completion, or text")
    return found


def by_columns(value: dict[str, Any], columns: Columns) -> Taken:
    """The row that ``columns`` picks; raises RowError where a key that it names is not there."""
    missing = [key for part, key in columns.items() if key not in value and part not in ("system", "input", "tools")]
    if missing:
        there = _names(value)
        raise RowError(f"no key {', '.join(map(shown, missing))}, which data.columns names; there are: {there}")
    row: dict[str, Any] = {part: value.get(key) for part, key in columns.items()}
    for part in ("prompt", "input", "completion", "system", "text"):
        if isinstance(row.get(part), int | float):
            row[part] = dump(row[part], shown(columns[part]))
        elif isinstance(row.get(part), dict) and part in ("prompt", "completion"):
            row[part] = [row[part]]
    if isinstance(row.get("prompt"), str):
        row["prompt"] = _joined(row["prompt"], row.get("input"))
    row.pop("input", None)
    told = ", ".join(f"{shown(key)} -> {part}" for part, key in columns.items())
    return Taken(_with_history(row), frozenset(columns.values()), told, columns.get("messages", "messages"))


def usual_form(value: dict[str, Any]) -> Taken | None:
    """The row in one of the usual forms; None where it is in none that is known here."""
    return _gemini(value) or _conversation(value) or pair(value)


def unknown_row(value: dict[str, Any]) -> RowError:
    """The error for a row that is in none of the forms."""
    names = _names(value)
    for needed in (("messages",), ("prompt", "completion"), ("text",)):
        if all(key in value for key in needed):
            return RowError(f"{next(key for key in needed if value[key] is None)} is null")
    if isinstance(value.get("instruction"), str) and isinstance(value.get("instances"), list):
        program = "(arrays[], objects) | .instruction as $q | .instances[] | {instruction: $q, input, output}"
        said = f"jq -c '{program}' old.json > new.jsonl"
        return RowError(f"unknown keys ({names}); self-instruct's seed tasks, several rows in one object: {said}")
    return RowError(f"unknown keys ({names}); expected one of: {FORMATS}")


def _names(value: dict[str, Any]) -> str:
    names = [shown(key) for key in itertools.islice(value, MOST_NAMES)]
    return ", ".join(names) + (", …" if len(value) > MOST_NAMES else "") or "none"


def pair(value: dict[str, Any]) -> Taken | None:
    """A question and its answer under any of their usual names; with context, system and history."""
    question, answer = _first(value, QUESTIONS, str), _first(value, ANSWERS, (str, int, float))
    if question is None or answer is None:
        if question is not None and isinstance(value.get("output"), list) and len(value["output"]) == 2:
            raise RowError("preference data (two outputs): answers are learnt here, not choices between two")
        return None
    context = next((key for key in CONTEXTS if isinstance(value.get(key), str) and key != question), None)
    asked = _joined(value[question], value[context] if context else None)
    answered = value[answer] if isinstance(value[answer], str) else dump(value[answer], answer)
    used = {question, answer, *([context] if context else [])}
    row = {"prompt": asked, "completion": answered}
    for key in ("system", "tools", "history"):
        if value.get(key):
            row[key] = value[key]
            used.add(key)
    first = f"{question} + {context}" if context else question
    names = [f"{first} -> question", f"{answer} -> answer", *(["history -> turns before"] if "history" in row else [])]
    return Taken(_with_history(row), frozenset(used), ", ".join(names))


def _conversation(value: dict[str, Any]) -> Taken | None:
    for key, turns in value.items():
        if key == "messages" or not isinstance(turns, list) or not turns or not all(map(is_turn, turns)):
            continue
        kept = {name: value[name] for name in ("system", "tools", "functions") if value.get(name)}
        form = " (ShareGPT)" if "from" in turns[0] else ""
        return Taken({**kept, "messages": turns}, frozenset((key, *kept)), f"{shown(key)}{form} -> messages", key)
    return None


def _gemini(value: dict[str, Any]) -> Taken | None:
    """``contents`` are taken as a conversation; here with the system text beside them."""
    told, turns = value.get("systemInstruction"), value.get("contents")
    if not isinstance(told, dict) or not isinstance(turns, list) or not isinstance(told.get("parts"), list):
        return None
    system = {"role": "system", "parts": told["parts"]}
    how = "contents (Gemini) -> messages"
    return Taken({"messages": [system, *turns]}, frozenset(("systemInstruction", "contents")), how, "contents")


def _joined(question: str, context: object) -> str:
    """The question, and what it is about behind it."""
    more = context if isinstance(context, str) else ""
    return "\n\n".join(text for text in (question, more) if text.strip()) or question


def _with_history(row: dict[str, Any]) -> dict[str, Any]:
    """LLaMA-Factory's pairs of earlier turns, put before the question."""
    history = row.pop("history", None)
    if not history:
        return row
    if not isinstance(history, list) or not all(isinstance(item, list) and len(item) == 2 for item in history):
        raise RowError("history must be a list of pairs, each a question and its answer")
    turns = [{"role": role, "content": text} for item in history
             for role, text in zip(("user", "assistant"), item, strict=True)]  # fmt: skip
    last = [{"role": "user", "content": row.pop("prompt")}, {"role": "assistant", "content": row.pop("completion")}]
    return {**row, "messages": [*turns, *last]}


def _first(value: dict[str, Any], names: tuple[str, ...], kinds: type | tuple[type, ...]) -> str | None:
    """The first of the keys that holds something; where none does, the first that is there."""
    there = [name for name in names if isinstance(value.get(name), kinds) and not isinstance(value[name], bool)]
    return next((name for name in there if str(value[name]).strip()), there[0] if there else None)
