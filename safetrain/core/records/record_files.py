"""Frozen dataclasses as JSON files, and back: the types of their fields say what a list or an object becomes."""

import dataclasses
import json
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from safetrain.core.errors import ConfigError
from safetrain.core.storage.files import write_json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Kind = TypeVar("Kind")


def write_record(path: Path, record: object) -> None:
    """Write a frozen dataclass as JSON."""
    if not dataclasses.is_dataclass(record) or isinstance(record, type):
        raise TypeError(f"a record is a dataclass, not {record!r}")
    write_json(path, dataclasses.asdict(record))


def read_record(path: Path, kind: type[Kind]) -> Kind:
    """What ``write_record`` wrote; raises OSError, and ValueError or TypeError for anything else."""
    return from_json(kind, json.loads(path.read_text(encoding="utf-8")))


def read_result(path: Path, stage: str, build: Callable[[Any], Kind]) -> Kind:
    """What ``build`` makes of the JSON that a stage has left; raises ConfigError where there is none to read."""
    try:
        return build(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(
            f"{path.name} is not there yet.",
            where=str(path),
            do=f"run 'dvc repro {stage}' first, or the 'safetrain run' that began it",
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path.name} cannot be read: {error}", where=str(path), do=f"run 'dvc repro -f -s {stage}'"
        ) from None


def read_beside(path: Path, kind: type[Kind], again: str) -> Kind:
    """The report that a command has left beside what it wrote; raises ConfigError, which advises ``again``."""
    try:
        return read_record(path, kind)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path.name} cannot be read: {error}", where=str(path), do=again) from None


def from_json(kind: type[Kind], value: Any, *, partly: bool = False) -> Kind:
    """The dataclass ``kind`` from its JSON; raises TypeError where a field is missing, unknown, or of another form.

    ``partly``: ``value`` may have more than ``kind`` has.
    """
    if not isinstance(value, dict):
        raise TypeError(f"{kind.__name__} is an object in JSON, this is {value!r}")
    hints = get_type_hints(kind)
    return kind(**{name: _field(hints.get(name), item) for name, item in value.items() if name in hints or not partly})


def to_line(record: "DataclassInstance") -> str:
    """A dataclass as one line of JSON that names its type."""
    return json.dumps({"type": type(record).__name__, **dataclasses.asdict(record)})


def from_line(text: str | bytes, kinds: Sequence[type[Kind]]) -> Kind | None:
    """The value of a line, if it is one of ``kinds``; None for one that is cut off, or that a library printed."""
    try:
        value = json.loads(text)
        name = value.pop("type")
        return next((from_json(kind, value) for kind in kinds if kind.__name__ == name), None)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _field(kind: Any, value: Any) -> Any:
    """A tuple from a list, a dataclass from an object, anything else as it is."""
    inside = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):  # of one type and None
        return None if value is None else _field(inside[0], value)
    if get_origin(kind) is tuple:
        return tuple(_field(inside[0], item) for item in value)
    return from_json(kind, value) if isinstance(kind, type) and dataclasses.is_dataclass(kind) else value
