"""Finds the messages, the question and answer, or the text of a row, under the usual keys or those in data.columns."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from safetrain.core.errors import ConfigError
from safetrain.data.rows import MEDIA_KEYS, ONLY_TEXT, Row, RowError, dump, kind, row_of, shown

Columns = Mapping[str, str]  # from a part of a row to the key that holds it
QUESTIONS = ("instruction", "prompt", "question", "query", "problem", "input", "user", "human", "source")
ASKING, CONTEXTS = QUESTIONS[:5], ("input", "context")  # keys not in ASKING: questions only if an answer is there
ANSWERS = ("completion", "response", "answer", "output", "solution", "assistant", "reply", "target")
PAIR = {"prompt": ASKING, "completion": ANSWERS}
FORMS = (  # the required parts of a row, and the optional ones
    ({"messages"}, {"system", "tools"}),
    ({"prompt", "completion"}, {"input", "system", "tools", "history"}),
    ({"text"}, set[str]()),
)
MAKES_ROW = "messages (and system, tools); or prompt and completion (and input, system, tools, history); or text"
KNOWN_KEYS = {*QUESTIONS, *CONTEXTS, *ANSWERS, "messages", "system", "text", "tools", "history", "conversations",
              "conversation"}  # fmt: skip
FORMATS = "messages; conversations; prompt and completion; instruction, input and output; question and answer; text"
AS_OBJECTS = 'write each row as {"prompt": "…", "completion": "…"}, {"messages": […]} or {"text": "…"}'
HEADER = "the first line is not a header: write one above it, such as question,answer"
MOST_NAMES = 12  # keys in an error
EMPTY: tuple[object, ...] = (None, "", [], {})
CLASSES = "keep the good rows without this key; to train on the class, name it as the completion in data.columns"
NOT_ANSWERS = {  # keys of rows that cannot be trained on: the reason, and the remedy
    **dict.fromkeys(("rejected", "preferred_output"), "preference data is not supported; keep only the better answers"),
    **dict.fromkeys(MEDIA_KEYS, ONLY_TEXT),
    **dict.fromkeys(("label", "labels", "kto_tag"), f"classes and KTO marks are not supported; {CLASSES}"),
    "input_ids": "token ids are not supported; give the texts",
    "weight": "rows cannot be weighted; remove this key (an assistant message with weight: 0 is not trained on)",
}


def named_columns(words: Iterable[str]) -> Columns | None:
    """Read the words of --columns, such as ``prompt=frage``; None without any. Raises ConfigError."""
    return checked_columns(dict(word.partition("=")[::2] for word in words) or None)


def checked_columns(columns: object) -> Columns | None:
    """Check data.columns and drop its empty entries; raises ConfigError if it describes no form of a row."""
    if columns is None:
        return None
    given = columns if isinstance(columns, Mapping) else {}
    checked = {str(part): str(key) for part, key in given.items() if key not in EMPTY}
    if not any(parts <= set(checked) <= parts | beside for parts, beside in FORMS):
        do = "write it like {prompt: frage, completion: antwort}, or null"
        raise ConfigError("data.columns does not describe a row.", expected=MAKES_ROW, got=shown(str(columns)), do=do)
    return checked


def _look_at(*ways: Columns) -> str:
    """The remedy: settings with which the row can be read, for params.yaml or the command line."""
    lines = ["leave these rows out (--fix OUT.jsonl --drop-bad), or if all rows are like this, choose their keys:"]
    for columns in ways:
        keys = ", ".join(f"{part}: {shown(key)}" for part, key in columns.items())
        lines.append(f"{'':12}data.columns={{{keys}}}")
    return "\n".join(lines)


def _names(keys: Collection[str]) -> str:
    """The first few keys as text, for an error."""
    return ", ".join(map(shown, list(keys)[:MOST_NAMES])) + (", …" if len(keys) > MOST_NAMES else "")


def parse_row(value: object, columns: Columns | None = None) -> Row:
    """Read a row by ``columns``, or else by the usual keys; raises RowError, or ``value`` if it is a RowError."""
    if isinstance(value, RowError):
        raise value
    if isinstance(value, Row):
        return value
    if not isinstance(value, dict):
        raise RowError(f"a row must be a JSON object, not {kind(value)}", do=AS_OBJECTS)
    if columns is None and len(value) == 1 and "messages" in value:
        return row_of(value, {})
    keys = columns or _usual_columns(value)
    row = row_of(_parts(value, keys), keys)
    used = set(keys.values())
    ignored = sorted(shown(key) for key, item in value.items() if key not in used and item not in EMPTY)
    renamed = ", ".join(f"{shown(key)} -> {part}" for part, key in keys.items() if key != part or part == "input")
    return replace(row, ignored_keys=tuple(ignored), taken=renamed)


def _parts(value: dict[str, Any], columns: Columns) -> dict[str, Any]:
    """The values under the keys of ``columns``, with numbers as text; raises RowError if a key is missing."""
    missing = [key for part, key in columns.items() if key not in value and part not in ("system", "input", "tools")]
    if missing:
        message = f"no key {_names(missing)}, which data.columns names; the row's keys: {_names(value)}"
        raise RowError(message, do="set --columns, or data.columns in params.yaml, to keys that the rows have")
    items = {part: [value[key]] if _is_turn(value.get(key)) else value.get(key) for part, key in columns.items()}
    return {part: dump(item, part) if isinstance(item, int | float) else item for part, item in items.items()}


def _usual_columns(value: dict[str, Any]) -> Columns:
    """Find the keys of the row's parts; raises RowError if none are known, or several are possible."""
    if value.get("chosen"):
        raise _preference(value)
    for key in NOT_ANSWERS:
        if value.get(key) not in EMPTY and (key != "labels" or value.get("text")):
            raise RowError(f"{key}: {NOT_ANSWERS[key]}")
    question, answer = _first(value, QUESTIONS, str), _first(value, ANSWERS, str | int | float)
    contexts = [key for key in CONTEXTS if key != question]
    has_question = question in ASKING or (question is not None and answer is not None)
    lists = [key for key in _turn_lists(value) if key != "history" or not has_question]
    if value.get("prompt") is not None and value.get("completion") is not None:  # texts, or lists of messages
        question, answer, contexts, lists = "prompt", "completion", [], []
    if value.get("messages") is not None:
        lists = ["messages"]
    system = "system" if value.get("system") else "system_prompt"  # OpenOrca's
    if lists:
        tools = "tools" if value.get("tools") else "functions"  # OpenAI's older name
        parts: dict[str, str | None] = {"messages": lists[0], "tools": tools, "system": system}
    elif question and answer:
        parts = {"prompt": question, "input": _first(value, contexts, str | None), "completion": answer}
        parts |= {"history": "history", "system": system, "tools": "tools"}
    elif isinstance(value.get("text"), str):
        return {"text": "text"}
    else:
        raise _unknown(value)
    optional = ("history", "system", "tools")
    columns = {part: key for part, key in parts.items() if key and (part not in optional or value.get(key))}
    _refuse_two_ways(value, columns)
    return columns


