"""Rows that mean something else than question and answer are refused as what they are: half of them would be taught."""

import re
from typing import Any

from safetrain.core.data.messages import MEDIA_KEYS
from safetrain.core.data.strict_json import Remedy, RowError, as_setting, choice

PREFERENCES = (
    *("chosen", "rejected", "chosen_messages", "rejected_messages", "chosen_response", "rejected_response"),
    *("preferred_output", "non_preferred_output"),
)
ONE_OF_TWO = re.compile(r"((?:response|answer|output|completion|reply)_?)(?:[abjk]|[0-9])", re.IGNORECASE)
LISTS = ("responses", "completions", "answers", "outputs")
GRADES = ("scores", "rankings", "ranks", "ratings", "rewards")
MARKS = ("label", "kto_tag")
CLASSES, MOST_CLASS = ("sentiment", "class"), 40  # names of labels beside a text, and the longest label
PAIRS_TO_EMBED = (("anchor", "positive"), ("sentence1", "sentence2"), ("query", "pos"), ("query", "positive"))
EMBEDDED = ("anchor", "positive", "sentence1", "pos", "embedding", "embeddings")
TRAIN_CHOSEN = "where all rows are such, to train the chosen ones"
MEANINGS = frozenset((*PREFERENCES, *MARKS, *MEDIA_KEYS, *EMBEDDED, *CLASSES, "input_ids", "weight", "labels"))


def refuse_other_meanings(value: dict[str, Any]) -> None:
    """Raise RowError for keys that change what the row means: to pass over them would train something else."""
    if MEANINGS.isdisjoint(value):
        return
    if any(value.get(key) is not None for key in PREFERENCES):
        raise _preferences(value)
    for key in MEDIA_KEYS:
        if value.get(key):
            only = _jq(f"select(.{key} == null or .{key} == [])")
            said = f"{key}: only text can be trained here; to keep the rows without it: {only}"
            raise RowError(said, Remedy(program=only))
    if any(all(value.get(key) is not None for key in keys) for keys in PAIRS_TO_EMBED):
        raise RowError("pairs of texts for an embedding model: there is no answer to learn in them")
    if any(isinstance(value.get(key), list) for key in ("embedding", "embeddings")):
        raise RowError("embedding: these rows are vectors; give the texts and their answers")
    for key in MARKS:
        if value.get(key) is not None:
            raise _mark(value, key)
    if value.get("labels") is not None and isinstance(value.get("text"), str):
        raise _mark(value, "labels")
    for key in CLASSES:
        if _is_class(value, key):
            raise _mark(value, key)
    if value.get("input_ids") is not None:
        raise RowError("input_ids: these rows are tokens of one model already; give the texts")
    if value.get("weight") is not None:
        raise RowError(
            "weight: rows cannot be weighted, only single answers left out (weight: 0 in an assistant message);"
            f" without it: {_jq('del(.weight)')}",
            Remedy(program=_jq("del(.weight)")),
        )


def _is_class(value: dict[str, Any], key: str) -> bool:
    """Whether ``key`` says in a word what the text is: nothing else beside it is a text or a list."""
    said = value.get(key)
    others = {name for name, item in value.items() if name != key and isinstance(item, str | list)}
    return others == {"text"} and isinstance(said, str | int) and len(str(said)) <= MOST_CLASS


def refuse_several_answers(value: dict[str, Any]) -> None:
    """Raise RowError where a row in no usual form has two answers to compare, or a list of them with their grades."""
    pairs: dict[str, list[str]] = {}
    for key, item in value.items():
        found = ONE_OF_TWO.fullmatch(key)
        if found and isinstance(item, str):
            pairs.setdefault(found[1].casefold(), []).append(key)
    several = next((keys for keys in pairs.values() if len(keys) > 1), [])
    lists = [key for key in LISTS if isinstance(value.get(key), list)]
    graded = [key for key in GRADES if isinstance(value.get(key), list)]
    if several or (lists and graded):
        names = ", ".join(several or (*lists, *graded))
        one = f"to train one of them: data.columns={{prompt: …, completion: {several[0]}}}" if several else ""
        raise RowError(
            f"preference data ({names}): answers are learnt here, not choices between them; "
            f"{one or 'write the one to learn as a text, under answer'}"
        )


def _jq(program: str) -> str:
    return f"jq -c '(arrays[], objects) | {program}' old.json > new.jsonl"


def _preferences(value: dict[str, Any]) -> RowError:
    names = ", ".join(key for key in PREFERENCES if value.get(key) is not None)
    told = f"preference data ({names}): answers are learnt here, not choices between two"
    chosen = next((key for key in PREFERENCES[::2] if value.get(key) is not None), None)
    if chosen is None:
        return RowError(f"{told}; there is no chosen answer to train")
    asked = next((key for key in ("prompt", "instruction", "question", "conversations") if value.get(key)), None)
    whole = isinstance(value[chosen], list) and (asked is None or len(value[chosen]) > 1)
    if whole or (asked is None and isinstance(value[chosen], str)):
        return choice(f"{told}; {TRAIN_CHOSEN}", {"messages" if whole else "text": chosen})
    if asked is None:
        return RowError(told)
    context = {"input": "input"} if asked == "instruction" and value.get("input") is not None else {}
    return choice(f"{told}; {TRAIN_CHOSEN}", {"prompt": asked, **context, "completion": chosen})


def _mark(value: dict[str, Any], key: str) -> RowError:
    if isinstance(value[key], bool):
        keep = _jq(f"select(.{key}) | del(.{key})")
        said = f"{key}: answers marked good and bad (KTO), and the bad ones would be trained; to keep the good: {keep}"
        return RowError(said, Remedy(program=keep))
    texts = [name for name in value if name != key and isinstance(value[name], str)]
    text = next((name for name in ("text", "sentence") if name in texts), texts[0] if len(texts) == 1 else None)
    if text is not None:
        as_answer, alone = {"prompt": text, "completion": key}, {"text": text}
        return RowError(
            f"{key}: data for a classifier; to train it as the answer: {as_setting(as_answer)}, or the text alone: "
            f"{as_setting(alone)}",
            Remedy(ways=(as_answer, alone)),
        )
    without = _jq(f"del(.{key})")
    said = f"{key} changes what the row means, and nothing here reads it; without it: {without}"
    return RowError(said, Remedy(program=without))
