"""The remedy where no row can be read, and all of them for one reason: then what wrote the rows is to be mended."""

import difflib
import re
from collections.abc import Mapping, Sequence

from safetrain.core.data.foreign_rows import Columns, as_options
from safetrain.core.data.jsonl import Fault

AS_OBJECTS = 'write each row as {"prompt": "…", "completion": "…"}, {"messages": […]} or {"text": "…"}'
REMEDIES = {  # by what the reason says
    "a row must be a JSON object": AS_OBJECTS,
    "unknown keys": AS_OBJECTS,
    "where the header names": "put cells that hold a separator into quotes, or name as many columns as there are cells",
    "json.dumps": "write the file again with json.dumps, one row on each line",
    "Extra data": "write one JSON object on each line, and nothing behind it",
}
WAY = re.compile(r"data\.columns=\{(\w+: [\w-]+(?:, \w+: [\w-]+)*)\}")
PROGRAM = re.compile(r"jq -c '[^']*' old\.json > new\.jsonl")
MISNAMED = re.compile(r"no key .*, which data\.columns names; there are: (.*)")
NEXT = "\n" + " " * 12  # a line of a remedy


def remedy_for_all(faults: Sequence[Fault], columns: Columns | None) -> str:
    """What to do where ``faults`` are those of all rows that there are; empty where they are of several reasons."""
    reasons = {fault.text for fault in faults}
    if len(reasons) != 1:
        return ""
    reason = reasons.pop()
    misnamed = MISNAMED.fullmatch(reason)
    if misnamed and columns:
        return _renamed(columns, misnamed[1].split(", "))
    known = next((remedy for said, remedy in REMEDIES.items() if said in reason), "")
    ways = [dict(pair.split(": ") for pair in way.split(", ")) for way in WAY.findall(reason)]
    program = PROGRAM.search(reason)
    if known:
        return known
    if ways:
        tries = "".join(f"{NEXT}{_command(way)}" for way in ways)
        return f"say which keys are meant: data.columns in params.yaml; to try it first:{tries}"
    if program:
        return f"make another file: {program[0]}"
    return "all rows are so: mend what wrote the file, and write it again" if len(faults) > 1 else ""


def _renamed(columns: Columns, there: Sequence[str]) -> str:
    """The columns with keys that the rows have; where none is like the one that was named, that alone is said."""
    folded = {key.casefold(): key for key in there}
    near = dict(columns)
    for part, key in columns.items():
        alike = difflib.get_close_matches(key.casefold(), folded, n=1)
        if key not in there and not alike:
            return "name keys that the rows have: --columns, or data.columns in params.yaml"
        near[part] = key if key in there else folded[alike[0]]
    return f"write the keys as the rows have them, here or in data.columns of params.yaml:{NEXT}{_command(near)}"


def _command(columns: Mapping[str, str]) -> str:
    return f"safetrain validate FILE {as_options(columns)}"
