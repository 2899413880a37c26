"""Which keys make a row: chat, completion, Alpaca, ShareGPT, question and answer, text, or those of data.columns.

A row that can be read in two ways, or that means something else than a question and its answer, is refused.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from safetrain.core.errors import ConfigError
from safetrain.data.messages import MEDIA_KEYS, ROLE_NAMES, is_turn
from safetrain.data.rows import Row, row_of
from safetrain.data.strict_json import MOST_SHOWN, RowError, dump, kind, shown

QUESTIONS = ("instruction", "prompt", "question", "query", "problem", "input", "user", "human", "source")
ASKING, CONTEXTS = QUESTIONS[:5], ("input", "context")  # ASKING is always a question, the others only alone
ANSWERS = ("completion", "response", "answer", "output", "solution", "assistant", "reply", "target")
PARTS = ("messages", "prompt", "input", "completion", "system", "text", "tools", "history")
USUAL = ("messages", "prompt", "completion", "text")
WITH_PARTS = {  # what can be read together
    "messages": {"messages", "system", "tools"},
    "prompt and completion": {"prompt", "input", "completion", "system", "tools", "history"},
    "text": {"text"},
}
KNOWN_KEYS = frozenset((*QUESTIONS, *CONTEXTS, *ANSWERS, *PARTS, "conversations", "conversation"))
FORMATS = "messages; conversations; prompt and completion; instruction, input and output; question and answer; text"
TWO_WAYS = "the row can be read in two ways, and only one can be meant"
AS_OBJECTS = 'write each row as {"prompt": "…", "completion": "…"}, {"messages": […]} or {"text": "…"}'
HEADER = "the first line is not a header: write one above it, such as question,answer"
MOST_NAMES, MOST_GROUP = 12, 80  # keys that an error lists; letters of a category
GROUPS = ("category", "task")  # keys that say what kind of row it is
PREFERENCES = ("chosen", "chosen_messages", "chosen_response", "preferred_output", "rejected", "rejected_messages",
               "rejected_response", "non_preferred_output")  # fmt: skip
ONE_OF_TWO = re.compile(r"((?:response|answer|output|completion|reply)_?)(?:[abjk]|[0-9])", re.IGNORECASE)
LISTS, GRADES = ("responses", "completions", "answers", "outputs"), ("scores", "rankings", "ranks", "ratings")
LABELS = ("label", "kto_tag", "labels", "sentiment", "class")
MOST_CLASS = 40  # letters of a classifier's label
EMBEDDED = (("anchor", "positive"), ("sentence1", "sentence2"), ("query", "pos"), ("query", "positive"))
MEANINGS = frozenset((*PREFERENCES, *LABELS, *MEDIA_KEYS, "anchor", "positive", "sentence1", "pos", "embedding",
                      "embeddings", "input_ids", "weight"))  # fmt: skip
PLAIN_KEY = re.compile(r"[^\W\d][\w-]*")
Columns = Mapping[str, str]  # parts of a row, and the keys that hold them


@dataclass(frozen=True)
class Reading:
    """A row in one of the usual forms, the keys it was made of, and how, in words."""

    value: dict[str, Any]
    used: frozenset[str]
    how: str = ""
    place: str = "messages"  # what messages are called in errors


def named_columns(words: Iterable[str]) -> Columns | None:
    """The columns that ``words`` name, each as ``prompt=frage``; None without any. Raises ConfigError."""
    pairs = [word.partition("=") for word in words]
    for part, _, key in pairs:
        if not part or not key:
            raise ConfigError(f"--columns {shown(part or key)} names no key.", expected="PART=KEY, as prompt=frage")
    if len({part for part, _, _ in pairs}) < len(pairs):
        raise ConfigError("--columns names two keys for one part of a row.")
    return checked_columns({part: key for part, _, key in pairs}) if pairs else None


def checked_columns(columns: object) -> Columns | None:
    """data.columns without what is null; raises ConfigError where no row can come of it."""
    if columns is None:
        return None
    if not isinstance(columns, Mapping):
        expected = "as {prompt: frage, completion: antwort}, or null"
        raise ConfigError("data.columns is not a mapping.", expected=expected, got=shown(str(columns)))
    found = {str(part): str(key) for part, key in columns.items() if key is not None}
    unknown = [part for part in found if part not in PARTS]
    if unknown:
        named = ", ".join(map(shown, unknown))
        raise ConfigError(f"data.columns: {named} is not a part of a row.", expected=f"one of {', '.join(PARTS)}")
    chosen = "messages" if "messages" in found else "text" if "text" in found else "prompt and completion"
    if chosen == "prompt and completion" and not {"prompt", "completion"} <= set(found):
        raise ConfigError("data.columns makes no row.", expected="messages, or prompt and completion, or text")
    beside = set(found) - WITH_PARTS[chosen]
    if beside:
        raise ConfigError(
            f"data.columns names what is not read beside {chosen}: {', '.join(sorted(beside))}.",
            expected="; or ".join(", ".join(part for part in PARTS if part in form) for form in WITH_PARTS.values()),
            do="leave it out, or name the parts of one form",
        )
    return found


def as_setting(columns: Columns) -> str:
    """data.columns as it is written in params.yaml and on a command line."""
    parts = (f"{part}: {key if PLAIN_KEY.fullmatch(key) else shown(key)}" for part, key in columns.items())
    return f"data.columns={{{', '.join(parts)}}}"


def parse_row(value: object, columns: Columns | None = None) -> Row:
    """The row in ``value``, taken by ``columns`` or, without them, by the usual names; raises RowError."""
    if isinstance(value, list) and value and all(map(is_turn, value)):
        value = {"messages": value}
    if not isinstance(value, dict):
        raise RowError(f"a row must be a JSON object, this is {kind(value)}", do=AS_OBJECTS)
    reading = _by_columns(value, columns) if columns else _by_names(value)
    ignored = [key for key, item in value.items() if key not in reading.used and item not in (None, "", [], {})]
    group = next((key for key in GROUPS if key in ignored and _is_group(value[key])), None)
    named = tuple(sorted(shown(key) for key in ignored if key != group))
    row = row_of(reading.value, reading.place)
    if not (named or reading.how or group):
        return row
    return replace(row, ignored_keys=named, taken=reading.how, group=value[group].strip() if group else "")


def is_row(value: object) -> bool:
    """Whether it is a row by the usual names, also one that can be read in two ways."""
    try:
        parse_row(value)
    except RowError as error:
        return str(error).startswith(TWO_WAYS)
    return True


def key_names(keys: Collection[str]) -> str:
    """The first of some keys, as they can be printed."""
    names = [shown(key) for key in itertools.islice(keys, MOST_NAMES)]
    return ", ".join(names) + (", …" if len(keys) > MOST_NAMES else "") or "none"


def _is_group(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MOST_GROUP and value.isprintable()


# Which keys make the row


def _by_names(value: dict[str, Any]) -> Reading:
    if len(value) > 1 or "messages" not in value:
        _refuse_other_meanings(value)
    if value.get("messages") is not None:
        return _of_turns(value, "messages")
    for question, answer in (("prompt", "completion"), _pair_of(value)):
        if question and answer and value.get(question) is not None and value.get(answer) is not None:
            return _of_pair(value, question, answer)
    if isinstance(value.get("systemInstruction"), dict) and isinstance(value.get("contents"), list):  # Gemini
        system = {"role": "system", "parts": value["systemInstruction"].get("parts")}
        used = frozenset(("systemInstruction", "contents"))
        return Reading({"messages": [system, *value["contents"]]}, used, "contents (Gemini) -> messages", "contents")
    turns = next((key for key in _turn_lists(value) if key != "history" or not _first(value, ASKING, str)), None)
    if turns is not None:
        return _of_turns(value, turns)
    if value.get("text") is not None:
        return Reading(value, frozenset(("text",)))
    raise _unknown(value)


def _of_turns(value: dict[str, Any], key: str) -> Reading:
    turns = value[key]
    lists = [other for other in _turn_lists(value) if other not in (key, "history")] if len(value) > 1 else []
    asked, answers = ([name for name in names if _is_text(value.get(name))] for names in (ASKING, ANSWERS))
    if lists or answers:
        texts = _texts_of(turns)
        ways = [{"messages": other} for other in lists if key != "messages" or not _texts_of(value[other]) <= texts]
        others = [[_is_other(value[name], texts) for name in names] for names in (asked, answers)]
        if asked and answers and any(map(all, others)):
            ways.append({"prompt": asked[0], "completion": answers[0]})
        elif answers and all(others[1]) and _ends_with_user(turns):
            ways.append({"prompt": key, "completion": answers[0]})
        if ways:
            raise _two_ways({"messages": key}, *ways)
    kept = {name: value[name] for name in ("system", "tools", "functions") if value.get(name)}
    first = turns[0] if isinstance(turns, list) and turns else {}
    form = " (ShareGPT)" if isinstance(first, dict) and "from" in first else ""
    how = "" if key == "messages" else f"{shown(key)}{form} -> messages"
    return Reading({**kept, "messages": turns}, frozenset((key, *kept)), how, key)


def _of_pair(value: dict[str, Any], question: str, answer: str) -> Reading:
    """A question and its answer under any of their usual names; with context, system, tools and history."""
    chosen, is_usual = {"prompt": question, "completion": answer}, (question, answer) == ("prompt", "completion")
    context = None if is_usual else _context_of(value, question)
    texts = _texts_of([value[question], value[answer]])
    ways: list[dict[str, str]] = []
    for key in _turn_lists(value):
        if key not in ("history", question, answer):
            ways += [{"messages": key}, {**chosen, "history": key}]
    asked = [name for name in ASKING if name not in (question, context) and _is_other(value.get(name), texts)]
    answered = [name for name in ANSWERS if name != answer and _is_other(value.get(name), texts)]
    ways += [{"prompt": name, "completion": answer} for name in asked]
    ways += [{"prompt": question, "completion": name} for name in answered]
    ways += [{"prompt": question, "input": name, "completion": answer} for name in asked]
    prompt = _joined(value[question], value[context] if context else None)
    completion = value[answer] if is_usual or isinstance(value[answer], str) else dump(value[answer], answer)
    text = value.get("text")
    if not is_usual and isinstance(text, str) and text.strip():
        lines = [line.strip() for part in (prompt, completion) for line in str(part).split("\n\n")]
        ways += [] if all(line in text for line in lines) else [{"text": "text"}]
    if ways:
        raise _two_ways(chosen, *ways)
    kept = {key: value[key] for key in ("system", "tools", "history") if value.get(key)}
    used = frozenset((question, answer, *kept, *([context] if context else [])))
    how = [] if is_usual else [f"{question}{f' + {context}' if context else ''} -> question", f"{answer} -> answer"]
    how += ["history -> turns before"] if "history" in kept else []
    return Reading(_with_history({"prompt": prompt, "completion": completion, **kept}), used, ", ".join(how))


def _by_columns(value: dict[str, Any], columns: Columns) -> Reading:
    """The row that ``columns`` picks; raises RowError where a key that it names is not there."""
    missing = [key for part, key in columns.items() if key not in value and part not in ("system", "input", "tools")]
    if missing:
        said = f"no key {', '.join(map(shown, missing))}, which data.columns names; there are: {key_names(value)}"
        raise RowError(said, do="name keys that the rows have: --columns, or data.columns in params.yaml")
    row: dict[str, Any] = {part: value.get(key) for part, key in columns.items()}
    for part in ("prompt", "input", "completion", "system", "text"):
        if isinstance(row.get(part), int | float):
            row[part] = dump(row[part], shown(columns[part]))
        elif isinstance(row.get(part), dict) and part in ("prompt", "completion"):
            row[part] = [row[part]]
    if row.get("input") and not (isinstance(row["input"], str) and isinstance(row.get("prompt"), str)):
        raise RowError(f"{shown(columns['input'])} is {kind(row['input'])}; it and the prompt must be texts")
    row["prompt"] = _joined(row.get("prompt"), row.pop("input", None))
    how = ", ".join(f"{shown(key)} -> {part}" for part, key in columns.items())
    if all(row.get(part) is None for part in ("messages", "text")) and None in (row["prompt"], row.get("completion")):
        raise RowError(f"null or an empty cell ({how})")
    return Reading(_with_history(row), frozenset(columns.values()), how, columns.get("messages", "messages"))


def _turn_lists(value: dict[str, Any]) -> list[str]:
    """The keys of lists of turns."""
    return [key for key, turns in value.items() if isinstance(turns, list) and turns and all(map(is_turn, turns))]


def _is_text(item: object) -> bool:
    return isinstance(item, str) and bool(item.strip())


def _pair_of(value: dict[str, Any]) -> tuple[str | None, str | None]:
    return _first(value, QUESTIONS, str), _first(value, ANSWERS, (str, int, float))


def _context_of(value: dict[str, Any], question: str) -> str | None:
    there = [key for key in CONTEXTS if key in value and isinstance(value[key], str | None) and key != question]
    return next((key for key in there if value[key]), there[0] if there else None)


def _first(value: dict[str, Any], names: tuple[str, ...], kinds: type | tuple[type, ...]) -> str | None:
    """The first of the keys that holds something; where none does, the first that is there."""
    there = [name for name in names if isinstance(value.get(name), kinds) and not isinstance(value[name], bool)]
    return next((name for name in there if str(value[name]).strip()), there[0] if there else None)


def _texts_of(turns: object) -> set[str]:
    """Every text in a list of turns, or the text itself, without the space around it."""
    found, waiting = set[str](), [turns]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str | int | float):
            found.add(str(item).strip())
        elif isinstance(item, dict):
            waiting += [part for key, part in item.items() if key not in ("role", "from")]
        elif isinstance(item, list):
            waiting += item
    return found


def _is_other(item: object, texts: set[str]) -> bool:
    """Whether it is a text or number that is not part of one of ``texts``."""
    if not isinstance(item, str | int | float) or isinstance(item, bool) or not str(item).strip():
        return False
    return not any(str(item).strip() in text for text in texts)


def _ends_with_user(turns: object) -> bool:
    last = turns[-1] if isinstance(turns, list) and turns else None
    role = last.get("role", last.get("from")) if isinstance(last, dict) else None
    return ROLE_NAMES.get(str(role).strip().casefold()) == "user"


def _joined(question: Any, context: object) -> Any:
    """The question, and after it what it is about."""
    more = context if isinstance(context, str) else ""
    if not isinstance(question, str):
        return question
    return "\n\n".join(text for text in (question, more) if text.strip()) or question


def _with_history(row: dict[str, Any]) -> dict[str, Any]:
    """Earlier turns put before prompt and completion: LLaMA-Factory's pairs, or messages, which are only shown."""
    history = row.pop("history", None)
    if not history:
        return row
    if not isinstance(row["prompt"], str) or not isinstance(row["completion"], str):
        raise RowError("history stands beside a prompt or completion that is not a text: put its turns into the prompt")
    if not isinstance(history, list):
        raise RowError("history must be a list of messages, or of pairs, each a question and its answer")
    last = [{"role": "user", "content": row.pop("prompt")}, {"role": "assistant", "content": row.pop("completion")}]
    if all(map(is_turn, history)):
        return {**row, "messages": [*({**turn, "weight": 0} for turn in history), *last]}
    if not all(isinstance(item, list) and len(item) == 2 for item in history):
        raise RowError("history must be a list of messages, or of pairs, each a question and its answer")
    roles = ("user", "assistant")
    earlier = [{"role": role, "content": text} for item in history for role, text in zip(roles, item, strict=True)]
    return {**row, "messages": [*earlier, *last]}


