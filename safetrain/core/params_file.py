"""params.yaml: writes values into its text, and lends it to one run.

`safetrain run KEY=VALUE` writes its values into params.yaml while it runs, because DVC and every stage read that file.
A record in .dvc/tmp, written first, says what the file was and which command changed it, so that a killed run leaves no
values of unknown origin.
"""

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetrain.core.errors import ConfigError, broken_yaml
from safetrain.core.formatting import RUN, with_python
from safetrain.core.lock import is_held
from safetrain.core.signals import handling
from safetrain.core.storage.files import read_or_none, write_atomic, write_record

PARAMS = Path("params.yaml")
PLAIN = re.compile(r"[A-Za-z_][\w./-]*")  # text that YAML reads without quotes
ALIAS, MOST_ALIASES = re.compile(r"(?<![\w*])\*\w"), 20
RECORD, RUN_LOCK = Path(".dvc/tmp/safetrain_run.json"), Path(".dvc/tmp/safetrain_run.lock")


@dataclass(frozen=True)
class LentParams:
    """RECORD: params.yaml while it has the values of one run."""

    command: str  # as the user typed it
    original: str  # the file's text, before and
    written: str  # during the run


def read_params() -> str:
    """The text of params.yaml, with its own line ends; raises ConfigError if it cannot be read as YAML at all."""
    try:
        text = PARAMS.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError("params.yaml is not UTF-8.", where=f"params.yaml:{line}", do="save it as UTF-8") from None
    if len(ALIAS.findall(text)) > MOST_ALIASES:  # each could double what there is
        do = "write the values themselves"
        raise ConfigError(f"params.yaml has more than {MOST_ALIASES} YAML aliases.", where="params.yaml", do=do)
    return text


def write_params(text: str) -> None:
    """Write params.yaml atomically; a link stays a link."""
    write_atomic(PARAMS.resolve(), lambda temporary: temporary.write_bytes(text.encode("utf-8")))


@contextmanager
def lent(text: str, command: str) -> Iterator[None]:
    """Let params.yaml hold ``text`` inside the block, for the run that ``command`` started."""
    write_record(RECORD, LentParams(command, read_params(), text))
    try:
        write_params(text)
        yield
    finally:
        with handling({signal.SIGINT: lambda _number: None, signal.SIGTERM: lambda _number: None}):
            put_back()


def put_back() -> str:
    """Put back what a run has set in params.yaml, except what was edited since.

    Returns the command whose values were there; empty if there were none. Raises ConfigError if an edit broke the file.
    """
    record, now = read_or_none(RECORD, LentParams), read_params()
    if record is None:
        return ""
    for half_written in PARAMS.resolve().parent.glob(f".{PARAMS.stem}-*.partial{PARAMS.suffix}"):
        half_written.unlink()
    text = record.original if now == record.written else _without(record, now)
    if text != now:
        write_params(text)
    RECORD.unlink()
    return record.command if text != now else ""


def left_behind() -> str:
    """Say which values of a killed run params.yaml still holds; empty if there are none, or if that run is alive."""
    if RUN in os.environ or not RECORD.is_file() or is_held(RUN_LOCK):
        return ""
    record = read_or_none(RECORD, LentParams)
    values = _still_held(record, read_params()) if record is not None else {}
    if record is None or not values:
        return ""
    said = ", ".join(f"{key}={value} (before: {before})" for key, (before, value) in values.items())
    return (
        f"params.yaml holds values of '{record.command}', which was killed: {said}.\n"
        "  do:       run the same command: it continues; any other 'safetrain run' or 'safetrain set' puts them back"
    )


def _without(record: LentParams, now: str) -> str:
    for key, (before, _) in _still_held(record, now).items():
        now = with_value(now, key, before)
    return now


def _still_held(record: LentParams, now: str) -> dict[str, tuple[Any, Any]]:
    """For each key that the run has set and that still has its value: the value before, and the run's."""
    before, run, current = (values_in(text) for text in (record.original, record.written, now))
    changed = {key: (before.get(key), value) for key, value in run.items() if before.get(key) != value}
    return {key: pair for key, pair in changed.items() if key in current and current[key] == pair[1]}


