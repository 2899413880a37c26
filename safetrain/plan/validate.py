"""What validation says of any file, without a pipeline: `safetrain validate`."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np

from safetrain.core.data.foreign_rows import Columns
from safetrain.core.data.plain_text import PLAIN
from safetrain.core.data.rendering import Labelling
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.errors import DataError
from safetrain.core.model.files import read_limits
from safetrain.core.records.reports import Finding
from safetrain.plan.files_by_split import data_files_of, rows_beside
from safetrain.plan.findings import ERROR, SHOWN_PLACES, Findings, Severities
from safetrain.plan.row_columns import named_when_full
from safetrain.plan.sources import SPLITS, DataFiles, split_named, suffix_of, tell_files
from safetrain.plan.survey import Survey
from safetrain.plan.survey_findings import Whole, tell
from safetrain.plan.tokenizing import Limits, ReadRow, RowReader

USUAL_SIMILARITY = 0.8
USUAL = Labelling(append_end=True, train_empty_thinking=True, opening="trained")


@dataclass(frozen=True)
class Decided:
    """What params.yaml decides (section data), where there is one."""

    labelling: Labelling = USUAL
    severities: Severities = Severities()  # noqa: RUF009 frozen
    columns: Columns | None = None
    similarity: float = USUAL_SIMILARITY
    documents: bool = False  # for a training from scratch


@dataclass(frozen=True)
class Piece:
    """A part of a row's text, and whether it is trained."""

    text: str
    trained: bool


@dataclass(frozen=True)
class ShownRow:
    """A row as it is trained."""

    where: str  # file:line
    trained: tuple[str, ...]  # the text of each trained span
    stops: tuple[str, ...]  # the token that closes each of them, empty where nothing does
    findings: tuple[str, ...]  # ids
    pieces: tuple[Piece, ...]  # the whole text


@dataclass(frozen=True)
class Validation:
    """What there is to say of some files."""

    rows: tuple[ShownRow, ...]
    findings: tuple[Finding, ...]
    count: int  # of rows
    tokens: int
    trained_tokens: int
    unmade: tuple[str, ...]  # splits without a file: the pipeline makes them of train
    context: int | None  # tokens that the model reads at most, if it says so
    documents: bool = False  # its rows are documents of a training from scratch
    label_bytes: int = 0  # of the text of all labels

    @property
    def has_errors(self) -> bool:
        """Whether a row, or a file, cannot be trained as it is."""
        return any(finding.severity == ERROR for finding in self.findings)


def named_files(paths: Sequence[Path], *, documents: bool = False) -> DataFiles:
    """All files of ``paths``, files or folders, each with its split: as it lies in its folder, or by its name.

    ``documents``: a folder of plain text is read as one, also where files of rows stand in it. Raises DataError for
    what is not there.
    """
    parts = list[DataFiles]()
    for path in paths:
        if not path.exists():
            raise DataError("The data file does not exist.", where=str(path), do="name a file or a folder")
        if path.is_dir():
            parts.append(data_files_of(path, documents=documents or not rows_beside(path)))
        else:
            parts.append(DataFiles((split_named(path),), (path,)))
    return DataFiles(
        names=tuple(name for part in parts for name in part.names),
        paths=tuple(path for part in parts for path in part.paths),
        unread=tuple(name for part in parts for name in part.unread),
        links=tuple(name for part in parts for name in part.links),
        followed=tuple(name for part in parts for name in part.followed),
    )


def validate_files(
    paths: Sequence[Path],
    model: Path,
    shown_rows: int = 3,
    decided: Decided = Decided(),
    most_places: int = SHOWN_PLACES,
) -> Validation:
    """Read every row of ``paths``, files or folders, for ``model``, and compare the files as the splits that they are.

    The first ``shown_rows`` are shown as they are trained, -1: all. A finding has its first ``most_places``. Raises
    ModelError for a model that cannot be read, DataError for what is not there.
    """
    vocabulary, max_positions = read_limits(model)
    files, findings = named_files(paths, documents=decided.documents), Findings(decided.severities, most_places)
    documents = decided.documents or any(suffix_of(path) in PLAIN for path in files.paths)
    max_positions = None if documents else max_positions  # windows lose nothing
    tokenizer, limits = ChatTokenizer(model, date.today()), Limits(vocabulary, max_positions)
    reader = RowReader(tokenizer, decided.labelling, limits, findings, decided.columns, documents=documents)
    shown, empty = list[ShownRow](), list[Path]()
    count = tokens = trained = label_bytes = 0
    scratch = Path(tempfile.gettempdir())
    with named_when_full(scratch), Survey(scratch) as survey:
        for number, path in enumerate(files.paths):
            for block in _blocks(reader, path, findings, empty):
                survey.add(block, number)
                for read in block:
                    count += 1
                    if read.tokens is not None:
                        label_bytes += read.label_bytes
                        tokens, trained = tokens + len(read.tokens), trained + read.tokens.trained_tokens
                    if shown_rows < 0 or len(shown) < shown_rows:
                        shown.append(_shown(read))
        tell_files(findings, files, empty)
        reader.tell_remedy()
        reader.tell_all(trained)
        if len(survey):
            facts = survey.facts()
            sides = np.array([SPLITS.index(name) for name in files.names], dtype=np.uint8)
            likeness = survey.likeness(decided.similarity, sides)
            names = [str(path) for path in files.paths]
            whole = Whole(facts, likeness, facts.by_file(sides), names, most_places, documents=documents)
            tell(findings, survey, whole)
    missing = tuple(name for name in SPLITS if name not in files.names) if "train" in files.names else ()
    counts = (count, tokens, trained, missing, max_positions, documents, label_bytes)
    return Validation(tuple(shown), findings.listed(), *counts)


def _blocks(reader: RowReader, path: Path, findings: Findings, empty: list[Path]) -> Iterator[list[ReadRow]]:
    """The rows of a file; where it has none, it is put to those that are ``empty``."""
    count = 0
    try:
        for block in reader.blocks(path, str(path)):
            count += len(block)
            yield block
    except DataError as error:  # it cannot be read at all, or no further
        findings.add("FILE-UNREADABLE", error.what, where=[error.where], remedy=error.do)
    else:
        empty += [] if count else [path]


def _shown(read: ReadRow) -> ShownRow:
    if read.rendered is None or read.tokens is None:
        return ShownRow(read.where, (), (), read.findings, ())
    text, spans = read.rendered.text, read.rendered.spans
    pieces, start = [], 0
    for span in spans:
        pieces += [Piece(text[start : span.start], False), Piece(text[span.start : span.end], True)]
        start = span.end
    pieces.append(Piece(text[start:], False))
    return ShownRow(
        read.where,
        tuple(text[span.start : span.end] for span in spans),
        tuple(span.closing for span in spans),
        read.findings,
        tuple(piece for piece in pieces if piece.text),
    )
