"""Recognises files that are not JSONL by their first bytes, and names the command that converts them."""

import re
from pathlib import Path

from safetrain.core.data.binary_forms import EXPECTED, binary_form, unknown_binary
from safetrain.core.data.conversion import command, python_command
from safetrain.core.data.strict_json import RowError, load, shown
from safetrain.core.errors import DataError

HEAD_BYTES = 64 * 1024
BYTE_ORDER_MARKS = (  # the longer first: UTF-32's begins as UTF-16's
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
COLUMN = re.compile(r'"?\w[\w.\-/]*"?')
KNOWN_COLUMNS = frozenset(
    ("prompt", "completion", "text", "instruction", "input", "output", "question", "answer", "response", "messages")
)
ROWS_INSIDE = re.compile(r'\{\s*"(\w+)"\s*:\s*\[\s*\{')
OF_OBJECTS = re.compile(r"\[\s*(\{|\]|$)")
OWN_LISTS = ("messages", "prompt", "completion", "tools", "conversations")


def check_form(path: Path) -> None:
    """Raise DataError where ``path`` is missing, empty, or begins as something that is no JSONL in UTF-8."""
    head = _head(path)
    error = binary_form(head, path) or _wide(head, path) or unknown_binary(head, path) or _lfs_pointer(head, path)
    if error is not None:
        raise error
    text = head.removeprefix(b"\xef\xbb\xbf").decode("utf-8", errors="replace")
    if not text.strip() and len(head) < HEAD_BYTES:
        raise DataError("The data file has no rows.", where=str(path), do="put one JSON object on each line")
    error = _mac_lines(text, path) or _json_form(text, path) or _other_text(text, path)
    if error is not None:
        raise error


def not_utf8(content: bytes, error: UnicodeDecodeError, path: Path, first_line: int) -> DataError:
    """The error for ``content``, whole lines of ``path`` from ``first_line`` on, that cannot be decoded."""
    start = error.start
    line = first_line + content.count(b"\n", 0, start)
    begin = content.rfind(b"\n", 0, start) + 1
    where = f"{path}:{line} (byte {start - begin + 1} of the line: 0x{content[start]:02x})"
    if error.end >= len(content) and error.reason == "unexpected end of data":
        return DataError(
            "The data file ends inside a character: it is cut off.", where=where, do="copy or download the file again"
        )
    if b"\x00" in content[max(0, start - HEAD_BYTES) : start + HEAD_BYTES]:
        return DataError(
            "The data file holds bytes that are no text.", where=where, expected=EXPECTED, do="make the file again"
        )
    if not content[:start].isascii():
        do = "correct that line alone: what stands before it is UTF-8, and converting the whole file would spoil it"
        return DataError("The data file is UTF-8, but for some bytes.", where=where, do=do)
    convert = command(path, ".windows-1252", "iconv -f WINDOWS-1252 -t UTF-8 {old} > {new}")
    do = f"{convert} (if letters come out wrong, name the encoding it was saved in)"
    return DataError("The data file is not UTF-8.", where=where, do=do)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except FileNotFoundError:
        raise DataError(
            "The data file does not exist.", where=str(path), do="correct data.path in params.yaml"
        ) from None
    except OSError as error:
        raise DataError(f"The data file cannot be read: {error.strerror}.", where=str(path)) from None


def _wide(head: bytes, path: Path) -> DataError | None:
    """UTF-16 and UTF-32: by their mark, or by the NUL in every second byte that Latin letters have there."""
    name = next((name for mark, name in BYTE_ORDER_MARKS if head.startswith(mark)), None)
    if name is None:
        name = _unmarked(head[:4096])
    if name is None:
        return None
    return DataError(
        f"The data file is {name}, not UTF-8.",
        where=str(path),
        expected=EXPECTED,
        do=f"{command(path, f'.{name.lower()}', f'iconv -f {name} -t UTF-8 {{old}} > {{new}}')}"
        " (PowerShell's > writes UTF-16: use | Set-Content -Encoding utf8)",
    )


def _unmarked(sample: bytes) -> str | None:
    units = len(sample) // 2
    if units < 2:
        return None
    even, odd = sample[0::2].count(0), sample[1::2].count(0)
    if odd > 0.4 * units and even < 0.1 * units:
        return "UTF-16LE"
    if even > 0.4 * units and odd < 0.1 * units:
        return "UTF-16BE"
    zeros = "".join("0" if sample[place::4].count(0) > 0.2 * units else "x" for place in range(4))
    return {"x000": "UTF-32LE", "000x": "UTF-32BE"}.get(zeros)


def _lfs_pointer(head: bytes, path: Path) -> DataError | None:
    if not head.startswith(b"version https://git-lfs"):
        return None
    do = f"git lfs install && git lfs pull, in the repository that holds {path.name}"
    return DataError("The data file is a pointer of Git LFS: the rows are not here yet.", where=str(path), do=do)


def _mac_lines(text: str, path: Path) -> DataError | None:
    if "\n" in text or not re.search(r"\}[ \t]*\r+[ \t]*\{", text):
        return None
    return DataError(
        "The data file has the line ends of old Macs (CR alone): it is one line to everybody else.",
        where=str(path),
        do=command(path, ".cr", r"tr '\r' '\n' < {old} > {new}"),
    )


def _json_form(text: str, path: Path) -> DataError | None:
    """One JSON array, or objects printed over several lines."""
    start = text.lstrip()
    first, _, rest = start.partition("\n")
    if start.startswith("["):
        lists = _is_json(first) and rest.lstrip().startswith("[")  # a list on each line: the row reader names it
        rows_follow = not OF_OBJECTS.match(start) and re.search(r"^\{", rest, re.MULTILINE)
        return None if lists or rows_follow or start.startswith("[[[") else _array(path)
    goes_on = rest.lstrip()[:1] in ('"', "}")
    if not start.startswith("{") or not goes_on or _is_json(first):
        return None
    inside = ROWS_INSIDE.match(start)
    key = inside[1] if inside and inside[1] not in OWN_LISTS else ""
    program = f".{key}[]" if key else "."
    what = f"one JSON object, with the rows in '{key}'" if key else "JSON objects printed over several lines"
    return DataError(
        f"The data file is {what}, not one object on each line.",
        where=f"{path}:{_line_of_start(text)}",
        expected=EXPECTED,
        do=command(path, ".json", f"jq -c '{program}' {{old}} > {{new}}"),
    )


def _array(path: Path) -> DataError:
    return DataError(
        "The data file is one JSON array, not one object on each line.",
        where=str(path),
        expected=EXPECTED,
        do=command(path, ".json", "jq -c '.[]' {old} > {new}")
        + "; or without jq: "
        + python_command(path, ".json", "for r in json.load(open(a,encoding='utf-8-sig'))"),
    )


def _is_json(line: str) -> bool:
    try:
        load(line.strip())
    except (RowError, RecursionError):
        return False
    return True


def _line_of_start(text: str) -> int:
    return text[: len(text) - len(text.lstrip())].count("\n") + 1


def _other_text(text: str, path: Path) -> DataError | None:
    """A table with separators, or text that holds no JSON object at all. Single bad lines are for the row reader."""
    first = text.lstrip().split("\n", 1)[0].rstrip("\r")
    if first.startswith(("{", "[")):
        return None
    for separator, name in SEPARATORS.items():
        columns = [column.strip() for column in first.split(separator)]
        if len(columns) > 1 and _is_header(columns):
            return _separated(path, separator, name, columns)
    if any(line.lstrip().startswith("{") for line in text.split("\n")):
        return None
    return DataError(
        "The data file is not JSONL: no line begins with a JSON object.",
        where=f"{path}:{_line_of_start(text)}",
        expected=EXPECTED,
        got=shown(first),
        do=_markup(first) or 'write each row as {"prompt": "…", "completion": "…"}, {"messages": […]} or {"text": "…"}',
    )


def _markup(first: str) -> str:
    if not first.lower().startswith(("<!doctype", "<html", "<?xml")):
        return ""
    return "this is a web page or XML: download the file itself ('raw', 'download'), not the page that shows it"


def _is_header(columns: list[str]) -> bool:
    names = {column.strip('"').lower() for column in columns}
    return bool(names & KNOWN_COLUMNS) or all(COLUMN.fullmatch(column) for column in columns)


def _separated(path: Path, separator: str, name: str, columns: list[str]) -> DataError:
    names = [column.strip('"') for column in columns]
    dialect = {"\t": ",delimiter='\\t'", ",": ""}.get(separator, f",delimiter='{separator}'")
    program = f"for r in csv.DictReader(open(a,encoding='utf-8-sig',newline=''){dialect})"
    convert = python_command(path, ".tsv" if separator == "\t" else ".csv", program)
    convert = convert.replace("import json,sys; ", "import csv,json,sys; csv.field_size_limit(2**31-1); ")
    return DataError(
        f"The data file is a table with {name} ({'TSV' if separator == chr(9) else 'CSV'}), not JSON.",
        where=str(path),
        expected=f"{EXPECTED}; columns prompt and completion, or text",
        got=f"columns {', '.join(map(shown, names))}",
        do=convert,
    )
