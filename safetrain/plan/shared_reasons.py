"""The remedy where no row can be read, and all of them for one reason: then what wrote the rows is to be mended."""

import difflib
from collections.abc import Mapping, Sequence

from safetrain.core.data.foreign_rows import Columns, as_options
from safetrain.core.data.jsonl import Fault

NEXT = "\n" + " " * 12  # a line of a remedy


def remedy_for_all(faults: Sequence[Fault], columns: Columns | None) -> str:
    """What to do where ``faults`` are those of all rows that there are; empty where they are of several reasons."""
    if len({fault.text for fault in faults}) != 1:
        return ""
    remedy = faults[0].remedy
    if remedy.there and columns:
        return _renamed(columns, remedy.there)
    if remedy.ways:
        tries = "".join(f"{NEXT}{_command(way)}" for way in remedy.ways)
        return f"say which keys are meant: data.columns in params.yaml; to try it first:{tries}"
    if remedy.program:
        return f"make another file: {remedy.program}"
    several = "all rows are so: mend what wrote the file, and write it again" if len(faults) > 1 else ""
    return remedy.do or several


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
