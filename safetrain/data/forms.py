"""Finds the messages, question and answer, pair or text of a row, under the usual keys or those in data.columns."""

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from safetrain.core.errors import ConfigError
from safetrain.data.options import has_class, with_right_option
from safetrain.data.rows import (
    MEDIA_KEYS,
    ONLY_TEXT,
    PAIRS,
    Message,
    Row,
    RowError,
    decoded,
    dump,
    is_turn,
    kind,
    names_of,
    parse_messages,
    parse_tools,
    plain,
    require_unicode,
    shared_turns,
    shown,
    shown_only,
    turns_in,
)

Columns = Mapping[str, str]  # from a part of a row to the key that holds it
ASKING = ("instruction", "prompt", "question", "query", "problem", "pergunta")
QUESTIONS = (*ASKING, "input", "user", "human", "source")  # keys not in ASKING: questions only if an answer is there
TEXTS = ("text", "sentence")  # of a class
CONTEXTS = ("input", "context")
OPTIONS = ("options", "choices")
ANSWERS = (
    "completion", "response", "answer", "answerkey", "output", "solution", "assistant", "reply", "target", "resposta"
)  # fmt: skip
FORMS = (  # the required parts of a row, and the optional ones
    ({"messages"}, {"system", "tools"}),
    ({"prompt", "completion"}, {"input", "system", "tools", "history", "options"}),
    ({"chosen", "rejected"}, {"prompt", "input", "system", "tools", "history"}),
    ({"text"}, set[str]()),
)
MAKES_ROW = (
    "messages (and system, tools); or prompt and completion (and input, system, tools, history, options); "
    "or chosen and rejected (and prompt, input, system, tools, history); or text"
)
KNOWN_KEYS = {*QUESTIONS, *CONTEXTS, *ANSWERS, "messages", "system", "text", "tools", "history", "conversations",
              "conversation", "chosen", "rejected", *OPTIONS}  # fmt: skip
FORMATS = (
    "messages; conversations; prompt and completion; instruction, input and output; question and answer; "
    "prompt, chosen and rejected; text"
)
AS_OBJECTS = 'write each row as {"prompt": "…", "completion": "…"}, {"messages": […]} or {"text": "…"}'
HEADER = "the first line is not a header: write one above it, such as question,answer"
TRANSCRIPT_TURN = re.compile(r"\n\n(Human|Assistant):")  # in Anthropic's preference data
JSON_KEYS = ("messages", "conversations", "conversation", "tools", "history", "functions", *OPTIONS)
OTHER_PAIRS = ("preferred_output", "non_preferred_output", "rejected_messages", "rejected_response")  # OpenAI, ms-swift
EMPTY: tuple[object, ...] = (None, "", [], {})
AS_PAIR = "write a better and a worse answer to the same prompt as chosen and rejected"
CLASSES = f"keep the good rows without this key; for pairs, {AS_PAIR}; "
CLASSES += "to train on the class, name it as the completion in data.columns"
NOT_ANSWERS = {  # keys of rows that cannot be trained on: the reason, and the remedy
    **dict.fromkeys(MEDIA_KEYS, ONLY_TEXT),
    "label": f"a class needs one text (text, sentence or a question) and no answer, KTO is not supported; {CLASSES}",
    **dict.fromkeys(("labels", "kto_tag"), f"classes and KTO marks are not supported; {CLASSES}"),
    **dict.fromkeys(OTHER_PAIRS, f"pairs of OpenAI's and ms-swift's form are not read; {AS_PAIR}"),
    "input_ids": "token ids are not supported; give the texts",
    "weight": "rows cannot be weighted; remove this key (an assistant message with weight: 0 is not trained on)",
}


def named_columns(words: Iterable[str]) -> Columns | None:
    """Read the words of --columns, such as ``prompt=frage`` or ``{prompt: frage}``; None without any.

    Raises ConfigError.
    """
    pairs = [pair for word in words for pair in (word.strip("{} ").split(",") if word.startswith("{") else [word])]
    divided = (pair.partition(":" if ":" in pair and "=" not in pair else "=")[::2] for pair in pairs)
    return checked_columns({part.strip(): key.strip() for part, key in divided} or None)


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


def _look_at(columns: Columns) -> str:
    """The remedy: a setting with which the row can be read, for params.yaml or the command line."""
    keys = ", ".join(f"{part}: {shown(key)}" for part, key in columns.items())
    do = f"for all rows: safetrain set 'data.columns={{{keys}}}' (safetrain validate takes the braces as --columns);"
    return f"{do}\n{'':12}or leave these rows out (--fix OUT.jsonl --drop-bad)"


