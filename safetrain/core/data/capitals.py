"""Usual keys that are written with other capitals (Question, MESSAGES) are read as the usual ones, and said so."""

import re
from collections.abc import Mapping
from typing import Any

from safetrain.core.data.foreign_rows import KNOWN_KEYS
from safetrain.core.data.other_meanings import MEANINGS

USUAL = KNOWN_KEYS | MEANINGS | {"functions", "contents"}


def usual_capitals(value: dict[str, Any]) -> dict[str, str]:
    """The usual keys that the row has in other capitals only, and how it writes them."""
    if "".join(value).islower():  # nearly all rows
        return {}
    found: dict[str, str] = {}
    for key in value:
        usual = key.casefold()
        if usual == key or usual not in USUAL or usual in value:
            continue
        if value[found.setdefault(usual, key)] != value[key]:
            return {}  # Answer and ANSWER say different things: nobody knows which is meant
    return found


def respelled(value: dict[str, Any], written: Mapping[str, str]) -> dict[str, Any]:
    """The row with its ``written`` keys as the usual ones."""
    usual = {key: name for name, key in written.items()}
    return {usual.get(key, key): item for key, item in value.items()}


def as_written(how: str, written: Mapping[str, str], ignored: tuple[str, ...]) -> str:
    """How the row was taken, with its keys as it writes them; none is left out that was read."""
    left = re.compile(rf"\b({'|'.join(written)})\b(?=[^,>]* ->)")
    how = left.sub(lambda found: written[found[0]], how)
    said = set(re.findall(r"\w+(?=[^,>]* ->)", how))
    more = [f"{key} -> {name}" for name, key in written.items() if key not in said and name not in ignored]
    return ", ".join(filter(None, (how, *more)))
