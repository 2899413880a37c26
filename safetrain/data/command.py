"""The command `safetrain validate`: prints findings as text or JSON, or writes a repaired copy."""

import dataclasses
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetrain.core.errors import ConfigError
from safetrain.core.formatting import counted, print_text, printable
from safetrain.data.findings import MOST_PLACES, SHOWN_PLACES, require_kinds, summary
from safetrain.data.json_rows import Place
from safetrain.data.repair import repair
from safetrain.data.tokenize import DataSettings, ReadRow
from safetrain.data.validate import Validation, validate

OPEN, CLOSE = "⟦", "⟧"  # around labels
EVERY_PLACE = 2**62


def pieces_of(row: ReadRow) -> list[tuple[str, str | None]]:
    """Split a row's text: each answer comes with its stop token (or ""), other text with None."""
    if row.rendered is None or row.tokens is None:
        return []
    text, pieces, start = row.rendered.text, list[tuple[str, str | None]](), 0
    for span in row.rendered.spans:
        pieces += [(text[start : span.start], None), (text[span.start : span.end], span.closing)]
        start = span.end
    return [*pieces, (text[start:], None)]


def report(paths: Sequence[Path], model: Path, settings: DataSettings, show_mask: int | None, *, as_json: bool) -> int:
    """Validate all files of ``paths`` and print the findings; returns the exit code. Raises SafetrainError."""
    shown_rows, most_places = 3 if show_mask is None else show_mask, MOST_PLACES if as_json else SHOWN_PLACES
    validation = validate(paths, model, settings, shown_rows=shown_rows, most_places=most_places)
    if as_json:
        print(_as_json(validation))
    else:
        file = shlex.quote(str(paths[0])) if len(paths) == 1 and not paths[0].is_dir() else "FILE"
        _print(validation, model, file, show_mask=show_mask is not None)
    return 1 if validation.has_errors else 0


def fix(paths: Sequence[Path], into: Path, model: Path, settings: DataSettings, drop: str, *, drop_bad: bool) -> int:
    """Write a repaired copy of the file in ``paths`` and print the changes; returns the exit code.

    The copy has no rows with the findings in ``drop``, and with ``drop_bad`` no rows that cannot be read.
    """
    if len(paths) != 1 or paths[0].is_dir():
        got = ", ".join(map(str, paths))
        raise ConfigError("--fix repairs one file.", got=got, do="repair one file at a time, each in its own command")
    dropped = _dropped_rows(paths[0], model, settings, drop) if drop else {}
    copy = repair(paths[0], into, settings.columns, dropped, drop_bad=drop_bad)
    print_text(copy.summary())
    return 0


def refuse_idle(options: Mapping[str, object], when: str) -> None:
    """Raise ConfigError if any of these options is set, because ``when`` --fix it would be ignored."""
    idle = [name for name, value in options.items() if value not in (None, False, "")]
    if idle:
        raise ConfigError(f"{when} --fix, {', '.join(idle)} does nothing.", do="leave it out")


def _dropped_rows(path: Path, model: Path, settings: DataSettings, drop: str) -> dict[Place, str]:
    """The rows with findings to drop; raises ConfigError for an unknown finding."""
    names = [name.strip().upper() for name in drop.split(",") if name.strip()]
    require_kinds("--drop", names)
    findings = validate([path], model, settings, most_places=EVERY_PLACE).found
    rows = ((finding.id, spot) for finding, spots in findings for spot in spots if finding.id in names)
    return {spot.place: identifier for identifier, spot in rows}


def _as_json(validation: Validation) -> str:
    """The sampled rows and all findings with their places, as one JSON object."""
    rows = [
        {
            "where": row.spot.text(),
            "trained": [text for text, stop in pieces_of(row) if stop is not None],
            "stops": [stop for _, stop in pieces_of(row) if stop is not None],
            "findings": row.findings,
        }
        for row in validation.rows
    ]
    findings = [
        {**dataclasses.asdict(finding), "places": [spot.as_json() for spot in spots]}
        for finding, spots in validation.found
    ]
    return json.dumps({"rows": rows, "findings": findings}, ensure_ascii=False, indent=2)


def _print(validation: Validation, model: Path, file: str, *, show_mask: bool) -> None:
    """Print rows with their labels marked, then errors, warnings and a count of notes; remedies name the ``file``."""
    for row in validation.rows if show_mask else ():
        print(_masked(row))
    if validation.findings:
        text = summary(validation.findings, "--json lists all")
        print_text(re.sub(r"(?m)(^  do: .*?)\bFILE\b", lambda found: found[1] + file, text))
    rows, trained = counted(validation.count, "document" if validation.documents else "row"), validation.trained_tokens
    print_text(f"{rows}, {counted(validation.tokens, 'token')} ({counted(trained, 'label')})")
    if validation.documents and trained:
        print_text(f"{validation.label_bytes / trained:.2f} bytes of text per token; for train.method=pretrain")
    if validation.tokens:
        context = f"; its context is {validation.context} tokens" if validation.context else ""
        print_text(f"tokenizer: {model}{context}")


def _masked(row: ReadRow) -> str:
    """A row's whole text with its labels between marks; control characters are escaped."""
    if row.tokens is None:
        return printable(f"{row.spot.text()}  cannot be trained on: {', '.join(row.findings)}\n")
    pieces = [piece if stop is None else f"{OPEN}{piece}{CLOSE}" for piece, stop in pieces_of(row)]
    return printable(f"{row.spot.text()}\n{''.join(pieces)}\n")
