"""Rows whose answer is one of a few: a text with its class, and a question with its options."""

import re
import string
from collections.abc import Mapping
from typing import Any

from safetrain.core.data.store import with_options
from safetrain.data.rows import RowError, plain, shown

NUMBER = re.compile(r"[-+]?\d+(\.\d*)?")
OTHER_FORMS = ("completion", "chosen", "rejected", "messages", "kto_tag")


def has_class(value: dict[str, Any], question: str | None, answer: str | None) -> bool:
    """Whether the row is a text with its class, under ``label``; ``question`` is the key of the text.

    Raises RowError for a class without a name: a number, which says nothing to the model, or true and false, which may
    be KTO's marks; and for a row without its class.
    """
    if "label" not in value or question is None or answer is not None or any(key in value for key in OTHER_FORMS):
        return False
    label = value["label"]
    if label in (None, ""):
        raise RowError("label is empty", do="write the class, or remove the key to train on the text alone")
    if isinstance(label, bool):
        do = "write the class as a text, such as yes and no; KTO's marks are not supported: keep the good rows"
        raise RowError("label is true or false: a class without a name, or a KTO mark", do=do)
    if NUMBER.fullmatch(plain(label)):
        do = "write the name of the class (datasets: features['label'].int2str), which its Parquet files have; to train"
        do += f" on the number: safetrain set 'data.columns={{prompt: {question}, completion: label}}'"
        raise RowError(f"label is {shown(label)}: a class without a name", do=do)
    return isinstance(label, str)


def with_right_option(value: dict[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """The row with its options as texts, below the question if that does not name them, and the right one's text.

    The answer is an option, its number from 0, or its letter from A, or its own label (ARC). Raises RowError.
    """
    place, found, answer = keys["options"], value[keys["options"]], value.get(keys["completion"])
    labels = list(string.ascii_uppercase)
    if isinstance(found, dict) and isinstance(found.get("text"), list):  # ARC's form
        found, labels = found["text"], list(map(plain, found.get("label") or labels))
    texts = list(map(plain, found)) if isinstance(found, list) else []
    if len(texts) < 2 or not all(texts) or len(set(texts)) < len(texts):
        raise RowError(f"{place} must be a list of at least two different texts")
    text = plain(answer)
    number = int(text) if text.isdecimal() and len(text) < 5 else -1
    number = labels.index(text.upper()) if text.upper() in labels else number
    if isinstance(answer, int) and text in texts and number in range(len(texts)) and texts[number] != text:
        raise RowError(f"{keys['completion']} is {text}: an option, or the number of another", do="write its text")
    if text not in texts or isinstance(answer, int):
        if number not in range(len(texts)):
            expected = f"one of {place}, its number from 0, or its letter"
            raise RowError(f"{keys['completion']} is {shown(answer)}; expected {expected}")
        text = texts[number]
    asked = next((key for part in ("input", "prompt") if plain(value.get(key := keys.get(part, "")))), keys["prompt"])
    before = " ".join(plain(value.get(keys.get(part, ""))) for part in ("prompt", "input"))
    listed = with_options(before, texts).removeprefix(before)
    more = {asked: value[asked] + listed} if isinstance(value.get(asked), str) else {}
    return {**value, place: texts, **more, keys["completion"]: text}
