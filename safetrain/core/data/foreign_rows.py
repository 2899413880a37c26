"""Rows in forms that other programs write, brought to messages, or prompt and completion; with what was taken."""

import itertools
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safetrain.core.data.strict_json import Remedy, RowError, as_setting, choice, dump, kind, shown
from safetrain.core.data.turn_forms import ROLE_NAMES, is_turn
from safetrain.core.errors import ConfigError

QUESTIONS = ("instruction", "prompt", "question", "query", "problem", "input", "user", "human", "source")
CONTEXTS = ("input", "context")
ASKING, WEAK = QUESTIONS[:5], ("input", "source")  # what is always a question, and what is one alone
ANSWERS = ("completion", "response", "answer", "output", "solution", "assistant", "reply", "target")
ANSWERS_ABROAD = ("antwort", "respuesta", "resposta", "risposta", "réponse", "reponse", "ответ", "回答", "答案")
PARTS = ("messages", "prompt", "input", "completion", "system", "text", "tools", "history")
WITH_PARTS = {  # what can be read together
    "messages": {"messages", "system", "tools"},
    "prompt and completion": {"prompt", "input", "completion", "system", "tools", "history"},
    "text": {"text"},
}
KNOWN_KEYS = frozenset((*QUESTIONS, *CONTEXTS, *ANSWERS, *PARTS, "conversations", "conversation"))
COLUMNS = "as {prompt: frage, completion: antwort}, or null"
MOST_NAMES = 12  # that are told
TWO_WAYS = "the row can be read in two ways, and only one can be meant"
FORMATS = (
    "messages; conversations; prompt and completion; instruction, input and output; question and answer; text. "
    "Other names: data.columns={prompt: NAME, completion: NAME}"
)
AS_OBJECTS = Remedy('write each row as {"prompt": "…", "completion": "…"}, {"messages": […]} or {"text": "…"}')
Columns = Mapping[str, str]  # parts of a row, and the keys that hold them


class UnknownKeysError(RowError):
    """A row whose keys are those of no form that is known."""

    def __init__(self, names: str, row: dict[str, Any]) -> None:
        super().__init__(f"unknown keys ({names}); expected one of: {FORMATS}", AS_OBJECTS)
        self.row = row


@dataclass(frozen=True)
class Taken:
    """A row in one of the usual forms, which keys it was made of, and how, in words."""

    value: dict[str, Any]
    used: frozenset[str]
    how: str
    place: str = "messages"  # what messages are called in errors


def named_columns(words: Sequence[str]) -> Columns | None:
    """The columns that ``words`` name, each as ``prompt=frage``; None without any. Raises ConfigError."""
    unclear = [word for word in words if not all(word.partition("="))]
    if unclear:
        raise ConfigError(
            f"--columns {shown(unclear[0])} names no key.", expected="a part of a row and its key, as prompt=frage"
        )
    pairs = [word.partition("=")[::2] for word in words]
    if len(dict(pairs)) < len(pairs):
        raise ConfigError("--columns names two keys for one part of a row.", got=", ".join(map(shown, words)))
    return checked_columns(dict(pairs)) if pairs else None


def as_options(columns: Mapping[str, str]) -> str:
    """What ``named_columns`` reads again, for a shell."""
    return " ".join(f"--columns {shlex.quote(f'{part}={key}')}" for part, key in columns.items())


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
    _refuse_parts_unread(set(found))
    return found


def _refuse_parts_unread(parts: set[str]) -> None:
    """Raise ConfigError where one part would be passed over for another."""
    chosen = "messages" if "messages" in parts else "text" if "text" in parts else "prompt and completion"
    with_it = WITH_PARTS[chosen]
    if parts - with_it:
        raise ConfigError(
            f"data.columns names what is not read beside {chosen}: {', '.join(sorted(parts - with_it))}.",
            expected="; or ".join(", ".join(part for part in PARTS if part in form) for form in WITH_PARTS.values()),
            do="leave it out, or name the parts of one form",
        )


