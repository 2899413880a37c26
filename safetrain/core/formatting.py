"""Numbers, texts and commands as people read them."""

import difflib
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from safetrain.core.records.schema import PAIRED, PRETRAIN

if TYPE_CHECKING:
    from safetrain.core.records.metrics import Proof

PLAIN_OVERRIDE = re.compile(r"[\w./@+-]+", re.ASCII)  # what Hydra and a shell read without quotes
RUN = "SAFETRAIN_RUN"  # environment variable: `safetrain run` and its overrides, as the user typed them
VISIBLE = "\n\t\xa0\u3000\u200c\u200d"  # white space, and joiners of letters in Persian or Hindi
EMPTY_ANSWER = "(empty answer)"  # in place of an answer without text


def counted(number: int, noun: str) -> str:
    """A count with its noun, such as ``1 update`` or ``2,000 updates``."""
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def count_text(number: float) -> str:
    """A count as text, such as ``1.7 billion``, ``85 million`` or ``9,870``."""
    if number >= 1e9:
        return f"{number / 1e9:,.3g} billion" if number < 1e12 else f"{number / 1e12:,.3g} trillion"
    return f"{number / 1e6:.3g} million" if number >= 1e6 else f"{number:,.0f}"


def duration_text(seconds: float) -> str:
    """A duration, such as ``40 s``, ``12 min``, ``7.5 h`` or ``3.5 days``."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:,.1f} days"


def size_text(size_bytes: float) -> str:
    """A size, such as ``3.98 GiB``; in MiB below 1 GiB."""
    return f"{size_bytes / 2**30:,.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.1f} MiB"


def printable(text: str) -> str:
    """Make ``text`` safe for a terminal: control characters (escapes, changes of text direction) are spelled out."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in VISIBLE else ascii(letter)[1:-1] for letter in text)


def print_text(text: str, stream: TextIO | None = None) -> None:
    """Print on stdout, or on ``stream``. On a terminal, long lines break between words and keep their indentation.

    Characters that it does not have are question marks.
    """
    out, lines = stream or sys.stdout, printable(text).split("\n")
    if out is None:  # closed
        return
    if out.isatty():
        width = shutil.get_terminal_size().columns
        lines = [_wrapped(line, width) if len(line) > width else line for line in lines]
    encoding = out.encoding or "utf-8"
    print("\n".join(lines).encode(encoding, "replace").decode(encoding), file=out, flush=True)


def _wrapped(line: str, width: int) -> str:
    columns = list(re.finditer(r" {2,}", line[:40]))  # of a table, or the indentation
    margin = " " * (columns[-1].end() if columns else 0)
    return textwrap.fill(line, width, subsequent_indent=margin, break_on_hyphens=False, break_long_words=False)


def similar_path(path: Path) -> str:
    """A hint such as ``did you mean data/example?`` for a missing path; empty if no path next to it is similar."""
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, 1, cutoff=0.7)
    return f"did you mean {path.parent / near[0]}?" if near else ""


def override(key: str, value: object) -> str:
    """An override such as ``data.path=rows.jsonl``, ready to paste into a shell: quoted for Hydra and shell."""
    if isinstance(value, dict | list):
        import yaml

        flow = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
        return shlex.quote(f"{key}={flow.strip()}")
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    if PLAIN_OVERRIDE.fullmatch(text):
        return f"{key}={text}"
    return shlex.quote(f"{key}={in_hydra_quotes(text)}")


def in_hydra_quotes(text: str) -> str:
    """A text in quotes for Hydra's grammar, with its quotes, backslashes and dollars escaped."""
    text = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + found[2].replace('"', '\\"'), text)
    return '"' + text.replace("${", r"\${") + '"'


def written_again() -> str:
    """Return what writes a record again that another version of the program wrote."""
    update = "run 'safetrain update', then " if Path(".safetrain").is_dir() else "run "
    return f"{update}'safetrain run'"


def with_python(module: str) -> str:
    """Return the start of a package's own command: an installed safetrain has no other program on the PATH."""
    return f"{shlex.quote(sys.executable)} -m {module}"


def run_again() -> str:
    """Return the command that started this run, or the usual one if that is unknown."""
    return os.environ.get(RUN) or "safetrain run"


def describe_proof(proof: "Proof") -> str:
    """Describe the adapter check in one line for a terminal."""
    opened, base = (round(like.same_answers * proof.rows) for like in (proof.opened, proof.base))
    return (
        f"adapter check: {proof.opened_by} opens the saved adapter and answers the same on "
        f"{opened} of {proof.rows} rows (base: {base}), "
        f"{proof.opened.divergence:.2g} nats per label apart (base: {proof.base.divergence:.2g})"
    )


def rows_text(rows: int, method: str) -> str:
    """A number of rows as the method counts them: ``484 pairs`` of two rows, ``20 windows`` or ``1,656 rows``."""
    if method in PAIRED:
        return counted(rows // 2, "pair")
    return counted(rows, "window" if method == PRETRAIN else "row")


Tell = Callable[[dict[str, Any]], None]


@contextmanager
def json_lines(*, asked: bool) -> Iterator[Tell | None]:
    """A function that prints a JSON object in a line, if that is asked for: all other output goes to stderr then.

    An error becomes the last line.
    """
    if not asked:
        yield None
        return
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as lines:
        os.dup2(2, 1)  # for child processes too

        def tell(event: dict[str, Any]) -> None:
            print(json.dumps(event, ensure_ascii=False), file=lines, flush=True)

        try:
            yield tell
        except BaseException as error:
            stopped = 130 if isinstance(error, KeyboardInterrupt) else 1
            told = {"exit_code": getattr(error, "exit_code", stopped), "message": str(error) or type(error).__name__}
            tell({"event": "error", **told})
            raise
