"""What validation says of any file, without a pipeline: `safetrain validate`."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np

from safetrain.core.data.foreign_rows import Columns
from safetrain.core.data.rendering import Labelling
from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.errors import DataError
from safetrain.core.model.files import read_limits
from safetrain.core.records.reports import Finding
from safetrain.plan.findings import ERROR, Findings, Severities
from safetrain.plan.row_columns import named_when_full
from safetrain.plan.sources import SPLITS, split_named
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

    @property
    def has_errors(self) -> bool:
        """Whether a row, or a file, cannot be trained as it is."""
        return any(finding.severity == ERROR for finding in self.findings)


def validate_files(
    files: Sequence[Path],
    model: Path,
    shown_rows: int = 3,
    decided: Decided = Decided(),
    splits: Sequence[str] = (),
) -> Validation:
    """Read every row of ``files`` for ``model``; show the first ``shown_rows`` as they are trained, -1: all.

    Files of ``splits`` (one for each file; empty: by their names) are compared as the splits they are.

    Raises ModelError for a model that cannot be read, DataError for a file that is not there.
    """
    vocabulary, max_positions = read_limits(model)
    findings, names = Findings(decided.severities), [str(path) for path in files]
    tokenizer, limits = ChatTokenizer(model, date.today()), Limits(vocabulary, max_positions)
    reader = RowReader(tokenizer, decided.labelling, limits, findings, decided.columns)
    shown: list[ShownRow] = []
    count = tokens = trained = 0
    scratch = Path(tempfile.gettempdir())
    with named_when_full(scratch), Survey(scratch) as survey:
        for number, path in enumerate(files):
            if not path.is_file():
                raise DataError("The data file does not exist.", where=str(path), do="name a file or a folder")
            for block in _blocks(reader, path, findings):
                survey.add(block, number)
                for read in block:
                    count += 1
                    if read.tokens is not None:
                        tokens, trained = tokens + len(read.tokens), trained + read.tokens.trained_tokens
                    if shown_rows < 0 or len(shown) < shown_rows:
                        shown.append(_shown(read))
        if len(survey):
            facts = survey.facts()
            of_file = [SPLITS.index(name) for name in splits or map(split_named, files)]
            sides = np.array(of_file, dtype=np.uint8)
            likeness = survey.likeness(decided.similarity, sides)
            tell(findings, survey, Whole(facts, likeness, facts.by_file(sides), names))
    return Validation(tuple(shown), findings.listed(), count, tokens, trained)


def _blocks(reader: RowReader, path: Path, findings: Findings) -> Iterator[list[ReadRow]]:
    try:
        yield from reader.blocks(path, str(path))
    except DataError as error:  # it cannot be read at all, or no further
        findings.add("FILE-UNREADABLE", error.what, where=[error.where], remedy=error.do)


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
