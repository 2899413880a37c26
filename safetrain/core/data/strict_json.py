"""JSON as the standard has it: no NaN, no key twice, no half characters. What is wrong is said as a RowError."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

MOST_SHOWN = 60
KINDS = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object",
         type(None): "null"}  # fmt: skip
MOST_DEEP = 300
DEEP = "brackets stand in brackets more than some hundred deep: no reader takes that"
DIGITS = "a number has more digits than can be read: write it as a text, in quotes"
ONE_OBJECT = "write one JSON object on each line, and nothing behind it"
WITH_DUMPS = "write the file again with json.dumps, one row on each line"
TOO_LONG = "a row is longer than 16 MiB, which is beyond any model's context: split it"


@dataclass(frozen=True)
class Remedy:
    """What helps where all rows of a file are at fault alike. At most one of the parts is given."""

    do: str = ""  # a sentence
    ways: tuple[Mapping[str, str], ...] = ()  # data.columns to choose from
    program: str = ""  # that makes another file
    there: tuple[str, ...] = ()  # the keys of the row, where data.columns names others


class RowError(ValueError):
    """One row cannot be used; the message says why. The reader adds file and line."""

    def __init__(self, message: str, remedy: Remedy = Remedy()) -> None:
        super().__init__(message)
        self.remedy = remedy


def as_setting(columns: Mapping[str, str]) -> str:
    """The data.columns as they are written on a command line."""
    return f"data.columns={{{', '.join(f'{part}: {shown(key)}' for part, key in columns.items())}}}"


def choice(said: str, *ways: Mapping[str, str]) -> RowError:
    """The error for a row that can be read in several ``ways``, which end what is ``said``."""
    return RowError(f"{said}: {' or '.join(map(as_setting, ways))}", Remedy(ways=ways))


def load(text: str) -> object:
    """The value that one line says. The error begins with the column where there is one."""
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise _no_json(text, error) from None
    except RowError:
        raise
    except ValueError:  # the one that json lets through: int() refuses more than 4,300 digits
        raise RowError(DIGITS) from None
    except RecursionError:
        raise RowError(DEEP) from None


def load_object(text: str) -> dict[str, object] | None:
    """The object that ``text`` says, or None where it says anything else."""
    try:
        value = load(text)
    except RowError:
        return None
    return value if isinstance(value, dict) else None


def dump(value: object, place: str) -> str:
    """``value`` as JSON text that ``load`` takes back; ``place`` names it in errors."""
    try:
        text = _ENCODER.encode(value)
    except ValueError:  # 1e999 is read as infinity
        raise RowError(f"{place} holds a number that is too large for JSON's readers") from None
    except RecursionError:
        raise RowError(f"{place}: {DEEP}") from None
    if text.count("[") + text.count("{") > MOST_DEEP and _depth(value) > MOST_DEEP:  # it is written inside others
        raise RowError(f"{place}: {DEEP}")
    require_unicode(text, place)
    return text


def _depth(value: object) -> int:
    deepest, waiting = 0, [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        deepest = max(deepest, depth)
        parts = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        waiting += [(part, depth + 1) for part in parts]
    return deepest


def require_unicode(text: str, place: str) -> None:
    r"""JSON can say half a character (``\ud83d`` alone), which no tokenizer and no file takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RowError(f"{place} holds half a surrogate pair, which is no character") from None


def shown(value: object) -> str:
    """A value from the data as it can be printed on one line of any terminal."""
    text = value if isinstance(value, str) and value.isprintable() else ascii(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def kind(value: object) -> str:
    """What JSON calls the type of ``value``."""
    return KINDS.get(type(value), type(value).__name__)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise RowError(f"the key '{shown(twice)}' stands twice in one object: only one of them can be meant")
    return value


def _constant(name: str) -> float:
    raise RowError(f"{name} is not valid JSON: write null, or leave the key out")


def strict_decoder() -> json.JSONDecoder:
    """Reads what ``load`` does, at any place of a text."""
    return json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


# One for all lines: json.loads and json.dumps would build one for each call that names an option.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_DECODER = strict_decoder()


def _no_json(text: str, error: json.JSONDecodeError) -> RowError:
    hint = _hint(text, error)
    do = ONE_OBJECT if error.msg.startswith("Extra data") else WITH_DUMPS if "json.dumps" in hint else ""
    return RowError(f"column {error.colno}: not valid JSON: {error.msg}{hint}", Remedy(do))


def _hint(text: str, error: json.JSONDecodeError) -> str:
    """The usual cause of a fault, in brackets; empty where none is known."""
    rest = text[error.pos :].lstrip()
    hint = ""
    if error.msg.startswith("Extra data"):
        hint = "two objects stand in one line: each needs a line of its own" if rest.startswith("{") else ""
    elif rest.startswith("'"):
        hint = "single quotes, as Python prints them: write the file with json.dumps"
    elif rest.startswith(("None", "True", "False")):
        hint = "as Python prints it: write the file with json.dumps"
    elif rest[:1] in ("}", "]") and text[: error.pos].rstrip().endswith(","):
        hint = "one comma too many before it"
    elif error.msg.startswith("Invalid control character"):
        hint = r"a raw control character inside a text: write a tab as \t"
    elif error.msg.startswith("Invalid \\escape"):
        hint = r"write a backslash as \\"
    elif not rest or error.msg.startswith("Unterminated string"):
        hint = "the line is cut off, or the object goes on in the next line: it must be one line"
    return f" ({hint})" if hint else ""