# What is refused


def _two_ways(*ways: dict[str, str]) -> RowError:
    return RowError(f"{TWO_WAYS}; say which: {' or '.join(map(as_setting, ways))}", columns=ways)


def _refuse_other_meanings(value: dict[str, Any]) -> None:
    """Raise RowError for keys that change what the row means: to pass over them would train something else."""
    if MEANINGS.isdisjoint(value):
        return
    preferences = [key for key in PREFERENCES if value.get(key) is not None]
    if preferences:
        raise _preferences(value, preferences)
    for key in MEDIA_KEYS:
        if value.get(key):
            raise RowError(f"{key}: images, audio and video cannot be trained here: keep the rows without it")
    if any(all(value.get(key) is not None for key in keys) for keys in EMBEDDED):
        raise RowError("pairs of texts for an embedding model: there is no answer to learn in them")
    if any(isinstance(value.get(key), list) for key in ("embedding", "embeddings")):
        raise RowError("embedding: these rows are vectors; give the texts and their answers")
    label = next((key for key in LABELS if _is_label(value, key)), None)
    if label is not None:
        raise _labelled(value, label)
    if value.get("input_ids") is not None:
        raise RowError("input_ids: these rows are tokens of one model already; give the texts")
    if value.get("weight") is not None:
        said = "weight: rows cannot be weighted: remove the key; weight: 0 in an assistant message leaves an answer out"
        raise RowError(said)


