"""How `safetrain validate` says what it found: for people, and as one JSON object."""

import dataclasses
import json
import sys

from rich.console import Console
from rich.text import Text

from safetrain.core.formatting import counted, printable
from safetrain.plan.findings import described
from safetrain.plan.validate import ShownRow, Validation

OPEN, CLOSE = "⟦", "⟧"  # around what is trained, where there are no colours


def as_json(validation: Validation) -> str:
    """One object: the rows that were shown, and all findings."""
    rows = [
        {"where": row.where, "trained": row.trained, "stops": row.stops, "findings": row.findings}
        for row in validation.rows
    ]
    findings = [dataclasses.asdict(item) for item in validation.findings]
    return json.dumps({"rows": rows, "findings": findings}, ensure_ascii=False, indent=2)


def print_validation(console: Console, validation: Validation, counted_with: str, *, show_mask: bool) -> None:
    """Rows with their labels marked, then the findings, the worst ones last; ``counted_with``: which model that was."""
    if show_mask:
        for row in validation.rows:
            console.print(masked(row, colours=sys.stdout.isatty()))
    for finding in reversed(validation.findings):
        console.print(printable(described(finding)))
    rows, trained = counted(validation.count, "document" if validation.documents else "row"), validation.trained_tokens
    console.print(f"{rows}, {counted(validation.tokens, 'token')}, {trained} of them trained")
    if validation.documents and trained:
        console.print(f"{validation.label_bytes / trained:.2f} bytes of text per token; for train.method=pretrain")
    if validation.tokens:
        context = f"; its context is {validation.context} tokens" if validation.context else ""
        console.print(f"counted with {counted_with}{context}")
    if validation.unmade and validation.tokens:
        unmade = " and ".join(validation.unmade)
        console.print(f"not looked at here: how {unmade} can be split off train; dvc repro validate_data does that")


def masked(row: ShownRow, *, colours: bool) -> Text:
    """A row's whole text; labels are green, or between marks. Control characters are escaped."""
    text = Text(printable(row.where))
    if not row.pieces:
        return text.append(f"  cannot be trained: {', '.join(row.findings)}\n")
    text.append("\n")
    for piece in row.pieces:
        words = printable(piece.text)
        if not piece.trained:
            text.append(words, style="dim" if colours else "")
        elif colours:
            text.append(words, style="bold green")
        else:
            text.append(f"{OPEN}{words}{CLOSE}")
    return text.append("\n")