def by_columns(value: dict[str, Any], columns: Columns) -> Taken:
    """The row that ``columns`` picks; raises RowError where a key that it names is not there."""
    missing = [key for part, key in columns.items() if key not in value and part not in ("system", "input", "tools")]
    if missing:
        there = key_names(value)
        said = f"no key {', '.join(map(shown, missing))}, which data.columns names; there are: {there}"
        raise RowError(said, Remedy(there=tuple(itertools.islice(value, MOST_NAMES))))
    row: dict[str, Any] = {part: value.get(key) for part, key in columns.items()}
    for part in ("prompt", "input", "completion", "system", "text"):
        if isinstance(row.get(part), int | float):
            row[part] = dump(row[part], shown(columns[part]))
        elif isinstance(row.get(part), dict) and part in ("prompt", "completion"):
            row[part] = [row[part]]
    if row.get("input") and not isinstance(row["input"], str):
        raise _no_text(columns["input"], row["input"])
    if isinstance(row.get("prompt"), str):
        row["prompt"] = _joined(row["prompt"], row.get("input"))
    elif row.get("input"):
        raise RowError(f"{shown(columns['prompt'])} is no text, and {shown(columns['input'])} cannot be put behind it")
    row.pop("input", None)
    told = ", ".join(f"{shown(key)} -> {part}" for part, key in columns.items())
    return Taken(with_history(row), frozenset(columns.values()), told, columns.get("messages", "messages"))


def usual_form(value: dict[str, Any]) -> Taken | None:
    """The row in one of the usual forms; None where it is in none that is known here."""
    return _gemini(value) or pair(value) or _conversation(value)


def _no_text(key: str, value: object) -> RowError:
    return RowError(f"{shown(key)} is {kind(value)}; it must be a text")


def unknown_row(value: dict[str, Any]) -> RowError:
    """The error for a row that is in none of the forms."""
    names = key_names(value)
    for needed in (("messages",), ("prompt", "completion"), ("text",)):
        if all(key in value for key in needed):
            return RowError(f"{next(key for key in needed if value[key] is None)} is null, or an empty cell")
    there = [next((key for key in keys if key in value), None) for keys in (QUESTIONS, ANSWERS)]
    empty = [key for key in there if key is not None and value[key] is None]
    if empty and None not in there:
        return RowError(f"{empty[0]} is null, or an empty cell")
    wrong = _wrong_kind(value)
    if wrong is not None:
        return wrong
    if isinstance(value.get("instruction"), str) and isinstance(value.get("instances"), list):
        program = "(arrays[], objects) | .instruction as $q | .instances[] | {instruction: $q, input, output}"
        said = f"jq -c '{program}' old.json > new.jsonl"
        told = f"unknown keys ({names}); self-instruct's seed tasks, several rows in one object: {said}"
        return RowError(told, Remedy(program=said))
    return UnknownKeysError(names, value)


def _wrong_kind(value: dict[str, Any]) -> RowError | None:
    """The error where question and answer have their usual names, and one is no text."""
    asked = _first(value, QUESTIONS, str) or next((key for key in ASKING if value.get(key) is not None), None)
    answered = _first(value, ANSWERS, str) or next((key for key in ANSWERS if value.get(key) is not None), None)
    answers = value.get("answers")
    if asked is not None and answered is None and isinstance(answers, dict) and isinstance(answers.get("text"), list):
        program = "(arrays[], objects) | select(.answers.text[0]) | .answer = .answers.text[0] | del(.answers)"
        said = f"jq -c '{program}' old.json > new.jsonl"
        return RowError(f"answers is an object, as in SQuAD; the answer must be a text: {said}", Remedy(program=said))
    if asked is not None and answered is None and isinstance(answers, list | dict):
        return RowError(f"answers is {kind(answers)}; write the one answer to learn as a text, under answer")
    wrong = [key for key in (asked, answered) if key and not isinstance(value[key], str)]
    return _no_text(wrong[0], value[wrong[0]]) if asked and answered and wrong else None


def key_names(value: Collection[str]) -> str:
    """The first of some keys, as they can be printed."""
    names = [shown(key) for key in itertools.islice(value, MOST_NAMES)]
    return ", ".join(names) + (", …" if len(value) > MOST_NAMES else "") or "none"