def _is_label(value: dict[str, Any], key: str) -> bool:
    """Whether ``key`` marks the row: always, or as a word beside a text alone."""
    said = value.get(key)
    if key in ("label", "kto_tag"):
        return said is not None
    if key == "labels":
        return said is not None and isinstance(value.get("text"), str)
    others = {name for name, item in value.items() if name != key and isinstance(item, str | list)}
    return others == {"text"} and isinstance(said, str | int) and len(str(said)) <= MOST_CLASS


def _preferences(value: dict[str, Any], names: list[str]) -> RowError:
    told = f"preference data ({', '.join(names)}): answers are learnt here, not choices between two"
    chosen = names[0] if names[0] in PREFERENCES[:4] else None
    if chosen is None:
        return RowError(f"{told}; there is no chosen answer to train")
    asked = next((key for key in ("prompt", "instruction", "question", "conversations") if value.get(key)), None)
    whole = isinstance(value[chosen], list) and (asked is None or len(value[chosen]) > 1)
    if whole or asked is None:
        way = {"messages" if whole else "text": chosen}
    else:
        context = {"input": "input"} if asked == "instruction" and value.get("input") is not None else {}
        way = {"prompt": asked, **context, "completion": chosen}
    return RowError(f"{told}; to train only the chosen ones: {as_setting(way)}", columns=(way,))