def parse_row(value: object, columns: Columns | None = None) -> Row:
    """Read a row by ``columns``, or else by the usual keys; raises RowError, or ``value`` if it is a RowError."""
    if isinstance(value, RowError):
        raise value
    if isinstance(value, Row):
        return value
    if not isinstance(value, dict):
        raise RowError(f"a row must be a JSON object, not {kind(value)}", do=AS_OBJECTS)
    value = _decoded(value if columns else _in_small_letters(value), columns)
    if columns is None and len(value) == 1 and "messages" in value:
        return _row_of(value, {})
    keys = columns or _usual_columns(value)
    value = with_right_option(value, keys) if "options" in keys else value
    row = _row_of(_parts(value, keys), keys)
    used = set(keys.values())
    ignored = sorted(shown(key) for key, item in value.items() if key not in used and item not in EMPTY)
    renamed = ", ".join(f"{shown(key)} -> {part}" for part, key in keys.items() if key != part or part == "input")
    return replace(row, ignored_keys=tuple(ignored), taken=renamed)


def _in_small_letters(value: dict[str, Any]) -> dict[str, Any]:
    """The row with its usual keys as they are usually written: spreadsheets have Question and ANSWER."""
    small = {
        key: name for key in value if (name := key.casefold()) in (*KNOWN_KEYS, *NOT_ANSWERS) and name not in value
    }
    return {small.get(key, key): item for key, item in value.items()} if small else value


def _decoded(value: dict[str, Any], columns: Columns | None) -> dict[str, Any]:
    """The row with JSON text read as JSON under the keys of turns and tools; raises RowError.

    Keys that may also hold text are read as JSON only if both keys of a pair hold a list of turns.
    """
    names = columns or {}
    parts = ("messages", "tools", "history", "options")
    keys = JSON_KEYS if columns is None else [names[part] for part in parts if part in names]
    found = {key: decoded(value[key], key) for key in keys if isinstance(value.get(key), str)}
    for pair in (("chosen", "rejected"), ("prompt", "completion")):
        chats = {key: turns_in(value.get(key)) for key in (names.get(part, part) for part in pair)}
        found |= chats if all(chats.values()) else {}
    return {**value, **found} if found else value


def _parts(value: dict[str, Any], columns: Columns) -> dict[str, Any]:
    """The values under the keys of ``columns``, with numbers as text; raises RowError if a key is missing."""
    missing = [key for part, key in columns.items() if key not in value and part not in ("system", "input", "tools")]
    if missing:
        message = f"no key {names_of(missing)}, which data.columns names; the row's keys: {names_of(value)}"
        raise RowError(message, do="set data.columns (or --columns) to keys that the rows have, or to null")
    items = {part: [value[key]] if is_turn(value.get(key)) else value.get(key) for part, key in columns.items()}
    return {part: dump(item, part) if isinstance(item, int | float) else item for part, item in items.items()}


def _usual_columns(value: dict[str, Any]) -> Columns:
    """Find the keys of the row's parts; raises RowError if none are known, or several are possible."""
    question, answer = _first(value, QUESTIONS, str), _first(value, ANSWERS, str | int | float)
    classified = has_class(value, question or _first(value, TEXTS, str), answer)
    for key in NOT_ANSWERS:
        if (
            value.get(key) not in EMPTY
            and (key != "labels" or value.get("text"))
            and (key != "label" or not classified)
        ):
            raise RowError(f"{key}: {NOT_ANSWERS[key]}")
    if any(value.get(key) not in EMPTY for key in ("chosen", "rejected")):
        return _pair_columns(value)
    if classified:
        question, answer = question or _first(value, TEXTS, str), "label"
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
        parts["options"] = next((key for key in OPTIONS if value.get(key)), OPTIONS[0])
    elif isinstance(value.get("text"), str):
        return {"text": "text"}
    else:
        raise _unknown(value)
    optional = ("history", "system", "tools", "options")
    columns = {part: key for part, key in parts.items() if key and (part not in optional or value.get(key))}
    _refuse_two_ways(value, columns)
    return columns


def _pair_columns(value: dict[str, Any]) -> Columns:
    """Find the keys of the parts of a pair; raises RowError if it has one answer only."""
    if "chosen" not in value or "rejected" not in value:
        raise RowError(f"a pair needs two answers, and there is one ({names_of(value)})", do=AS_PAIR)
    keys = [key for key in value if value[key] not in EMPTY]
    question = next((key for key in (*ASKING, "input", "conversations") if key in keys), None)
    parts = {"prompt": question, "input": "input" if question in ASKING else None, "tools": "tools"}
    parts |= {"system": "system" if "system" in keys else "system_prompt", "history": "history"}
    return {part: key for part, key in parts.items() if key in keys} | {"chosen": "chosen", "rejected": "rejected"}


