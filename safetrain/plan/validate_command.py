"""The command `safetrain validate`: what is said of files, or a repaired copy of a file or a folder."""

import codecs
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from safetrain.core.data.foreign_rows import checked_columns, named_columns
from safetrain.core.errors import ConfigError, DataError
from safetrain.core.formatting import printable
from safetrain.plan.corpus_files import corpus_of
from safetrain.plan.findings import MOST_PLACES, SHOWN_PLACES
from safetrain.plan.repair import repair, summary
from safetrain.plan.tokenizing import rules_of
from safetrain.plan.validate import Decided, validate_files
from safetrain.plan.validate_text import as_json as json_text
from safetrain.plan.validate_text import print_validation
from safetrain.plan.validate_tokens import validate_tokens


def decided_by(data: Any, columns: Sequence[str], *, documents: bool = False) -> Decided:
    """By the section data of params.yaml, if there is one, and by --columns before it; raises ConfigError.

    ``documents``: the data is for a training from scratch.
    """
    named = named_columns(columns)
    if data is None:
        return Decided(columns=named)
    found = named or checked_columns(data.get("columns"))
    return Decided(*rules_of(data), found, data.near_duplicate_similarity, documents)


def paths_of(names: Sequence[str]) -> list[Path]:
    """What was named; raises ConfigError for an empty name, which would be the folder one stands in."""
    if not all(names):
        raise ConfigError("The name of a data file is empty.", do="name a file or a folder; '.' is this folder")
    return [Path(name) for name in names]


def tell(
    console: Console,
    paths: Sequence[Path],
    model: Path,
    decided: Decided,
    show_mask: int | None,
    *,
    as_json: bool,
    usual_model: bool = False,
) -> int:
    """Print what is found in all files of ``paths``; gives the exit code. Raises SafetrainError.

    ``usual_model``: nobody named it in the command.
    """
    most_places = MOST_PLACES if as_json else SHOWN_PLACES
    if _is_corpus(paths, decided):
        found = validate_tokens(paths[0], model, decided)
    else:
        found = validate_files(paths, model, 3 if show_mask is None else show_mask, decided, most_places)
    if as_json:
        print(json_text(found))
    else:
        print_validation(
            console, found, f"{model}{' (yours: --model)' if usual_model else ''}", show_mask=show_mask is not None
        )
    return 1 if found.has_errors else 0


def _is_corpus(paths: Sequence[Path], decided: Decided) -> bool:
    """Whether it is a corpus of tokens; raises DataError where that is one of several things."""
    found = [path for path in paths if path.exists() and corpus_of(path, links=decided.documents)]
    if found and len(paths) > 1:
        raise DataError("A corpus of tokens is validated alone.", where=str(found[0]), do="name the folder it lies in")
    return bool(found)


def refuse_without_fix(encoding: str | None, *, drop_bad: bool, keep_mojibake: bool) -> None:
    """Raise ConfigError where an option of --fix stands alone: it would be passed over."""
    given = {"--encoding": encoding is not None, "--drop-bad": drop_bad, "--keep-mojibake": keep_mojibake}
    alone = [name for name, is_given in given.items() if is_given]
    if alone:
        raise ConfigError(f"Without --fix, nothing reads {', '.join(alone)}.", do="add --fix OUT, or leave it out")


def refuse_with_fix(show_mask: int | None, *, as_json: bool) -> None:
    """Raise ConfigError where an option about what is shown stands beside --fix: it would be passed over."""
    given = {"--show-mask": show_mask is not None, "--json": as_json}
    beside = [name for name, is_given in given.items() if is_given]
    if beside:
        raise ConfigError(f"With --fix, nothing reads {', '.join(beside)}.", do="validate the copy in a second command")


def fix(
    paths: Sequence[Path],
    into: Path,
    decided: Decided,
    encoding: str | None,
    *,
    drop_bad: bool,
    keep_mojibake: bool = False,
) -> int:
    """Write a repaired copy of the file or folder in ``paths`` and say what was changed; gives the exit code."""
    if len(paths) != 1:
        raise ConfigError("--fix repairs one file or folder.", got=", ".join(map(str, paths)), do="name one of them")
    try:
        name = codecs.lookup(encoding).name if encoding else None
        "".encode(name or "utf-8")  # there are codecs that are none of text
    except LookupError:
        raise ConfigError(f"There is no encoding {encoding!r}.", expected="as windows-1252, latin-2, cp437") from None
    done = repair(paths[0], into, decided.columns, name, drop_bad=drop_bad, keep_mojibake=keep_mojibake)
    print(printable(summary(done)))
    if done.changes.get("dropped"):
        print(f"{done.changes['dropped']} of {done.read} rows are NOT in {done.into}", file=sys.stderr)
    return 0