def _labelled(value: dict[str, Any], key: str) -> RowError:
    if isinstance(value[key], bool):
        said = "answers marked good and bad (KTO), and the bad ones would be trained"
        return RowError(f"{key}: {said}: keep the rows where it is true, without the key")
    texts = [name for name in value if name != key and isinstance(value[name], str)]
    text = next((name for name in ("text", "sentence") if name in texts), texts[0] if len(texts) == 1 else None)
    if text is None:
        return RowError(f"{key} changes what the row means, and nothing here reads it: remove the key")
    ways = ({"prompt": text, "completion": key}, {"text": text})
    said = f"to train it as the answer: {as_setting(ways[0])}, or only the text: {as_setting(ways[1])}"
    return RowError(f"{key}: data for a classifier; {said}", columns=ways)


def _unknown(value: dict[str, Any]) -> RowError:
    """The error for a row that is in none of the forms."""
    pairs: dict[str, list[str]] = {}
    for key, item in value.items():
        found = ONE_OF_TWO.fullmatch(key)
        if found and isinstance(item, str):
            pairs.setdefault(found[1].casefold(), []).append(key)
    several = next((keys for keys in pairs.values() if len(keys) > 1), [])
    several += [key for key in (*LISTS, *GRADES) if isinstance(value.get(key), list)]
    if len(several) > 1:
        said = f"preference data ({', '.join(several)}): answers are learnt here, not choices between them"
        return RowError(f"{said}; name the one to learn: data.columns={{prompt: …, completion: …}}")
    asked, answered = (next((key for key in keys if key in value), None) for keys in (QUESTIONS, (*ANSWERS, "answers")))
    for key in (asked, answered) if asked and answered else [key for key in USUAL if key in value]:
        if key is not None and not isinstance(value[key], str):
            said = "null, or an empty cell" if value[key] is None else f"{kind(value[key])}; it must be a text"
            return RowError(f"{key} is {said}")
    if any(len(key) > MOST_SHOWN or re.search(r"\s\S+\s.*[.?!。？！]$", key) for key in value):
        return RowError(f"unknown keys ({key_names(value)})", do=HEADER)
    texts = [key for key, item in value.items() if isinstance(item, str) and item.strip() and key.isprintable()]
    longest = sorted(texts, key=lambda key: -len(value[key]))[:2]
    names = ("text",) if len(texts) == 1 else ("prompt", "completion")
    guess = dict(zip(names, sorted(longest, key=texts.index), strict=False))
    said = f"unknown keys ({key_names(value)}); expected one of: {FORMATS}"
    return RowError(said, columns=(guess,) if guess else (), do=AS_OBJECTS)