def pair(value: dict[str, Any]) -> Taken | None:
    """A question and its answer under any of their usual names; with context, system and history."""
    question, answer = _first(value, QUESTIONS, str), _first(value, ANSWERS, (str, int, float))
    if question is None or answer is None:
        if question is not None and isinstance(value.get("output"), list) and len(value["output"]) == 2:
            raise RowError("preference data (two outputs): answers are learnt here, not choices between two")
        return None
    refuse_turns_beside(value, question, answer)
    _refuse_second(value, question, answer)
    beside = [key for key in CONTEXTS if key in value and isinstance(value[key], str | None) and key != question]
    context = next((key for key in beside if value[key]), beside[0] if beside else None)
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
    return Taken(with_history(row), frozenset(used), ", ".join(names))


def _refuse_second(value: dict[str, Any], question: str, answer: str) -> None:
    """Raise RowError where two keys hold what is asked, or two what is answered, and say different things."""
    asked = _others(value, [name for name in QUESTIONS if isinstance(value.get(name), str) and name not in WEAK],
                    question)  # fmt: skip
    answered = _others(value, ANSWERS, answer)
    if asked or answered:
        raise _second(question, asked, answer, answered)


def _second(question: str, asked: list[str], answer: str, answered: list[str]) -> RowError:
    pairs = [(question, answer), *((other, answer) for other in asked), *((question, other) for other in answered)]
    ways = [{"prompt": first, "completion": second} for first, second in pairs]
    ways += [{"prompt": question, "input": other, "completion": answer} for other in asked]
    said = f"{TWO_WAYS}: {', '.join((question, *asked))} -> {', '.join((answer, *answered))}; say which"
    return choice(said, *ways)


def refuse_beside_completion(value: dict[str, Any]) -> None:
    """Raise RowError where another question or answer stands beside ``prompt`` and ``completion``, and no part of it.

    A reference that the completion holds, or an instruction that the prompt does, is no second way.
    """
    asked = [key for key in ASKING if key != "prompt" and _is_other(value.get(key), value["prompt"])]
    answered = [key for key in ANSWERS if key != "completion" and _is_other(value.get(key), value["completion"])]
    if asked or answered:
        raise _second("prompt", asked, "completion", answered)


def refuse_beside_messages(value: dict[str, Any]) -> None:
    """Raise RowError where other turns, or a question and its answer, stand beside ``messages``, and no part of them.

    One question or one answer alone is no second way.
    """
    turns = value["messages"]
    _refuse_answer_beside(value, "messages")
    lists = [key for key in _turn_lists(value) if key != "history"]
    other = next((key for key in lists if not _texts_of(value[key]) <= _texts_of(turns)), None)
    if other is not None:
        raise _beside_messages(f"{shown(other)} holds other turns", {"messages": other})
    questions = [key for key in ASKING if isinstance(value.get(key), str) and value[key].strip()]
    answers = [key for key in ANSWERS if isinstance(value.get(key), str) and value[key].strip()]
    for keys in (questions, answers) if questions and answers else ():
        if all(_is_other(value[key], turns) for key in keys):
            pair_of = {"prompt": questions[0], "completion": answers[0]}
            raise _beside_messages(f"{questions[0]} and {answers[0]} say another thing", pair_of)


def _refuse_answer_beside(value: dict[str, Any], key: str) -> None:
    """Raise RowError where an answer stands beside the turns under ``key``, and they may lack it.

    A chat that ends with its own answer, under a usual key, has only a reference beside it.
    """
    turns = value[key]
    names = [name for name in value if name.casefold() in (*ANSWERS, *ANSWERS_ABROAD) and _is_other(value[name], turns)]
    if not names or not isinstance(turns, list) or not all(map(is_turn, turns)):
        return
    roles = [ROLE_NAMES.get(str(turn.get("role", turn.get("from"))).strip().casefold()) for turn in turns]
    if not turns or (roles[-1] != "user" and key in KNOWN_KEYS):
        return
    behind = {"prompt": key, "completion": names[0]}
    said = f"{shown(key)} holds turns, and {shown(names[0])} an answer that is none of them; to train it behind them"
    if "assistant" not in roles:
        raise choice(said, behind)
    raise choice(f"{TWO_WAYS}: {said}, or the turns alone", behind, {"messages": key})


def _beside_messages(what: str, columns: Columns) -> RowError:
    return choice(f"{TWO_WAYS}: messages, and {what}; say which", {"messages": "messages"}, columns)


