"""Lines of JSONL as rows. Every fault is named by file, line and column; none is skipped."""

import re

from safetrain.core.data.rows import Row, RowError, parse_row
from safetrain.core.data.strict_json import load
from safetrain.core.errors import DataError
from safetrain.core.formatting import counted

SHOWN_FAULTS = 20
SHOWN_PLACES = 5
FAULT = re.compile(r"(.*?:\d+)(:\d+)?: (.*)", re.DOTALL)
COLUMN = re.compile(r"column (\d+): ")


def parse_line(line: str) -> Row:
    """The row that one line says; raises RowError. A byte order mark, left where files were joined, is passed over."""
    try:
        return parse_row(load(line.removeprefix("\ufeff")))
    except RecursionError:
        raise RowError("brackets stand in brackets more than some hundred deep: no reader takes that") from None


def located(where: str, error: RowError) -> str:
    """The fault with its place, as editors open it: ``file:line:column: …`` where the column is known."""
    text = str(error)
    column = COLUMN.match(text)
    return f"{where}:{column[1]}: {text[column.end() :]}" if column else f"{where}: {text}"


def bad_rows(faults: list[str], total: int | None = None) -> DataError:
    """One error for all bad rows: twenty different faults are listed, each once, with the places that share it."""
    places: dict[str, list[str]] = {}
    for fault in faults:
        match = FAULT.fullmatch(fault)
        place, text = (match[1] + (match[2] or ""), match[3]) if match else ("", fault)
        places.setdefault(text, []).append(place)
    shown = [line for text, where in list(places.items())[:SHOWN_FAULTS] for line in _listed(text, where)]
    told = sum(len(where) for where in list(places.values())[:SHOWN_FAULTS])
    total = len(faults) if total is None else total  # of which these are the first
    rest = f"\n  and {total - told} more" if total > told else ""
    count = counted(total, "bad row")
    return DataError(
        "\n".join([f"The data has {count}:", *shown]) + rest, do="correct or remove them; nothing was written"
    )


def _listed(text: str, where: list[str]) -> list[str]:
    first = f"  {where[0]}: {text}" if where[0] else f"  {text}"
    if len(where) == 1:
        return [first]
    others = ", ".join(where[1 : SHOWN_PLACES + 1]) + (", …" if len(where) > SHOWN_PLACES + 1 else "")
    return [first, f"    the same in {counted(len(where) - 1, 'more row')}: {others}"]