def _first(value: dict[str, Any], names: Iterable[str], kinds: Any) -> str | None:
    """The first of the keys whose value is not empty, or else the first that the row has."""
    there = [
        name for name in names
        if name in value and isinstance(value[name], kinds) and not isinstance(value[name], bool)
    ]  # fmt: skip
    return next((name for name in there if plain(value[name])), there[0] if there else None)


def _turn_lists(value: dict[str, Any]) -> list[str]:
    return [key for key, item in value.items() if isinstance(item, list) and item and all(map(is_turn, item))]


def _contents(item: object) -> list[str]:
    """The texts of a list of turns, or the one text."""
    turns = item if isinstance(item, list) else [{"content": item}]
    contents = [turn.get("content", turn.get("value")) for turn in turns if isinstance(turn, dict)]
    pieces = [content if isinstance(content, list) else [content] for content in contents]  # or parts with texts
    each = [
        piece.get("text", piece.get("value")) if isinstance(piece, dict) else piece for part in pieces for piece in part
    ]
    return [plain(text) for text in each]


def _refuse_two_ways(value: dict[str, Any], columns: Columns) -> None:
    """Raise RowError if other keys hold questions, answers or turns that ``columns`` do not read."""
    used, is_chat = {*columns.values(), "history"}, "messages" in columns
    texts = [text for key in columns.values() for text in _contents(value[key])]
    others = [key for key in (*ASKING, *ANSWERS, *TEXTS) if key not in used and plain(value.get(key))]
    new = [key for key in others if not any(plain(value[key]) in text for text in texts)]
    answers = {key for key in others if key in ANSWERS}
    if is_chat and not (answers and answers <= set(new)):
        new = []  # they describe the chat
    elif any(texts):  # a text that contains all others repeats the row, as in Alpaca
        new = [key for key in new if key in ANSWERS or not all(text in plain(value[key]) for text in texts)]
    new += [key for key in _turn_lists(value) if key not in used and not set(_contents(value[key])) <= set(texts)]
    if new:
        message = f"the row can be read in two ways: by {names_of(columns.values())}, or with {names_of(new)}"
        raise RowError(message, do=_look_at(columns))


def _unknown(value: dict[str, Any]) -> RowError:
    """The error for a row of unknown form, with a data.columns setting that may fit."""
    questions, answers = ([key for key in names if key in value] for names in (ASKING, (*ANSWERS, "answers")))
    for key in (questions[0], answers[0]) if questions and answers else ("text",):
        if not isinstance(value.get(key, ""), str):
            return RowError(f"{key} must be a string, not {kind(value[key])}")
    message = f"unknown keys ({names_of(value)}); expected one of: {FORMATS}"
    if any(len(key.split()) > 2 and key.endswith((".", "?", "!")) for key in value):
        return RowError(message, do=HEADER)
    texts = [key for key in value if plain(value[key]) and key.isprintable() and key not in ("system", "tools")]
    best = sorted(texts, key=lambda key: (key not in questions + answers, -len(plain(value[key]))))[:2]
    parts = ("text",) if len(best) == 1 else ("prompt", "completion")
    chats = [key for key in texts if turns_in(value[key])]
    guess = {"messages": chats[0]} if chats else dict(zip(parts, sorted(best, key=texts.index), strict=False))
    return RowError(message, do=_look_at(guess) if guess and best != questions else AS_OBJECTS)


# Making rows of parts


def _row_of(parts: Mapping[str, Any], keys: Mapping[str, str]) -> Row:
    """Make a row from messages, prompt and completion, a pair, or text; ``keys`` name these parts in errors."""
    if "text" in parts:
        return Row("text", text=_text(parts["text"], keys["text"]))
    if "chosen" in parts:
        return _preference(parts, keys)
    is_chat = "messages" in parts
    turns = parse_messages(parts["messages"], keys.get("messages", "messages")) if is_chat else _pair(parts, keys)
    messages = _with_system(parts.get("system"), turns)
    for index, message in enumerate(messages):
        require_unicode(message.content, f"messages[{index}].content")
    if not any(message.trained for message in messages if message.role == "assistant"):
        raise RowError("no assistant turn to train on; turns with weight 0 or in the prompt are not trained on")
    tools, has_more = parse_tools(parts.get("tools")), parts.get("tools") or parts.get("history")
    is_plain = not has_more and all(isinstance(parts.get(part), str) for part in ("prompt", "completion"))  # as mlx-lm
    form = "tools" if tools else "completions" if is_plain else "chat"
    return Row(form, messages, tools, options=tuple(parts.get("options") or ()) if is_plain else ())