def _is_other(item: object, usual: object) -> bool:
    """Whether it is a text or number that is no part of a text in ``usual``."""
    if not isinstance(item, str | int | float) or isinstance(item, bool):
        return False
    return not any(str(item).strip() in text for text in ("", *_texts_of(usual)))


def _texts_of(turns: object) -> set[str]:
    """Every text in a list of turns, or the text itself, without the space around it."""
    found, waiting = set[str](), [turns]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            found.add(item.strip())
        elif isinstance(item, dict):
            waiting += [part for key, part in item.items() if key not in ("role", "from")]
        elif isinstance(item, list):
            waiting += item
    return found


def _others(value: dict[str, Any], names: Iterable[str], first: str) -> list[str]:
    """The keys that hold another text or number than the one under ``first``."""
    said = [(name, str(value[name]).strip()) for name in names
            if isinstance(value.get(name), str | int | float) and not isinstance(value[name], bool)]  # fmt: skip
    return [name for name, text in said if text and name != first and text != str(value[first]).strip()]


def refuse_turns_beside(value: dict[str, Any], question: str, answer: str) -> None:
    """Raise RowError where a list of turns stands beside a question and its answer; ``history`` is read with them."""
    key = next((key for key in _turn_lists(value) if key not in ("history", question, answer)), None)
    if key is None:
        return
    chat, pair_of = {"messages": key}, {"prompt": question, "completion": answer}
    with_turns = {**pair_of, "history": key}
    raise RowError(
        f"{TWO_WAYS}: {shown(key)} holds turns ({as_setting(chat)}), beside {question} and {answer} "
        f"({as_setting(pair_of)}, or with the turns before: {as_setting(with_turns)})",
        Remedy(ways=(chat, pair_of, with_turns)),
    )


def _turn_lists(value: dict[str, Any]) -> list[str]:
    """The keys of lists of turns, but for ``messages``."""
    return [
        key for key, turns in value.items()
        if isinstance(turns, list) and turns and key != "messages" and all(map(is_turn, turns))
    ]  # fmt: skip


def _conversation(value: dict[str, Any]) -> Taken | None:
    keys = _turn_lists(value)
    if len(keys) > 1:
        raise choice(
            f"two conversations ({', '.join(map(shown, keys[:MOST_NAMES]))}), as in preference data: answers are "
            "learnt here, not choices between two; to train one of them, whichever was chosen",
            *({"messages": key} for key in keys[:2]),
        )
    if not keys or (keys == ["history"] and _first(value, ASKING, str) is not None):  # turns before a question
        return None
    key, turns = keys[0], value[keys[0]]
    _refuse_answer_beside(value, key)
    kept = {name: value[name] for name in ("system", "tools", "functions") if value.get(name)}
    form = " (ShareGPT)" if "from" in turns[0] else ""
    return Taken({**kept, "messages": turns}, frozenset((key, *kept)), f"{shown(key)}{form} -> messages", key)


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


def with_history(row: dict[str, Any]) -> dict[str, Any]:
    """Earlier turns put before prompt and completion: LLaMA-Factory's pairs, or messages, which are only shown."""
    history = row.get("history")
    if not history:
        return {key: item for key, item in row.items() if key != "history"}
    if not isinstance(row["prompt"], str) or not isinstance(row["completion"], str):
        raise RowError("history stands beside a prompt or completion that is no text: put its turns into the prompt")
    last = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
    rest = {key: item for key, item in row.items() if key not in ("history", "prompt", "completion")}
    return {**rest, "messages": [*_earlier(history), *last]}


def _earlier(history: object) -> list[dict[str, Any]]:
    if isinstance(history, list) and all(map(is_turn, history)):
        return [{**turn, "weight": 0} for turn in history]
    if not isinstance(history, list) or not all(isinstance(item, list) and len(item) == 2 for item in history):
        raise RowError("history must be a list of messages, or of pairs, each a question and its answer")
    return [{"role": role, "content": text} for item in history
            for role, text in zip(("user", "assistant"), item, strict=True)]  # fmt: skip


def _first(value: dict[str, Any], names: tuple[str, ...], kinds: type | tuple[type, ...]) -> str | None:
    """The first of the keys that holds something; where none does, the first that is there."""
    there = [name for name in names if isinstance(value.get(name), kinds) and not isinstance(value[name], bool)]
    return next((name for name in there if str(value[name]).strip()), there[0] if there else None)