def require_same(before: Any, after: Any, stage: str) -> None:
    """Raise ConfigError if an edit of params.yaml changed values of a stage while it ran: DVC reads them after it."""
    import yaml
    from omegaconf import OmegaConf

    known = yaml.safe_load(Path("dvc.yaml").read_text(encoding="utf-8"))["stages"].get(stage, {}).get("params", [])
    names = [name for name in known if isinstance(name, str)]
    changed = [name for name in names if OmegaConf.select(before, name) != OmegaConf.select(after, name)]
    if changed:
        what = f"{', '.join(changed)} changed in params.yaml while {stage} ran; its result has the earlier values."
        do = "run the same command again"
        if not RECORD.is_file():  # after a run with values of its own, params.yaml loses them
            keep = f"to keep it, set them back and run: {with_python('dvc')} commit -f {stage}"
            do = f"{keep}; to run with the new values: safetrain run"
        raise ConfigError(what, where="params.yaml", do=do)


def values_in(text: str) -> dict[str, Any]:
    """The values in the text of params.yaml by ``section.key``, as DVC and the stages read them."""
    from omegaconf import OmegaConf
    from yaml import YAMLError

    try:
        sections = OmegaConf.to_container(OmegaConf.create(text))
    except RecursionError:
        raise ConfigError("params.yaml is nested too deeply.", where="params.yaml") from None
    except YAMLError as error:
        if mark := getattr(error, "problem_mark", None):
            mark.name = str(PARAMS)
        raise broken_yaml(error) from None
    named = sections.items() if isinstance(sections, dict) else ()
    return {f"{name!s}.{key!s}": value for name, own in named if isinstance(own, dict) for key, value in own.items()}


def with_value(text: str, key: str, value: object) -> str:
    """Set ``section.key`` in the text of params.yaml; all else stays as it is, and a comment keeps its column.

    Raises ConfigError if the text has no such key, or if another value would change too.
    """
    import yaml

    place = _place(text, key)
    if place is None:
        raise ConfigError(f"params.yaml has no {key}.", where="params.yaml", do="safetrain update adds missing keys")
    is_plain = isinstance(value, str) and PLAIN.fullmatch(value) and yaml.safe_load(value) == value  # no, on, null: not
    written = str(value) if is_plain else json.dumps(value, ensure_ascii=False)
    start, end = place
    gap = re.match(r"[ \t]*", text[start:])[0] or " "  # type: ignore[index]
    old, comment = text[start:end], re.match(r" +(?=#)", text[end:])
    if "\n" in old and (own := re.match(r"\s*#[^\n]*", old)):  # a list below its key, which has a comment
        written += own[0]
    elif comment is not None:
        written += " " * max(1, len(old) + len(comment[0]) - len(gap + written))
        end += len(comment[0])
    changed = text[:start] + gap + written + text[end:]
    with suppress(ConfigError):  # an alias may have lost its anchor
        if values_in(changed) == {**values_in(text), key: value}:
            return changed
    what = f"{key} cannot be written into params.yaml: other values depend on its place."
    raise ConfigError(what, where="params.yaml", do=f"write {key}: {written} there yourself")


def _place(text: str, key: str) -> tuple[int, int] | None:
    """Where the value of ``section.key`` is: from its colon to its last letter. None if there is no such key."""
    import yaml

    node: Any = yaml.compose(text, yaml.SafeLoader)
    start = 0
    for name in key.split("."):
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = next(((own, value) for own, value in pairs if own.value == name), None)
        if found is None:
            return None
        start = text.index(":", found[0].end_mark.index) + 1
        node = found[1]
    while isinstance(node, yaml.CollectionNode) and not node.flow_style:  # its own end is where the next key begins
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    end = max(start, node.end_mark.index)
    return start, start + len(text[start:end].rstrip())