def _first(value: dict[str, Any], names: Iterable[str], kinds: Any) -> str | None:
    """The first of the keys whose value is not empty, or else the first that the row has."""
    there = [
        name for name in names
        if name in value and isinstance(value[name], kinds) and not isinstance(value[name], bool)
    ]  # fmt: skip
    return next((name for name in there if _plain(value[name])), there[0] if there else None)


def _plain(item: object) -> str:
    """A string or number, stripped of white space; empty for any other value."""
    return str(item).strip() if isinstance(item, str | int | float) and not isinstance(item, bool) else ""


def _is_turn(value: object) -> bool:
    """Whether the value looks like one turn of a chat, with OpenAI's or ShareGPT's keys."""
    return isinstance(value, dict) and (
        ("role" in value and ("content" in value or "tool_calls" in value)) or ("from" in value and "value" in value)
    )


def _turn_lists(value: dict[str, Any]) -> list[str]:
    return [key for key, item in value.items() if isinstance(item, list) and item and all(map(_is_turn, item))]


def _contents(item: object) -> list[str]:
    """The texts of a list of turns, or the one text."""
    turns = item if isinstance(item, list) else [{"content": item}]
    return [_plain(turn.get("content", turn.get("value"))) for turn in turns if isinstance(turn, dict)]