def _pair(parts: Mapping[str, Any], keys: Mapping[str, str]) -> tuple[Message, ...]:
    """The turns of a history, a prompt with its input, and a completion."""
    prompt, completion = parts["prompt"], parts["completion"]
    before = _earlier(parts.get("history")) + _prompt(parts, keys)
    if isinstance(prompt, list) or isinstance(completion, list):
        before = shown_only(before)  # as in TRL
    return before + _turns(completion, "assistant", keys["completion"])


def _prompt(parts: Mapping[str, Any], keys: Mapping[str, str]) -> tuple[Message, ...]:
    """The turns of a prompt with its input."""
    prompt, more = parts["prompt"], parts.get("input")
    if more:
        if not isinstance(prompt, str) or not isinstance(more, str):
            raise RowError(f"{keys['input']} is {kind(more)}; this key and the prompt must be strings")
        prompt = "\n\n".join(text for text in (prompt, more) if text.strip()) or prompt
    return _turns(prompt, "user", keys["prompt"])


def _preference(parts: Mapping[str, Any], keys: Mapping[str, str]) -> Row:
    """Make a pair. The messages with which both chats begin are the prompt; its answers are not trained on."""
    chats = [_with_system(parts.get("system"), _side(name, parts, keys)) for name in ("chosen", "rejected")]
    read_only = [shown_only(chat) for chat in chats]
    end = shared_turns(*read_only)
    if not end or any(chat[end].role != "assistant" or chat[-1].role != "assistant" for chat in chats):
        raise RowError(f"{keys['chosen']} and {keys['rejected']} are not two answers to the same prompt")
    chosen, rejected = (before[:end] + chat[end:] for before, chat in zip(read_only, chats, strict=True))
    for message in (*chosen, *rejected):
        require_unicode(message.content, "a message")
    return Row(PAIRS, chosen, parse_tools(parts.get("tools")), rejected=rejected)


def _side(name: str, parts: Mapping[str, Any], keys: Mapping[str, str]) -> tuple[Message, ...]:
    """The whole chat of one answer of a pair: the answer follows the prompt, or the value contains both."""
    value, key = parts[name], keys[name]
    prompt = _earlier(parts.get("history")) + _prompt(parts, keys) if parts.get("prompt") else ()
    if isinstance(value, str) and not prompt:
        return _transcript(value, key)
    turns = _turns(value, "assistant", key)
    if turns[0].role == "assistant":
        return prompt + turns
    if not {message.content.strip() for message in prompt} <= {message.content.strip() for message in turns[:-1]}:
        do = f"if it is not their prompt, set data.columns={{chosen: {keys['chosen']}, rejected: {keys['rejected']}}}"
        raise RowError(f"{keys['prompt']} is not in the messages of {key}", do=do)
    return turns


def _transcript(value: str, key: str) -> tuple[Message, ...]:
    """Read a text of turns that begin with "\n\nHuman:" or "\n\nAssistant:"; the last one is the answer."""
    before, mark, answer = f"\n\n{value.strip()}".rpartition("\n\nAssistant:")
    first, *turns = TRANSCRIPT_TURN.split(before)
    if not mark or first.strip() or not turns:
        raise RowError(f"{key} has no prompt: expected a key prompt, a list of messages, or Human: … Assistant: …")
    turns += ["Assistant", answer]
    named = zip(turns[::2], turns[1::2], strict=True)
    return parse_messages([{"role": role, "content": text.strip()} for role, text in named], key)


def _turns(value: object, role: str, key: str) -> tuple[Message, ...]:
    """Read a list of messages, or a text as one message with this role."""
    return parse_messages(value, key) if isinstance(value, list) else (Message(role, _text(value, key)),)


def _earlier(history: object) -> tuple[Message, ...]:
    """Earlier turns: LLaMA-Factory's pairs, which are trained on, or messages, which are not."""
    if not history:
        return ()
    if not isinstance(history, list) or not all(isinstance(item, list) and len(item) == 2 for item in history):
        return shown_only(parse_messages(history, "history"))
    turns = [({"role": "user", "content": one}, {"role": "assistant", "content": two}) for one, two in history]
    return parse_messages(list(itertools.chain(*turns)), "history")


def _with_system(text: object, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Prepend the system prompt that a row has next to its messages (Bedrock, LLaMA-Factory)."""
    if text in (None, ""):
        return messages
    system = Message("system", _text(text, "system"))
    if messages[0].role not in ("system", "developer"):
        return (system, *messages)
    if messages[0] != system:
        raise RowError("two different system prompts, next to messages and in messages[0]: keep one")
    return messages


def _text(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{key} must be a string, not {kind(value)}")
    if not value.strip():
        raise RowError(f"{key} is empty")
    require_unicode(value, key)
    return value