def _refuse_two_ways(value: dict[str, Any], columns: dict[str, str]) -> None:
    """Raise RowError if other keys hold questions, answers or turns that ``columns`` do not read."""
    used, turns = {*columns.values(), "history"}, columns.get("messages")
    texts = [text for key in columns.values() for text in _contents(value[key])]
    others = [key for key in (*ASKING, *ANSWERS, "text") if key in value and key not in used and _plain(value[key])]
    new = [key for key in others if not any(_plain(value[key]) in text for text in texts)]
    if any(texts):  # a text that contains all others repeats the row, as in Alpaca
        new = [key for key in new if key in ANSWERS or not all(text in _plain(value[key]) for text in texts)]
    lists = [key for key in _turn_lists(value) if key not in used and not set(_contents(value[key])) <= set(texts)]
    ways = [{"messages": key} for key in lists]
    questions, answers = ([key for key in others if key in names] for names in (ASKING, ANSWERS))
    if turns is None:
        ways += [{**columns, part: key} for part, keys in PAIR.items() for key in keys if key in new]
        ways += [{"text": "text"}] if "text" in new else []
    elif answers and any(keys and set(keys) <= set(new) for keys in (questions, answers)):
        ways.append({"prompt": questions[0] if questions else turns, "completion": answers[0]})
    if ways:
        raise RowError(f"the row can be read in two ways ({_names(value)})", do=_look_at(columns, *ways))


def _preference(value: dict[str, Any]) -> RowError:
    """The error for a row of preference data, with the setting that trains on the chosen answers."""
    question = next((key for key in (*QUESTIONS, "conversations") if value.get(key)), None)
    is_chat = isinstance(value["chosen"], list) and (question is None or len(value["chosen"]) > 1)
    pair = {"prompt": question, "completion": "chosen"} if question else {"text": "chosen"}
    columns = {"messages": "chosen"} if is_chat else pair
    message = f"chosen: preference data is not supported, except to train on the chosen answers ({_names(value)})"
    return RowError(message, do=_look_at(columns))


def _unknown(value: dict[str, Any]) -> RowError:
    """The error for a row of unknown form, with a data.columns setting that may fit."""
    for key, item in value.items():
        first = item[0] if isinstance(item, list) and item else None
        if key not in KNOWN_KEYS and isinstance(first, dict) and first.keys() & KNOWN_KEYS:
            message = f"the file is one object, with its rows under the key '{shown(key)}'"
            return RowError(message, do="write only that list, or JSON lines with one row on each line")
    questions, answers = ([key for key in names if key in value] for names in (ASKING, (*ANSWERS, "answers")))
    for key in (questions[0], answers[0]) if questions and answers else ("text",):
        if not isinstance(value.get(key, ""), str):
            return RowError(f"{key} must be a string, not {kind(value[key])}")
    if any(len(key.split()) > 2 and key.endswith((".", "?", "!")) for key in value):
        return RowError(f"unknown keys ({_names(value)})", do=HEADER)
    if questions and not answers and set(value) <= {*QUESTIONS, *CONTEXTS, "category", "task", "id", "system", "tools"}:
        return RowError(f"{questions[0]} has no answer next to it: expected a key like {', '.join(ANSWERS[:4])}")
    texts = [key for key in value if _plain(value[key]) and key.isprintable() and key not in ("system", "tools")]
    best = sorted(texts, key=lambda key: (key not in questions + answers, -len(_plain(value[key]))))[:2]
    parts = ("text",) if len(best) == 1 else ("prompt", "completion")
    guess = dict(zip(parts, sorted(best, key=texts.index), strict=False))
    message = f"unknown keys ({_names(value)}); expected one of: {FORMATS}"
    return RowError(message, do=_look_at(guess) if guess else AS_OBJECTS)
